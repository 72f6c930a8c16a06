"""Sequential gate: non-inferiority of every series, valid at every look.

Each series (`lockstep.release.series`) is judged by `lockstep.release.statistics`: its mean is above its bound with
certainty, or below it with certainty, or there is no decision yet. All series share one order, that of arrivals, and
one set of looks.

- **Rollback** is by e-BH over all series, at each look. The first look that rejects is a stopping time, so the rejected
  series have a false discovery rate of at most alpha there; where no series is above its bound, that is the chance of a
  rollback at any look. The decision is latched: the verdict of a batch is rollback if that of any look before its end
  would be. Series that are rejected at the last look are named as well, which has the same rate, so at most twice alpha
  for both.
- **Promotion** is by intersection and union: every series has to be below its bound with certainty alpha at the last
  look. That needs no correction: a wrong promotion is wrong in one series at least, and that one alone has a chance
  of alpha.
- What is certain neither way holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.release.memory import TimesTrack, beside, track_times
from lockstep.release.policy import Policy
from lockstep.release.series import RATIOS, TIMES, Series
from lockstep.release.statistics import (
    MIN_PAIRS,
    Bools,
    Looks,
    Track,
    bet_below,
    bet_upper,
    e_bh,
    looks_of,
    track,
    width_after,
)
from lockstep.release.verdict import ALL, CurvePoint, Decision, SeriesSummary, Signal, hold
from lockstep.shown import signed_percent

BLOCKS_PER_BURST = 2
"""A bet is on so many times the longest burst: what is left of one in the next block is little."""
MAX_CURVE = 64
"""Looks of a series that a verdict shows."""
MAX_NAMED = 3
"""Undecided series that are named in a sentence."""
WORDS = {
    **{signal: metric.words for signal, metric in RATIOS.items()},
    "latency-tail": "the share of answers beyond the baseline's p95 latency",
    "errors": "the error rate",
    "output-mismatch": "the mismatch rate",
    "agreement": "the rate of disagreement",
    "logprob-gap": "the gap of log-probabilities",
    "missing-pairs": "the share of records that the candidate lacks",
}
"""Series in words, by signal."""
OPEN = ("undecided", "changing", "no-evidence")
"""States of series that are neither outside nor within."""
MOST_PAIRS = 10_000_000
"""Where more would be needed, the report states that no traffic suffices."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of following series, at each look (the last axis of all arrays)."""

    num_pairs: int
    looks: Looks
    series: tuple[Series, ...]
    tracks: tuple[Track, ...]
    times: tuple[TimesTrack | None, ...]
    """Of series of times: what was excluded, and whether they change."""
    rejected: Bools
    """Shape (..., series, looks): certainly above its bound, whatever else is followed."""
    is_rolled_back: Bools
    """Shape (..., looks): a series is rejected, at this look or before."""
    is_promoted: Bools
    """Shape (..., looks): every series is certainly below its bound, and there was no rollback."""


def follow(policy: Policy, series: Sequence[Series], num_pairs: int, looks: Looks | None = None) -> Findings:
    """Follow series to the end of the pairs.

    Args:
        num_pairs: of all series together: what their places count.
        looks: numbers of pairs at which is looked; None: as often as it is worth.
    """
    looks = looks_of(num_pairs) if looks is None else looks
    counts = [np.searchsorted(each.places, looks) for each in series]
    times = _times_of(policy, series, counts, looks)
    tracks = tuple(_track_of(policy, *each) for each in zip(series, counts, times, strict=True))
    # A segment that is small yet neither burdens the others nor holds them back.
    is_there = np.array(
        [c >= (1 if s.segment == ALL else policy.min_pairs) for s, c in zip(series, counts, strict=True)]
    )
    above = np.stack([line.log_above for line in tracks], axis=-2)
    below = np.stack([line.log_below for line in tracks], axis=-2)
    rejects = np.array([each.response is Decision.ROLLBACK for each in series])
    is_hypothesis = np.broadcast_to(is_there & rejects[:, None], above.shape)
    found = e_bh(np.swapaxes(above, -1, -2), policy.alpha, np.swapaxes(is_hypothesis, -1, -2))
    rejected: Bools = np.swapaxes(found, -1, -2)
    is_rolled_back: Bools = np.logical_or.accumulate(rejected.any(axis=-2), axis=-1)
    passes = ((below >= math.log(1 / policy.alpha)) | ~is_there).all(axis=-2)
    is_promoted = passes & ~is_rolled_back
    return Findings(num_pairs, looks, tuple(series), tracks, times, rejected, is_rolled_back, is_promoted)


