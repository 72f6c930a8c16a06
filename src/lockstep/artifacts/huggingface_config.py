"""Hugging Face configuration: converts config.json to a `ModelConfig`, with names and defaults of transformers.

Settings that would change the forward pass but are not supported are rejected by name. Independent of tensors.

The settings of rotary embedding are read in the forms of all transformers versions: older ones have `rope_theta` and
`rope_scaling`, newer ones `rope_parameters`, nested by layer type if layers differ. The formulas are from
`modeling_rope_utils.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from typing import Any

from lockstep.artifacts.architectures import ARCHITECTURES, Architecture
from lockstep.artifacts.encoders import BERT_LIKE, read_huggingface_encoder
from lockstep.artifacts.gemma4 import proportional_scaling, read_huggingface_gemma4, rotated_share
from lockstep.artifacts.hybrids import layer_kinds, read_huggingface_mixers, renamed_lfm2, with_lfm3_defaults
from lockstep.artifacts.layout import check_num_layers
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import ModelConfig, QueryScaling, RopeScaling

_LAYER_KINDS = {"full_attention": False, "attention": False, "sliding_attention": True}
KNOWN_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_CAUSAL, _WITH_TEXT = "ForCausalLM", "ForConditionalGeneration"
_SHARED = ("quantization_config", "eos_token_id")
"""Keys beside ``text_config`` that override those in it."""


def read_config(declared: Metadata) -> ModelConfig:
    """Convert config.json to a model configuration.

    Raises:
        UnsupportedArtifactError: the architecture or a variant is not supported; the error names it.
        CorruptArtifactError: a value is missing or has the wrong type.
    """
    declared = text_part(declared)
    architecture = _architecture(declared)
    if architecture.name in BERT_LIKE:
        return read_huggingface_encoder(declared, architecture)
    if architecture.name == "lfm2":
        declared = renamed_lfm2(declared)
    if architecture.name == "lfm3":
        declared = with_lfm3_defaults(declared)
    num_layers = declared.integer("num_hidden_layers")
    check_num_layers(num_layers, declared.path)
    if architecture.name == "gemma4":
        return read_huggingface_gemma4(declared, architecture, num_layers)
    _refuse_variants(declared, architecture)
    hidden_size = declared.integer("hidden_size")
    num_heads = declared.integer("num_attention_heads")
    head_dim = architecture.head_dim or hidden_size // max(num_heads, 1)
    head_dim = declared.integer("head_dim", head_dim)
    unrotated = _unrotated_layers(declared, architecture, num_layers)
    windows = _windows(declared, architecture, num_layers, unrotated)
    rope = read_rope(declared, architecture, head_dim)
    if "layer_rope_theta" in declared.values and architecture.name == "granite_swa":
        rope, unrotated = _with_layer_bases(rope, declared, windows, num_layers)
    fields: dict[str, Any] = {
        "attention_bias": declared.flag("attention_bias", False),
        **_scales(declared, architecture, hidden_size),
        **architecture.traits,
        **read_huggingface_mixers(declared, architecture, num_layers),
    }
    return ModelConfig(
        architecture=architecture.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=declared.integer(
            "shared_intermediate_size" if architecture.has_shared_mlp else "intermediate_size"
        ),
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
        query_scaling=rope.query_scaling,
        tied_embeddings=declared.flag("tie_word_embeddings", architecture.tied_embeddings),
        norm_offset=architecture.norm_offset,
        windows=windows,
        unrotated_layers=unrotated,
        **fields,
    )


@dataclass(frozen=True, slots=True)
class Rope:
    """Rope fields of `ModelConfig`, and the context length for which they are valid."""

    theta: float
    scaling: RopeScaling | None
    rotary_dim: int | None
    local_theta: float | None
    query_scaling: QueryScaling | None
    max_model_len: int


def read_rope(declared: Metadata, architecture: Architecture, head_dim: int) -> Rope:
    """Read the rope settings. Raises UnsupportedArtifactError if the rope type is not supported."""
    rope, local = _sections(declared, architecture)
    theta = rope.real("rope_theta", declared.real("rope_theta", architecture.rope_theta))
    local_theta = None
    if architecture.has_local_rope:
        local_theta = declared.real("rope_local_base_freq", architecture.local_rope_theta or theta)
        local_theta = local.real("rope_theta", local_theta)
    rotary_dim = _rotary_dim(rope, declared, architecture, head_dim)
    scaling, max_model_len = _scaling(rope, declared, architecture, head_dim if rotary_dim is None else rotary_dim)
    return Rope(theta, scaling, rotary_dim, local_theta, _query_scaling(rope, architecture), max_model_len)


def _query_scaling(rope: Metadata, architecture: Architecture) -> QueryScaling | None:
    beta = rope.real("llama_4_scaling_beta", 0.0)
    if not beta or architecture.name != "mistral3":
        return None
    return QueryScaling(beta, _whole(rope.real("original_max_position_embeddings")))


def _with_layer_bases(
    rope: Rope, declared: Metadata, windows: tuple[int, ...], num_layers: int
) -> tuple[Rope, tuple[int, ...]]:
    """Rope bases by ``layer_rope_theta``, and the layers that are not rotated, whose base is 0."""
    bases = declared.reals("layer_rope_theta")
    if len(bases) != num_layers:
        raise declared.corrupt(f"layer_rope_theta has {len(bases)} entries; {num_layers} are expected")
    is_local = [bool(windows and windows[layer]) for layer in range(num_layers)]
    full, local = (
        sorted({base for base, flag in zip(bases, is_local, strict=True) if base and flag is kind})
        for kind in (False, True)
    )
    if len(full) > 1 or len(local) > 1:
        raise declared.unsupported(
            "rope bases (layer_rope_theta) that differ among layers with a window, or among the others; "
            "one for each of both kinds is supported"
        )
    theta = (full or local or [rope.theta])[0]
    local_theta = local[0] if local and local[0] != theta else None
    if local_theta is not None and rope.scaling is not None:
        raise declared.unsupported("scaled rope beside rope bases that differ by layer (layer_rope_theta)")
    unrotated = tuple(layer for layer, base in enumerate(bases) if not base)
    return replace(rope, theta=theta, local_theta=local_theta), unrotated


def yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature (arXiv 2309.00071, equation 22), as a factor for queries and keys alike."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * _log(factor) + 1.0


def longrope_attention(stretch: float, trained: float) -> float:
    """Phi-3's factor for queries and keys. ``stretch`` is the ratio of the context to the trained one."""
    return 1.0 if stretch <= 1.0 else math.sqrt(1 + _log(stretch) / _log(trained))


