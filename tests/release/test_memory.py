"""Times are judged with a variance that covers slow changes, and without a warm-up."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.release.memory import (
    AVERAGES,
    BLOCKS_STEP,
    EXPONENTS,
    MAX_BLOCKS,
    MAX_FREQUENCIES,
    MAX_LESS_LIKELY,
    MAX_SCORE,
    WINDOWS_TO_PASS,
    spectrum_of,
    track_times,
)
from lockstep.release.policy import Policy
from lockstep.release.sequential import follow, notes_of, signals_of, summaries_of
from lockstep.release.series import Series
from lockstep.release.statistics import MIN_PAIRS, Floats, looks_of
from lockstep.release.verdict import Decision

POLICY = Policy(mode="sequential")
MARGIN = math.log1p(POLICY.margin)
WINDOW = POLICY.warmup_pairs
seeds = st.integers(0, 2**32 - 1)


def noise(seed: int, num: int, mean: float = 0.0, sd: float = 0.19, phi: float = 0.0) -> Floats:
    values = np.random.default_rng(seed).normal(0.0, sd, num)
    for at in range(1, num):
        values[at] += phi * values[at - 1]
    return values + mean


def latency(values: Floats) -> Series:
    return Series("latency", "all", "ratio", values, np.arange(len(values)), MARGIN)


def spectrum_by_definition(values: Floats) -> tuple[float, bool]:
    """Variance, and whether the series changes, from sums of cosines."""
    num = len(values)
    size = math.ceil(num / MAX_BLOCKS)
    num_blocks = num // size // BLOCKS_STEP * BLOCKS_STEP
    blocks = values[num - num_blocks * size :].reshape(num_blocks, size).sum(axis=1)
    power = []
    for frequency in range(1, min(MAX_FREQUENCIES, num_blocks // 2) + 1):
        wave = [math.cos(math.pi * frequency * (at + 0.5) / num_blocks) for at in range(num_blocks)]
        power.append(2 * float(np.dot(blocks, wave)) ** 2 / (num_blocks * size))
    logs = np.log(np.arange(1, len(power) + 1))
    found = [float(np.var(values))]
    found += [factor * float(np.mean(power[:most])) for most, factor in AVERAGES.items()]
    levels = [float(np.mean(power * np.exp(2 * each * logs))) for each in EXPONENTS]
    chances = [
        -0.5 * len(power) * (math.log(level) - 2 * d * logs.mean()) for d, level in zip(EXPONENTS, levels, strict=True)
    ]
    is_likely = [chance >= max(chances) - MAX_LESS_LIKELY for chance in chances]
    for exponent, level, counts in zip(EXPONENTS, levels, is_likely, strict=True):
        if counts:
            hurst = exponent + 0.5
            of_mean = math.gamma(2 * hurst + 1) * math.sin(math.pi * hurst)
            found.append(level * math.pi ** (2 * exponent) / of_mean)
    centred = logs - logs.mean()
    score = -float(power @ centred) / math.sqrt(2 * float(centred @ centred)) / float(np.mean(power))
    return max(found), score > MAX_SCORE or is_likely[-1]


@given(seeds, st.integers(MIN_PAIRS, 2_000), st.floats(0, 0.95))
def test_the_variance_is_that_of_the_lowest_cosine_frequencies(seed: int, num: int, phi: float) -> None:
    values = noise(seed, num, phi=phi)
    variance, begins = spectrum_of(np.concatenate([[0.0], np.cumsum(values)]), np.array([num]))
    expected, is_changing = spectrum_by_definition(values)
    assert variance[0] == pytest.approx(expected)
    assert bool(np.isinf(begins[0])) == is_changing


def test_a_trend_a_walk_and_a_swing_are_slow_changes_and_noise_is_not() -> None:
    at = np.arange(3_000)
    slow = (at / 3_000, noise(1, 3_000, sd=0.01).cumsum(), 0.1 * np.sin(2 * np.pi * at / 5_000))
    for change in slow:
        _, begins = spectrum_of(np.concatenate([[0.0], np.cumsum(noise(2, 3_000) + change)]), np.array([3_000]))
        assert np.isinf(begins[0])
    for values in (noise(2, 3_000), np.zeros(3_000)):
        variance, begins = spectrum_of(np.concatenate([[0.0], np.cumsum(values)]), np.array([3_000]))
        assert begins[0] == MIN_PAIRS
        assert np.var(values) <= variance[0] <= 2 * np.var(values) + 1e-12


@given(seeds, st.floats(0, 0.9), st.floats(-0.3, 0.3), st.booleans(), st.integers(0, 79))
def test_no_look_at_times_depends_on_later_pairs(seed: int, phi: float, warm: float, is_event: bool, at: int) -> None:
    values, looks = noise(seed, 3_000, phi=phi), looks_of(3_000)
    values[:400] += warm
    values = np.trunc(np.clip(3 * values, -1, 1)) if is_event else values
    num = looks[at]
    whole = track_times(values, 0.05, 0.05, looks, looks, (400, 400), is_event=is_event)
    cut, own = np.array([num]), min(400, int(num))
    part = track_times(values[:num], 0.05, 0.05, cut, cut, (400, own), is_event=is_event)
    for name in ("lower", "upper", "log_above", "log_below"):
        assert getattr(part.line, name)[0] == getattr(whole.line, name)[at], name
    assert (part.is_excluded[0], part.is_changing[0]) == (whole.is_excluded[at], whole.is_changing[at])


@given(seeds, st.floats(-0.1, 0.2))
def test_evidence_on_times_is_sufficient_if_the_confidence_sequence_excludes_the_bound(seed: int, mean: float) -> None:
    looks = looks_of(6_000)
    line = track_times(noise(seed, 6_000, mean), MARGIN, 0.05, looks, looks, (500, 500), is_event=False).line
    limit = math.log(20)
    assert list(line.log_above > limit + 1e-9) == list(line.lower > MARGIN + 1e-12)
    may_pass = looks >= WINDOWS_TO_PASS * 500
    assert list(line.log_below > limit + 1e-9) == list((line.upper < MARGIN - 1e-12) & may_pass)


def test_a_warm_up_is_excluded_and_reported_and_the_equal_candidate_promotes() -> None:
    values = noise(3, 6_000)
    values[:WINDOW] += math.log(1.3)
    findings = follow(POLICY, [latency(values)], 6_000)
    assert not findings.is_rolled_back[-1]
    assert findings.is_promoted[-1]
    [found] = summaries_of(POLICY, findings)
    assert (found.state, found.excluded_pairs) == ("within", WINDOW)
    assert found.excluded_effect == pytest.approx(1.3, rel=0.03)
    assert found.effect == pytest.approx(1.0, abs=0.02)
    [note] = notes_of(POLICY, [found])
    assert note.startswith("warm-up: the first 500 pairs of latency were excluded; they have +")


@pytest.mark.parametrize("slower", [1.1, 1.3, 3.0])
def test_a_candidate_that_stays_slower_is_rolled_back_after_the_warm_up(slower: float) -> None:
    findings = follow(POLICY, [latency(noise(4, 2_000, math.log(slower)))], 2_000)
    first = int(findings.looks[findings.is_rolled_back.argmax()])
    assert findings.is_rolled_back[-1]
    assert WINDOW + MIN_PAIRS <= first <= 900


def test_a_candidate_that_is_fast_at_first_and_slow_later_holds_as_changing() -> None:
    values = noise(5, 6_000, math.log(1.1))
    values[:WINDOW] -= math.log(1.5)
    findings = follow(POLICY, [latency(values)], 6_000)
    assert not findings.is_promoted.any()
    [found] = summaries_of(POLICY, findings)
    assert (found.state, found.excluded_pairs) == ("changing", 0)


def test_latency_that_swings_holds_by_name_and_its_tail_with_it() -> None:
    values = noise(6, 3_000) + 0.1 * np.sin(2 * np.pi * (np.arange(3_000) / 5_000 - 0.2))
    tail = Series("latency-tail", "all", "points", np.zeros(2_500), np.arange(500, 3_000), 0.05, is_event=True)
    summaries = summaries_of(POLICY, follow(POLICY, [latency(values), tail], 3_000))
    assert [each.state for each in summaries] == ["changing", "changing"]
    [signal] = signals_of(summaries)
    assert (signal.name, signal.response) == ("non-stationary", Decision.HOLD)


def test_without_a_window_times_are_judged_from_the_first_look_on() -> None:
    policy = Policy(mode="sequential", warmup_pairs=0)
    findings = follow(policy, [latency(noise(7, 300, math.log(1.5)))], 300)
    assert findings.is_rolled_back[-1]
    assert not follow(POLICY, [latency(noise(7, 300, math.log(1.5)))], 300).is_rolled_back[-1]


def test_before_the_window_ends_a_warning_names_the_setting() -> None:
    findings = follow(POLICY, [latency(noise(8, 300, math.log(1.5)))], 300)
    [note] = notes_of(POLICY, summaries_of(POLICY, findings))
    assert "600 pairs" in note
    assert "warmup_pairs" in note
