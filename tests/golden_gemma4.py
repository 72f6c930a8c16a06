"""Gemma 4 whose logits other engines computed (tools/golden/gemma4_cases.py), opened as people have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Artifact
from lockstep.artifacts.source import open_artifact
from tools.golden.gemma4_cases import GEMMA4_CASES, GEMMA4_GGUF_CASES, SEED
from tools.golden.logit_cases import sharpened
from tools.random_models import write_gguf, write_safetensors

GOLDEN = Path(__file__).resolve().parent / "golden" / "logits_gemma4.npz"


def open_huggingface_gemma4(name: str, directory: Path, **changes: Any) -> Artifact:
    """Open a case.

    Args:
        changes: changed keys of config.json; None removes a key.
    """
    case = GEMMA4_CASES[name]
    directory.mkdir(exist_ok=True)
    config = {key: value for key, value in (case.config() | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", sharpened(case.shape))
    return open_artifact(str(directory), cache_dir=directory / "cache")


def open_gguf_gemma4(name: str, encoding: str, directory: Path) -> Artifact:
    path = write_gguf(directory / "m.gguf", GEMMA4_GGUF_CASES[name].shape, encoding, seed=SEED)
    return open_artifact(str(path), cache_dir=directory / "cache")


def golden_gemma4(name: str) -> npt.NDArray[Any]:
    stored: npt.NDArray[Any] = np.load(GOLDEN)[name]
    return stored
