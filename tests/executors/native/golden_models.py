"""The tiny models whose logits other engines computed (tools/golden), opened as people have them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lockstep.artifacts.model import Artifact, Encoding, RopeScaling, Tensor, Weights
from lockstep.artifacts.source import open_artifact
from lockstep.executors.base import Logits
from tests.executors.native.loading import loaded
from tests.executors.native.support import artifact_of, config_of, run
from tools.golden.architecture_cases import GGUF_CASES, HUGGINGFACE_CASES
from tools.golden.logit_cases import POSITIONS, SEED, LogitCase, gguf_shape, sharpened, tensors, token_ids
from tools.random_models import interleaved_rows, write_gguf, write_safetensors

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


def golden_prompt_logits(artifact: Artifact, kv: str = "f32") -> Logits:
    with loaded(artifact, 8, 0, kv_cache_precision=kv) as executor:
        ids = token_ids(artifact.config.vocab_size).tolist()
        return run(executor, (ids, 0, (3, 1, 4, 2)), all_rows=True)[list(POSITIONS)]


def artifact_of_case(name: str, case: LogitCase) -> Artifact:
    config = replace(config_of(case.shape), attention_bias=case.attention_bias)
    if case.rope_scaling:
        numbers = {key: float(str(value)) for key, value in case.rope_scaling.items() if key != "rope_type"}
        factor = numbers.pop("factor")
        config = replace(config, rope_scaling=RopeScaling(str(case.rope_scaling["rope_type"]), factor, numbers))
    stored = {name: Tensor(name, Encoding.F32, tensor.shape, tensor) for name, tensor in tensors(case).items()}
    return artifact_of(config, stored, name)


def relative_error(logits: Logits, golden: Logits) -> float:
    return float((np.linalg.norm(logits - golden, axis=1) / np.linalg.norm(golden, axis=1)).max())


def open_case(directory: Path, architecture: str, encoding: str) -> Artifact:
    path = directory / f"{architecture}-{encoding}.gguf"
    if not path.exists():
        write_gguf(path, gguf_shape(architecture, encoding), encoding, seed=SEED)
    return open_artifact(str(path), cache_dir=directory)


@dataclass(frozen=True)
class StillInterleaved:
    """Weights whose reader forgot to undo llama.cpp's rope permutation."""

    inner: Weights
    num_heads: int
    num_kv_heads: int

    def names(self) -> tuple[str, ...]:
        return self.inner.names()

    def __contains__(self, name: object) -> bool:
        return name in self.inner

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.inner[name]
        heads = {"q_proj": self.num_heads, "k_proj": self.num_kv_heads}.get(name.split(".")[-2])
        return tensor if heads is None else replace(tensor, data=interleaved_rows(tensor.data, heads))


def open_huggingface_case(name: str, directory: Path) -> Artifact:
    case = HUGGINGFACE_CASES[name]
    (directory / "config.json").write_text(json.dumps(case.config()))
    write_safetensors(directory / "model.safetensors", sharpened(case.shape))
    return open_artifact(str(directory), cache_dir=directory / "cache")


def transformers_logits(name: str) -> Logits:
    logits: Logits = np.load(GOLDEN / "logits_architectures.npz")[name]
    return logits


def open_gguf_case(name: str, encoding: str, directory: Path) -> Artifact:
    case = GGUF_CASES[name]
    path = write_gguf(directory / "m.gguf", case.shape, encoding, seed=SEED, extra=case.extra)
    return open_artifact(str(path), cache_dir=directory / "cache")


def llama_cpp_logits(name: str, encoding: str) -> Logits:
    logits: Logits = np.load(GOLDEN / "logits_architectures_llama_cpp.npz")[f"{name}.{encoding}"]
    return logits
