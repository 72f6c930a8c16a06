"""Files that documents name as the reader's own: what stands for each in the folder where a page is run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.artifacts.hub.stand_in import StandIn
from tests.documents.pages import ROOT
from tests.processes import run
from tools.random_models import SHAPES, write_gguf, write_huggingface

_SHAPE = replace(SHAPES["tiny-llama"], max_model_len=32_768)
"""With room for what documents ask of a context."""
_WORD = re.compile(r"[\w./-]+")
_HUB = re.compile(r"hf://([\w.-]+/[\w.-]+)")


def lay_out(text: str, folder: Path) -> None:
    """Make what a command names, unless it is there: an earlier command of the page may have written it."""
    for word in _WORD.findall(text):
        name = word.removeprefix("./").rstrip("/")
        make = MAKERS.get(name)
        if make is not None and not (folder / name).exists():
            make(folder / name)


def stock(text: str, hub: StandIn, folder: Path) -> None:
    """Give the hub each repository that a command names: a directory of random weights, or a GGUF file."""
    for name in _HUB.findall(text):
        if name in hub.repos:
            continue
        place = folder / name.replace("/", "-")
        if "GGUF" in name:
            place.mkdir()
            write_gguf(place / "tiny-Q8_0.gguf", _SHAPE, "Q8_0")
        else:
            write_huggingface(place, "tiny-qwen3")
        hub.add_directory(name, place)


def _gguf(path: Path) -> None:
    write_gguf(path, _SHAPE, "Q8_0")


def _directory(path: Path) -> None:
    write_huggingface(path, "tiny-qwen3")


def _trace(path: Path) -> None:
    """A trace in Mooncake's format, whose prompts share a beginning."""
    lines = [
        {"timestamp": 40 * number, "input_length": 600, "output_length": 6, "hash_ids": [0, 1 + number % 3]}
        for number in range(12)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _prompts(path: Path) -> None:
    path.write_text("".join(f"{json.dumps({'prompt': f'Letter {number}'})}\n" for number in range(4)))


def _prices(path: Path) -> None:
    prices = {"constant_ps": 5e9, "prefill_token_ps": 2e8, "decode_seq_ps": 1e9, "context_token_ps": 1e6}
    path.write_text(json.dumps({name: int(value) for name, value in prices.items()}))


def _manifest(path: Path) -> None:
    path.write_text((ROOT / "examples" / "customer-support.yaml").read_text())


def _side(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        rows = json.loads((ROOT / "examples" / "release_gate_safe.json").read_text())[name]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    return make


def _recording(*flags: str) -> Callable[[Path], None]:
    """A recording of the logical clock, which is read like a server's."""

    def make(path: Path) -> None:
        path.mkdir()
        ended = run("replay", "examples/workload.json", *flags, "--trace", str(path / "1.lstrace"), folder=ROOT)
        assert ended.returncode == 0, ended.stderr

    return make


def _mirrored(path: Path) -> None:
    path.write_text((ROOT / "examples" / "backend_mirror_vllm_sglang.json").read_text())


MAKERS: dict[str, Callable[[Path], None]] = {
    "model.gguf": _gguf,
    "hf-directory": _directory,
    "trace.jsonl": _trace,
    "conversation_trace.jsonl": _trace,
    "mooncake_conversation.jsonl": _trace,
    "prompts.jsonl": _prompts,
    "cost.json": _prices,
    "cluster.yaml": _manifest,
    "baseline.jsonl": _side("baseline"),
    "candidate.jsonl": _side("candidate"),
    "again.jsonl": _side("baseline"),
    "run.json": _mirrored,
    "baseline-trace": _recording(),
    "candidate-trace": _recording("--set", "max_num_seqs=2"),
}
"""By the name that the documents use."""
