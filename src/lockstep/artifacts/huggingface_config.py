"""config.json as a `ModelConfig`. Field names and defaults: transformers' configuration classes.

What would change the forward pass and is not computed is refused by name. Knows no tensor.
"""

from __future__ import annotations

from typing import Any

from lockstep.artifacts.architectures import ARCHITECTURES, Architecture
from lockstep.artifacts.huggingface_rope import read_rope
from lockstep.artifacts.layout import check_num_layers
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import ModelConfig
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError

_LAYER_KINDS = {"full_attention": False, "sliding_attention": True}


def read_config(declared: Metadata) -> ModelConfig:
    """config.json as data.

    Raises:
        UnsupportedArtifactError: an architecture or a variant that we do not know, by name.
        CorruptArtifactError: a value is missing or of the wrong kind.
    """
    architecture = _architecture(declared)
    _refuse_variants(declared, architecture)
    hidden_size = declared.integer("hidden_size")
    num_layers = declared.integer("num_hidden_layers")
    check_num_layers(num_layers, declared.path)
    num_heads = declared.integer("num_attention_heads")
    head_dim = architecture.head_dim or hidden_size // max(num_heads, 1)
    head_dim = declared.integer("head_dim", head_dim)
    unrotated = _unrotated_layers(declared, architecture, num_layers)
    rope = read_rope(declared, architecture, head_dim)
    fields: dict[str, Any] = {
        "attention_bias": declared.flag("attention_bias", False),
        **_scales(declared, architecture, hidden_size),
        **architecture.traits,
    }
    return ModelConfig(
        architecture=architecture.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=declared.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=declared.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=declared.integer("vocab_size"),
        max_model_len=rope.max_model_len,
        rms_norm_eps=declared.real("rms_norm_eps", architecture.rms_norm_eps),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=rope.rotary_dim,
        local_rope_theta=rope.local_theta,
        tied_embeddings=declared.flag("tie_word_embeddings", architecture.tied_embeddings),
        norm_offset=architecture.norm_offset,
        windows=_windows(declared, architecture, num_layers, unrotated),
        unrotated_layers=unrotated,
        **fields,
    )


def _architecture(declared: Metadata) -> Architecture:
    """By class name where config.json has one (a model type is shared by classifiers and the like)."""
    by_class = {row.class_name: row for row in ARCHITECTURES.values()}
    known = ", ".join(by_class)
    if "architectures" in declared.values:
        names = declared.strings("architectures")
        for name in names:
            if name in by_class:
                return by_class[name]
        raise UnsupportedArtifactError(
            f"architecture {' or '.join(names) or 'of no name'}; the known ones are {known}", path=declared.path
        )
    model_type = declared.text("model_type")
    for row in ARCHITECTURES.values():
        if model_type == (row.model_type or row.name):
            return row
    raise UnsupportedArtifactError(f"model type {model_type!r}; the known ones are {known}", path=declared.path)


def _refuse_variants(declared: Metadata, architecture: Architecture) -> None:
    """What would change the forward pass and is not computed."""
    problem = None
    expected = architecture.hidden_act
    activation = declared.text("hidden_activation", declared.text("hidden_act", expected))
    if activation != expected:
        problem = f"activation {activation!r}; {expected} is supported"
    elif declared.flag("mlp_bias", False):
        problem = "mlp_bias; feed-forward layers without biases are supported"
    elif "quantization_config" in declared.values:
        method = declared.section("quantization_config").values.get("quant_method", "unknown")
        problem = f"weights quantised by {method!r}; float safetensors, or a GGUF file, are supported"
    elif declared.flag("use_bidirectional_attention", False):
        problem = "use_bidirectional_attention; causal attention is supported"
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in declared.values:
            problem = f"{key}; scores and logits without a cap are supported"
    if problem is not None:
        raise UnsupportedArtifactError(problem, path=declared.path)


