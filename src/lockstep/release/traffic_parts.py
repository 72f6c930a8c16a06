"""Parts of the traffic: the one that a signal comes from, where one part explains it.

Traffic is cut by segment, and by the version, replica and route that the candidate's answers name. A part explains a
signal only if little of it is left without that part, and if chance does not scatter it so.
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
"""Fields of the candidate's answers that cut traffic, beside segments."""
MAX_PARTS = 100
"""A cut into as many parts or more is by request, not by place; names are counted so far."""
MIN_PAIRS = 10
"""Pairs that a part and the rest need each, for one to explain numbers."""
MAX_LOOKS = 10
"""Parts, those that rank highest, whose percentiles are looked at."""
CONCENTRATION = 0.95
"""Part of all events that a part of the traffic has to hold."""
MAX_LEFT = 0.25
"""Part of a regression that may be left without the place that explains it."""
MIN_EVIDENCE = math.log(1000.0)
"""How much rarer by chance a concentration of events has to be than parts are many."""
MIN_Z = 3.5
"""Of the rank sum of a place's pairs among all: standard deviations from chance."""


class Cut(NamedTuple):
    """One way of cutting traffic into parts."""

    names: tuple[str, ...]
    part: NDArray[np.int32]
    """Of each pair, a place in ``names``; -1: of none."""


class TrafficPart(NamedTuple):
    """Pairs of one part, or all."""

    name: str
    mask: Bools


def cuts_of(evidence: Evidence) -> tuple[Cut, ...]:
    """All ways of cutting the traffic that give more than one part."""
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
    """The smallest part that holds nearly all of the affected pairs; all if none does, or chance may have done it.

    Args:
        population: pairs that could have been affected.
        affected: those of them that are.
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
    """The smallest part without which little of a regression of the 95th percentile is left; all if there is none.

    Args:
        usable: pairs that have both numbers.
        baseline: a number per pair.
        candidate: likewise.
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
    """Parts whose pairs got slower than others', beyond chance, by rank; the most certain ones first."""
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
    """The smallest place, by all names that its pairs have."""
    if not found:
        return TrafficPart(ALL, np.ones(num_pairs, np.bool_))
    _, _, mask = min(found, key=lambda each: each[:2])
    names = [name for _, name, other in found if np.array_equal(mask, other)]
    return TrafficPart(", ".join(names), mask)


def _sizes(cut: Cut, mask: Bools) -> NDArray[np.intp]:
    """Pairs of each part."""
    return np.bincount(cut.part[mask & (cut.part >= 0)], minlength=len(cut.names))


def _ways(total: int, chosen: int) -> float:
    """Logarithm of the number of ways to choose some of all."""
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


def _regression(baseline: Floats, candidate: Floats) -> tuple[float, float]:
    """By how much the percentile grew, and the logarithm of how many times: a place explains both."""
    before, after = p95(baseline), p95(candidate)
    return after - before, float(_log_ratio(np.array([before]), np.array([after]))[0])


def _log_ratio(baseline: Floats, candidate: Floats) -> Floats:
    least = 1e-9
    result: Floats = np.log(np.maximum(candidate, least) / np.maximum(baseline, least))
    return result


def _ranks(values: Floats) -> Floats:
    """Ranks from 1, equal values sharing their mean."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = (last - (counts - 1) / 2)[places]
    return ranks
