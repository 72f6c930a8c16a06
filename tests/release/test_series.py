"""Series are numbers of the pairs that have them, in order, each with the policy's bound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lockstep.release.evidence import Pairs, TrafficSegment
from lockstep.release.observation import METRICS
from lockstep.release.outputs import Output
from lockstep.release.policy import Policy
from lockstep.release.series import Answers, Series, missing_pairs, series_of
from lockstep.release.statistics import MIN_PAIRS, Floats
from lockstep.release.verdict import Decision


def pairs_of(num: int, **columns: Any) -> Pairs:
    """Healthy pairs of 100 ms on both sides, other columns as given."""
    nothing, everywhere = np.full(num, math.nan), np.ones(num, np.bool_)
    metrics: dict[str, tuple[Floats, Floats]] = dict.fromkeys((each.name for each in METRICS), (nothing, nothing))
    metrics["latency_ms"] = (np.full(num, 100.0), np.full(num, 100.0))
    metrics |= columns.pop("metrics", {})
    fields: dict[str, Any] = {
        "ts": np.arange(num, dtype=np.float64),
        "is_timed": True,
        "ok": (everywhere, everywhere),
        "metrics": metrics,
        "output": np.full(num, Output.SAME, np.int8),
        "segment": np.zeros(num, np.int32),
        "segments": (TrafficSegment("m", None, None, None, "a"),),
        "routed": (everywhere, everywhere),
        "streamed": (everywhere, everywhere),
        "missing_at": np.empty(0, np.int64),
        "missing": np.empty(0),
    }
    return Pairs(**{**fields, **columns})


def named(found: list[Series], signal: str, segment: str = "all") -> Series:
    [series] = [each for each in found if (each.signal, each.segment) == (signal, segment)]
    return series


def test_ratios_are_of_healthy_pairs_that_have_both_numbers() -> None:
    baseline, candidate = np.array([100.0, 100, 0, 100, math.nan]), np.array([110.0, 120, 100, 0, 100])
    ok = np.array([True, False, True, True, True]), np.ones(5, np.bool_)
    series = named(
        series_of(Policy(margin=0.1), pairs_of(5, ok=ok, metrics={"ttft_ms": (baseline, candidate)})), "ttft"
    )
    assert list(series.places) == [0]
    assert series.values == pytest.approx([math.log(1.1)])
    assert series.bound == pytest.approx(math.log(1.1))


def test_tokens_read_at_once_give_no_gaps() -> None:
    gaps = np.array([10.0, 10.0, 0.004, 0.1]), np.array([11.0, 0.003, 10.0, 11.0])
    assert list(named(series_of(Policy(), pairs_of(4, metrics={"decode_ms": gaps})), "decode").places) == [0]
    alone = named(series_of(Policy(), pairs_of(4, metrics={"ttft_ms": gaps})), "ttft")
    assert list(alone.places) == [0, 1, 2, 3], "a first token may be as early"


def test_metrics_without_values_give_no_series() -> None:
    found = series_of(Policy(), pairs_of(10))
    assert {each.signal for each in found} == {"latency", "errors", "missing-pairs"}


def test_a_failure_counts_for_its_side_and_one_of_both_for_neither() -> None:
    ok = np.array([True, False, True, False]), np.array([True, True, False, False])
    series = named(series_of(Policy(error_margin=2), pairs_of(4, ok=ok)), "errors")
    assert (list(series.values), series.bound, series.is_event) == ([0, -1, 1, 0], 0.02, True)


def test_the_tail_bound_is_from_the_baselines_first_pairs_which_are_excluded() -> None:
    num = MIN_PAIRS + 3
    baseline, candidate = np.arange(1.0, num + 1), np.arange(1.0, num + 1)
    baseline[-3:], candidate[-3:] = (94.0, 96.0, 96.0), (96.0, 94.0, 95.0)
    pairs = pairs_of(num, metrics={"latency_ms": (baseline, candidate)})
    series = named(series_of(Policy(warmup_pairs=0), pairs), "latency-tail")
    assert list(series.places) == [num - 3, num - 2, num - 1]
    assert list(series.values) == [1, -1, -1]
    assert series.bound == pytest.approx(0.05)
    longer = named(series_of(Policy(warmup_pairs=num - 1), pairs), "latency-tail")
    assert list(longer.places) == [num - 1]
    for policy, few in ((Policy(warmup_pairs=0), MIN_PAIRS), (Policy(), num)):
        assert "latency-tail" not in {each.signal for each in series_of(policy, pairs_of(few))}


def test_missing_records_are_placed_by_their_arrival() -> None:
    series = missing_pairs(Policy(), pairs_of(4, missing_at=np.array([0, 2, 2, 4]), missing=np.array([1.0, 1, -1, 1])))
    assert list(series.values) == [1, 0, 0, 1, -1, 0, 0, 1]
    assert list(series.places) == sorted(series.places)
    assert series.response is Decision.HOLD


def test_segments_have_series_if_enforced_and_large_enough() -> None:
    segments = tuple(TrafficSegment("m", None, None, None, label) for label in "abc")
    pairs = pairs_of(60, segment=np.repeat(np.array([0, 1, 2], np.int32), (30, 20, 10)), segments=segments)
    assert {each.segment for each in series_of(Policy(), pairs)} == {"all"}
    found = series_of(Policy(segments="enforce"), pairs)
    assert {each.segment for each in found} == {"all", "m, a", "m, b"}
    assert list(named(found, "latency", "m, b").places) == list(range(30, 50))


OUTPUT = np.array([Output.SAME, Output.DIFFERS, Output.INCOMPARABLE, Output.DRIFTED, Output.FAILED], np.int8)


@pytest.mark.parametrize(
    ("policy", "answers", "signal", "values", "bound"),
    [
        ({"outputs": "agreement(x)", "min_agreement": 0.9}, Answers(), "agreement", [0, 1, 1], 0.1),
        ({"max_mismatch_rate": 0.2}, Answers(is_estimated=True), "output-mismatch", [0, 1, 1], 0.2),
        (
            {"mismatch_margin": 3},
            Answers(excess=np.array([0.0, 1.0, math.nan, -1.0, math.nan])),
            "output-mismatch",
            [0, 1, -1],
            0.03,
        ),
        (
            {"max_logprob_gap": 0.5},
            Answers(logprob_gap=np.array([0.1, 0.2, math.nan, 0.3, math.nan])),
            "logprob-gap",
            [0.1, 0.2, 0.3],
            0.5,
        ),
    ],
)
def test_series_of_answers_follow_the_policy(
    policy: dict[str, Any], answers: Answers, signal: str, values: list[float], bound: float
) -> None:
    series = named(series_of(Policy(**policy), pairs_of(5, output=OUTPUT), answers), signal)
    assert list(series.values) == values
    assert list(series.places) == [0, 1, 3]
    assert series.bound == pytest.approx(bound)
    assert series.is_event == (signal != "logprob-gap")


@pytest.mark.parametrize("policy", [{"outputs": "ignore"}, {"outputs": "agreement(x)", "min_agreement": 1.0}, {}])
def test_ignored_or_strictly_equal_answers_have_no_series(policy: dict[str, Any]) -> None:
    found = series_of(Policy(**policy), pairs_of(5, output=OUTPUT), Answers())
    assert not {each.signal for each in found} & {"agreement", "output-mismatch", "logprob-gap"}