def _scales(declared: Metadata, architecture: Architecture, hidden_size: int) -> dict[str, float]:
    """Factors that an architecture of that name has, under the names of `ModelConfig`."""
    if architecture.name == "gemma3":
        scalar = declared.real("query_pre_attn_scalar", 256)
        if scalar <= 0:
            raise CorruptArtifactError(
                f"query_pre_attn_scalar is {scalar}; a positive number is expected", path=declared.path
            )
        return {"embedding_scale": max(hidden_size, 0) ** 0.5, "attention_scale": scalar**-0.5}
    if architecture.name == "granite":
        return {
            "embedding_scale": declared.real("embedding_multiplier", 1.0),
            "attention_scale": declared.real("attention_multiplier", 1.0),
            "residual_scale": declared.real("residual_multiplier", 1.0),
            "logits_divisor": declared.real("logits_scaling", 1.0),
        }
    return {}


def _unrotated_layers(declared: Metadata, architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    """SmolLM3 lists, per layer, whether it is rotated; every fourth is not where the list is absent."""
    if architecture.name != "smollm3":
        return ()
    if "no_rope_layers" not in declared.values:
        interval = declared.integer("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, num_layers, interval)) if interval > 0 else ()
    rotated = declared.reals("no_rope_layers")
    if len(rotated) != num_layers:
        raise CorruptArtifactError(
            f"no_rope_layers has {len(rotated)} entries; {num_layers} are expected", path=declared.path
        )
    return tuple(layer for layer, flag in enumerate(rotated) if not flag)


def _windows(
    declared: Metadata, architecture: Architecture, num_layers: int, unrotated: tuple[int, ...]
) -> tuple[int, ...]:
    """Tokens that each layer sees, 0 for all; empty when no layer has a window."""
    local = _local_layers(declared, architecture, num_layers, unrotated)
    if not any(local):
        return ()
    size = declared.integer("sliding_window", architecture.sliding_window)
    if size < 1:
        raise CorruptArtifactError(
            f"sliding_window is {size} in a model with sliding attention; at least 1 is expected", path=declared.path
        )
    return tuple(size if flag else 0 for flag in local)


def _local_layers(
    declared: Metadata, architecture: Architecture, num_layers: int, unrotated: tuple[int, ...]
) -> list[bool]:
    """Which layers have a window: as config.json lists them, else by the rule of the architecture."""
    layers = range(num_layers)
    listed = _listed_layers(declared, num_layers)
    if architecture.windows in ("none", "all"):
        if listed is not None and any(listed):
            raise UnsupportedArtifactError(
                f"sliding attention in some layers; that is not part of a plain {architecture.name} model",
                path=declared.path,
            )
        everywhere = architecture.windows == "all" and "sliding_window" in declared.values
        return [everywhere for _ in layers]
    if architecture.windows == "periodic":
        period = declared.integer("sliding_window_pattern", architecture.period)
        return listed if listed is not None else [period > 0 and (layer + 1) % period != 0 for layer in layers]
    if not declared.flag("use_sliding_window", False):
        if listed is not None and any(listed):
            raise UnsupportedArtifactError(
                "layers with sliding window attention, which use_sliding_window does not switch on", path=declared.path
            )
        return [False for _ in layers]
    if listed is not None or "sliding_window" not in declared.values:
        return listed or [False for _ in layers]
    if architecture.name == "smollm3":
        return [layer in unrotated for layer in layers]
    first = declared.integer("max_window_layers", 28)
    return [layer >= first for layer in layers]


def _listed_layers(declared: Metadata, num_layers: int) -> list[bool] | None:
    if "layer_types" not in declared.values:
        return None
    kinds = declared.strings("layer_types")
    for kind in kinds:
        if kind not in _LAYER_KINDS:
            known = ", ".join(_LAYER_KINDS)
            raise UnsupportedArtifactError(f"a layer of type {kind!r}; the known ones are {known}", path=declared.path)
    if len(kinds) != num_layers:
        raise CorruptArtifactError(
            f"layer_types has {len(kinds)} entries; {num_layers} are expected", path=declared.path
        )
    return [_LAYER_KINDS[kind] for kind in kinds]