def _log(x: float) -> float:
    """Natural logarithm, correctly rounded. Results of the C library depend on its version and could change answers."""
    return float(Decimal(x).ln(Context(prec=30)))


def has_head(declared: Metadata) -> bool:
    """False if config.json names a decoder's class without the head, e.g. ``Qwen3Model``: it was saved to make
    vectors."""
    names = declared.strings("architectures") if "architectures" in declared.values else []
    return not _headless().keys() & set(names)


def _headless() -> dict[str, Architecture]:
    """Decoders by their classes without the head. A Gemma3TextModel is an encoder."""
    decoders = {row.class_name: row for row in ARCHITECTURES.values() if row.class_name.endswith(_CAUSAL)}
    return {f"{name.removesuffix(_CAUSAL)}Model": row for name, row in decoders.items() if row.name != "gemma3"}


def text_part(declared: Metadata) -> Metadata:
    """Configuration of the language model, as the config.json of a model of its own would have it, if ``declared``
    is that of a model which also takes images or sound (``text_config`` in a ``...ForConditionalGeneration``, or
    without a class name). Otherwise ``declared`` itself.

    Raises:
        UnsupportedArtifactError: the language model is not of a supported architecture.
    """
    names = declared.strings("architectures") if "architectures" in declared.values else []
    if "text_config" not in declared.values or (names and not any(name.endswith(_WITH_TEXT) for name in names)):
        return declared
    text = declared.section("text_config")
    kind = text.text("model_type")
    rows = {row.model_type or row.name: row for row in ARCHITECTURES.values() if row.class_name.endswith(_CAUSAL)}
    if kind not in rows:
        known = ", ".join(rows)
        raise declared.unsupported(f"a {' or '.join(names) or 'model'} with text of type {kind!r}; supported: {known}")
    shared = {key: declared.values[key] for key in _SHARED if key in declared.values}
    own = {"architectures": [rows[kind].class_name]}
    return Metadata(declared.path, {**rows[kind].defaults, **text.values, **shared, **own})


