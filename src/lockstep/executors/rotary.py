"""Rotary frequencies: derives them from a model's configuration. Pure numpy.

Unscaled frequencies need a power, and one scaling needs a logarithm. Their bits differ by processor if numpy or the C
library computes them, so both functions are arguments. All other steps are basic arithmetic, which is the same
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import ModelConfig, RopeScaling
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError

KNOWN_SCALINGS = ("linear", "llama3", "yarn", "factors")
PlainFrequencies = Callable[[int, float], npt.NDArray[np.float32]]


def plain_frequencies(rotary_dim: int, theta: float) -> npt.NDArray[np.float32]:
    """[rotary_dim / 2]: unscaled frequencies theta ** -(2 i / rotary_dim), computed by numpy, whose bits differ by
    processor."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return (np.float32(1.0) / np.float32(theta) ** exponents).astype(np.float32)


def inverse_frequencies(
    config: ModelConfig, plain: PlainFrequencies = plain_frequencies, log: Callable[[float], float] = math.log
) -> npt.NDArray[np.float32]:
    """[rotary_dim / 2]: angle per position of each pair (i, i + rotary_dim / 2).

    Args:
        plain: function that computes the unscaled frequencies for a number of dimensions and a base.
        log: the natural logarithm. All other steps are basic arithmetic, which is the same everywhere.

    Raises:
        UnsupportedArtifactError: the scaling is unknown.
        CorruptArtifactError: there are too few or too many explicit factors, or they are not positive numbers.
    """
    frequencies = plain(rotary_dim(config, config.full_head_dim or config.head_dim), config.rope_theta)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return (frequencies / np.float32(scaling.factor)).astype(np.float32)
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, config.rope_theta, log)
    if scaling.kind == "factors":
        return _divided(frequencies, scaling)
    known = ", ".join(KNOWN_SCALINGS)
    raise UnsupportedArtifactError(f"rope scaling {scaling.kind!r} is not supported; supported: {known}")


def local_frequencies(config: ModelConfig, plain: PlainFrequencies = plain_frequencies) -> npt.NDArray[np.float32]:
    """Like `inverse_frequencies`, for layers with a window of a model that rotates them differently."""
    assert config.local_rope_theta is not None, "all layers have the same rotation"
    return plain(rotary_dim(config, config.head_dim), config.local_rope_theta)


def rotary_dim(config: ModelConfig, head_dim: int) -> int:
    """Number of leading dimensions that are rotated in heads of a size."""
    return head_dim if config.rotary_dim is None else config.rotary_dim


def _llama3(frequencies: npt.NDArray[np.float32], scaling: RopeScaling) -> npt.NDArray[np.float32]:
    """Llama 3.1 scaling: long wavelengths are stretched by ``factor``, short ones kept, those between interpolated.

    Source of the formula: transformers, modeling_rope_utils.py, ``_compute_llama3_parameters``.
    """
    low_factor = scaling.parameters["low_freq_factor"]
    high_factor = scaling.parameters["high_freq_factor"]
    original_context = scaling.parameters["original_max_position_embeddings"]
    wavelengths = 2.0 * math.pi / frequencies.astype(np.float64)
    smooth = (original_context / wavelengths - low_factor) / (high_factor - low_factor)
    stretched = frequencies / scaling.factor
    between = (1.0 - smooth) * stretched + smooth * frequencies
    scaled = np.where(wavelengths > original_context / low_factor, stretched, between)
    return np.where(wavelengths < original_context / high_factor, frequencies, scaled).astype(np.float32)


def _yarn(
    frequencies: npt.NDArray[np.float32], scaling: RopeScaling, theta: float, log: Callable[[float], float]
) -> npt.NDArray[np.float32]:
    """YaRN scaling (arXiv 2309.00071): pairs that rotate often within the trained context are kept, slow ones are
    stretched.

    Between ``beta_fast`` and ``beta_slow`` rotations, the share rises linearly with the index of the pair. Source of
    the details: transformers, modeling_rope_utils.py, ``_compute_yarn_parameters``.
    """
    if theta <= 1:
        raise CorruptArtifactError(f"rope theta is {theta}; yarn requires a value above 1")
    trained, num_pairs = scaling.parameters["original_max_position_embeddings"], len(frequencies)

    def pair_that_turns(times: float) -> float:
        return num_pairs * log(trained / (times * 2 * math.pi)) / log(theta)

    low, high = (pair_that_turns(scaling.parameters[key]) for key in ("beta_fast", "beta_slow"))
    if scaling.parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    span = high - low if high != low else 0.001
    stretched = np.clip((np.arange(num_pairs, dtype=np.float32) - np.float32(low)) / np.float32(span), 0, 1)
    slow = frequencies / np.float32(scaling.factor)
    mixed: npt.NDArray[np.float32] = (slow * stretched + frequencies * (1 - stretched)).astype(np.float32)
    return mixed


def _divided(frequencies: npt.NDArray[np.float32], scaling: RopeScaling) -> npt.NDArray[np.float32]:
    """Explicit divisors, one per frequency, in which llama.cpp's converter stores llama3 scaling."""
    factors = np.array(scaling.factors, np.float32)
    if factors.shape != frequencies.shape:
        raise CorruptArtifactError(f"there are {len(factors)} rope factors; there must be {len(frequencies)}")
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CorruptArtifactError("a rope factor is not a positive number")
    return (frequencies / factors).astype(np.float32)
