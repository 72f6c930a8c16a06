"""Victims: choose how many blocks to take from which sequences, so that enough become free. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def choose_whole(held: Sequence[Sequence[int]], refs: Callable[[int], int], missing: int) -> list[int] | None:
    """Choose sequences to take all blocks from, so that ``missing`` become free.

    Args:
        held: the candidates' device blocks in all KV groups, first victim first.
        refs: number of sequences that hold a block.

    Returns:
        By candidate, the number of blocks to take: all or none; None if all of them together do not suffice.
    """
    left = missing
    released: dict[int, int] = {}
    counts = []
    for blocks in held:
        counts.append(len(blocks) if left > 0 else 0)
        for block in blocks if left > 0 else ():
            released[block] = released.get(block, 0) + 1
            left -= released[block] == refs(block)
    return None if left > 0 else counts


def choose_tails(tables: Sequence[tuple[int, ...]], refs: Callable[[int], int], missing: int) -> list[int] | None:
    """Number of blocks to take from the tail of each table so that ``missing`` become free.

    Blocks with only one holder are taken first. Taking a shared block frees nothing until its last holder releases it,
    so those are taken only if there is no other way.

    Args:
        tables: the candidates' device blocks, first victim first.
        refs: number of sequences that hold a block.

    Returns:
        One count per table, or None if all of them together do not suffice.
    """
    left = missing
    counts = []
    for table in tables:
        count = 0
        while left and count < len(table) and refs(table[-1 - count]) == 1:
            count += 1
            left -= 1
        counts.append(count)
    return _shared_tails(tables, refs, missing) if left else counts


def _shared_tails(tables: Sequence[tuple[int, ...]], refs: Callable[[int], int], missing: int) -> list[int] | None:
    left = missing
    counts = []
    released: dict[int, int] = {}
    for table in tables:
        count = 0
        while left and count < len(table):
            block = table[-1 - count]
            count += 1
            released[block] = released.get(block, 0) + 1
            if released[block] == refs(block):
                left -= 1
        counts.append(count)
    return None if left else counts
