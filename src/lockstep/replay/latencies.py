"""Distributions of times from outcomes. Exact: whole numbers are sorted and counted, and divided once at the end.

A request's times, from its arrival on (which is the begin of its arrival tick where arrivals count ticks):

- ``ttft`` to the end of the step that brought its first token;
- ``e2e`` to the end of its last step;
- ``queue`` to the begin of the step that admitted it;
- ``tpot`` from its first token to its last, divided by the tokens after the first; requests of one token have none;
- ``itl`` is no request's but each single gap between two tokens of one, rounded down to microseconds; its mean is not
  rounded.

A time that spans ticks ``a`` to ``b`` whole is ``b - a + 1`` ticks. The percentile ``p`` is the least value that at
least ``p`` percent do not exceed (nearest rank), so every percentile is a time that somebody saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from lockstep.replay.progress import GAP_QUANTUM_PS, Gaps
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.workload import PS_PER_MS

DIGITS = 6
"""Decimals of every figure that is no whole number."""
_PERCENTS = (50, 90, 95, 99)
_MICROTICKS = 1_000_000
"""Per tick: mean times per token are whole millionths of ticks."""
_QUANTA_PER_MS = PS_PER_MS // GAP_QUANTUM_PS


class Distribution(msgspec.Struct, frozen=True):
    """Mean and percentiles of some times."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class Latencies(msgspec.Struct, frozen=True):
    """One unit's distributions; None where nobody has such a time."""

    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    queue: Distribution | None


def latencies_in_ticks(outcomes: Iterable[RequestOutcome], gaps: Gaps) -> Latencies:
    """Of the requests that ended."""
    done = [each for each in outcomes if each.finished_tick >= 0]
    several = [each for each in done if each.num_output_tokens > 1]
    return Latencies(
        ttft=distribution([each.first_token_tick - each.arrival_tick + 1 for each in done], 1),
        tpot=distribution(
            [
                (each.finished_tick - each.first_token_tick) * _MICROTICKS // (each.num_output_tokens - 1)
                for each in several
            ],
            _MICROTICKS,
        ),
        itl=_of_counts(gaps.by_ticks, 1, sum(each.finished_tick - each.first_token_tick for each in done), 1),
        e2e=distribution([each.finished_tick - each.arrival_tick + 1 for each in done], 1),
        queue=distribution([each.admitted_tick - each.arrival_tick for each in done], 1),
    )


def latencies_in_ms(outcomes: Iterable[RequestOutcome], gaps: Gaps) -> Latencies:
    """Of the requests that ended."""
    done = [each for each in outcomes if each.finished_tick >= 0]
    several = [each for each in done if each.num_output_tokens > 1]
    return Latencies(
        ttft=distribution([ttft_ps(each) for each in done], PS_PER_MS),
        tpot=distribution([tpot_ps(each) for each in several], PS_PER_MS),
        itl=_of_counts(
            gaps.by_us, _QUANTA_PER_MS, sum(each.finished_ps - each.first_token_ps for each in done), PS_PER_MS
        ),
        e2e=distribution([e2e_ps(each) for each in done], PS_PER_MS),
        queue=distribution([each.admitted_ps - each.arrival_ps for each in done], PS_PER_MS),
    )


def ttft_ps(outcome: RequestOutcome) -> int:
    """Arrival to first token."""
    return outcome.first_token_ps - outcome.arrival_ps


def e2e_ps(outcome: RequestOutcome) -> int:
    """Arrival to end."""
    return outcome.finished_ps - outcome.arrival_ps


def tpot_ps(outcome: RequestOutcome) -> int:
    """Mean time of the tokens after the first, rounded down; 0 where there are none."""
    return (outcome.finished_ps - outcome.first_token_ps) // max(1, outcome.num_output_tokens - 1)


def ratio(numerator: int | float, denominator: int | float) -> float:
    """A quotient as reports write it; 0 where there is nothing to divide by."""
    return round(numerator / denominator, DIGITS) if denominator else 0.0


def distribution(values: list[int], per_unit: int) -> Distribution | None:
    """Of single values.

    Args:
        per_unit: how many of the values' units make one of the figures'.
    """
    if not values:
        return None
    ordered = sorted(values)
    ranks = [-(-percent * len(ordered) // 100) - 1 for percent in _PERCENTS]
    percentiles = [ratio(ordered[rank], per_unit) for rank in ranks]
    return Distribution(ratio(sum(ordered), len(ordered) * per_unit), *percentiles)


def _of_counts(counts: Mapping[int, int], per_unit: int, total: int, total_per_unit: int) -> Distribution | None:
    """Of values with their counts, and the exact sum of all of them."""
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
