"""The fewest items that still show something: delta debugging. Knows neither requests nor schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Minimum(Generic[Item]):
    """What minimising found."""

    items: tuple[Item, ...]
    """In their old order; they show it."""
    is_minimal: bool
    """Whether it was seen that none of them can be left out alone; False: asking had to stop before."""
    num_probes: int


def minimise(
    items: Sequence[Item], shows: Callable[[tuple[Item, ...]], bool], may_ask: Callable[[], bool] = lambda: True
) -> Minimum[Item]:
    """Leave out what is not needed, in ever smaller pieces, until no single item can be left out.

    The algorithm is ddmin (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 2002)
    that asks for complements only: what we look for needs many items together as a rule (a full pool, a full batch), so
    that a small part alone shows it rarely.

    Args:
        items: all; they are taken to show it.
        shows: whether some of the items, in their order, still show it; always the same answer to the same items.
        may_ask: whether ``shows`` may be asked once more; without a bound it is asked, in the worst case, about as
            often as the square of the number of items.
    """
    kept = tuple(items)
    num_probes = 0
    size = max(1, len(kept) // 2)
    start = num_useless = 0
    while kept and num_useless * size < len(kept):
        if not may_ask():
            return Minimum(kept, False, num_probes)
        num_probes += 1
        rest = kept[:start] + kept[start + size :]
        if shows(rest):
            kept, num_useless = rest, 0
        else:
            start, num_useless = start + size, num_useless + 1
        if start >= len(kept):
            start = 0
        if num_useless * size >= len(kept) and size > 1:
            size, start, num_useless = max(1, min(size, len(kept)) // 2), 0, 0
    return Minimum(kept, True, num_probes)
