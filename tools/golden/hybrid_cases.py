"""Tiny hybrid models, with answers long enough for errors of a state to add up.

Weights are drawn from a seed (`logit_cases.sharpened`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.golden.architecture_cases import ArchitectureCase, GgufCase
from tools.random_hybrids import DeltaShape
from tools.random_shapes import SHAPES, Shape

NUM_TOKENS = 500
POSITIONS = (0, 1, 2, 3, 31, 32, 63, 64, 127, 128, 300, 498, 499)
"""Positions with stored logits: the first ones, where convolutions see less than their width, borders of blocks and of
the chunks that other engines compute at once, and the end."""
SEED = 20261128
_QWEN, _LFM2, _LFM3 = SHAPES["tiny-qwen35"], SHAPES["tiny-lfm2"], SHAPES["tiny-lfm3"]
_EQUAL = replace(_QWEN, delta_net=DeltaShape(3, 3, 32, 32, 4))
_WIDE = replace(_QWEN, tied_embeddings=False, delta_net=DeltaShape(1, 4, 16, 48, 3))
_ATTENTION, _CONVOLUTION = "attention", "convolution"
_LFM3_BY_DEFAULT = replace(
    _LFM3, num_layers=6, head_dim=48, tied_embeddings=False, conv_taps=3, windows=(0, 0, 0, 0, 40, 0),
    mixers=(_CONVOLUTION, _CONVOLUTION, _ATTENTION, _CONVOLUTION, _ATTENTION, _CONVOLUTION),
)  # fmt: skip

HYBRID_CASES: Mapping[str, ArchitectureCase] = {
    "qwen35": ArchitectureCase(_QWEN),
    "qwen35-equal-heads": ArchitectureCase(_EQUAL),
    "qwen35-wide-values": ArchitectureCase(_WIDE),
    "lfm2": ArchitectureCase(_LFM2),
    "lfm2-adjusted": ArchitectureCase(
        replace(_LFM2, tied_embeddings=False),
        {
            "intermediate_size": 230, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.2,
            "block_multiple_of": 64,
        },
    ),
    "lfm2-long": ArchitectureCase(replace(_LFM2, conv_taps=7)),
    "lfm3": ArchitectureCase(_LFM3),
    "lfm3-by-default": ArchitectureCase(_LFM3_BY_DEFAULT, {"layer_types": None, "rope_parameters": None}),
}  # fmt: skip
"""Cases compared with transformers, in float32. Two thirds of 230, times 1.2, are 183: rounded up 192."""


def _with_extra_layer(writer: Any) -> None:
    """A layer that predicts the token after the next one, as converters write it behind the others."""
    rng = np.random.default_rng(SEED)
    hidden, heads = _QWEN.hidden_size, _QWEN.head_dim
    queries, keys, inner = _QWEN.num_heads * heads, _QWEN.num_kv_heads * heads, _QWEN.intermediate_size
    layer = _QWEN.num_layers
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "post_attention_norm": (hidden,), "attn_q": (2 * queries, hidden),
        "attn_k": (keys, hidden), "attn_v": (keys, hidden), "attn_output": (hidden, queries), "attn_q_norm": (heads,),
        "attn_k_norm": (heads,), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
        "nextn.eh_proj": (hidden, 2 * hidden), "nextn.enorm": (hidden,), "nextn.hnorm": (hidden,),
        "nextn.shared_head_norm": (hidden,),
    }  # fmt: skip
    for name, size in shapes.items():
        writer.add_tensor(f"blk.{layer}.{name}.weight", rng.standard_normal(size, np.float32))
    prefix = "qwen35."
    replaced = {"block_count": layer + 1, "nextn_predict_layers": 1}
    for values in writer.kv_data:
        values.pop(f"{prefix}block_count", None)
        values.pop(f"{prefix}attention.recurrent_layers", None)
    for key, value in replaced.items():
        writer.add_uint32(prefix + key, value)


_BOTH = ("F32", "Q8_0")
HYBRID_GGUF_CASES: Mapping[str, GgufCase] = {
    "qwen35": GgufCase(_QWEN, encodings=_BOTH),
    "qwen35-equal-heads": GgufCase(_EQUAL),
    "qwen35-extra-layer": GgufCase(_QWEN, _with_extra_layer),
    "lfm2": GgufCase(_LFM2, encodings=_BOTH),
    "lfm2-long": GgufCase(replace(_LFM2, conv_taps=5)),
}
"""Cases compared with llama.cpp, on files that `tools.random_models` writes."""


def hybrid_token_ids(shape: Shape) -> npt.NDArray[np.int64]:
    """Prompt and answer, [NUM_TOKENS]."""
    return np.random.default_rng(SEED).integers(0, shape.vocab_size, NUM_TOKENS)
