"""Tiny random models with golden logits: uses only numpy, for the scripts that run other engines and for the tests.

Queries and keys are large enough that attention is far from uniform. With noise of 0.02, a wrong rotary embedding would
be within any tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tools.random_blocks import has_long_blocks
from tools.random_hybrids import huggingface_name
from tools.random_models import ENCODINGS, SHAPES, Shape, as_stored, random_tensor, tensor_shapes

Floats = npt.NDArray[np.float32]

NUM_TOKENS = 100
POSITIONS = (0, 1, 2, 31, 32, 33, 63, 64, 98, 99)
"""Positions with stored logits: block borders, and positions far enough for rope scaling to matter."""
SEED = 20260401
_SHARPNESS = 2.0
_ATTENTION = tuple(f"{name}_proj.weight" for name in "qkvo")


@dataclass(frozen=True)
class LogitCase:
    """A shape with changes of its `ModelConfig`."""

    shape: Shape
    attention_bias: bool = False
    rope_scaling: Mapping[str, object] = field(default_factory=dict)
    """``rope_type`` and its parameters, as in config.json."""


_LLAMA, _QWEN3 = SHAPES["tiny-llama"], SHAPES["tiny-qwen3"]
CASES: Mapping[str, LogitCase] = {
    "llama": LogitCase(_LLAMA),
    "llama-tied": LogitCase(replace(_LLAMA, tied_embeddings=True)),
    "llama-no-gqa": LogitCase(replace(_LLAMA, num_kv_heads=4)),
    "llama-bias": LogitCase(_LLAMA, attention_bias=True),
    "llama-linear": LogitCase(_LLAMA, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama-llama3": LogitCase(
        _LLAMA,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "qwen3": LogitCase(_QWEN3),
    "qwen3-untied": LogitCase(replace(_QWEN3, tied_embeddings=False)),
}
"""Cases compared with transformers, in float32."""
GGUF_ARCHITECTURES = ("llama", "qwen3")
GGUF_ENCODINGS = (*ENCODINGS, "Q4_K_M")
"""Encodings compared with llama.cpp, on files that `tools.random_models` writes with `SEED`."""


def gguf_shape(architecture: str, encoding: str) -> Shape:
    """The tiny shape, or for encodings with blocks of 256 the small one, whose rows are whole blocks."""
    return SHAPES[f"{'small' if has_long_blocks(encoding) else 'tiny'}-{architecture}"]


def token_ids(vocab_size: int) -> npt.NDArray[np.int64]:
    """Prompt, [NUM_TOKENS]."""
    return np.random.default_rng(SEED).integers(0, vocab_size, NUM_TOKENS)


def tensors(case: LogitCase) -> dict[str, Floats]:
    """Tensors in float32 by their Hugging Face names."""
    drawn = sharpened(case.shape)
    if case.attention_bias:
        for name in [name for name in drawn if name.endswith(_ATTENTION)]:
            bias = name.replace(".weight", ".bias")
            drawn[bias] = np.asarray(random_tensor(bias, drawn[name].shape[:1], "F32", SEED), np.float32)
    return drawn


def sharpened(shape: Shape) -> dict[str, Floats]:
    """Tensors of a shape in the form of a Hugging Face file, with enlarged queries and keys, by their norms if there
    are any."""
    sizes = tensor_shapes(shape)
    normed = any(name.endswith("q_norm.weight") for name in sizes)
    sharp = ("q_norm.weight", "k_norm.weight") if normed else ("q_proj.weight", "k_proj.weight")
    drawn = {}
    for name, size in sizes.items():
        tensor = np.asarray(random_tensor(name, size, "F32", SEED), np.float32)
        if name.endswith(sharp):
            tensor = tensor * np.float32(_SHARPNESS)
        if name.endswith("qkv_proj.weight"):
            tensor[: (shape.num_heads + shape.num_kv_heads) * shape.head_dim] *= np.float32(_SHARPNESS)
        drawn[huggingface_name(shape, name)] = np.asarray(as_stored(shape, name, tensor), np.float32)
    return drawn
