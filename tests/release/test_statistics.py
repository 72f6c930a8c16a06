"""Every formula agrees with an independent implementation of its definition, and no look depends on later pairs."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lockstep.release.statistics import (
    MIN_BLOCKS,
    MIN_PAIRS,
    MIN_TIMES_CORRELATED,
    MIXTURE_PRECISION,
    STAKES,
    Floats,
    bet_below,
    bet_upper,
    e_bh,
    looks_of,
    nearest_rank,
    track,
    width_after,
)

ALPHA = 0.05
NODES, WEIGHTS = np.polynomial.legendre.leggauss(100)
numbers = st.floats(-1e6, 1e6)
seeds = st.integers(0, 2**32 - 1)


# -- second implementations, of definitions --------------------------------------------------------------------------


def mixture_by_integration(excess: float, num: int) -> float:
    """Logarithm of the integral of likelihood ratios over half-normal effects, by Gauss and Legendre."""
    centre = max(excess / (num + MIXTURE_PRECISION), 0.0)
    width = 12 / math.sqrt(num + MIXTURE_PRECISION)
    low, high = max(0.0, centre - width), centre + (width if excess >= 0 else min(width, 40 / -excess))
    effects = low + (high - low) * (NODES + 1) / 2
    logs = effects * excess - 0.5 * effects**2 * (num + MIXTURE_PRECISION)
    logs += math.log(2.0) + 0.5 * math.log(MIXTURE_PRECISION / (2 * math.pi))
    most = float(logs.max())
    return most + math.log(float(WEIGHTS @ np.exp(logs - most)) * (high - low) / 2)


def long_run_variance(series: Floats) -> tuple[float, float]:
    """Largest variance of block means times their length, plus a standard error; and pairs per independent pair."""
    found = []
    size = 1
    while len(series) // size >= MIN_BLOCKS:
        blocks = [series[start : start + size].mean() for start in range(0, len(series) - size + 1, size)]
        found.append((size * float(np.var(blocks, ddof=1)), math.sqrt(2 / len(blocks))))
        size *= 2
    return max(variance * (1 + error) for variance, error in found), max(found)[0] / found[0][0]


def log_bets(series: Floats, bound: float, block: int) -> float:
    """Logarithm of the mean wealth of gamblers who each bet a share of a unit on every block."""
    wealth = []
    for stake in STAKES:
        money = 1.0
        for start in range(0, len(series) - block + 1, block):
            money *= 1.0 + stake * (bound - float(np.mean(series[start : start + block])))
        wealth.append(money)
    return math.log(sum(wealth) / len(wealth))


def autoregressive(seed: int, num: int, phi: float = 0.6) -> Floats:
    noise = np.random.default_rng(seed).normal(0.02, 0.2, num)
    for at in range(1, num):
        noise[at] += phi * noise[at - 1]
    return noise


# -- nearest rank -----------------------------------------------------------------------------------------------------


@given(st.lists(numbers, min_size=1, max_size=60), st.integers(1, 100))
def test_nearest_rank_is_the_least_value_that_enough_values_are_not_above(values: list[float], percent: int) -> None:
    enough = [value for value in values if 100 * sum(each <= value for each in values) >= percent * len(values)]
    assert nearest_rank(np.array(values), percent / 100) == min(enough)


def test_nearest_rank_of_no_values_is_nan() -> None:
    assert math.isnan(nearest_rank(np.array([]), 0.95))


def test_nearest_rank_is_not_moved_by_the_rounding_of_a_fraction() -> None:
    assert nearest_rank(np.arange(1.0, 101.0), 0.95) == 95.0
    assert nearest_rank(np.arange(1.0, 21.0), 0.95) == 19.0
    assert nearest_rank(np.arange(1.0, 11.0), 0.7) == 7.0  # 0.7 * 10 is 7.000000000000001


# -- looks ------------------------------------------------------------------------------------------------------------


@given(st.integers(MIN_PAIRS, 10**7), st.integers(0, 10**6))
def test_looks_of_a_longer_series_begin_with_those_of_a_shorter_one(num: int, more: int) -> None:
    shorter, longer = looks_of(num), looks_of(num + more)
    assert shorter[-1] == num
    assert longer[-1] == num + more
    assert list(shorter) == sorted(set(shorter))
    assert set(shorter[:-1]) == {look for look in longer if look < num and look != num + more}


@pytest.mark.parametrize("num", [0, 1, MIN_PAIRS - 1])
def test_short_series_have_no_looks(num: int) -> None:
    assert not len(looks_of(num))


# -- means ------------------------------------------------------------------------------------------------------------


@given(st.integers(MIN_PAIRS, 100_000), st.floats(-60, 60))
def test_the_mixture_is_the_integral_that_defines_it(num: int, deviations: float) -> None:
    looks = np.array([num])
    series = np.random.default_rng(num).permutation(np.resize([-1.0, 1.0], num))  # remembers nothing
    line = track(series, 0.0, ALPHA, looks)
    if not np.isfinite(line.upper[0]):
        return
    bound = float(line.mean[0] - deviations * line.scale[0] / math.sqrt(num))
    line = track(series, bound, ALPHA, looks)
    excess = deviations * math.sqrt(num)
    assert line.log_above[0] == pytest.approx(mixture_by_integration(excess, num), abs=1e-5)
    assert line.log_below[0] == pytest.approx(mixture_by_integration(-excess, num), abs=1e-5)


@given(seeds, st.integers(MIN_PAIRS, 700), st.floats(0, 0.8))
def test_the_variance_is_the_largest_of_those_of_block_means(seed: int, num: int, phi: float) -> None:
    series = autoregressive(seed, num, phi)
    line = track(series, 0.0, ALPHA, np.array([num]))
    variance, forgets_in = long_run_variance(series)
    assert line.mean[0] == pytest.approx(series.mean())
    assert line.scale[0] == pytest.approx(math.sqrt(variance))
    assert line.begins[0] == pytest.approx(max(MIN_TIMES_CORRELATED * forgets_in, MIN_PAIRS))
    assert np.isfinite(line.upper[0]) == np.isfinite(line.lower[0]) == (num >= line.begins[0])


@given(seeds, st.floats(0, 0.9), st.booleans(), st.integers(0, 79))
def test_no_look_depends_on_later_values(seed: int, phi: float, is_event: bool, at: int) -> None:
    series, looks = autoregressive(seed, 3_000, phi), looks_of(3_000)
    series = np.sign(series) if is_event else series
    num = looks[at]
    whole = track(series, 0.05, ALPHA, looks, is_event=is_event)
    part = track(series[:num], 0.05, ALPHA, np.array([num]), is_event=is_event)
    for name in ("mean", "scale", "begins", "lower", "upper", "log_above", "log_below"):
        assert getattr(part, name)[0] == getattr(whole, name)[at], name
    bets = bet_below(np.sign(series), 0.05, 10, looks)
    assert bet_below(np.sign(series[:num]), 0.05, 10, np.array([num]))[0] == bets[at]


@given(seeds, st.floats(-0.3, 0.3), st.sampled_from([0.001, 0.05, 0.3]), st.booleans())
def test_evidence_is_sufficient_exactly_if_the_confidence_sequence_excludes_the_bound(
    seed: int, bound: float, alpha: float, is_event: bool
) -> None:
    series = autoregressive(seed, 4_000, 0.0)
    series = np.trunc(series * 3) if is_event else series
    line = track(np.clip(series, -1, 1), bound, alpha, looks_of(4_000), is_event=is_event)
    limit = math.log(1 / alpha)
    assert list(line.log_above > limit + 1e-9) == list(line.lower > bound + 1e-12)
    assert list(line.log_below > limit + 1e-9) == list(line.upper < bound - 1e-12)


def test_a_constant_series_is_certain_and_has_no_memory() -> None:
    line = track(np.full(100, math.log(1.1)), math.log(1.05), ALPHA, np.array([100]))
    assert line.begins[0] == MIN_PAIRS
    assert line.upper[0] - line.lower[0] < 1e-9
    assert line.log_above[0] > 1e6
    assert line.log_below[0] < 0


def test_values_far_on_the_other_side_of_the_bound_give_no_evidence() -> None:
    line = track(np.full(1_000, 1e12), 0.0, ALPHA, np.array([1_000]))
    assert line.log_below[0] < 0


def test_a_series_with_a_memory_longer_than_itself_gives_no_evidence() -> None:
    """Neither a random walk nor a trend has a mean that its beginning predicts, although both end far above 0."""
    rng = np.random.default_rng(4)
    for series in (rng.normal(0.01, 0.1, 20_000).cumsum(), np.linspace(0, 1, 20_000) + rng.normal(0, 0.1, 20_000)):
        line = track(series, 0.0, ALPHA, np.array([20_000]))
        assert line.mean[0] > 0.4
        assert line.log_above[0] == -math.inf
        assert np.isinf(line.upper[0])


def test_events_that_were_never_seen_have_the_variance_of_three() -> None:
    line = track(np.zeros(1_000), 0.01, ALPHA, np.array([1_000]), is_event=True)
    assert line.scale[0] == pytest.approx(math.sqrt(3 / 1_000))


def test_few_events_are_judged_with_the_variance_that_they_would_have_at_the_bound() -> None:
    """Ten in 10,000 against 1 %: the bound has ten times as many, with about ten times the variance."""
    series = np.zeros(10_000)
    series[500::1000] = 1.0
    line = track(series, 0.011, ALPHA, np.array([10_000]), is_event=True)
    assert line.scale[0] ** 2 == pytest.approx(long_run_variance(series)[0])
    excess = (0.001 - 0.011) * 10_000 / line.scale[0]
    assert line.log_below[0] == pytest.approx(mixture_by_integration(-excess / math.sqrt(11), 10_000), abs=1e-5)
    assert line.log_above[0] == pytest.approx(mixture_by_integration(excess, 10_000), abs=1e-5)


@given(st.floats(1e-3, 10), st.integers(MIN_PAIRS, 10**6), st.sampled_from([0.001, 0.05, 0.3]))
def test_the_predicted_width_equals_that_of_the_longer_series(scale: float, num: int, alpha: float) -> None:
    width = float(width_after(scale, np.array([num]), alpha)[0])
    at_boundary = mixture_by_integration(width * num / scale, num)
    assert at_boundary == pytest.approx(math.log(1 / alpha), abs=1e-6)


# -- events -----------------------------------------------------------------------------------------------------------

events = st.lists(st.sampled_from([-1.0, 0.0, 0.0, 0.0, 1.0]), min_size=1, max_size=200)


@given(events, st.floats(0.001, 0.9), st.integers(1, 30))
def test_bets_are_the_mean_wealth_of_gamblers(series: list[float], bound: float, block: int) -> None:
    values = np.array(series)
    looks = np.arange(len(series) + 1)
    found = bet_below(values, bound, block, looks)
    for num in (0, len(series) // 2, len(series)):
        assert found[num] == pytest.approx(log_bets(values[:num], bound, block), abs=1e-9)


@given(arrays(np.float64, (3, 40), elements=st.sampled_from([-1.0, 0.0, 1.0])))
def test_no_bet_gains_on_average_where_the_mean_is_at_the_bound(values: Floats) -> None:
    """The e-process is a martingale there: over all signs of a block's mean its mean wealth is constant."""
    bound = 0.25
    for stake in STAKES:
        gains = [1 + stake * (bound - mean) for mean in (bound - 0.5, bound + 0.5)]
        assert np.mean(gains) == pytest.approx(1.0)
    up = bet_below(np.tile([bound + 0.5, bound - 0.5], 20), bound, 2, np.array([40]))
    assert up[0] == pytest.approx(0.0, abs=1e-9)
    both = bet_below(values, bound, 5, np.array([40]))
    assert both.shape == (3, 1)
    for row, line in zip(values, both, strict=True):
        assert line[0] == pytest.approx(log_bets(row, bound, 5), abs=1e-9)


