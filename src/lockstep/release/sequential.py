"""Sequential gate: tests non-inferiority of every series, valid at every look (interim analysis).

`lockstep.release.statistics` judges each series (`lockstep.release.series`): its mean is certainly above its bound,
certainly below it, or undecided. All series have the same order, that of arrivals, and the same looks.

- **Rollback** is decided by e-BH over all series, at each look. The first look that rejects a series is a stopping
  time, so the series rejected there have a false discovery rate of at most alpha. If no series is above its bound, this
  is the probability of a rollback at any look. The decision is latched: the verdict of a batch is rollback if any
  earlier look would have rolled back. The verdict also names the series that are rejected at the last look. They have
  the same rate, so the total is at most twice alpha.
- **Promotion** is decided by an intersection-union test: at the last look every series must be below its bound at level
  alpha. No correction is needed: a wrong promotion is wrong for at least one series, and the probability of that error
  is at most alpha.
- If neither is certain, the decision is hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.release.memory import TimesTrack, track_times, without_changing
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
"""Length of a betting block, in lengths of the longest burst. A burst then rarely extends far into the next block."""
MAX_CURVE = 64
"""Maximum number of looks of a series in a verdict."""
MAX_NAMED = 3
"""Maximum number of undecided series that a sentence names."""
WORDS = {
    **{signal: metric.words for signal, metric in RATIOS.items()},
    "latency-tail": "the share of answers beyond the baseline's p95 latency",
    "errors": "the error rate",
    "output-mismatch": "the mismatch rate",
    "agreement": "the rate of disagreement",
    "logprob-gap": "the gap of log-probabilities",
    "missing-pairs": "the share of records that the candidate lacks",
}
"""Name of each series for sentences, by signal."""
OPEN = ("undecided", "changing", "no-evidence")
"""States of series that are neither outside nor within."""
MOST_PAIRS = 10_000_000
"""If a series needs more pairs than this, the report states that more traffic would not decide it."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Results of all series at each look. The last axis of all arrays is the looks."""

    num_pairs: int
    looks: Looks
    series: tuple[Series, ...]
    tracks: tuple[Track, ...]
    times: tuple[TimesTrack | None, ...]
    """Excluded warm-up and detected changes of each series of times; None for other series."""
    rejected: Bools
    """Shape (..., series, looks). True: the series is certainly above its bound, corrected for the number of series."""
    is_rolled_back: Bools
    """Shape (..., looks). True: a series was rejected at this look or before."""
    is_promoted: Bools
    """Shape (..., looks). True: every series is certainly below its bound, and there was no rollback."""


def follow(policy: Policy, series: Sequence[Series], num_pairs: int, looks: Looks | None = None) -> Findings:
    """Evaluate all series at every look, up to the last pair.

    Args:
        num_pairs: number of all pairs, to which the places of each series refer.
        looks: numbers of pairs at which to evaluate; None: `looks_of`.
    """
    looks = looks_of(num_pairs) if looks is None else looks
    counts = [np.searchsorted(each.places, looks) for each in series]
    times = _times_of(policy, series, counts, looks)
    tracks = tuple(_track_of(policy, *each) for each in zip(series, counts, times, strict=True))
    # A segment that is still small neither counts as a hypothesis nor prevents a promotion.
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
    """Tracks of the series of times; None for other series."""
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
            line = without_changing(line, latency[each.segment])
        found.append(line)
    return tuple(found)


def _track_of(policy: Policy, series: Series, counts: Looks, times: TimesTrack | None) -> Track:
    """Track of a series. For events, both methods must be certain that they are rare enough."""
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
    """Sentence on the guaranteed error rates."""
    return (
        "at any look, a rollback where no series is above its bound and a promotion where one is have each a chance of "
        f"at most {policy.alpha:g}, asymptotically (docs/gate-error-rates.md has simulated rates); not covered are "
        f"bursts of more than {policy.burst_pairs:,} failures of which none was seen yet, times that stay at one level "
        f"for more than {policy.warmup_pairs:,} pairs and then change, and effects that missing pairs hide"
    )


# -- results for the verdict ------------------------------------------------------------------------------------------


def summaries_of(policy: Policy, findings: Findings) -> tuple[SeriesSummary, ...]:
    """Summary of each series of one canary, for the verdict."""
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
    """Indexes of the looks to show: at equal distances, including the last one."""
    step = math.ceil(num_looks / MAX_CURVE)
    return list(range((num_looks - 1) % step, num_looks, step))


def _in_unit(series: Series, value: float) -> float | None:
    """Mean in the unit of the series: a ratio, percentage points or nats; None if it is infinite."""
    if math.isinf(value):
        return None
    if series.unit == "ratio":
        return math.exp(min(value, 700.0))
    return 100 * value if series.unit == "points" else value


def _more_pairs(policy: Policy, findings: Findings, at: int) -> int | None:
    """Number of further pairs, of all series together, after which the series would be within its bound if its mean
    stayed the same; None if it would not."""
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
    """One signal per series that is outside. Without a rollback, also one for all undecided series and one for all that
    change."""
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
    """Sentence on the undecided series; those that need the most pairs are named first."""
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
    """Notes on excluded pairs, on drift that is no reason to hold, and on series that were undecided at a rollback."""
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
    """Signal that explains why no series can be evaluated yet; None if they can."""
    if num_pairs and not is_timed:
        return hold("missing-times", "some pairs have no time (ts), and sequential evidence needs an order")
    if num_pairs < MIN_PAIRS:
        return hold("no-evidence-yet", f"{num_pairs:,} pairs; sequential evidence begins with {MIN_PAIRS}")
    return None


def amount(unit: str, value: float | None) -> str:
    """Effect with its unit, as text."""
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
    """The count rounded up to two significant digits."""
    unit = int(10.0 ** max(0, len(str(count)) - 2))
    return -(-count // unit) * unit
