"""Sequential gate: non-inferiority of every metric, valid at every look.

Each metric of each segment is a series over pairs in the order of time, judged by `lockstep.release.statistics.track`.
Regressions are above the margin with a lower bound, or below it with an upper bound; what lies between is no decision.
Rollback is by e-BH over all series at the looks they share; promotion wants every series to pass.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from lockstep.release.evidence import Bools, Evidence, Floats, Pairs
from lockstep.release.policy import Policy
from lockstep.release.statistics import MIN_PAIRS, Track, bet_below, e_bh, looks_of, nearest_rank, track
from lockstep.release.verdict import Decision, SegmentSummary, Signal

RATIOS = {"latency": "latency_ms", "ttft": "ttft_ms", "decode": "decode_ms"}
"""Signals whose series is the logarithm of the candidate's number over the baseline's."""
FIGURE_OF = {"latency": "latency_p95_ms", "ttft": "ttft_p95_ms", "decode": "decode_p95_ms", "errors": "error_rate"}
EVENTS_FLOOR = 3.0
"""Variance of rare events is at least that of as many of them."""
BLOCKS_PER_BURST = 2
"""A bet is on so many times the longest burst: what is left of it in the next block is little."""
ALL = "all"


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one segment over its pairs."""

    signal: str
    segment: str
    values: Floats
    places: NDArray[np.intp]
    """Of its pairs among all."""
    bound: float
    is_event: bool = False
    """Whether its values are -1, 0 and 1."""
    response: Decision = Decision.ROLLBACK


@dataclass(frozen=True, slots=True)
class Findings:
    """What following all series gave."""

    signals: list[Signal]
    notes: list[str]
    guarantee: str
    tracks: dict[tuple[str, str], tuple[Series, Track]]
    looks: NDArray[np.int64] = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    """Pairs so far, at each look of every track."""

    def with_bounds(self, summary: SegmentSummary) -> SegmentSummary:
        """A summary whose figures have their confidence bounds."""
        figures = dict(summary.figures)
        for signal, figure in FIGURE_OF.items():
            found = self.tracks.get((signal, summary.name))
            if found is not None:
                _, line = found
                scale = math.exp if signal in RATIOS else _points
                figures[figure] = msgspec.structs.replace(
                    figures[figure], lower=scale(line.lower), upper=scale(line.upper) if line.upper < 700 else math.inf
                )
        return msgspec.structs.replace(summary, figures=figures)


def _points(value: float) -> float:
    return 100.0 * value


def follow(policy: Policy, evidence: Evidence) -> Findings:
    """Follow every series to the end of the pairs."""
    pairs = evidence.pairs
    if not pairs.is_timed and len(pairs):
        return Findings(
            [_hold("no-evidence-yet", "some pairs have no time (ts), and sequential evidence needs an order")],
            [],
            "none",
            {},
        )
    looks = looks_of(len(pairs))
    if not len(looks):
        return Findings(
            [_hold("no-evidence-yet", f"{len(pairs):,} pairs; evidence begins with {MIN_PAIRS}")], [], "none", {}
        )
    tracks: dict[tuple[str, str], tuple[Series, Track]] = {}
    for each in _all_series(policy, pairs):
        tracks[each.signal, each.segment] = (each, _followed(policy, each, np.searchsorted(each.places, looks)))
    signals, notes = _decide(policy, tracks, looks)
    guarantee = (
        f"at any look, a wrong rollback and a wrong promotion have each a chance of at most {policy.alpha:g} where every "
        "series is at its margin; asymptotic, docs/gate-error-rates.md has the simulated rates; with several series the "
        "false discovery rate of rollbacks is what is bounded"
    )
    return Findings(signals, notes, guarantee, tracks, looks)


def _followed(policy: Policy, series: Series, looks: NDArray[np.int64]) -> Track:
    """A series at each look. That events are rare enough has to be certain by both ways."""
    floor = EVENTS_FLOOR if series.is_event else 0.0
    line = track(series.values, series.bound, policy.alpha, looks, floor)
    if not series.is_event:
        return line
    block = BLOCKS_PER_BURST * policy.burst_pairs
    bets = bet_below(series.values, series.bound, block, looks)
    return replace(line, log_below=np.minimum(line.log_below, bets))


def _hold(name: str, sentence: str) -> Signal:
    return Signal(name=name, response=Decision.HOLD, segment=ALL, sentence=sentence)


