"""Hybrids whose logits other engines computed (tools/golden/hybrid_cases.py), opened as people have them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Artifact
from lockstep.artifacts.source import open_artifact
from tools.golden.hybrid_cases import HYBRID_CASES, HYBRID_GGUF_CASES, SEED
from tools.golden.logit_cases import sharpened
from tools.random_models import write_gguf, write_safetensors

Floats = npt.NDArray[np.float32]
GOLDEN = Path(__file__).resolve().parent / "golden"


def open_huggingface_hybrid(name: str, directory: Path) -> Artifact:
    case = HYBRID_CASES[name]
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(case.config()))
    write_safetensors(directory / "model.safetensors", sharpened(case.shape))
    return open_artifact(str(directory), cache_dir=directory / "cache")


def open_gguf_hybrid(name: str, encoding: str, directory: Path) -> Artifact:
    case = HYBRID_GGUF_CASES[name]
    path = write_gguf(directory / "m.gguf", case.shape, encoding, seed=SEED, extra=case.extra)
    return open_artifact(str(path), cache_dir=directory / "cache")


def transformers_hybrid_logits(name: str) -> Floats:
    """[len(POSITIONS), vocab]."""
    logits: Floats = np.load(GOLDEN / "logits_hybrids.npz")[name]
    return logits


def llama_cpp_hybrid_logits(name: str, encoding: str) -> Floats:
    """[len(POSITIONS), vocab]."""
    logits: Floats = np.load(GOLDEN / "logits_hybrids_llama_cpp.npz")[f"{name}.{encoding}"]
    return logits
