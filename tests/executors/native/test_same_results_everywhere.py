"""Results of the sampler's and the rotation's operations do not depend on the processor; numpy's formulas do."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.executors.rotary import inverse_frequencies, local_frequencies
from tests.executors.native.native_elements import Elements
from tests.executors.native.result_digests import (
    CONFIG,
    CONFIGS,
    digests,
    frequencies_by,
    native_frequencies,
    native_results,
)

ROOT = Path(__file__).resolve().parents[3]


def optional_features() -> list[str]:
    """Features of this processor that numpy chooses code by and that can be withheld from it."""
    core: Any = importlib.import_module("numpy._core._multiarray_umath")
    return [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]


def digests_of_a_process(library: ctypes.CDLL, isa: str, withheld: list[str]) -> dict[str, dict[str, str]]:
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(withheld)}
    command = [sys.executable, "-m", "tests.executors.native.result_digests", library._name, isa]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def test_results_are_the_same_with_every_instruction_set(isas: list[Elements]) -> None:
    expected = digests(native_results(isas[0]))
    assert [digests(native_results(each)) for each in isas[1:]] == [expected] * (len(isas) - 1)


def test_results_are_independent_of_numpy_features(library: ctypes.CDLL, best: Elements) -> None:
    """NumPy's functions are the negative twin: they give other bits, answers too, where a feature is withheld."""
    features = optional_features()
    withheld = digests_of_a_process(library, "portable", features)
    with_all = digests_of_a_process(library, best.isa, [])
    assert with_all["native"] == withheld["native"]
    assert digests(native_results(best)).items() <= withheld["native"].items()
    if features:
        changed = {name for name, digest in with_all["numpy"].items() if withheld["numpy"][name] != digest}
        assert {"weights", "answers"} <= changed, f"numpy gives the same bits without {features}: {changed}"


@pytest.mark.parametrize("index", range(len(CONFIGS)))
def test_frequencies_are_those_of_today_and_nearer_to_the_exact_ones(library: ctypes.CDLL, index: int) -> None:
    config = CONFIGS[index]
    found = native_frequencies(library, config)
    np.testing.assert_allclose(found, inverse_frequencies(config), rtol=1e-6)
    if config.rope_scaling is None:
        exact = [500_000.0 ** (-2 * pair / 48) for pair in range(24)]
        np.testing.assert_array_equal(found, np.array(exact, np.float32))


def test_frequencies_of_layers_with_a_window(library: ctypes.CDLL) -> None:
    config = replace(CONFIG, local_rope_theta=10_000.0, windows=(16,))

    def plain(rotary_dim: int, theta: float) -> Any:
        return frequencies_by(library, rotary_dim, theta)

    np.testing.assert_array_equal(local_frequencies(config, plain), frequencies_by(library, 48, 10_000.0))
    assert len(local_frequencies(config, plain)) == 24
