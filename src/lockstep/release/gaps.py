"""Percentiles of gaps between tokens: computes the exact 95th percentile over all answers of a side, in bounded memory.

There are many times more gaps than answers. If there are too many gaps to sort, a sample (the gaps stored with the
facts of a few answers) gives two values that probably enclose the percentile. One pass over all gaps then counts the
gaps above them and keeps those between. If the percentile is not between them, the pass is repeated with values that
are farther apart.
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
"""Maximum number of a side's gaps that are sorted or sampled."""
EVERYTHING = -1
"""Segment number that stands for all segments."""
_NEAR = 0.005
"""Minimum distance of the two values from the percentile, as a fraction of all gaps."""


class Bracket(NamedTuple):
    """Two values that probably enclose the percentile."""

    low: float
    high: float


_NOTHING = Bracket(math.inf, -math.inf)


def pooled_p95(store: Store, max_sorted: int = MAX_SORTED) -> dict[int, tuple[float, float]]:
    """95th percentiles of both sides by segment, and for `EVERYTHING`; NaN: there are no gaps.

    They are computed from the healthy pairs in which both sides have gaps. If there is no such pair, they are computed
    from all gaps of each side.

    Args:
        max_sorted: maximum number of a side's gaps that are sorted or sampled.
    """
    store.run(
        "CREATE TABLE healthy AS SELECT o.b, o.c, segment, b.num_gaps AS num_baseline, c.num_gaps AS num_candidate,"
        f" b.digest FROM {BOTH_SIDES} {IN_SEGMENT} WHERE b.ok AND c.ok"
        " QUALIFY (num_baseline > 0 AND num_candidate > 0)"
        " OR NOT bool_or(num_baseline > 0 AND num_candidate > 0) OVER ()"
    )
    found = [_p95_of(store, side, max_sorted) for side in SIDES]
    segments = sorted(found[0].keys() | found[1].keys())
    return {each: (found[0].get(each, math.nan), found[1].get(each, math.nan)) for each in segments}


def _p95_of(store: Store, side: Side, max_sorted: int) -> dict[int, float]:
    counts = {
        int(segment): int(count)
        for segment, count in store.rows(f"SELECT segment, sum(num_{side}) FROM healthy GROUP BY 1 ORDER BY 1")
        if count
    }
    if not counts:
        return {}
    total = sum(counts.values())
    one_in = max(1, total // max_sorted)
    drawn = store.columns(
        f"SELECT segment, unnest(drawn) AS gap FROM healthy JOIN (SELECT row AS {side[0]}, drawn FROM facts_{side}"
        f" WHERE drawn IS NOT NULL) USING ({side[0]}) WHERE digest % {one_in} = 0"
    )
    samples = {each: drawn["gap"][drawn["segment"] == each] for each in counts if each >= 0}
    samples[EVERYTHING] = drawn["gap"]
    counts = {each: count for each, count in counts.items() if each >= 0} | {EVERYTHING: total}
    if len(drawn["gap"]) == total:
        return {each: nearest_rank(sample, P95) for each, sample in samples.items()}
    results: dict[int, float] = {}
    near = _NEAR
    while missing := counts.keys() - results.keys():
        brackets = {each: _bracket(samples[each], near) for each in sorted(missing)}
        results |= _within(store, side, brackets, counts)
        near *= 8
    return results


def _bracket(sample: NDArray[np.float64], near: float) -> Bracket:
    """Two values around the percentile of a sample. They are farther apart for smaller samples."""
    apart = near + 2.0 / math.sqrt(max(1, len(sample)))
    low, high = P95 - apart, P95 + apart
    return Bracket(
        nearest_rank(sample, low) if low > 0 and len(sample) else -math.inf,
        nearest_rank(sample, high) if high < 1 and len(sample) else math.inf,
    )


def _within(store: Store, side: Side, brackets: Mapping[int, Bracket], counts: Mapping[int, int]) -> dict[int, float]:
    """Percentiles by segment, for the segments whose percentile is within its bracket."""
    of_all = brackets.get(EVERYTHING, _NOTHING)
    lowest = min(bracket.low for bracket in brackets.values())
    store.run("CREATE OR REPLACE TABLE brackets (segment INTEGER, low DOUBLE, high DOUBLE)")
    store.insert("brackets", [(each, *brackets.get(each, _NOTHING)) for each in sorted(counts)])
    store.run(  # the only pass over all gaps; it drops those that are far below the percentile
        "CREATE OR REPLACE TABLE near AS SELECT segment, gap FROM (SELECT segment, unnest(gaps) AS gap FROM healthy"
        f" JOIN (SELECT row AS {side[0]}, gaps FROM observed_{side}) USING ({side[0]})) WHERE gap >= {_number(lowest)}"
    )
    above = store.columns(
        f"SELECT segment, count(*) FILTER (gap > high) AS num, count(*) FILTER (gap > {_number(of_all.high)}) AS of_all"
        " FROM near JOIN brackets USING (segment) GROUP BY segment"
    )
    num_above = {int(each): int(num) for each, num in zip(above["segment"], above["num"], strict=True)}
    num_above[EVERYTHING] = int(above["of_all"].sum())
    between = store.columns(
        "SELECT segment, gap FROM near JOIN brackets USING (segment) WHERE gap BETWEEN low AND high"
        f" OR gap BETWEEN {_number(of_all.low)} AND {_number(of_all.high)}"
    )
    results = {}
    for each, (low, high) in brackets.items():
        gaps = between["gap"] if each == EVERYTHING else between["gap"][between["segment"] == each]
        gaps = gaps[(gaps >= low) & (gaps <= high)]
        place = max(1, math.ceil(P95 * counts[each] - 1e-9)) - 1 - (counts[each] - num_above.get(each, 0) - len(gaps))
        if 0 <= place < len(gaps):
            results[each] = float(np.partition(gaps, place)[place])
    return results


def _number(value: float) -> str:
    return f"'{value!r}'::DOUBLE"
