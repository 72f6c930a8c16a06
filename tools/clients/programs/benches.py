"""Common parts of load generators: prompts in a file, a tokenizer in a directory, one command."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

from tools.clients.programs.scenarios import ASK

COMMAND_S = 300
NUM_REQUESTS = 8


def write_prompts(folder: Path, key: str) -> Path:
    """JSONL file of prompts under a key."""
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({key: f"{ASK}, number {n}"}) + "\n" for n in range(NUM_REQUESTS)))
    return path


def write_tokenizer(folder: Path) -> Path:
    """Tokenizer directory for transformers with bytes as tokens, so that no hub is needed."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = folder / "tokenizer"
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


def command(folder: Path, name: str, *arguments: str) -> None:
    """Run a program of this environment in a folder; AssertionError with its output if it fails."""
    script = Path(sysconfig.get_path("scripts")) / name
    done = subprocess.run([str(script), *arguments], cwd=folder, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise AssertionError((done.stderr or done.stdout).strip()[-600:])