def _architecture(declared: Metadata) -> Architecture:
    """Find the architecture: by class name if config.json has one, because classifiers share the model type."""
    rows = ARCHITECTURES.values()
    by_class = {name: row for row in rows for name in (row.class_name, row.classifier_name) if name}
    known = ", ".join(by_class)
    by_class |= _headless()
    if "architectures" in declared.values:
        names = declared.strings("architectures")
        for name in names:
            if name in by_class:
                return by_class[name]
        raise declared.unsupported(f"architecture {' or '.join(names) or 'without a name'}; supported: {known}")
    model_type = declared.text("model_type")
    for row in ARCHITECTURES.values():
        if model_type == (row.model_type or row.name):
            return row
    raise declared.unsupported(f"model type {model_type!r}; supported: {known}")


def _refuse_variants(declared: Metadata, architecture: Architecture) -> None:
    """Reject settings that would change the forward pass and are not supported."""
    problem = None
    expected = architecture.hidden_act
    activation = declared.text("hidden_activation", declared.text("hidden_act", expected))
    if activation != expected:
        problem = f"activation {activation!r}; {expected} is supported"
    elif not declared.flag("is_causal", True) and not architecture.traits.get("bidirectional"):
        problem = "is_causal: false in a decoder; attention to earlier tokens is supported"
    elif declared.flag("mlp_bias", False):
        problem = "mlp_bias; feed-forward layers without biases are supported"
    elif "quantization_config" in declared.values:
        method = declared.section("quantization_config").values.get("quant_method", "unknown")
        problem = f"weights quantised by {method!r}; float safetensors, or a GGUF file, are supported"
    elif architecture.has_shared_mlp and declared.integer("num_local_experts", 8) != 0:
        problem = "experts (num_local_experts); models without experts are supported"
    elif architecture.has_shared_mlp and "layer_types" not in declared.values:
        problem = "layers without attention (no layer_types); attention in every layer is supported"
    elif architecture.name == "mistral3" and "rope_parameters" not in declared.values:
        problem = "no rope_parameters; their defaults have changed between versions of transformers"
    elif declared.flag("use_bidirectional_attention", False) != bool(architecture.traits.get("bidirectional", False)):
        problem = f"use_bidirectional_attention in a {architecture.class_name}; it belongs to Gemma3TextModel"
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in declared.values:
            problem = f"{key}; scores and logits without a cap are supported"
    if problem is not None:
        raise declared.unsupported(problem)


def _scales(declared: Metadata, architecture: Architecture, hidden_size: int) -> dict[str, float]:
    """Scaling factors of the architecture, under the names of `ModelConfig`."""
    if architecture.name in ("gemma3", "gemma-embedding"):
        scalar = declared.real("query_pre_attn_scalar", 256)
        if scalar <= 0:
            raise declared.corrupt(f"query_pre_attn_scalar is {scalar}; a positive number is expected")
        return {"embedding_scale": max(hidden_size, 0) ** 0.5, "attention_scale": scalar**-0.5}
    if architecture.name in ("granite", "granite_swa", "granitemoehybrid"):
        return {
            "embedding_scale": declared.real("embedding_multiplier", 1.0),
            "attention_scale": declared.real("attention_multiplier", 1.0),
            "residual_scale": declared.real("residual_multiplier", 1.0),
            "logits_divisor": declared.real("logits_scaling", 1.0),
        }
    return {}


