"""Tiny models of each architecture and its variants, as a config.json that both sides read.

Weights are drawn from a seed (`logit_cases.sharpened`), and every prompt is longer than the attention windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tools.random_configs import huggingface_config
from tools.random_shapes import SHAPES, Shape


@dataclass(frozen=True)
class ArchitectureCase:
    """A shape with changes of its config.json."""

    shape: Shape
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changed keys of config.json; None removes a key."""

    def config(self) -> dict[str, Any]:
        merged = huggingface_config(self.shape) | dict(self.changes)
        return {key: value for key, value in merged.items() if value is not None}


_ROPE = {"rope_theta": 10000.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_MINISTRAL = {
    **_YARN,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_BEYOND = {**_MINISTRAL, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5}
"""Half of the stored logits are of positions beyond the trained context."""
_SHORT = [1.0 + 0.25 * index for index in range(12)]
_LONG = [2.0 + 0.5 * index for index in range(12)]
_QWEN2, _PHI3 = SHAPES["tiny-qwen2"], replace(SHAPES["tiny-phi3"], rotary_dim=24)
_GEMMA3, _OLMO3 = SHAPES["tiny-gemma3"], SHAPES["tiny-olmo3"]

HUGGINGFACE_CASES: Mapping[str, ArchitectureCase] = {
    "qwen2": ArchitectureCase(_QWEN2),
    "qwen2-window": ArchitectureCase(
        replace(_QWEN2, tied_embeddings=False, windows=(0, 16)),
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen2-yarn": ArchitectureCase(_QWEN2, {"rope_parameters": {**_ROPE, **_YARN}}),
    "mistral": ArchitectureCase(SHAPES["tiny-mistral"]),
    "mistral-window-40": ArchitectureCase(replace(SHAPES["tiny-mistral"], windows=(40, 40))),
    "mistral-full": ArchitectureCase(replace(SHAPES["tiny-mistral"], windows=())),
    "gemma3": ArchitectureCase(_GEMMA3, {"query_pre_attn_scalar": 20}),
    "gemma3-linear": ArchitectureCase(
        _GEMMA3,
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "phi3": ArchitectureCase(SHAPES["tiny-phi3"]),
    "phi3-longrope": ArchitectureCase(
        replace(_PHI3, windows=(), tied_embeddings=True),
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                **_ROPE,
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "short_factor": _SHORT,
                "long_factor": _LONG,
            },
        },
    ),
    "granite": ArchitectureCase(SHAPES["tiny-granite"]),
    "granitemoehybrid": ArchitectureCase(SHAPES["tiny-granitemoehybrid"]),
    "granitemoehybrid-no-rope": ArchitectureCase(
        replace(SHAPES["tiny-granitemoehybrid"], tied_embeddings=False, unrotated_layers=(0, 1))
    ),
    "granite_swa": ArchitectureCase(SHAPES["tiny-granite_swa"]),
    "granite_swa-two-bases": ArchitectureCase(
        replace(SHAPES["tiny-granite_swa"], unrotated_layers=()), {"layer_rope_theta": [1e6, 1e4, 1e4, 1e4]}
    ),
    "mistral3": ArchitectureCase(SHAPES["tiny-mistral3"], {"rope_parameters": {**_ROPE, **_MINISTRAL}}),
    "mistral3-beyond": ArchitectureCase(SHAPES["tiny-mistral3"], {"rope_parameters": {**_ROPE, **_BEYOND}}),
    "olmo2": ArchitectureCase(SHAPES["tiny-olmo2"]),
    "olmo3": ArchitectureCase(
        _OLMO3,
        {
            "rope_parameters": {
                "full_attention": {**_YARN, "rope_theta": 5e5, "attention_factor": 1.2, "beta_fast": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            }
        },
    ),
    "smollm3": ArchitectureCase(SHAPES["tiny-smollm3"]),
    "smollm3-other-layers": ArchitectureCase(SHAPES["tiny-smollm3"], {"no_rope_layers": [0, 1, 1, 0]}),
}
"""Cases compared with transformers, in float32."""


@dataclass(frozen=True)
class GgufCase:
    """A shape with changes of its GGUF metadata."""

    shape: Shape
    extra: Callable[[Any], None] = lambda writer: None
    encodings: tuple[str, ...] = ("F32",)
    """Encodings; more than one if rows are permuted, since blocks are permuted too."""


def _linear(writer: Any) -> None:
    writer.add_string("gemma3.rope.scaling.type", "linear")
    writer.add_rope_scaling_factor(8.0)


def _yarn(writer: Any) -> None:
    writer.add_string("qwen2.rope.scaling.type", "yarn")
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def _longrope(writer: Any) -> None:
    import numpy as np

    writer.add_rope_scaling_orig_ctx_len(1024)
    writer.add_rope_scaling_attn_factors(1.19)
    for name, factors in (("short", _SHORT), ("long", _LONG)):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(factors, np.float32))


def _ministral(writer: Any, trained: int = 128, beta: float = 0.1) -> None:
    writer.add_string("mistral3.rope.scaling.type", "yarn")
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(trained)
    writer.add_rope_scaling_yarn_log_mul(1.0)
    writer.add_attn_temperature_scale(beta)


_BOTH = ("F32", "Q8_0")
GGUF_CASES: Mapping[str, GgufCase] = {
    "qwen2": GgufCase(_QWEN2),
    "qwen2-yarn": GgufCase(_QWEN2, _yarn),
    "mistral": GgufCase(replace(SHAPES["tiny-mistral"], windows=())),
    "gemma3": GgufCase(_GEMMA3, encodings=_BOTH),
    "gemma3-linear": GgufCase(_GEMMA3, _linear),
    "phi3": GgufCase(replace(SHAPES["tiny-phi3"], windows=()), encodings=_BOTH),
    "phi3-longrope": GgufCase(replace(_PHI3, windows=()), _longrope),
    "granite": GgufCase(SHAPES["tiny-granite"], encodings=_BOTH),
    "granite_swa": GgufCase(SHAPES["tiny-granite_swa"], encodings=_BOTH),
    "mistral3": GgufCase(SHAPES["tiny-mistral3"], _ministral, encodings=_BOTH),
    "mistral3-beyond": GgufCase(SHAPES["tiny-mistral3"], partial(_ministral, trained=32, beta=0.5)),
    "olmo2": GgufCase(SHAPES["tiny-olmo2"]),
    "olmo3": GgufCase(_OLMO3),
    "smollm3": GgufCase(SHAPES["tiny-smollm3"]),
}
"""Cases compared with llama.cpp, on files that `tools.random_models` writes."""
