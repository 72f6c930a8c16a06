"""Series of the sequential gate: computes the numbers per pair for each metric and segment, with bounds on their
means."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lockstep.release.evidence import Bools, Floats, Pairs, p95
from lockstep.release.observation import METRICS, Metric
from lockstep.release.outputs import COMPARED, DIFFERENT
from lockstep.release.policy import Policy
from lockstep.release.statistics import MIN_PAIRS
from lockstep.release.verdict import ALL, Decision

RATIOS: Mapping[str, Metric] = {each.signal: each for each in METRICS if each.unit == "ms"}
"""Metrics whose series is the logarithm of the ratio of candidate and baseline, by signal."""
METRIC_OF: Mapping[str, Metric] = {each.signal: each for each in METRICS if each.signal} | {
    "latency-tail": RATIOS["latency"]
}
"""Metrics by signal."""
TIMES = frozenset([*RATIOS, "latency-tail"])
"""Signals whose series are about times."""
Unit = Literal["ratio", "points", "nats"]


@dataclass(frozen=True, slots=True)
class Series:
    """Numbers of one metric in the pairs of one segment."""

    signal: str
    segment: str
    unit: Unit
    values: Floats
    """Values of shape (..., pairs): logarithms of ratios, fractions, or nats."""
    places: NDArray[np.intp]
    """Places of the series' pairs among all pairs, ascending."""
    bound: float
    """Upper bound on the mean, in the unit of the values."""
    is_event: bool = False
    """True if the values are -1, 0 and 1."""
    response: Decision = Decision.ROLLBACK
    """Decision if the mean is certainly above the bound."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Measurements by which the gate judges whether answers are the same."""

    is_estimated: bool = False
    """True if the engines guarantee equal answers but the policy allows a rate of mismatches, which is estimated."""
    excess: Floats | None = None
    """Mismatch of the candidate minus mismatch of a second baseline, per pair; NaN: not all three answers are
    comparable; None: there is no second baseline."""
    is_bounded: bool = False
    """True if a promotion needs a mismatch rate that is certainly below its margin, without a second baseline."""
    logprob_gap: Floats | None = None
    """Mean difference of log-probabilities per pair; NaN: unknown; None: there are no log-probabilities."""


def series_of(policy: Policy, pairs: Pairs, answers: Answers | None = None) -> list[Series]:
    """Series of all pairs and, if segments are enforced, of each segment with enough pairs."""
    masks: list[tuple[str, Bools]] = [(ALL, np.ones(len(pairs), np.bool_))]
    if policy.segments == "enforce" and len(pairs.segments) > 1:
        masks += [
            (segment.name, mask)
            for number, segment in enumerate(pairs.segments)
            if (mask := pairs.segment == number).sum() >= policy.min_pairs
        ]
    found = []
    for name, mask in masks:
        found += [*_ratios(policy, pairs, mask), *_tail(policy, pairs, mask), _errors(policy, pairs, mask)]
        found += _outputs(policy, pairs, answers or Answers(), mask)
        found = [replace(each, segment=each.segment or name) for each in found]
    return [*found, missing_pairs(policy, pairs)]


def missing_pairs(policy: Policy, pairs: Pairs) -> Series:
    """Series of records without a partner: requests to a slow candidate time out, and the remaining pairs look fast."""
    values = np.insert(np.zeros(len(pairs)), pairs.missing_at, pairs.missing)
    places = np.insert(np.arange(len(pairs)), pairs.missing_at, pairs.missing_at)
    return Series("missing-pairs", ALL, "points", values, places, policy.missing_margin / 100, True, Decision.HOLD)


def has_ratio(pairs: Pairs, signal: str) -> Bools:
    """Mask of the pairs with a ratio of one of `RATIOS`: both sides answered, and both values are usable as
    evidence."""
    metric = RATIOS[signal]
    baseline, candidate = pairs.metrics[metric.name]
    least = max(0.0, metric.least)
    usable: Bools = pairs.healthy & (baseline > least) & (candidate > least)
    return usable


def _ratios(policy: Policy, pairs: Pairs, mask: Bools) -> Iterator[Series]:
    for signal, metric in RATIOS.items():
        usable = mask & has_ratio(pairs, signal)
        if usable.any():
            baseline, candidate = pairs.metrics[metric.name]
            values = np.log(candidate[usable] / baseline[usable])
            yield Series(signal, "", "ratio", values, np.flatnonzero(usable), math.log1p(policy.margin))


def _tail(policy: Policy, pairs: Pairs, mask: Bools) -> Iterator[Series]:
    """Series of latencies beyond the 95th percentile of the baseline's first pairs. These first pairs cover at least
    the warm-up and are not part of the series."""
    baseline, candidate = pairs.metrics["latency_ms"]
    places = np.flatnonzero(mask & pairs.known("latency_ms"))
    num_first = max(MIN_PAIRS, int(np.searchsorted(places, policy.warmup_pairs)))
    first, rest = places[:num_first], places[num_first:]
    if len(rest):
        threshold = p95(baseline[first])
        values = (candidate[rest] > threshold).astype(float) - (baseline[rest] > threshold).astype(float)
        yield Series("latency-tail", "", "points", values, rest, policy.tail_margin / 100, True)


def _errors(policy: Policy, pairs: Pairs, mask: Bools) -> Series:
    failures = (~pairs.ok[1][mask]).astype(float) - (~pairs.ok[0][mask]).astype(float)
    return Series("errors", "", "points", failures, np.flatnonzero(mask), policy.error_margin / 100, True)


def _outputs(policy: Policy, pairs: Pairs, answers: Answers, mask: Bools) -> Iterator[Series]:
    """Series of disagreements, mismatches, and gaps of log-probabilities."""
    differs = np.where(np.isin(pairs.output, COMPARED), np.isin(pairs.output, DIFFERENT), math.nan)
    found: list[tuple[str, Unit, Floats | None, float]] = []
    response = Decision.ROLLBACK
    if policy.agreement_field:
        if policy.min_agreement < 1:
            found.append(("agreement", "points", differs, 1 - policy.min_agreement))
    elif policy.outputs != "ignore" and answers.is_estimated:
        found.append(("output-mismatch", "points", differs, policy.max_mismatch_rate))
    elif policy.outputs != "ignore":
        values = answers.excess
        if answers.is_bounded:
            values, response = differs, Decision.HOLD
        found.append(("output-mismatch", "points", values, policy.mismatch_margin / 100))
    if policy.max_logprob_gap is not None:
        found.append(("logprob-gap", "nats", answers.logprob_gap, policy.max_logprob_gap))
    for signal, unit, values, bound in found:
        known = mask & ~np.isnan(values) if values is not None else mask & False
        if values is not None and known.any():
            is_event = unit == "points"
            mine = response if signal == "output-mismatch" else Decision.ROLLBACK
            yield Series(signal, "", unit, values[known], np.flatnonzero(known), bound, is_event, mine)
