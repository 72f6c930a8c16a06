"""Scaled frequencies follow their formulas, however a file states them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.huggingface_config import read_config
from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import ModelConfig, RopeScaling
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError
from lockstep.executors.rotary import inverse_frequencies, local_frequencies

GOLDEN: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).resolve().parents[1] / "golden" / "rope.json").read_text()
)
"""Written by tools/golden/rope.py."""
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


def test_factors_of_a_gguf_equal_the_formula() -> None:
    """llama.cpp's converter writes llama3 scaling as one divisor per pair (`rope_freqs.weight`)."""
    expected = inverse_frequencies(replace(CONFIG, rope_scaling=LLAMA3))
    divisors = tuple(float(value) for value in inverse_frequencies(CONFIG) / expected)
    scaling = RopeScaling("factors", 1.0, factors=divisors)
    np.testing.assert_allclose(inverse_frequencies(replace(CONFIG, rope_scaling=scaling)), expected, rtol=1e-6)


@pytest.mark.parametrize("factors", [(), (1.0,) * 31, (0.0,) * 32, (float("nan"),) * 32, (-1.0,) * 32])
def test_factors_that_are_not_one_positive_number_per_pair_are_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(CorruptArtifactError, match="rope factor"):
        inverse_frequencies(replace(CONFIG, rope_scaling=RopeScaling("factors", 1.0, factors=factors)))


@pytest.mark.parametrize("name", GOLDEN)
def test_frequencies_of_a_config_equal_those_of_transformers(name: str) -> None:
    golden = GOLDEN[name]
    config = read_config(Metadata(Path("config.json"), golden["config"]))
    np.testing.assert_allclose(inverse_frequencies(config), golden["frequencies"], rtol=2e-6)
    factor = 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor
    assert factor == pytest.approx(golden["attention_factor"], rel=1e-9)


def test_yarn_on_waves_that_do_not_differ_is_refused() -> None:
    config = read_config(Metadata(Path("config.json"), GOLDEN["yarn"]["config"]))
    with pytest.raises(CorruptArtifactError, match="yarn requires a value above 1"):
        inverse_frequencies(replace(config, rope_theta=1.0))


def test_layers_with_a_window_have_frequencies_of_their_own() -> None:
    config = replace(CONFIG, rope_scaling=LLAMA3, local_rope_theta=10000.0, windows=(16,))
    plain = replace(CONFIG, rope_theta=10000.0)
    np.testing.assert_array_equal(local_frequencies(config), inverse_frequencies(plain))


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedArtifactError, match="'spiral' is not supported; supported: linear"):
        inverse_frequencies(replace(CONFIG, rope_scaling=RopeScaling("spiral", 2.0)))
