"""Parts of the traffic: finds the part that explains a signal, if there is one.

Traffic is divided by segment, and by the version, replica and route of the candidate's answers. A part explains a
signal only if the rest of the traffic hardly shows it, and if the concentration is not due to chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.release.evidence import Bools, Evidence, Floats, p95
from lockstep.release.verdict import ALL

FIELDS = ("model_version", "replica_id", "route_id")
"""Fields of the candidate's answers that divide the traffic, in addition to segments."""
MAX_PARTS = 100
"""Number of values from which a field is not used, since it distinguishes single requests. Matches the maximum number
of values that are read."""
MIN_PAIRS = 10
"""Minimum number of pairs in a part, and in the rest, so that the part can explain a regression."""
MAX_LOOKS = 10
"""Maximum number of parts, the highest ranked ones, whose percentiles are computed."""
CONCENTRATION = 0.95
"""Minimum fraction of all events in a part that explains them."""
MAX_LEFT = 0.25
"""Maximum fraction of a regression that may remain without the part that explains it."""
MIN_EVIDENCE = math.log(1000.0)
"""Minimum log-evidence against a chance concentration of events, in addition to the logarithm of the number of
parts."""
MIN_Z = 3.5
"""Minimum z-score of the rank sum of a part's pairs."""


class Cut(NamedTuple):
    """Division of the traffic into parts."""

    names: tuple[str, ...]
    part: NDArray[np.int32]
    """Index in ``names`` of each pair's part; -1: none."""


class TrafficPart(NamedTuple):
    """Pairs of one part of the traffic, or all pairs."""

    name: str
    mask: Bools


def cuts_of(evidence: Evidence) -> tuple[Cut, ...]:
    """All divisions of the traffic that have more than one part."""
    pairs = evidence.pairs
    cuts = [Cut(tuple(segment.name for segment in pairs.segments), pairs.segment)]
    for field in FIELDS:
        values = evidence.names[field][1]
        if 1 < len(values) < MAX_PARTS:
            listed = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
            found = evidence.store.columns(
                f"SELECT coalesce(list_position([{listed}], c.{field}), 0)::INTEGER - 1 AS part FROM ordered o"
                " JOIN facts_candidate f ON o.c = f.row JOIN labels_candidate c ON f.label = c.label ORDER BY place"
            )
            cuts.append(Cut(tuple(f"{field} {value}" for value in values), np.asarray(found["part"], np.int32)))
    return tuple(cut for cut in cuts if len(cut.names) > 1)


def part_of_events(cuts: Sequence[Cut], population: Bools, affected: Bools) -> TrafficPart:
    """Smallest part that contains nearly all affected pairs; all pairs if there is none or it may be due to chance.

    Args:
        population: mask of the pairs that could be affected.
        affected: mask of the affected pairs.
    """
    total, num_affected = int(population.sum()), int((population & affected).sum())
    num_parts = sum(len(cut.names) for cut in cuts)
    found: list[tuple[int, str, Bools]] = []
    for cut in cuts:
        sizes, counts = _sizes(cut, population), _sizes(cut, population & affected)
        for number in np.flatnonzero((counts > 0) & (counts >= CONCENTRATION * num_affected) & (sizes < total)):
            inside, size = int(counts[number]), int(sizes[number])
            if inside * math.log(total / size) - _ways(num_affected, inside) >= MIN_EVIDENCE + math.log(num_parts):
                found.append((size, cut.names[number], cut.part == number))
    return _smallest(found, len(population))


def part_of_regression(cuts: Sequence[Cut], usable: Bools, baseline: Floats, candidate: Floats) -> TrafficPart:
    """Smallest part without which little of a regression of the 95th percentile remains; all pairs if there is none.

    Args:
        usable: mask of the pairs with both values.
        baseline: value of the baseline per pair.
        candidate: value of the candidate per pair.
    """
    found: list[tuple[int, str, Bools]] = []
    for cut, number in _slowest(cuts, usable, baseline, candidate):
        is_there = cut.part == number
        mask, rest = usable & is_there, usable & ~is_there
        inside, left = _regression(baseline[mask], candidate[mask]), _regression(baseline[rest], candidate[rest])
        if min(inside) > 0 and all(over <= MAX_LEFT * of for over, of in zip(left, inside, strict=True)):
            found.append((int(mask.sum()), cut.names[number], is_there))
    return _smallest(found, len(usable))


def _slowest(cuts: Sequence[Cut], usable: Bools, baseline: Floats, candidate: Floats) -> Iterator[tuple[Cut, int]]:
    """Parts whose pairs slowed down more than others', by a rank test beyond chance; the most certain ones first."""
    total = int(usable.sum())
    ranks = np.zeros(len(usable))
    ranks[usable] = _ranks(_log_ratio(baseline[usable], candidate[usable]))
    found: list[tuple[float, int, int]] = []
    for at, cut in enumerate(cuts):
        sizes = _sizes(cut, usable)
        is_part = usable & (cut.part >= 0)
        sums = np.bincount(cut.part[is_part], weights=ranks[is_part], minlength=len(cut.names))
        for number in np.flatnonzero((sizes >= MIN_PAIRS) & (total - sizes >= MIN_PAIRS)):
            size = int(sizes[number])
            scatter = math.sqrt((total - size) * (total + 1) / (12 * size))
            z = (float(sums[number]) / size - (total + 1) / 2) / scatter
            if z >= MIN_Z:
                found.append((-z, at, int(number)))
    for _, at, part in sorted(found)[:MAX_LOOKS]:
        yield cuts[at], part


def _smallest(found: list[tuple[int, str, Bools]], num_pairs: int) -> TrafficPart:
    """Smallest part, with the names of all parts that have the same pairs."""
    if not found:
        return TrafficPart(ALL, np.ones(num_pairs, np.bool_))
    _, _, mask = min(found, key=lambda each: each[:2])
    names = [name for _, name, other in found if np.array_equal(mask, other)]
    return TrafficPart(", ".join(names), mask)


def _sizes(cut: Cut, mask: Bools) -> NDArray[np.intp]:
    """Number of pairs in each part."""
    return np.bincount(cut.part[mask & (cut.part >= 0)], minlength=len(cut.names))


def _ways(total: int, chosen: int) -> float:
    """Logarithm of the binomial coefficient."""
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


def _regression(baseline: Floats, candidate: Floats) -> tuple[float, float]:
    """Growth of the 95th percentile, as a difference and as the logarithm of a ratio."""
    before, after = p95(baseline), p95(candidate)
    return after - before, float(_log_ratio(np.array([before]), np.array([after]))[0])


def _log_ratio(baseline: Floats, candidate: Floats) -> Floats:
    least = 1e-9
    result: Floats = np.log(np.maximum(candidate, least) / np.maximum(baseline, least))
    return result


def _ranks(values: Floats) -> Floats:
    """Ranks from 1. Equal values have their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[places]
    return ranks
