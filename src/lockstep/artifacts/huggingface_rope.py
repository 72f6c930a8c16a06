"""Rotary embedding as config.json states it, in each of transformers' generations.

The older spelling is `rope_theta` and `rope_scaling`, the newer one `rope_parameters`, nested by layer type where
layers differ. Formulas: transformers' `modeling_rope_utils.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.artifacts.architectures import Architecture
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import RopeScaling
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError

KNOWN_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Rope:
    """Fields of `ModelConfig`, and the context for which they hold."""

    theta: float
    scaling: RopeScaling | None
    rotary_dim: int | None
    local_theta: float | None
    max_model_len: int


def read_rope(declared: Metadata, architecture: Architecture, head_dim: int) -> Rope:
    """Raises UnsupportedArtifactError for a rope that is not computed, by name."""
    rope, local = _sections(declared, architecture)
    theta = rope.real("rope_theta", declared.real("rope_theta", architecture.rope_theta))
    local_theta = None
    if architecture.windows == "periodic":
        local_theta = declared.real("rope_local_base_freq", architecture.local_rope_theta or theta)
        local_theta = local.real("rope_theta", local_theta)
    rotary_dim = _rotary_dim(rope, declared, architecture, head_dim)
    scaling, max_model_len = _scaling(rope, declared, architecture, head_dim if rotary_dim is None else rotary_dim)
    return Rope(theta, scaling, rotary_dim, local_theta, max_model_len)


def _sections(declared: Metadata, architecture: Architecture) -> tuple[Metadata, Metadata]:
    """The parameters of full attention and those of layers with a window."""
    none = Metadata(declared.path, {})
    if "rope_parameters" not in declared.values:
        return declared.section("rope_scaling"), none
    rope = declared.section("rope_parameters")
    if not any(isinstance(value, dict) for value in rope.values.values()):
        if architecture.windows == "periodic" and rope.values:
            raise UnsupportedArtifactError(f"rope_parameters without {_FULL!r}", path=declared.path)
        return rope, none
    if architecture.windows != "periodic":
        raise UnsupportedArtifactError("rope parameters that differ by layer; equal ones are supported", path=rope.path)
    full, local = rope.section(_FULL), rope.section(_SLIDING)
    kind = local.text("rope_type", "default")
    if kind != "default":
        raise UnsupportedArtifactError(
            f"rope type {kind!r} in layers with a sliding window; default is known", path=rope.path
        )
    return full, local


def _rotary_dim(rope: Metadata, declared: Metadata, architecture: Architecture, head_dim: int) -> int | None:
    share = rope.real("partial_rotary_factor", declared.real("partial_rotary_factor", 1.0))
    if share == 1.0:
        return None
    if not architecture.partial_rope:
        raise UnsupportedArtifactError("rope on a part of each head; on the whole is supported", path=rope.path)
    return _whole(head_dim * share)


def _scaling(
    rope: Metadata, declared: Metadata, architecture: Architecture, rotary_dim: int
) -> tuple[RopeScaling | None, int]:
    """The scaling, and the context up to which it is as trained."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "su" or (kind == "yarn" and architecture.name == "phi3"):
        kind = "longrope"  # the older names of it
    context = declared.integer("max_position_embeddings")
    trained = declared.real(
        "original_max_position_embeddings", rope.real("original_max_position_embeddings", float(context))
    )
    if kind == "default" or kind == "dynamic":
        # Dynamic scaling begins beyond the declared context, and a sequence ends there.
        return None, context
    if kind == "linear":
        return RopeScaling(kind, rope.real("factor")), context
    if kind not in KNOWN_TYPES:
        known = ", ".join(KNOWN_TYPES)
        raise UnsupportedArtifactError(f"rope type {kind!r}; the known ones are {known}", path=rope.path)
    if trained <= 0:
        raise CorruptArtifactError(
            f"original_max_position_embeddings is {trained}; a positive number is expected", path=rope.path
        )
    if kind == "llama3":
        return _llama3(rope, trained), context
    if kind == "yarn":
        scaling = _yarn(rope, trained)
        # Files that name the trained context often still declare it as the whole one.
        stated = any("original_max_position_embeddings" in section.values for section in (rope, declared))
        return scaling, max(context, _whole(scaling.factor * trained)) if stated else context
    return _longrope(rope, trained, context, rotary_dim)


def _llama3(rope: Metadata, trained: float) -> RopeScaling:
    parameters = {name: rope.real(name) for name in ("low_freq_factor", "high_freq_factor")}
    if parameters["low_freq_factor"] >= parameters["high_freq_factor"]:
        raise CorruptArtifactError("low_freq_factor is not below high_freq_factor", path=rope.path)
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


def yarn_attention(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature (arXiv 2309.00071, equation 22), as a factor of queries and keys alike."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: Metadata, trained: float, context: int, rotary_dim: int) -> tuple[RopeScaling, int]:
    """The short divisors, within the context for which they are meant.

    Beyond it transformers changes all of a sequence's divisors, keys in the cache included; a sequence's numbers would
    then depend on how long it gets, so that is not offered.
    """
    factors = rope.reals("short_factor")
    if len(factors) != rotary_dim // 2:
        raise CorruptArtifactError(f"{len(factors)} short rope factors; {rotary_dim // 2} are expected", path=rope.path)
    stretch = rope.real("factor", context / trained)
    attention = longrope_attention(stretch, trained) if trained > 1 else 1.0
    return (
        RopeScaling("factors", 1.0, factors=factors, attention_factor=rope.real("attention_factor", attention)),
        min(context, _whole(trained)),
    )


def longrope_attention(stretch: float, trained: float) -> float:
    """Phi-3's factor of queries and keys for a context stretched that many times."""
    return 1.0 if stretch <= 1.0 else math.sqrt(1 + math.log(stretch) / math.log(trained))


def _whole(value: float) -> int:
    """Rounded down, and not beyond what any check accepts."""
    return int(min(max(value, -1.0), 2.0**62))


def _positive(rope: Metadata, key: str) -> float:
    value = rope.real(key)
    if value <= 0:
        raise CorruptArtifactError(f"rope {key} is {value}; a positive number is expected", path=rope.path)
    return value