def _times_of(
    policy: Policy, series: Sequence[Series], counts: Sequence[Looks], looks: Looks
) -> tuple[TimesTrack | None, ...]:
    """Series of times at each look; None for the others."""
    found: list[TimesTrack | None] = []
    latency: dict[str, TimesTrack] = {}
    for each, count in zip(series, counts, strict=True):
        if each.signal not in TIMES:
            found.append(None)
            continue
        window = policy.warmup_pairs, int(np.searchsorted(each.places, policy.warmup_pairs))
        line = track_times(each.values, each.bound, policy.alpha, count, looks, window, is_event=each.is_event)
        if each.signal == "latency":
            latency[each.segment] = line
        elif each.signal == "latency-tail" and each.segment in latency:
            line = beside(line, latency[each.segment])
        found.append(line)
    return tuple(found)


def _track_of(policy: Policy, series: Series, counts: Looks, times: TimesTrack | None) -> Track:
    """A series at each look. That events are rare enough has to be certain by both ways."""
    if times is not None:
        line = times.line
    else:
        line = track(series.values, series.bound, policy.alpha, counts, is_event=series.is_event)
    if not series.is_event:
        return line
    bets = bet_below(series.values, series.bound, _block(policy), counts)
    return replace(line, log_below=np.minimum(line.log_below, bets))


def _block(policy: Policy) -> int:
    return BLOCKS_PER_BURST * policy.burst_pairs


def guarantee_of(policy: Policy) -> str:
    """Sentence on the error rates that hold."""
    return (
        "at any look, a rollback where no series is above its bound and a promotion where one is have each a chance of "
        f"at most {policy.alpha:g}, asymptotically (docs/gate-error-rates.md has simulated rates); not covered are "
        f"bursts of more than {policy.burst_pairs:,} failures of which none was seen yet, times that stay at one level "
        f"for more than {policy.warmup_pairs:,} pairs and then change, and effects that missing pairs hide"
    )


# -- what a verdict says of it ----------------------------------------------------------------------------------------


def summaries_of(policy: Policy, findings: Findings) -> tuple[SeriesSummary, ...]:
    """Each series of one canary as a verdict has it."""
    return tuple(_summary(policy, findings, at) for at in range(len(findings.series)))


def _summary(policy: Policy, findings: Findings, at: int) -> SeriesSummary:
    series, line = findings.series[at], findings.tracks[at]
    rejecting = np.flatnonzero(findings.rejected.any(axis=0))
    mine = np.flatnonzero(findings.rejected[at])
    is_named = (bool(len(mine)) and mine[0] == rejecting[0]) or bool(findings.rejected[at, -1])
    limit = math.log(1 / policy.alpha)
    upper = line.upper[-1]
    if series.is_event:
        upper = max(upper, bet_upper(series.values, policy.alpha, _block(policy)))
    times = findings.times[at]
    is_excluded = times is not None and bool(times.is_excluded[-1])
    state = "undecided"
    if is_named or (series.response is Decision.HOLD and line.log_above[-1] >= limit):
        state = "outside"
    elif line.log_below[-1] >= limit:
        state = "within"
    elif times is not None and times.is_changing[-1]:
        state = "changing"
    elif math.isinf(line.upper[-1]):
        state = "no-evidence"
    shown = _shown(len(findings.looks)) if series.segment == ALL else []
    return SeriesSummary(
        signal=series.signal,
        segment=series.segment,
        unit=series.unit,
        pairs=series.values.shape[-1],
        effect=_in_unit(series, float(line.mean[-1])),
        lower=_in_unit(series, float(line.lower[-1])),
        upper=_in_unit(series, float(upper)),
        bound=_in_unit(series, series.bound),
        state=state,
        response=series.response,
        excluded_pairs=times.window if times is not None and is_excluded else 0,
        excluded_effect=_in_unit(series, float(times.window_mean)) if times is not None and is_excluded else None,
        outside_after=int(findings.looks[mine[0]]) if is_named else None,
        more_pairs=_more_pairs(policy, findings, at) if state in ("undecided", "no-evidence") else None,
        curve=tuple(
            CurvePoint(
                pairs=int(findings.looks[look]),
                effect=_in_unit(series, float(line.mean[look])),
                lower=_in_unit(series, float(line.lower[look])),
                upper=_in_unit(series, float(line.upper[look])),
            )
            for look in shown
        ),
    )


