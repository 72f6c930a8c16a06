"""Grids of settings, what is best in them, and what is cheapest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod

from lockstep.core.policy import SchedulerConfig
from lockstep.errors import UsageError
from lockstep.replay.configs import check_field, parse_value

MAX_CONFIGS = 1024
"""Combinations of one grid: at seconds for each, an hour."""

Settings = dict[str, str]
"""Field to value as text."""


def parse_grid(axes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """``["max_num_seqs=8,16,32"]`` as values by field, in the order given.

    Raises:
        UsageError: not ``field=value,value``, no field of a scheduler, a value that is not of its type, or a field or
            value given twice.
    """
    grid: dict[str, tuple[str, ...]] = {}
    for axis in axes:
        name, equals, text = (part.strip() for part in axis.partition("="))
        values = tuple(value.strip() for value in text.split(","))
        if not equals or not all(values):
            raise UsageError(f"--grid {axis!r} is no axis; write field=value,value, such as max_num_seqs=8,16,32")
        check_field(name, "no limit of a scheduler has that name")
        if name in grid:
            raise UsageError(f"--grid names {name} twice; give all its values at once")
        if len(set(values)) < len(values):
            raise UsageError(f"--grid {axis!r} has a value twice")
        for value in values:
            parse_value(name, value)
        grid[name] = values
    return grid


def combinations(grid: Mapping[str, Sequence[str]]) -> tuple[Settings, ...]:
    """Every combination; the last axis changes fastest.

    Raises:
        UsageError: none at all, or more than ``MAX_CONFIGS``.
    """
    count = prod(len(values) for values in grid.values())
    if not grid:
        raise UsageError("there is no grid to sweep; give one --grid field=value,value or more")
    if count > MAX_CONFIGS:
        raise UsageError(f"the grid has {count:,} combinations; at most {MAX_CONFIGS:,} are swept at once")
    return tuple(dict(zip(grid, values, strict=True)) for values in product(*grid.values()))


def pareto_front(points: Sequence[Sequence[float] | None]) -> tuple[bool, ...]:
    """Which points are not beaten: no other is at least as good in everything and better in something.

    Args:
        points: one value per objective, less is better; None: no candidate.
    """
    return tuple(
        point is not None and not any(other is not None and _beats(other, point) for other in points)
        for point in points
    )


def _beats(other: Sequence[float], point: Sequence[float]) -> bool:
    pairs = list(zip(other, point, strict=True))
    return all(x <= y for x, y in pairs) and any(x < y for x, y in pairs)


def price(config: SchedulerConfig) -> tuple[int, ...]:
    """What a config costs, for comparing: first KV memory in tokens, then host memory, then sequences at once, then
    tokens of a step."""
    return (
        config.num_blocks * config.block_size,
        config.num_host_blocks * config.block_size,
        config.max_num_seqs,
        config.max_num_batched_tokens,
    )
