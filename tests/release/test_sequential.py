"""Decisions over series are valid at any look: latched, over the existing series, with the promised error rates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gate_error_rates import Scenario, Size, run, scenarios
from benchmarks.gate_tables import TABLES, table, upper_bound, with_tables
from lockstep.release.policy import Policy
from lockstep.release.sequential import (
    MAX_CURVE,
    Findings,
    follow,
    notes_of,
    signals_of,
    summaries_of,
    too_early,
)
from lockstep.release.series import Series
from lockstep.release.statistics import Floats, looks_of
from lockstep.release.verdict import Decision, SeriesSummary

POLICY = Policy(mode="sequential", warmup_pairs=0)
MARGIN = math.log1p(POLICY.margin)


def noise(seed: int, num: int, mean: float = 0.0, sd: float = 0.1) -> Floats:
    return np.random.default_rng(seed).normal(mean, sd, num)


def ratio(values: Floats, signal: str = "latency", segment: str = "all", **fields: Any) -> Series:
    places = fields.pop("places", np.arange(len(values)))
    return Series(signal, segment, "ratio", values, places, MARGIN, **fields)


def failures(values: Floats, **fields: Any) -> Series:
    return Series("errors", "all", "points", values, np.arange(len(values)), 0.01, is_event=True, **fields)


def summaries(*series: Series, policy: Policy = POLICY) -> tuple[SeriesSummary, ...]:
    return summaries_of(policy, follow(policy, series, max(int(each.places[-1]) + 1 for each in series)))


def decided(findings: Findings) -> tuple[bool, bool]:
    """Decisions of the last look: rollback, promote."""
    return bool(findings.is_rolled_back[-1]), bool(findings.is_promoted[-1])


# -- decisions --------------------------------------------------------------------------------------------------------


def test_a_mean_above_its_bound_rolls_back_and_one_below_is_promoted() -> None:
    assert decided(follow(POLICY, [ratio(noise(1, 2_000, 0.1))], 2_000)) == (True, False)
    assert decided(follow(POLICY, [ratio(noise(1, 2_000, 0.0))], 2_000)) == (False, True)
    assert decided(follow(POLICY, [ratio(noise(1, 2_000, MARGIN))], 2_000)) == (False, False)


def test_a_rollback_is_latched() -> None:
    values = np.concatenate([noise(1, 500, 0.2), noise(2, 4_500, -0.1)])
    findings = follow(POLICY, [ratio(values)], 5_000)
    assert not findings.rejected[0, -1]
    assert decided(findings) == (True, False)
    [found] = summaries_of(POLICY, findings)
    assert (found.state, found.outside_after) == ("outside", int(findings.looks[findings.is_rolled_back][0]))


def test_a_promotion_needs_every_series_at_the_last_look() -> None:
    good, late = ratio(noise(4, 3_000)), np.concatenate([noise(2, 1_000), noise(3, 2_000, 0.06)])
    findings = follow(POLICY, [good, ratio(late, "ttft")], 3_000)
    assert findings.is_promoted.any()
    assert decided(findings) == (False, False)
    assert decided(follow(POLICY, [good, good], 3_000)) == (False, True)


@given(st.integers(0, 2**32 - 1), st.integers(100, 2_000), st.floats(-0.1, 0.2), st.floats(0, 0.05))
def test_the_decision_after_n_pairs_is_independent_of_later_pairs(
    seed: int, num: int, mean: float, rate: float
) -> None:
    """A later batch has the looks of an earlier one except its end, and decides equally at each of them."""
    policy, rng = Policy(mode="sequential", min_pairs=50, warmup_pairs=0), np.random.default_rng(seed)
    values = rng.normal(mean, 0.2, 3_000)
    small = np.sort(rng.choice(3_000, 400, replace=False))
    failed = (rng.random(3_000) < rate).astype(np.float64)

    def cut(n: int) -> Findings:
        mine = small[small < n]
        parts = [ratio(values[mine], segment="small", places=mine)] if len(mine) else []
        return follow(policy, [ratio(values[:n]), failures(failed[:n]), *parts], n)

    part, whole = cut(num), cut(3_000)
    shared = looks_of(num)[:-1]
    count = len(part.series)
    for name in ("is_rolled_back", "is_promoted"):
        assert list(getattr(part, name)[: len(shared)]) == list(getattr(whole, name)[: len(shared)])
    assert np.array_equal(part.rejected[:, : len(shared)], whole.rejected[:count, : len(shared)])


def test_small_segments_neither_weaken_nor_delay_the_others() -> None:
    small = ratio(noise(3, 19), segment="small", places=np.arange(0, 1_900, 100))
    findings = follow(POLICY, [ratio(noise(1, 2_000)), small], 2_000)
    assert decided(findings) == (False, True)
    many = [ratio(noise(9, 15), segment=f"{at}", places=np.arange(15)) for at in range(1_000)]
    effect = noise(2, 300, 0.085)
    alone, among = (follow(POLICY, [ratio(effect), *more], 300) for more in ([], many))
    assert np.array_equal(alone.is_rolled_back, among.is_rolled_back)
    assert alone.is_rolled_back[-1]


def test_a_segment_with_enough_pairs_holds_until_it_is_certain() -> None:
    segment = ratio(noise(3, 60), segment="new", places=np.arange(0, 1_800, 30))
    assert decided(follow(POLICY, [ratio(noise(1, 2_000)), segment], 2_000)) == (False, False)


def test_series_that_can_only_hold_are_no_hypotheses() -> None:
    bad = ratio(noise(1, 2_000, 0.3), "missing-pairs", response=Decision.HOLD)
    findings = follow(POLICY, [bad, ratio(noise(2, 2_000))], 2_000)
    assert decided(findings) == (False, False)
    assert summaries_of(POLICY, findings)[0].state == "outside"


def test_rare_events_need_both_tests() -> None:
    """Their variance alone would be certain after a few hundred pairs without events."""
    short, long = (follow(POLICY, [failures(np.zeros(num))], num) for num in (2_000, 5_000))
    assert decided(short) == (False, False)
    assert short.tracks[0].upper[-1] < 0.01
    assert decided(long) == (False, True)


def test_several_canaries_are_followed_side_by_side() -> None:
    rows = np.stack([noise(1, 1_000, 0.2), noise(2, 1_000), noise(3, 1_000, MARGIN)])
    together = follow(POLICY, [Series("latency", "all", "ratio", rows, np.arange(1_000), MARGIN)], 1_000)
    for at, row in enumerate(rows):
        alone = follow(POLICY, [ratio(row)], 1_000)
        assert np.array_equal(together.is_rolled_back[at], alone.is_rolled_back)
        assert np.array_equal(together.is_promoted[at], alone.is_promoted)


# -- words ------------------------------------------------------------------------------------------------------------


def test_undecided_series_are_one_signal_sorted_by_needed_pairs() -> None:
    found = summaries(
        ratio(noise(1, 400)),
        ratio(noise(2, 400, 0.04), "ttft"),
        ratio(noise(3, 400, 0.06), "decode"),
        failures(np.zeros(400)),
    )
    [signal] = signals_of(found)
    assert (signal.name, signal.response) == ("undecided", Decision.HOLD)
    assert signal.sentence.startswith(
        "3 of 4 series are not yet certain to be below their bounds: gap between tokens (+"
    )
    assert "1 of them would not come below their bounds by more pairs like these" in signal.sentence
    assert "more pairs would settle the others" in signal.sentence


def test_a_rollback_precedes_undecided_series() -> None:
    found = summaries(ratio(noise(1, 1_000, 0.2)), failures(np.zeros(1_000)), ratio(noise(3, 1_000, 0.05), "ttft"))
    assert [each.name for each in signals_of(found)] == ["latency"]
    assert "2 of 3 series were undecided when others were certain" in list(notes_of(POLICY, found))


def test_a_hold_for_missing_pairs_lists_undecided_series() -> None:
    missing = ratio(noise(1, 1_000, 0.3), "missing-pairs", response=Decision.HOLD)
    found = summaries(missing, failures(np.zeros(1_000)))
    assert [each.name for each in signals_of(found)] == ["missing-pairs", "undecided"]


def test_an_effect_between_tolerance_and_margin_is_drift_and_decides_nothing() -> None:
    found = summaries(ratio(noise(1, 20_000, math.log(1.035))))
    assert not list(signals_of(found))
    [note] = notes_of(POLICY, found)
    assert note.startswith("drift: latency is +3.")


def test_numbers_are_ratios_or_points() -> None:
    latency, errors = summaries(ratio(np.full(400, math.log(1.1))), failures(np.tile([0.0, 0.0, 0.0, 1.0], 100)))
    assert [latency.effect, latency.bound] == pytest.approx([1.1, 1.05])
    assert [errors.effect, errors.bound] == pytest.approx([25.0, 1.0])
    assert latency.lower == pytest.approx(1.1, rel=1e-6)
    assert errors.lower is not None
    assert errors.upper is not None
    assert errors.lower < 25 < errors.upper


def test_a_series_that_is_too_short_or_too_correlated_has_no_bounds_yet() -> None:
    [found] = summaries(ratio(np.linspace(0.0, 0.5, 400)))
    assert (found.state, found.lower, found.upper) == ("changing", None, None)
    assert [each.name for each in signals_of([found])] == ["non-stationary"]
    [found] = summaries(ratio(np.linspace(0.0, 0.5, 400), "logprob-gap"))
    assert (found.state, found.lower, found.upper) == ("no-evidence", None, None)
    assert "(+" in next(signals_of([found])).sentence


def test_the_estimate_of_needed_pairs_is_accurate() -> None:
    values = noise(6, 40_000, 0.03, 0.3)
    [early] = summaries(ratio(values[:2_000]))
    assert early.state == "undecided"
    assert early.more_pairs is not None
    findings = follow(POLICY, [ratio(values)], 40_000)
    first = int(findings.looks[findings.is_promoted.argmax()])
    assert first / 3 <= 2_000 + early.more_pairs <= 3 * first


def test_rare_failures_need_as_many_pairs_as_the_bets() -> None:
    [early] = summaries(failures(np.zeros(1_000)))
    assert early.more_pairs is not None
    needed = next(
        num for num in range(1_000, 9_000, 10) if follow(POLICY, [failures(np.zeros(num))], num).is_promoted[-1]
    )
    assert needed <= 1_000 + early.more_pairs <= 1.2 * needed


def test_the_evidence_is_shown_at_some_looks_including_the_last() -> None:
    [found] = summaries(ratio(noise(1, 300_000)))
    assert len(looks_of(300_000)) > len(found.curve) > MAX_CURVE / 2
    assert found.curve[-1].pairs == 300_000
    assert found.curve[-1].upper == found.upper


def test_without_times_or_with_few_pairs_nothing_is_followed() -> None:
    for num, is_timed, name in (
        (50, True, "no-evidence-yet"),
        (0, True, "no-evidence-yet"),
        (500, False, "missing-times"),
    ):
        signal = too_early(num, is_timed)
        assert signal is not None
        assert (signal.name, signal.response) == (name, Decision.HOLD)
    assert too_early(100, True) is None


# -- error rates ------------------------------------------------------------------------------------------------------

SMALL = {
    "latency": ("independent", "AR(1), 0.9", "bursty arrivals at a queue", "Pareto tails, index 1.2"),
    "slow": ("slow spells of 200", "AR(1), 0.999", "warm-up of 500, 30 % slower"),
    "slow-covered": ("slow spells of 500", "swing of 10 %, period 5,000", "level of AR(1), 0.999"),
    "tail": ("answers beyond p95, AR(1), 0.9",),
    "events": ("failures in bursts of 5, baseline 1 %",),
    "missing": ("the candidate's slowest 5 %",),
    "family": ("independent, all at the margin",),
}


def small(table: str) -> list[Scenario]:
    return [each for each in scenarios(60) if each.table == table and each.name in SMALL[table]]


@pytest.mark.parametrize(
    "scenario", [each for name in SMALL if name != "family" for each in small(name)], ids=lambda each: each.name
)
def test_rates_of_wrong_decisions_stay_within_alpha(scenario: Scenario) -> None:
    """Small, seeded version of docs/gate-error-rates.md: 200 canaries of 6,000 pairs, at 60 looks."""
    num = 20 if scenario.table == "missing" else 200
    found = run(Scenario(scenario.table, scenario.name, scenario.job, Size(6_000, 60)), num, seed=3)
    assert found["canaries"] == num
    for wrong in ("rollback at none", "rollback at margin", "promotion at margin"):
        assert 1 - upper_bound(num - found[wrong], num) < POLICY.alpha, (wrong, found)


def test_rates_of_wrong_decisions_stay_within_alpha_over_many_series() -> None:
    [scenario] = small("family")
    found = run(Scenario(scenario.table, scenario.name, scenario.job, Size(4_000, 30)), 12, seed=3)
    assert found["rollback at any"] + found["promotion at any"] == 0


def test_a_candidate_that_is_a_tenth_slower_is_caught() -> None:
    """Margin 5 %, log-sd 0.3: within 900 pairs, or without a warm-up within 300 at correlation 0.95."""
    for scenario in scenarios(40):
        if scenario.name in ("independent, within 900 pairs", "correlation 0.95, within 300 pairs, warmup_pairs 0"):
            found = run(Scenario(scenario.table, scenario.name, scenario.job, scenario.size), 20, seed=3)
            assert found["rollback at caught"] >= 0.9 * found["canaries"], scenario.name


def test_a_stopped_run_can_be_continued() -> None:
    scenario = next(each for each in scenarios(10) if each.table == "rivals")
    short = Scenario(scenario.table, scenario.name, scenario.job, Size(400, 10), chunk=10)
    stopped = run(short, 40, 1, until=-math.inf)
    assert stopped["canaries"] == 10
    whole = run(short, 40, 1)
    assert run(short, 40, 1, found=stopped) == whole
    assert run(short, 40, 2) != whole


@given(st.integers(1, 400), st.data())
def test_the_upper_bound_of_a_rate_has_a_tail_of_a_fortieth(count: int, data: st.DataObject) -> None:
    events = data.draw(st.integers(0, count - 1))
    rate = upper_bound(events, count)
    assert events / count < rate < 1
    chance = sum(math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(events + 1))
    assert chance == pytest.approx(0.025, rel=1e-6)


def test_the_page_of_error_rates_has_a_place_for_every_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gate-error-rates.md").read_text()
    tables = {}
    for name, columns in TABLES.items():
        tables[name] = table(name, [("a stream", {"canaries": 200.0, **dict.fromkeys(columns.values(), 3.0)})])
    found = with_tables(page, tables)
    for text in tables.values():
        assert text in found
    assert with_tables(found, tables) == found
    assert "| a stream | 1.50 % (<= 4.32 %) |" in tables["latency"]
