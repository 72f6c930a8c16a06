"""Tiny models of Gemma 4, with prompts and answers many times longer than their windows.

Weights are drawn from a seed (`logit_cases.sharpened`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tools.golden.architecture_cases import ArchitectureCase, GgufCase
from tools.random_shapes import SHAPES, Shape

NUM_TOKENS, NUM_PROMPT_TOKENS = 500, 20
POSITIONS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 128, 300, 498, 499)
"""Positions with stored logits: the first ones, borders of the window and of blocks, and the end."""
SEED = 20261129
_TINY = SHAPES["tiny-gemma4"]
_PLAIN = replace(
    _TINY, windows=(40, 40, 40, 40, 40, 0), kv_owners=(), intermediate_sizes=(), per_layer_size=0, logits_cap=0.0,
    full_head_dim=32, tied_embeddings=False,
)  # fmt: skip

GEMMA4_CASES: Mapping[str, ArchitectureCase] = {
    "gemma4": ArchitectureCase(_TINY),
    "gemma4-plain": ArchitectureCase(_PLAIN, {"layer_types": None}),
    "gemma4-listed-heads": ArchitectureCase(
        _TINY, {"global_head_dim": None, "per_layer_config": {"2": {"head_dim": 64}, "5": {"head_dim": 64}}}
    ),
}
"""Cases compared with transformers, in float32. Those of the second one have no layers that share, and default
types of layers."""
GEMMA4_GGUF_CASES: Mapping[str, GgufCase] = {
    "gemma4": GgufCase(_TINY, encodings=("F32", "Q8_0", "Q4_0")),
    "gemma4-plain": GgufCase(_PLAIN),
}
"""Cases compared with llama.cpp, on files that `tools.random_models` writes."""


def gemma4_token_ids(shape: Shape) -> npt.NDArray[np.int64]:
    """Text, [NUM_TOKENS]."""
    return np.random.default_rng(SEED).integers(0, shape.vocab_size, NUM_TOKENS)
