"""Which blocks a step takes from whom when it lacks some. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def choose_tails(tables: Sequence[tuple[int, ...]], refs: Callable[[int], int], missing: int) -> list[int] | None:
    """How many blocks to take from the tail of each table so that ``missing`` become free.

    Blocks that only their owner holds go first; taking a shared one frees nothing until its last holder lets go, so
    those are taken only when there is no other way.

    Args:
        tables: the candidates' device blocks, first victim first.
        refs: how many sequences hold a block.

    Returns:
        One count per table, or None when all of them together do not suffice.
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