@given(events, st.integers(1, 10), st.sampled_from([0.01, 0.05, 0.3]))
def test_the_upper_bound_of_events_is_the_least_rate_that_bets_reject(
    series: list[float], block: int, alpha: float
) -> None:
    values, end, limit = np.array(series), np.array([len(series)]), math.log(1 / alpha)
    upper = bet_upper(values, alpha, block)
    if upper < 1:
        assert bet_below(values, upper, block, end)[0] >= limit - 1e-6
    if upper > 1e-6:
        assert bet_below(values, upper - 1e-6, block, end)[0] < limit


def test_absent_events_are_certainly_rare_after_enough_blocks() -> None:
    """Betting a whole unit on each of m empty blocks gains (1 + bound)^m: 315 blocks at 1 % and alpha 0.05."""
    looks = np.arange(10_001)
    wealth = bet_below(np.zeros(10_000), 0.01, 10, looks)
    first = int(looks[wealth >= math.log(20)][0]) // 10
    assert math.log(20) / math.log1p(0.95 * 0.01) <= first <= 1.4 * math.log(20) / math.log1p(0.95 * 0.01)


# -- e-BH -------------------------------------------------------------------------------------------------------------


def e_bh_by_definition(log_values: list[float], alpha: float) -> list[bool]:
    """Largest set in which every member's e-value is at least the number of hypotheses / (alpha x its size)."""
    num = len(log_values)
    best: tuple[int, ...] = ()
    for size in range(1, num + 1):
        for members in combinations(range(num), size):
            if all(log_values[each] >= math.log(num) - math.log(alpha * size) for each in members):
                best = members
    return [each in best for each in range(num)]


