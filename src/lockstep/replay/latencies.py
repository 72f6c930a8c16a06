"""Latency distributions of requests: computed exactly, from sorted integers with one division at the end.

Times of a request, counted from its arrival (the begin of its arrival tick, if arrivals are in ticks):

- ``ttft``: to the end of the step with its first token;
- ``e2e``: to the end of its last step;
- ``queue``: to the begin of the step that admitted it;
- ``tpot``: from its first token to its last, divided by the tokens after the first; requests of one token have none;
- ``itl``: each gap between two consecutive tokens of a request, rounded down to microseconds, over all requests; its
  mean is not rounded.

The time from tick ``a`` through tick ``b`` is ``b - a + 1`` ticks. The percentile ``p`` is the smallest value that at
least ``p`` percent of the values do not exceed (nearest rank), so every percentile is an observed time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from lockstep.replay.progress import GAP_QUANTUM_PS, Gaps
from lockstep.replay.timeline import Course, RequestOutcome
from lockstep.replay.workload import PS_PER_MS

DIGITS = 6
"""Decimals of every figure that is not an integer."""
_PERCENTS = (50, 90, 95, 99)
_MICROTICKS = 1_000_000
"""Parts of a tick: mean times per token are counted in millionths of ticks."""


class Distribution(msgspec.Struct, frozen=True):
    """Mean and percentiles of times."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class Latencies(msgspec.Struct, frozen=True):
    """Distributions in one unit; None if no request has such a time."""

    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    queue: Distribution | None


def latencies_in_ticks(done: Iterable[RequestOutcome], gaps: Gaps) -> Latencies:
    """Latencies of completed requests, in ticks."""
    return _latencies([each.in_ticks for each in done], gaps.by_ticks, per_unit=1, per_gap=1, scale=_MICROTICKS)


def latencies_in_ms(done: Iterable[RequestOutcome], gaps: Gaps) -> Latencies:
    """Latencies of completed requests, in milliseconds."""
    return _latencies([each.in_ps for each in done], gaps.by_us, per_unit=PS_PER_MS, per_gap=GAP_QUANTUM_PS, scale=1)


def _latencies(
    courses: Sequence[Course], gaps: Mapping[int, int], *, per_unit: int, per_gap: int, scale: int
) -> Latencies:
    """Distributions in one unit.

    Args:
        per_unit: units of the courses per unit of the result.
        per_gap: units of the courses per unit of the counted gaps.
        scale: resolution of a request's mean times, in parts of a unit.
    """
    return Latencies(
        ttft=distribution([each.ttft for each in courses], per_unit),
        tpot=distribution([each.tpot(scale) for each in courses if each.num_output_tokens > 1], per_unit * scale),
        itl=_of_counts(gaps, per_unit // per_gap, sum(each.finished - each.first_token for each in courses), per_unit),
        e2e=distribution([each.e2e for each in courses], per_unit),
        queue=distribution([each.admitted - each.arrival for each in courses], per_unit),
    )


def ratio(numerator: int | float, denominator: int | float) -> float:
    """Quotient as in reports; 0 if the denominator is 0."""
    return round(numerator / denominator, DIGITS) if denominator else 0.0


def distribution(values: list[int], per_unit: int) -> Distribution | None:
    """Distribution of single values; None: no values.

    Args:
        per_unit: units of the values per unit of the result.
    """
    return _of_counts(Counter(values), per_unit, sum(values), per_unit)


def _of_counts(counts: Mapping[int, int], per_unit: int, total: int, total_per_unit: int) -> Distribution | None:
    """Distribution of counted values with an exact total; None: no values."""
    number = sum(counts.values())
    if not number:
        return None
    percentiles: list[float] = []
    num_below = 0
    for value in sorted(counts):
        num_below += counts[value]
        while len(percentiles) < len(_PERCENTS) and num_below * 100 >= _PERCENTS[len(percentiles)] * number:
            percentiles.append(ratio(value, per_unit))
    return Distribution(ratio(total, number * total_per_unit), *percentiles)
