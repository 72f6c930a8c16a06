"""Places: the part of the traffic that a signal comes from, where one part explains it.

Traffic is cut by segment, and by what the candidate says of the version, replica and route that answered. A part
explains a signal only if little of it is left without that part, and if chance does not scatter it so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.release.evidence import Bools, Evidence, Floats
from lockstep.release.statistics import nearest_rank

ALL = "all"
CUTS = ("model_version", "replica_id", "route_id")
"""Fields of the candidate's answers that cut traffic, beside segments."""
MAX_PARTS = 100
"""A cut into as many parts or more is by request, not by place; names are counted so far."""
MIN_PAIRS = 10
"""Pairs that a part and the rest need each, for one to explain numbers."""
CONCENTRATION = 0.95
"""Part of all events that a part of the traffic has to hold."""
MAX_LEFT = 0.25
"""Part of a regression that may be left without the place that explains it."""
MIN_EVIDENCE = math.log(1000.0)
"""How much rarer by chance a concentration of events has to be than parts are many."""
MIN_Z = 3.5
"""Of the rank sum of a place's pairs among all: standard deviations from chance."""


class Part(NamedTuple):
    """Pairs of one place."""

    name: str
    mask: Bools


def parts_of(evidence: Evidence) -> tuple[Part, ...]:
    """All places that traffic can be told apart by; those of the same pairs are one."""
    pairs = evidence.pairs
    parts = [Part(segment.name, pairs.segment == number) for number, segment in enumerate(pairs.segments)]
    for field in CUTS:
        values = evidence.names[field][1]
        if len(values) < MAX_PARTS:
            parts += [Part(f"{field} {value}", _answered_by(evidence, field, value)) for value in values]
    found: dict[bytes, Part] = {}
    for part in parts:
        if not 0 < part.mask.sum() < len(pairs):
            continue
        key = part.mask.tobytes()
        found[key] = Part(f"{found[key].name}, {part.name}", part.mask) if key in found else part
    return tuple(found.values())


def _answered_by(evidence: Evidence, field: str, value: str) -> Bools:
    quoted = value.replace("'", "''")
    rows = evidence.store.rows(
        f"SELECT place FROM ordered o JOIN facts_candidate c ON o.c = c.row WHERE c.{field} = '{quoted}'"
    )
    mask = np.zeros(len(evidence.pairs), np.bool_)
    mask[np.array([place for (place,) in rows], np.intp)] = True
    return mask


def place_of_events(parts: Sequence[Part], population: Bools, affected: Bools) -> str:
    """The smallest place that holds nearly all of the affected pairs; ``all`` if none does, or chance may have done it.

    Args:
        population: pairs that could have been affected.
        affected: those of them that are.
    """
    total, num_affected = int(population.sum()), int((population & affected).sum())
    found: list[tuple[int, str]] = []
    for part in parts:
        size = int((population & part.mask).sum())
        inside = int((population & part.mask & affected).sum())
        if not 0 < size < total or inside < CONCENTRATION * num_affected or not inside:
            continue
        ways = math.log(math.comb(num_affected, inside))
        if inside * math.log(total / size) - ways >= MIN_EVIDENCE + math.log(len(parts)):
            found.append((size, part.name))
    return min(found)[1] if found else ALL


def place_of_regression(parts: Sequence[Part], usable: Bools, baseline: Floats, candidate: Floats) -> str:
    """The smallest place without which little of a regression of the 95th percentile is left; ``all`` if there is none.

    Args:
        usable: pairs that have both numbers.
        baseline: a number per pair.
        candidate: likewise.
    """
    numbers = _ranks(_log_ratio(candidate[usable], baseline[usable]))
    found: list[tuple[int, str]] = []
    for part in parts:
        mask, rest = usable & part.mask, usable & ~part.mask
        size, others = int(mask.sum()), int(rest.sum())
        if size < MIN_PAIRS or others < MIN_PAIRS:
            continue
        inside, left = _regression(baseline[mask], candidate[mask]), _regression(baseline[rest], candidate[rest])
        if min(inside) <= 0 or any(over > MAX_LEFT * of for over, of in zip(left, inside, strict=True)):
            continue
        excess = float(numbers[part.mask[usable]].mean()) - (size + others + 1) / 2
        if excess >= MIN_Z * math.sqrt(others * (size + others + 1) / (12 * size)):
            found.append((size, part.name))
    return min(found)[1] if found else ALL


def _regression(baseline: Floats, candidate: Floats) -> tuple[float, float]:
    """By how much the percentile grew, and the logarithm of how many times: a place explains both."""
    before, after = nearest_rank(baseline, 0.95), nearest_rank(candidate, 0.95)
    return after - before, float(_log_ratio(np.array([after]), np.array([before]))[0])


def _log_ratio(candidate: Floats, baseline: Floats) -> Floats:
    least = 1e-9
    result: Floats = np.log(np.maximum(candidate, least) / np.maximum(baseline, least))
    return result


def _ranks(values: Floats) -> NDArray[np.float64]:
    """Ranks from 1, equal values sharing their mean."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[places]