few_values = st.lists(st.sampled_from([0.0, 1.0, 3.0, 3.5, 4.0, 4.5, 6.0]) | st.floats(-3, 8), min_size=1, max_size=8)


@given(few_values, st.sampled_from([0.01, 0.05, 0.2]))
def test_e_bh_rejects_the_largest_self_consistent_set(values: list[float], alpha: float) -> None:
    assert list(e_bh(np.array(values), alpha)) == e_bh_by_definition(values, alpha)


@given(few_values, st.data())
def test_e_bh_of_some_hypotheses_is_that_of_them_alone(values: list[float], data: st.DataObject) -> None:
    counts = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    found = e_bh(np.array(values), ALPHA, counts)
    assert not found[~counts].any()
    assert list(found[counts]) == list(e_bh(np.array(values)[counts], ALPHA))


def test_e_bh_of_one_hypothesis_is_its_own_test() -> None:
    values = np.array([[math.log(20) + 1e-9], [math.log(20) - 1e-6]])
    assert e_bh(values, ALPHA).tolist() == [[True], [False]]


def test_e_bh_treats_each_row_separately() -> None:
    rows = np.random.default_rng(1).normal(3, 2, (4, 5, 6))
    found = e_bh(rows, ALPHA)
    for place in np.ndindex(4, 5):
        assert list(found[place]) == list(e_bh(rows[place], ALPHA))
