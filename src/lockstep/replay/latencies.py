"""Distributions of times from outcomes. Exact: whole numbers are sorted and counted, and divided once at the end.

A request's times, from its arrival on (which is the begin of its arrival tick where arrivals count ticks):

- ``ttft`` to the end of the step that brought its first token;
- ``e2e`` to the end of its last step;
- ``queue`` to the begin of the step that admitted it;
- ``tpot`` from its first token to its last, divided by the tokens after the first; requests of one token have none;
- ``itl`` is no request's but each single gap between two tokens of one, rounded down to microseconds; its mean is not
  rounded.

A time that spans ticks ``a`` to ``b`` whole is ``b - a + 1`` ticks. The percentile ``p`` is the least value that at
least ``p`` percent do not exceed (nearest rank), so every percentile is a time that was observed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from lockstep.replay.progress import GAP_QUANTUM_PS, Gaps
from lockstep.replay.timeline import Course, RequestOutcome
from lockstep.replay.workload import PS_PER_MS

DIGITS = 6
"""Decimals of every figure that is no whole number."""
_PERCENTS = (50, 90, 95, 99)
_MICROTICKS = 1_000_000
"""Per tick: mean times per token are whole millionths of ticks."""


class Distribution(msgspec.Struct, frozen=True):
    """Mean and percentiles of times."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class Latencies(msgspec.Struct, frozen=True):
    """One unit's distributions; None where no request has such a time."""

    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    queue: Distribution | None


def latencies_in_ticks(done: Iterable[RequestOutcome], gaps: Gaps) -> Latencies:
    """Latencies of the requests that were completed."""
    return _latencies([each.in_ticks for each in done], gaps.by_ticks, per_unit=1, per_gap=1, scale=_MICROTICKS)


def latencies_in_ms(done: Iterable[RequestOutcome], gaps: Gaps) -> Latencies:
    """Latencies of the requests that were completed."""
    return _latencies([each.in_ps for each in done], gaps.by_us, per_unit=PS_PER_MS, per_gap=GAP_QUANTUM_PS, scale=1)


def _latencies(
    courses: Sequence[Course], gaps: Mapping[int, int], *, per_unit: int, per_gap: int, scale: int
) -> Latencies:
    """Distributions of one unit.

    Args:
        per_unit: how much of the courses' unit is one of the figures'.
        per_gap: how much of it is one of those that gaps are counted by.
        scale: parts of it in which means of a request are counted.
    """
    return Latencies(
        ttft=distribution([each.ttft for each in courses], per_unit),
        tpot=distribution([each.tpot(scale) for each in courses if each.num_output_tokens > 1], per_unit * scale),
        itl=_of_counts(gaps, per_unit // per_gap, sum(each.finished - each.first_token for each in courses), per_unit),
        e2e=distribution([each.e2e for each in courses], per_unit),
        queue=distribution([each.admitted - each.arrival for each in courses], per_unit),
    )


def ratio(numerator: int | float, denominator: int | float) -> float:
    """A quotient as reports write it; 0 where there is nothing to divide by."""
    return round(numerator / denominator, DIGITS) if denominator else 0.0


def distribution(values: list[int], per_unit: int) -> Distribution | None:
    """Distribution of single values; None: there are none.

    Args:
        per_unit: how many of the values' units make one of the figures'.
    """
    return _of_counts(Counter(values), per_unit, sum(values), per_unit)


def _of_counts(counts: Mapping[int, int], per_unit: int, total: int, total_per_unit: int) -> Distribution | None:
    """Distribution of values by their counts, and the exact sum of all of them; None: there are none."""
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