def _shown(num_looks: int) -> list[int]:
    """Looks that are shown, evenly, the last one among them."""
    step = math.ceil(num_looks / MAX_CURVE)
    return list(range((num_looks - 1) % step, num_looks, step))


def _in_unit(series: Series, value: float) -> float | None:
    """A mean as a ratio, in percentage points or in nats; None: nothing is known."""
    if math.isinf(value):
        return None
    if series.unit == "ratio":
        return math.exp(min(value, 700.0))
    return 100 * value if series.unit == "points" else value


def _more_pairs(policy: Policy, findings: Findings, at: int) -> int | None:
    """Pairs, of all together, after which the series is below its bound if it goes on so; None: it is not."""
    series, line = findings.series[at], findings.tracks[at]
    num, mean = series.values.shape[-1], float(line.mean[-1])
    if not num or mean >= series.bound:
        return None
    lengths = np.unique(np.geomspace(num, max(num, MOST_PAIRS), 400).astype(np.int64))
    enough = (series.bound - mean >= width_after(float(line.scale[-1]), lengths, policy.alpha)) & (
        lengths >= line.begins[-1]
    )
    if not enough.any():
        return None
    needed = int(lengths[enough][0])
    if series.is_event:
        gain = bet_below(series.values, series.bound, _block(policy), np.array([num]))[0]
        empty = bet_below(np.zeros(num), series.bound, _block(policy), np.array([num]))[0]
        if gain <= 0 < empty and num >= 10 * _block(policy):
            return None
        rate = (gain if gain > 0 else empty) / num
        if rate > 0:
            needed = max(needed, math.ceil(math.log(1 / policy.alpha) / rate))
    more: int = math.ceil(max(0, needed - num) * findings.num_pairs / num)
    return more


def signals_of(summaries: Sequence[SeriesSummary]) -> Iterator[Signal]:
    """Signals of what is outside, and one of all that is undecided, unless something else was decided."""
    for each in summaries:
        if each.state == "outside":
            after = f", certain after {each.outside_after:,} pairs" if each.outside_after else ""
            yield Signal(
                name=each.signal,
                response=each.response,
                segment=each.segment,
                sentence=f"{WORDS[each.signal]} is {amount(each.unit, each.effect)}{_range(each)}, "
                f"above the bound of {amount(each.unit, each.bound)}{after}",
                value=each.effect,
                bound=each.bound,
            )
    open_ones = [each for each in summaries if each.state in ("undecided", "no-evidence")]
    is_decided = any(each.state == "outside" and each.response is Decision.ROLLBACK for each in summaries)
    changing = [_name(each) for each in summaries if each.state == "changing"]
    if changing and not is_decided:
        yield hold("non-stationary", _changing(changing))
    if open_ones and not is_decided:
        yield hold("undecided", _undecided(open_ones, len(summaries)))


