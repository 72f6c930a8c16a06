"""Plans without a scheduler: builds steps of sequences whose blocks are allocated once, in every KV group of a model.

The pool is divided into regions of equal size: one for each block of a column in each group. A sequence is given by its
blocks of the first region. Its other blocks are those at the same positions in the other regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from lockstep.core.groups import KVGroup
from lockstep.core.step import StepPlan
from lockstep.executors.base import Geometry, StepBatch

Tokens = npt.NDArray[np.int64]
Item = tuple[Sequence[int] | Tokens, int, tuple[int, ...]]
"""Tokens of a chunk, position of the first, and blocks of the sequence in the first region."""


@dataclass(frozen=True, slots=True)
class Regions:
    """Division of a pool."""

    groups: tuple[KVGroup, ...]
    block_size: int
    num_blocks: int
    """Number of blocks of a region. Those of the first one are 1..num_blocks."""

    @classmethod
    def of(cls, geometry: Geometry, pool_blocks: int) -> Regions:
        """The regions of a pool of blocks 1..pool_blocks. Blocks that are left over are not used."""
        return cls(geometry.groups, geometry.block_size, pool_blocks // num_regions(geometry))

    def blocks_of(self, table: Sequence[int]) -> tuple[int, ...]:
        """All blocks of a sequence. Of a state there is one, at the sequence's first block."""
        found = [*table]
        for group, first in zip(self.groups[1:], self._first_regions(), strict=True):
            columns = table[:1] if group.is_state else table
            found += [block for column in columns for block in self._column(column, group, first)]
        return tuple(found)

    def other_tables(self, table: Sequence[int], start: int, end: int) -> tuple[tuple[int, ...], ...]:
        """Tables of a chunk of positions ``start`` to ``end - 1`` for the groups after the first one, as in
        `StepPlan.other_tables`. States are updated in place."""
        num_columns = -(-end // self.block_size)
        tables: list[tuple[int, ...]] = []
        for group, first in zip(self.groups[1:], self._first_regions(), strict=True):
            if group.is_state:
                tables.append(self._column(table[0], group, first))
                continue
            begin = group.first_column(start, self.block_size)
            columns = (self._column(column, group, first) for column in table[begin:num_columns])
            tables.append((begin, *chain.from_iterable(columns)))
        return tuple(tables)

    def _first_regions(self) -> list[int]:
        """The first region of each group after the first one."""
        return list(accumulate(group.num_parts for group in self.groups[:-1]))

    def _column(self, block: int, group: KVGroup, first_region: int) -> tuple[int, ...]:
        return tuple(block + (first_region + part) * self.num_blocks for part in range(group.num_parts))


def num_regions(geometry: Geometry) -> int:
    """Number of regions, each for one block of a column."""
    return sum(group.num_parts for group in geometry.groups)


def step_of(
    items: Sequence[Item],
    regions: Regions,
    unsampled: set[int] | dict[int, int] | None = None,
    all_rows: bool = False,
    *,
    swap_out: tuple[tuple[int, int], ...] = (),
    swap_in: tuple[tuple[int, int], ...] = (),
    copies: tuple[tuple[int, int], ...] = (),
) -> StepBatch:
    """Build a step of chunks. It samples the last row of all but ``unsampled``."""
    lengths = tuple(len(tokens) for tokens, _, _ in items)
    samples = tuple(index not in (unsampled or {}) for index in range(len(items)))
    has_others = len(regions.groups) > 1
    plan = StepPlan(
        step=0,
        evicted=(),
        swap_out=swap_out,
        swap_in=swap_in,
        copies=copies,
        seq_ids=tuple(range(len(items))),
        starts=tuple(start for _, start, _ in items),
        lengths=lengths,
        tables=tuple(table for _, _, table in items),
        samples=samples,
        other_tables=tuple(
            regions.other_tables(table, start, start + len(tokens)) for tokens, start, table in items if has_others
        ),
    )
    token_ids = np.fromiter(chain.from_iterable(tokens for tokens, _, _ in items), np.int64, sum(lengths))
    ends = np.cumsum(np.array(lengths, np.int64)) - 1
    rows = np.arange(len(token_ids)) if all_rows else ends[np.array(samples, bool)]
    return StepBatch(plan, token_ids, rows.astype(np.int64))
