"""95th percentiles of gaps between tokens, pooled over all answers of a side: exact, in bounded memory.

There are many times more gaps than answers. Where they are too many to be sorted, those of a few answers, drawn by
their digests, tell between which two values the percentile must be; one pass over all of them then counts what is above
and keeps what is between. If the percentile is not there after all, the two values are moved apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.release.observation import SIDES, Side
from lockstep.release.outputs import BOTH_SIDES, IN_SEGMENT
from lockstep.release.statistics import nearest_rank
from lockstep.release.store import Store

P95 = 0.95
MAX_SORTED = 2_000_000
"""Gaps of a side that are sorted, or drawn."""
EVERYTHING = -1
"""In place of a segment: all of them."""
_NEAR = 0.005
"""How far the two values are from the percentile at least, as a part of all."""


class _Bracket(NamedTuple):
    """Two values with the percentile between them."""

    low: float
    high: float


def pooled_p95(store: Store) -> dict[int, tuple[float, float]]:
    """95th percentiles of both sides over healthy pairs, by segment, and of `EVERYTHING`; NaN: there are no gaps."""
    store.run(
        "CREATE TABLE healthy AS SELECT o.b, o.c, segment, b.num_gaps AS num_baseline, c.num_gaps AS num_candidate,"
        f" b.digest FROM {BOTH_SIDES} {IN_SEGMENT} WHERE b.ok AND c.ok"
    )
    found = [_p95_of(store, side) for side in SIDES]
    segments = sorted(found[0].keys() | found[1].keys())
    return {each: (found[0].get(each, math.nan), found[1].get(each, math.nan)) for each in segments}


def _p95_of(store: Store, side: Side) -> dict[int, float]:
    counts = {
        int(segment): int(count)
        for segment, count in store.rows(f"SELECT segment, sum(num_{side}) FROM healthy GROUP BY 1 ORDER BY 1")
        if count
    }
    if not counts:
        return {}
    total = sum(counts.values())
    one_in = max(1, total // MAX_SORTED)
    drawn = store.columns(f"SELECT segment, unnest(gaps) AS gap FROM {_gaps(side)} WHERE digest % {one_in} = 0")
    samples = {each: drawn["gap"][drawn["segment"] == each] for each in counts if each >= 0}
    samples[EVERYTHING] = drawn["gap"]
    counts = {each: count for each, count in counts.items() if each >= 0} | {EVERYTHING: total}
    if one_in == 1:
        return {each: nearest_rank(sample, P95) for each, sample in samples.items()}
    results: dict[int, float] = {}
    near = _NEAR
    while missing := counts.keys() - results.keys():
        brackets = {each: _bracket(samples[each], near) for each in sorted(missing)}
        results |= _within(store, side, brackets, counts)
        near *= 8
    return results


def _gaps(side: Side) -> str:
    return f"healthy JOIN (SELECT row AS {side[0]}, gaps FROM observed_{side}) USING ({side[0]})"


def _bracket(sample: NDArray[np.float64], near: float) -> _Bracket:
    """Two values around the percentile of a sample: the smaller the sample, the farther apart."""
    apart = near + 2.0 / math.sqrt(max(1, len(sample)))
    low, high = P95 - apart, P95 + apart
    return _Bracket(
        nearest_rank(sample, low) if low > 0 and len(sample) else -math.inf,
        nearest_rank(sample, high) if high < 1 and len(sample) else math.inf,
    )


def _within(store: Store, side: Side, brackets: Mapping[int, _Bracket], counts: Mapping[int, int]) -> dict[int, float]:
    """Percentiles of those whose brackets hold them."""
    store.run("CREATE OR REPLACE TABLE brackets (segment INTEGER, low DOUBLE, high DOUBLE)")
    store.insert("brackets", [(segment, *bracket) for segment, bracket in brackets.items() if segment >= 0])
    low, high = brackets.get(EVERYTHING, _Bracket(math.inf, math.inf))
    found = store.columns(
        "SELECT segment, count(*) FILTER (gap > high) AS num_above,"
        " coalesce(list(gap) FILTER (gap BETWEEN low AND high), []) AS gaps,"
        f" count(*) FILTER (gap > {_number(high)}) AS all_above,"
        f" coalesce(list(gap) FILTER (gap BETWEEN {_number(low)} AND {_number(high)}), []) AS all_gaps"
        " FROM (SELECT segment, coalesce(low, 'inf') AS low, coalesce(high, 'inf') AS high, unnest(gaps) AS gap"
        f" FROM {_gaps(side)} LEFT JOIN brackets USING (segment))"
        f" WHERE gap >= least(low, {_number(low)}) GROUP BY segment ORDER BY segment"
    )
    values = {
        int(segment): (int(above), np.asarray(gaps, np.float64))
        for segment, above, gaps in zip(found["segment"], found["num_above"], found["gaps"], strict=True)
    }
    values[EVERYTHING] = (
        int(found["all_above"].sum()),
        np.concatenate([np.asarray(gaps, np.float64) for gaps in found["all_gaps"]] or [np.empty(0)]),
    )
    results = {}
    for each in brackets.keys() & values.keys():
        num_above, gaps = values[each]
        place = max(1, math.ceil(P95 * counts[each] - 1e-9)) - 1 - (counts[each] - num_above - len(gaps))
        if 0 <= place < len(gaps):
            results[each] = float(np.partition(gaps, place)[place])
    return results


def _number(value: float) -> str:
    return f"'{value!r}'::DOUBLE"