def _unrotated_layers(declared: Metadata, architecture: Architecture, num_layers: int) -> tuple[int, ...]:
    """Layers without rope. SmolLM3 has a list of flags per layer; without it, every fourth layer has none."""
    if architecture.has_shared_mlp and declared.text("position_embedding_type", "") != "rope":
        return tuple(range(num_layers))
    if architecture.name != "smollm3":
        return ()
    if "no_rope_layers" not in declared.values:
        interval = declared.integer("no_rope_layer_interval", 4)
        return tuple(range(interval - 1, num_layers, interval)) if interval > 0 else ()
    rotated = declared.reals("no_rope_layers")
    if len(rotated) != num_layers:
        raise declared.corrupt(f"no_rope_layers has {len(rotated)} entries; {num_layers} are expected")
    return tuple(layer for layer, flag in enumerate(rotated) if not flag)


def _windows(
    declared: Metadata, architecture: Architecture, num_layers: int, unrotated: tuple[int, ...]
) -> tuple[int, ...]:
    """Window size of each layer in tokens, 0 without a window; empty if no layer has a window."""
    local = _local_layers(declared, architecture, num_layers, unrotated)
    if not any(local):
        return ()
    size = declared.integer("sliding_window", architecture.sliding_window)
    if size < 1:
        raise declared.corrupt(f"sliding_window is {size} in a model with sliding attention; at least 1 is expected")
    return tuple(size if flag else 0 for flag in local)


def _local_layers(
    declared: Metadata, architecture: Architecture, num_layers: int, unrotated: tuple[int, ...]
) -> list[bool]:
    """Flags of layers with a sliding window: the list in config.json, otherwise the rule of the architecture."""
    layers = range(num_layers)
    if architecture.recurrent:
        return [kind == _SLIDING for kind in layer_kinds(declared, architecture, num_layers)]
    listed = _listed_layers(declared, num_layers)
    if architecture.windows in ("none", "all"):
        if listed is not None and any(listed):
            raise declared.unsupported(
                f"sliding attention in some layers; that is not part of a plain {architecture.name} model"
            )
        everywhere = architecture.windows == "all" and "sliding_window" in declared.values
        return [everywhere for _ in layers]
    if architecture.windows == "periodic":
        period = declared.integer("sliding_window_pattern", architecture.period)
        return listed if listed is not None else [period > 0 and (layer + 1) % period != 0 for layer in layers]
    if architecture.windows == "listed":
        return listed if listed is not None else [layer % architecture.period != 0 for layer in layers]
    if not declared.flag("use_sliding_window", False):
        if listed is not None and any(listed):
            raise declared.unsupported("layers with sliding window attention, but use_sliding_window is not enabled")
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
            raise declared.unsupported(f"a layer of type {kind!r}; supported: {known}")
    if len(kinds) != num_layers:
        raise declared.corrupt(f"layer_types has {len(kinds)} entries; {num_layers} are expected")
    return [_LAYER_KINDS[kind] for kind in kinds]


def _sections(declared: Metadata, architecture: Architecture) -> tuple[Metadata, Metadata]:
    """Rope settings of full attention, and those of layers with a window."""
    none = Metadata(declared.path, {})
    if "rope_parameters" not in declared.values:
        return declared.section("rope_scaling"), none
    rope = declared.section("rope_parameters")
    if not any(isinstance(value, dict) for value in rope.values.values()):
        if architecture.has_local_rope and rope.values:
            raise declared.unsupported(f"rope_parameters without {_FULL!r}")
        return rope, none
    if not architecture.has_local_rope:
        raise rope.unsupported("rope parameters that differ by layer; equal ones are supported")
    full, local = rope.section(_FULL), rope.section(_SLIDING)
    kind = local.text("rope_type", "default")
    if kind != "default":
        raise rope.unsupported(f"rope type {kind!r} in layers with a sliding window; default is supported")
    return full, local


def _kind(rope: Metadata) -> str:
    return rope.text("rope_type", rope.text("type", "default"))


def _rotary_dim(rope: Metadata, declared: Metadata, architecture: Architecture, head_dim: int) -> int | None:
    default = declared.real("partial_rotary_factor", architecture.rotary_share)
    share = rope.real("partial_rotary_factor", default)
    if share == 1.0 or _kind(rope) == "proportional":
        return None
    if not architecture.partial_rope:
        raise rope.unsupported("rope on a part of each head; rope on the whole head is supported")
    return _whole(head_dim * share)


