"""Scaled frequencies follow their formulas, however a file states them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.artifacts.model import ModelConfig, RopeScaling
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError
from lockstep.executors.openvino.rope import inverse_frequencies

CONFIG = ModelConfig("llama", 1, 64, 64, 1, 1, 64, 10, 131072, 1e-5, 500000.0)
LLAMA3 = RopeScaling(
    "llama3",
    8.0,
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192.0},
)


def test_plain_frequencies_fall_by_the_base() -> None:
    plain = inverse_frequencies(CONFIG)
    assert plain[0] == 1.0
    np.testing.assert_allclose(plain[16], 500000.0**-0.5, rtol=1e-6)


def test_linear_divides_by_its_factor() -> None:
    scaled = inverse_frequencies(replace(CONFIG, rope_scaling=RopeScaling("linear", 4.0)))
    np.testing.assert_array_equal(scaled, inverse_frequencies(CONFIG) / np.float32(4.0))


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain, scaled = inverse_frequencies(CONFIG), inverse_frequencies(replace(CONFIG, rope_scaling=LLAMA3))
    assert scaled[0] == plain[0]
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8, rtol=1e-6)
    assert np.all(np.diff(plain / scaled) >= 0)


def test_factors_of_a_gguf_give_what_the_formula_gives() -> None:
    """llama.cpp's converter writes llama3 scaling as one divisor per pair (`rope_freqs.weight`)."""
    expected = inverse_frequencies(replace(CONFIG, rope_scaling=LLAMA3))
    divisors = tuple(float(value) for value in inverse_frequencies(CONFIG) / expected)
    scaling = RopeScaling("factors", 1.0, factors=divisors)
    np.testing.assert_allclose(inverse_frequencies(replace(CONFIG, rope_scaling=scaling)), expected, rtol=1e-6)


@pytest.mark.parametrize("factors", [(), (1.0,) * 31, (0.0,) * 32, (float("nan"),) * 32, (-1.0,) * 32])
def test_factors_that_are_not_one_positive_number_per_pair_are_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(CorruptArtifactError, match="rope factor"):
        inverse_frequencies(replace(CONFIG, rope_scaling=RopeScaling("factors", 1.0, factors=factors)))


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArtifactError, match="'spiral' is not known; known are: linear"):
        inverse_frequencies(replace(CONFIG, rope_scaling=RopeScaling("spiral", 2.0)))
