"""Pictures of a verdict's page for the documentation: `python -m tools.gate_page` writes docs/gate-*.png again.

The pairs are drawn: a candidate whose answers are the same, and six percent later in one of two segments.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from tests.browser import chromium

DOCS = Path(__file__).resolve().parents[1] / "docs"
SEED, NUM_PAIRS = 14, 5000
SLOWER = {"chat": 1.0, "code": 1.06}


def write_pairs(path: Path) -> None:
    """Latencies of both sides with a queue that grows and shrinks, equal tokens, a few routes."""
    draw = random.Random(SEED)
    load = 0.0
    with path.open("w") as file:
        for index in range(NUM_PAIRS):
            load = 0.95 * load + draw.gauss(0, 0.1)
            segment = draw.choice(sorted(SLOWER))
            pair: dict[str, object] = {"request_id": f"req-{index}", "model": "support-7b", "segment": segment}
            for side, factor in (("baseline", 1.0), ("candidate", SLOWER[segment])):
                base_ms = 40 * draw.lognormvariate(load, 0.12) * factor
                gaps_ms = [9 * draw.lognormvariate(load / 2, 0.2) * factor for _ in range(8)]
                pair[side] = {
                    "ts": index / 4,
                    "backend": "vllm",
                    "accelerator": "h100",
                    "model_version": f"2026-{10 if side == 'baseline' else 11}",
                    "ttft_ms": base_ms,
                    "token_latencies_ms": gaps_ms,
                    "latency_ms": base_ms + sum(gaps_ms),
                    "token_ids": [index, *range(8)],
                }
            file.write(json.dumps(pair) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        pairs, page = Path(folder) / "pairs.jsonl", Path(folder) / "gate.html"
        write_pairs(pairs)
        command = [sys.executable, "-m", "lockstep", "gate", str(pairs), "--set", "mode=sequential"]
        subprocess.run([*command, "--html", str(page)], check=False, stdout=subprocess.DEVNULL)
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for scheme in schemes:
            tab = browser.new_page(viewport={"width": 1180, "height": 900}, color_scheme=scheme)
            tab.goto(page.as_uri())
            tab.locator("section", has=tab.locator("#distributions")).screenshot(path=DOCS / f"gate-{scheme}.png")


if __name__ == "__main__":
    main()