def _all_series(policy: Policy, pairs: Pairs) -> list[Series]:
    """Series of all pairs and, where segments are enforced, of each that has enough of them."""
    masks: list[tuple[str, Bools]] = [(ALL, np.ones(len(pairs), np.bool_))]
    if policy.segments == "enforce" and len(pairs.segments) > 1:
        masks += [
            (segment.name, mask)
            for number, segment in enumerate(pairs.segments)
            if (mask := pairs.segment == number).sum() >= policy.min_pairs
        ]
    found = []
    for name, mask in masks:
        for signal, metric in RATIOS.items():
            baseline, candidate = pairs.metrics[metric]
            usable = mask & pairs.healthy & (baseline > 0) & (candidate > 0)
            if usable.any():
                values = np.log(candidate[usable] / baseline[usable])
                found.append(Series(signal, name, values, np.flatnonzero(usable), math.log1p(policy.margin)))
        found += _tail(policy, pairs, name, mask)
        failures = (~pairs.ok[1][mask]).astype(float) - (~pairs.ok[0][mask]).astype(float)
        found.append(Series("errors", name, failures, np.flatnonzero(mask), policy.error_margin / 100.0, True))
    return [*found, _missing(policy, pairs)]


def _missing(policy: Policy, pairs: Pairs) -> Series:
    """Records of one side alone, between the pairs: slow candidates time out, and what is left of them looks fast."""
    values = np.insert(np.zeros(len(pairs)), pairs.missing_at, pairs.missing)
    places = np.insert(np.arange(len(pairs)), pairs.missing_at, pairs.missing_at)
    return Series("missing-pairs", ALL, values, places, policy.missing_margin / 100.0, True, Decision.HOLD)


def _tail(policy: Policy, pairs: Pairs, name: str, mask: Bools) -> list[Series]:
    """Latencies beyond the 95th percentile of the baseline's first pairs, which are no evidence themselves."""
    baseline, candidate = pairs.metrics["latency_ms"]
    places = np.flatnonzero(mask & pairs.healthy & ~np.isnan(baseline) & ~np.isnan(candidate))
    first, rest = places[:MIN_PAIRS], places[MIN_PAIRS:]
    if not len(rest):
        return []
    threshold = nearest_rank(baseline[first], 0.95)
    values = (candidate[rest] > threshold).astype(float) - (baseline[rest] > threshold).astype(float)
    return [Series("latency-tail", name, values, rest, policy.margin, True)]


def _decide(
    policy: Policy, tracks: dict[tuple[str, str], tuple[Series, Track]], looks: NDArray[np.int64]
) -> tuple[list[Signal], list[str]]:
    """Rollback by e-BH at the first look that rejects, hold where a series has not passed, drift as a note."""
    family = [(each, line) for each, line in tracks.values() if each.response is Decision.ROLLBACK]
    rejected: dict[tuple[str, str], int] = {}
    for at, num_pairs in enumerate(looks):
        for place in e_bh([float(line.log_above[at]) for _, line in family], policy.alpha):
            each, _ = family[place]
            rejected.setdefault((each.signal, each.segment), int(num_pairs))
    signals, notes = [], []
    limit = math.log(1.0 / policy.alpha)
    for name, (each, line) in tracks.items():
        effect, bound = _words(each.signal, float(line.mean[-1])), _words(each.signal, each.bound)
        if name in rejected:
            text = f"{each.signal} is {effect}, with certainty above {bound} after {rejected[name]:,} pairs"
            signals.append(_signal(each, line, each.response, text))
        elif line.log_below[-1] < limit:
            text = f"{each.signal} is {effect}, and not yet certain to be below {bound}"
            signals.append(_signal(each, line, Decision.HOLD, text))
        elif each.signal in RATIOS and line.lower > math.log1p(policy.tolerance):
            notes.append(f"drift of {each.signal} in {each.segment}: {effect}, which is beyond the tolerance")
    return signals, notes


def _signal(series: Series, line: Track, response: Decision, sentence: str) -> Signal:
    return Signal(
        name=series.signal,
        response=response,
        segment=series.segment,
        sentence=sentence,
        value=float(line.mean[-1]),
        bound=series.bound,
    )


def _words(signal: str, value: float) -> str:
    """An effect as a person says it."""
    if signal in RATIOS:
        return f"{100 * math.expm1(value):+.3g} %"
    return f"{100 * value:+.3g} points"
