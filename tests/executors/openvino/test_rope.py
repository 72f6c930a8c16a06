"""Rope scalings are data; what is not known or not whole is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.executors.openvino.support import TINY_LLAMA, config_of

from lockstep.artifacts.model import RopeScaling
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError
from lockstep.executors.openvino.rope import inverse_frequencies

CONFIG = config_of(TINY_LLAMA)


def test_frequencies_fall_from_one_by_powers_of_theta() -> None:
    frequencies = inverse_frequencies(CONFIG)
    assert frequencies.shape == (16,)
    assert frequencies[0] == 1
    assert np.allclose(frequencies[8], 10000.0**-0.5)


def test_linear_scaling_and_equal_divisors_are_the_same() -> None:
    linear = inverse_frequencies(replace(CONFIG, rope_scaling=RopeScaling("linear", 4.0)))
    divided = inverse_frequencies(replace(CONFIG, rope_scaling=RopeScaling("factors", 1.0, factors=(4.0,) * 16)))
    assert np.array_equal(linear, inverse_frequencies(CONFIG) / 4)
    assert np.array_equal(linear, divided)


@pytest.mark.parametrize("factors", [(), (1.0,) * 15, (0.0,) * 16, (float("nan"),) * 16, (-1.0,) * 16])
def test_wrong_divisors_are_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(CorruptArtifactError, match="rope factor"):
        inverse_frequencies(replace(CONFIG, rope_scaling=RopeScaling("factors", 1.0, factors=factors)))


def test_an_unknown_scaling_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedArtifactError, match="'yarn' is not known; known are: linear, llama3, factors"):
        inverse_frequencies(replace(CONFIG, rope_scaling=RopeScaling("yarn", 4.0)))
