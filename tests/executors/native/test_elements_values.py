"""Row operations compute what they are said to, within the bounds that math.hpp states, and refuse wrong sizes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lockstep.executors.logits import token_logprobs
from lockstep.executors.rejection_sampling import EXP_MARGIN
from lockstep.executors.row_math import NumpyMath
from tests.executors.native.native_elements import GATES, Elements, Floats, logarithm, powers, rows_of

Doubles = npt.NDArray[np.float64]


def ulps(found: npt.NDArray[Any], exact: Doubles) -> float:
    """The largest distance of floats from exact values, in units of the last place of those."""
    return float((np.abs(found - exact) / np.spacing(np.abs(exact.astype(found.dtype))).astype(np.float64)).max())


def exact(function: Callable[[float], float], x: Floats) -> Doubles:
    """A function of the C library in doubles, whose error does not count beside that of floats."""
    return np.fromiter(map(function, x.tolist()), np.float64, len(x))


def floats(low: float, high: float, count: int = 20_001) -> Floats:
    """Numbers from low to high, evenly; and as many whose magnitudes go down to 1e-30."""
    even = np.linspace(low, high, count)
    return np.concatenate([even, even * np.geomspace(1e-30, 1, count)]).astype(np.float32)


def test_exp_of_floats_is_within_its_bound(best: Elements) -> None:
    x = floats(-87.0, 88.7, 50_001)
    assert ulps(best.weigh_lightly(x, 0.0, 1.0), exact(math.exp, x)) < 1.1
    small = floats(-103.9, -87.4)[:20_001]
    assert ulps(best.weigh_lightly(small, 0.0, 1.0), exact(math.exp, small)) < 1.1
    ends = np.array([-np.inf, -1e38, -104.0, 0.0, 88.8, 1e38, np.inf, np.nan], np.float32)
    expected = [0.0, 0.0, 0.0, 1.0, np.inf, np.inf, np.inf, np.nan]
    np.testing.assert_array_equal(best.weigh_lightly(ends, 0.0, 1.0), expected)


def test_exp_and_log_of_doubles_are_within_their_bounds(library: ctypes.CDLL, best: Elements) -> None:
    """Against decimal, which rounds correctly."""
    rng = np.random.default_rng(0)

    def distance(found: float, right: Decimal) -> float:
        return float(abs(Decimal(found) - right) / Decimal(math.ulp(float(right))))

    with localcontext() as context:
        context.prec = 40
        x = np.concatenate([rng.uniform(-700, 700, 400), rng.normal(0, 1, 400)]).astype(np.float32)
        weights = zip(best.weigh(x, 0.0, 1.0).tolist(), x.tolist(), strict=True)
        assert max(distance(found, Decimal(each).exp()) for found, each in weights) < 1.1
        tiny = rng.uniform(-744, -709, 200).astype(np.float32)
        weights = zip(best.weigh(tiny, 0.0, 1.0).tolist(), tiny.tolist(), strict=True)
        assert max(distance(found, Decimal(each).exp()) for found, each in weights) < 1.1
        positive = [*(10.0 ** rng.uniform(-323, 308, 400)), *rng.uniform(0.5, 2, 400), *(1 + rng.normal(0, 1e-9, 200))]
        assert max(distance(logarithm(library, each), Decimal(each).ln()) for each in map(float, positive)) < 2.0
        found = powers(library, 500_000.0, -np.arange(0, 1, 1 / 64))
        right = [Decimal(500_000) ** Decimal(-each / 64) for each in range(64)]
        assert max(map(distance, found.tolist(), right)) < 32
    assert [logarithm(library, each) for each in (0.0, 1.0, math.inf)] == [-math.inf, 0.0, math.inf]
    assert math.isnan(logarithm(library, -1.0))
    np.testing.assert_array_equal(best.weigh(np.array([-1e30, 0, 1e30], np.float32), 0.0, 1.0), [0.0, 1.0, np.inf])


def test_tanh_and_erf_are_within_their_bounds(best: Elements) -> None:
    x = floats(-12, 12)
    assert ulps(best.cap(x, 1.0), exact(math.tanh, x)) < 2.0
    x, one = floats(-6, 6), np.float32(1)
    # x/2 (1 + erf(x / sqrt 2)): the error of erf, that of its argument, and two roundings.
    found = best.gate("gelu_erf", x, np.full_like(x, one))
    right = exact(lambda each: 0.5 * each * (1 + math.erf(each * math.sqrt(0.5))), x)
    assert float((np.abs(found - right) / np.maximum(np.abs(x), 1e-30)).max()) < 3 * 2.0**-24


@pytest.mark.parametrize("cap", [30.0, 50.0])
def test_a_cap_is_a_scaled_tanh(best: Elements, cap: float) -> None:
    x = np.linspace(-500, 500, 3001, dtype=np.float32)
    np.testing.assert_allclose(best.cap(x, cap), cap * np.tanh(x.astype(np.float64) / cap), rtol=4e-7)
    np.testing.assert_array_equal(best.cap(np.array([-np.inf, np.inf], np.float32), cap), [-cap, cap])


def test_gates_are_their_functions_times_the_other_half(best: Elements) -> None:
    rng = np.random.default_rng(1)
    x, up = (rng.normal(0, 3, (5, 333)).astype(np.float32) for _ in range(2))
    wide = x.astype(np.float64)
    silu = wide / (1 + np.exp(-wide)) * up
    np.testing.assert_allclose(best.gate("silu", x, up), silu, rtol=3e-7, atol=1e-30)
    gelu = 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))) * up
    np.testing.assert_allclose(best.gate("gelu_tanh", x, up), gelu, rtol=3e-6, atol=1e-7)
    ends = np.array([-200.0, -0.0, 0.0, 200.0], np.float32)
    for function in ("silu", "gelu_tanh", "gelu_erf"):
        np.testing.assert_array_equal(best.gate(function, ends, np.ones_like(ends)), [0.0, 0.0, 0.0, 200.0])


def test_an_activation_alone_is_its_gate_times_one(best: Elements) -> None:
    x = np.random.default_rng(3).normal(0, 3, (5, 333)).astype(np.float32)
    for function in GATES:
        expected = best.gate(function, x, np.ones_like(x))
        np.testing.assert_array_equal(best.activate(function, x), expected)
    np.testing.assert_array_equal(best.activate("relu", x), np.maximum(x, 0))
    assert np.isnan(best.activate("relu", np.full(3, np.nan, np.float32))).all()
    assert np.array_equal(best.activate("identity", x), x)
    np.testing.assert_allclose(best.activate("sigmoid", x), 1 / (1 + np.exp(-x.astype(np.float64))), rtol=3e-7)
    assert ulps(best.activate("tanh", floats(-12, 12)), exact(math.tanh, floats(-12, 12))) < 2.0


def test_layer_norms_are_those_of_torch(best: Elements) -> None:
    rng = np.random.default_rng(4)
    for shape in ((7, 576), (7, 40), (5, 1), (3, 15)):
        x = (rng.normal(0, 3, shape) + 5).astype(np.float32)
        weights = rng.normal(0, 1, (2, shape[1])).astype(np.float32)
        wide = x.astype(np.float64)
        centred = wide - wide.mean(axis=1, keepdims=True)
        right = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * weights[0] + weights[1]
        np.testing.assert_allclose(best.layer_norm(x, weights), right, rtol=1e-5, atol=2e-6)
    with pytest.raises(ValueError, match="two rows"):
        best.layer_norm(x, weights[:1])


def test_norms_are_those_of_the_graph(best: Elements) -> None:
    rng = np.random.default_rng(2)
    for shape, offset in (((7, 576), 0.0), ((7, 40), 1.0), ((28, 64), 0.0)):  # 28 heads of 64
        x, weight = rng.normal(0, 3, shape).astype(np.float32), rng.normal(0, 1, shape[1]).astype(np.float32)
        wide = x.astype(np.float64)
        right = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * (weight + np.float32(offset))
        np.testing.assert_allclose(best.norm(x, weight, offset), right, rtol=1e-6)
    with_offset = best.norm(x, weight, 1.0)
    np.testing.assert_array_equal(with_offset, best.norm(x, weight + np.float32(1.0)))


def test_additions_and_divisions_round_once_for_each_operation(best: Elements) -> None:
    """Granite's multipliers: the numbers of numpy, whose basic arithmetic is IEEE's."""
    x, y = np.random.default_rng(3).normal(0, 1, (2, 4, 77)).astype(np.float32)
    np.testing.assert_array_equal(best.add(x, y), x + y)
    np.testing.assert_array_equal(best.add(x, y, 0.22), x + y * np.float32(0.22))
    np.testing.assert_array_equal(best.divide(x, 8.3), x / np.float32(8.3))


def test_rows_of_a_table_are_widened_and_scaled(best: Elements) -> None:
    table = np.random.default_rng(4).normal(0, 1, (9, 50)).astype(np.float32)
    ids = [3, 0, 8, 3]
    factor = np.float32(math.sqrt(50))
    np.testing.assert_array_equal(best.embed("f32", table, ids, 50, float(factor)), table[ids] * factor)
    half = table.astype(np.float16)
    np.testing.assert_array_equal(best.embed("f16", half, ids, 50), half[ids].astype(np.float32))
    brain = (table.view(np.uint32) >> 16).astype(np.uint16)
    expected = (brain[ids].astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(best.embed("bf16", brain, ids, 50), expected)
    np.testing.assert_array_equal(best.embed("bf16", brain, ids, 43), expected[:, :43])


def test_rotations_are_correctly_rounded_cosines_and_sines(best: Elements) -> None:
    """Of the rounded product of position and frequency, up to the last position that there may be."""
    frequencies = np.geomspace(1, 1e-6, 48).astype(np.float32)
    positions = np.array([0, 1, 2, 3, 1000, 131_071, 1_048_575, 10_485_759, 2**24])
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    right = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    assert np.abs(best.rotation(frequencies, positions) - right).max() <= 2.0**-25 * 1.0001
    scaled = best.rotation(frequencies, positions, 1.25)
    np.testing.assert_array_equal(scaled, best.rotation(frequencies, positions) * np.float32(1.25))


def test_weights_and_sums_are_those_of_the_sampler(best: Elements) -> None:
    row = np.random.default_rng(5).normal(0, 5, 4001).astype(np.float32)
    peak = float(row.max())
    np.testing.assert_allclose(best.weigh(row, peak, 0.7), NumpyMath().weigh(row, peak, 0.7), rtol=1e-13)
    light = best.weigh_lightly(row, peak, 0.7)
    np.testing.assert_allclose(light, NumpyMath().weigh_lightly(row, peak, 0.7), rtol=1e-6)
    heavy = best.weigh(row, peak, 0.7)
    assert (np.abs(light - heavy) <= EXP_MARGIN * heavy)[heavy > 2.0**-64].all()
    assert best.total(light) == pytest.approx(math.fsum(light.tolist()), rel=1e-14)
    assert best.total(heavy) == pytest.approx(math.fsum(heavy.tolist()), rel=1e-14)


def test_log_probabilities_are_those_of_the_sampler(best: Elements) -> None:
    rng = np.random.default_rng(6)
    rows = rng.normal(0, 5, (6, 5000)).astype(np.float32)
    rows[1] = np.round(rows[1])  # many ties
    rows[2, 100:] = -np.inf
    rows[3] = 1.0
    rows[4, ::7] = -np.inf
    tokens = [0, 17, 3, 4999, 4, 6]
    found, ids, top = best.logprobs(rows, tokens, 130)
    for index, row in enumerate(rows):
        right = token_logprobs(row, tokens[index], 130)
        assert ids[index].tolist() == [token for token, _ in right.top]
        np.testing.assert_allclose(top[index], [each for _, each in right.top], rtol=1e-6, atol=1e-6)
        assert found[index] == pytest.approx(right.logprob, rel=1e-6)
        np.testing.assert_allclose(best.log_softmax(row)[ids[index]], top[index].astype(np.float32), rtol=0)
    assert best.logprobs(rows[:1], [0], 0)[0].tolist() == found[:1].tolist()


def test_a_row_that_is_not_finite_has_no_log_probabilities(best: Elements) -> None:
    rows = np.zeros((3, 100), np.float32)
    rows[0, 50], rows[1, 50], rows[2] = np.nan, np.inf, -np.inf
    found, ids, top = best.logprobs(rows, [0, 0, 0], 100)
    assert np.isnan(found).all()
    assert np.isnan(top).all()
    assert ids[0].tolist() == [*range(50), *range(51, 100), -1]
    assert ids[1].tolist() == [50, *range(50), *range(51, 100)]


def test_softmax_is_a_distribution(best: Elements) -> None:
    rows = np.random.default_rng(7).normal(0, 5, (3, 1001)).astype(np.float32)
    weights = np.exp((rows.astype(np.float64) - rows.max(axis=1, keepdims=True)) / 0.5)
    np.testing.assert_allclose(best.softmax(rows, 0.5), weights / weights.sum(axis=1, keepdims=True), rtol=5e-6)


def test_unit_vectors_and_cosines(best: Elements) -> None:
    rows = np.random.default_rng(8).normal(0, 5, (4, 777)).astype(np.float32)
    rows[2] = 0
    units = best.unit(rows)
    np.testing.assert_allclose(units, NumpyMath().unit(rows), rtol=1e-7)
    assert not units[2].any()
    right = [math.fsum(float(a) * float(b) for a, b in zip(row, units[0], strict=True)) for row in units]
    np.testing.assert_allclose(best.dot(units, units[0]), right, rtol=1e-14, atol=1e-15)


FITS = np.zeros((3, 20), np.float32)
FAULTS: dict[str, Callable[[Elements], object]] = {
    "does not run that instruction set": lambda e: Elements(e.library, "avx1024").add(FITS, FITS),
    "the shapes of inputs and outputs differ": lambda e: e.map("add", FITS, FITS[:2], ctypes.c_float(1)),
    "the shapes of inputs and outputs differ ": lambda e: e.map(
        "cap", FITS, ctypes.c_float(1), out=FITS[:, :19].copy()
    ),
    "not one row of its columns": lambda e: e.norm(FITS, FITS[0, :19]),
    "not one row of its columns ": lambda e: e.norm(FITS, FITS),
    "the function is none of": lambda e: e.map("gate", len(GATES), FITS, FITS),
    "the function is none of ": lambda e: e.map("activate", -1, FITS),
    "the cap is not a positive number": lambda e: e.cap(FITS, math.nan),
    "an id is not a row of the table": lambda e: e.embed("f32", FITS, [3], 20),
    "an id is not a row of the table ": lambda e: e.embed("f32", FITS, [-1], 20),
    "shorter than the output's": lambda e: e.embed("f16", FITS[:, :9].copy(), [0], 20),
    "not twice as many columns": lambda e: e.call(
        "rotation", rows_of(FITS[0, :9]), np.zeros(3, np.int64), ctypes.c_float(1), rows_of(FITS)
    ),
    "a frequency is negative": lambda e: e.rotation(np.array([-1.0], np.float32), [0]),
    "a position is negative": lambda e: e.rotation(np.array([1.0], np.float32), [-1]),
    "a position is negative, or its angle": lambda e: e.rotation(np.array([2.0], np.float32), [2**24]),
    "the temperature is not a positive number": lambda e: e.weigh(FITS[0], 0.0, 0.0),
    "the temperature is not a positive number ": lambda e: e.softmax(FITS, math.inf),
    "more tokens are wanted than there are": lambda e: e.logprobs(FITS, [0, 0, 0], 21),
    "a token is not in the vocabulary": lambda e: e.logprobs(FITS, [0, 20, 0], 1),
    "the base is not a positive number": lambda e: powers(e.library, -1.0, np.zeros(1)),
}


@pytest.mark.parametrize("message", FAULTS)
def test_wrong_sizes_and_numbers_are_refused(best: Elements, message: str) -> None:
    with pytest.raises(ValueError, match=message.strip()):
        FAULTS[message](best)


@pytest.mark.parametrize("field", [("capacity", 59), ("rows", -1), ("rows", 2**62), ("stride", 19), ("stride", 2**62)])
def test_a_view_that_leaves_its_memory_is_refused_untouched(best: Elements, field: tuple[str, int]) -> None:
    array, out = np.ones((3, 20), np.float32), np.full((3, 20), 77, np.float32)
    views = [rows_of(array), rows_of(out)]
    for view in views:
        before = getattr(view, field[0])
        setattr(view, *field)
        with pytest.raises(ValueError, match=r"rows do not fit their memory|the shapes"):
            best.call("log_softmax", *views)
        setattr(view, field[0], before)
    assert (out == 77).all()
