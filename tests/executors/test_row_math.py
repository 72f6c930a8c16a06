"""Functions of the sampler and of vectors: by the library and by NumPy they agree."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lockstep.executors.row_math import NativeMath, NumpyMath, RowMath, row_math

ROWS = np.random.default_rng(3).normal(0, 4, (5, 1_003)).astype(np.float32)


@pytest.fixture(params=[NumpyMath(), row_math()], ids=["numpy", "in use"])
def functions(request: pytest.FixtureRequest) -> RowMath:
    found: RowMath = request.param
    return found


def test_the_library_is_in_use() -> None:
    assert isinstance(row_math(), NativeMath)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_weights_are_those_of_the_definition(functions: RowMath, temperature: float) -> None:
    peak = float(ROWS[0].max())
    expected = [math.exp((float(x) - peak) / temperature) for x in ROWS[0]]
    np.testing.assert_allclose(functions.weigh(ROWS[0], peak, temperature), expected, rtol=1e-14)
    np.testing.assert_allclose(functions.weigh_lightly(ROWS[0], peak, temperature), expected, rtol=2e-5)
    block = ROWS[:4, :64].T.copy()[:, 1:3]  # not contiguous
    one = functions.weigh_lightly(block[5:6, 1], peak, 1.0)
    assert functions.weigh_lightly(block, peak, 1.0)[5, 1] == one[0]


def test_sums_and_logarithms(functions: RowMath) -> None:
    assert functions.total(ROWS[0]) == pytest.approx(math.fsum(ROWS[0].tolist()), rel=1e-12)
    some = ROWS[0].astype(np.float64)[::2]
    assert functions.total(some) == pytest.approx(math.fsum(some.tolist()), rel=1e-12)
    assert functions.total(ROWS[0][:0]) == 0.0
    expected = math.log(math.fsum(math.exp(x) for x in ROWS[1].tolist()))
    assert functions.log_total(ROWS[1]) == pytest.approx(expected, rel=1e-6)
    assert functions.log(0.05) == pytest.approx(math.log(0.05), rel=1e-15)
    powers = functions.power(10_000.0, np.array([0.0, -0.5, 1.0]))
    np.testing.assert_allclose(powers, [1.0, 0.01, 10_000.0], rtol=1e-14)


def test_unit_vectors_have_length_one_or_are_zero(functions: RowMath) -> None:
    units = functions.unit(np.stack([ROWS[0], np.zeros(ROWS.shape[1], np.float32)]))
    assert np.linalg.norm(units[0]) == pytest.approx(1.0)
    assert not units[1].any()
    assert functions.unit(ROWS[:0]).shape == (0, ROWS.shape[1])