def _scaling(
    rope: Metadata, declared: Metadata, architecture: Architecture, rotary_dim: int
) -> tuple[RopeScaling | None, int]:
    """Return the rope scaling, and the context length for which it is valid."""
    kind = _kind(rope)
    if kind == "su" or (kind == "yarn" and architecture.name == "phi3"):
        kind = "longrope"  # older names
    context = declared.integer("max_position_embeddings")
    trained = declared.real(
        "original_max_position_embeddings", rope.real("original_max_position_embeddings", float(context))
    )
    if kind == "default" or kind == "dynamic":
        # Dynamic scaling only applies beyond the declared context, which limits sequences.
        return None, context
    if kind == "linear":
        return RopeScaling(kind, rope.real("factor")), context
    if kind not in KNOWN_TYPES:
        known = ", ".join(KNOWN_TYPES)
        raise rope.unsupported(f"rope type {kind!r}; supported: {known}")
    if kind == "proportional":
        return proportional_scaling(rotated_share(rope)[0], rotary_dim), context
    if trained <= 0:
        raise rope.corrupt(f"original_max_position_embeddings is {trained}; a positive number is expected")
    if kind == "llama3":
        return _llama3(rope, trained), context
    if kind == "yarn":
        scaling = _yarn(rope, trained)
        # Files that specify the trained context often also declare it as the full context.
        stated = any("original_max_position_embeddings" in section.values for section in (rope, declared))
        return scaling, max(context, _whole(scaling.factor * trained)) if stated else context
    return _longrope(rope, trained, context, rotary_dim)


def _llama3(rope: Metadata, trained: float) -> RopeScaling:
    parameters = {name: rope.real(name) for name in ("low_freq_factor", "high_freq_factor")}
    if parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise rope.corrupt("low_freq_factor is not below high_freq_factor")
    return RopeScaling("llama3", rope.real("factor"), parameters | {"original_max_position_embeddings": trained})


def _yarn(rope: Metadata, trained: float) -> RopeScaling:
    factor = _positive(rope, "factor")
    mscale, mscale_all = rope.real("mscale", 0.0), rope.real("mscale_all_dim", 0.0)
    attention = yarn_attention(factor)
    if mscale and mscale_all:
        attention = yarn_attention(factor, mscale) / yarn_attention(factor, mscale_all)
    parameters = {
        "original_max_position_embeddings": trained,
        "beta_fast": rope.real("beta_fast", 0.0) or 32.0,
        "beta_slow": rope.real("beta_slow", 0.0) or 1.0,
        "truncate": float(rope.flag("truncate", True)),
    }
    return RopeScaling("yarn", factor, parameters, attention_factor=rope.real("attention_factor", attention))


def _longrope(rope: Metadata, trained: float, context: int, rotary_dim: int) -> tuple[RopeScaling, int]:
    """Longrope scaling with the short divisors, limited to the context for which they are valid.

    Beyond it, transformers changes all divisors of a sequence, including those of cached keys. The results of a
    sequence would then depend on its final length, so this is not supported.
    """
    factors = rope.reals("short_factor")
    if len(factors) != rotary_dim // 2:
        raise rope.corrupt(f"{len(factors)} short rope factors; {rotary_dim // 2} are expected")
    stretch = rope.real("factor", context / trained)
    attention = longrope_attention(stretch, trained) if trained > 1 else 1.0
    return (
        RopeScaling("factors", 1.0, factors=factors, attention_factor=rope.real("attention_factor", attention)),
        min(context, _whole(trained)),
    )


def _whole(value: float) -> int:
    """Round down, and clamp to a range that includes every valid value."""
    return int(min(max(value, -1.0), 2.0**62))


def _positive(rope: Metadata, key: str) -> float:
    value = rope.real(key)
    if value <= 0:
        raise rope.corrupt(f"rope {key} is {value}; a positive number is expected")
    return value