def _changing(names: Sequence[str]) -> str:
    """Sentence on the series that change too slowly."""
    rest = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return (
        f"{', '.join(names[:MAX_NAMED])}{rest}: the difference between the sides changes slowly over these pairs, so "
        "their mean is no evidence of the next ones"
    )


def _undecided(open_ones: Sequence[SeriesSummary], num_series: int) -> str:
    """Sentence on the series that are neither in nor out, those that need the most first."""
    ranked = sorted(open_ones, key=lambda each: -(MOST_PAIRS if each.more_pairs is None else each.more_pairs))
    named = [
        f"{_name(each)} ({amount(each.unit, each.effect)}, bound {amount(each.unit, each.bound)})"
        for each in ranked[:MAX_NAMED]
    ]
    rest = f" and {len(ranked) - MAX_NAMED:,} more" if len(ranked) > MAX_NAMED else ""
    known = [each.more_pairs for each in ranked]
    never = sum(each is None for each in known)
    more = max((each for each in known if each is not None), default=0)
    effort = f"; about {_round(more):,} more pairs would settle {'the others' if never else 'them'}" if more else ""
    hopeless = f"; {never:,} of them would not come below their bounds by more pairs like these" if never else ""
    return (
        f"{len(ranked):,} of {num_series:,} series are not yet certain to be below their bounds: "
        f"{', '.join(named)}{rest}{hopeless}{effort}"
    )


def notes_of(policy: Policy, summaries: Sequence[SeriesSummary]) -> Iterator[str]:
    """Excluded pairs, drift, which is no reason to hold, and what a rollback left undecided."""
    first = policy.warmup_pairs + MIN_PAIRS
    if any(each.signal in TIMES for each in summaries) and max(each.pairs for each in summaries) < first:
        yield (
            f"times are not judged before {first:,} pairs, since a candidate may warm up; set warmup_pairs to 0 where "
            "both sides were warm before the first pair"
        )
    for each in summaries:
        if each.excluded_pairs:
            yield (
                f"warm-up: the first {each.excluded_pairs:,} pairs of {_name(each)} were excluded; they have "
                f"{amount(each.unit, each.excluded_effect)}, the later ones {amount(each.unit, each.effect)}"
            )
        is_ratio = each.unit == "ratio" and each.state != "outside"
        if is_ratio and each.lower is not None and each.lower > 1 + policy.tolerance:
            yield (
                f"drift: {_name(each)} is {amount(each.unit, each.effect)}, certainly beyond the tolerance of "
                f"{100 * policy.tolerance:g} %"
            )
    if any(each.state == "outside" and each.response is Decision.ROLLBACK for each in summaries):
        num_open = sum(each.state in OPEN for each in summaries)
        if num_open:
            yield f"{num_open:,} of {len(summaries):,} series were undecided when others were certain"


def too_early(num_pairs: int, is_timed: bool) -> Signal | None:
    """Reason for which nothing can be followed yet."""
    if num_pairs and not is_timed:
        return hold("missing-times", "some pairs have no time (ts), and sequential evidence needs an order")
    if num_pairs < MIN_PAIRS:
        return hold("no-evidence-yet", f"{num_pairs:,} pairs; sequential evidence begins with {MIN_PAIRS}")
    return None


def amount(unit: str, value: float | None) -> str:
    """An effect as a person states it."""
    if value is None:
        return "unknown"
    if unit == "ratio":
        return signed_percent(value - 1)
    return f"{value:+.3g} points" if unit == "points" else f"{value:.3g} nats"


def _range(summary: SeriesSummary) -> str:
    if summary.lower is None or summary.upper is None:
        return ""
    return f" (from {amount(summary.unit, summary.lower)} to {amount(summary.unit, summary.upper)})"


def _name(summary: SeriesSummary) -> str:
    return f"{WORDS[summary.signal]}{'' if summary.segment == ALL else f' in {summary.segment}'}"


def _round(count: int) -> int:
    """Two significant digits."""
    unit = int(10.0 ** max(0, len(str(count)) - 2))
    return -(-count // unit) * unit
