"""Licensed public messages, read from `--data DIR`, with our intents.

Banking77 (Casanueva et al., 2020, CC-BY-4.0) and CLINC150 (Larson et al., 2019, CC-BY-3.0). `public_map.txt` maps their
intents; it was fixed before any training run. Only the evaluation reads test splits.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

SPLITS = {"train": ("train", "oos_train", "val", "oos_val"), "test": ("test", "oos_test")}


@dataclass(frozen=True)
class Message:
    """One public message with our label and a suitable answer."""

    text: str
    intent: str
    source: str
    answer: str
    public: str


def read_map(path: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """Map from (source, public intent) to (our label or `drop`, answer)."""
    mapped = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            key, _, answer = line.partition(" =")
            source, public, label = key.split()
            mapped[source, public] = (label, answer.strip())
    return mapped


def read_public(data: Path, split: str) -> list[Message]:
    """All messages of one split whose intent is not dropped, in file order; an unmapped intent is an error."""
    mapped = read_map(Path(__file__).with_name("public_map.txt"))
    rows: list[tuple[str, str, str]] = []
    with (data / f"banking77_{split}.csv").open(encoding="utf-8", newline="") as file:
        rows += [("banking77", row["category"], row["text"]) for row in csv.DictReader(file)]
    clinc = json.loads((data / "clinc150_full.json").read_text(encoding="utf-8"))
    rows += [("clinc150", public, text) for part in SPLITS[split] for text, public in clinc[part]]
    messages = []
    for source, public, text in rows:
        if (source, public) not in mapped:
            raise ValueError(f"{source} intent {public!r} is not in public_map.txt")
        label, answer = mapped[source, public]
        if label != "drop":
            messages.append(Message(" ".join(text.split()), label, source, answer, public))
    return messages
