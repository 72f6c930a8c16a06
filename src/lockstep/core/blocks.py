"""Pool of KV blocks: tracks free and cached blocks, and the holders of each. Depends on no hashes and no sequences."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

NULL_BLOCK = 0
"""Number of the block that is never handed out, so that padding may be written to it."""


class Allocation(NamedTuple):
    """Blocks that were handed out, and those of them that were cached before."""

    blocks: tuple[int, ...]
    evicted: tuple[int, ...]


class BlockPool:
    """Device blocks 1..num_blocks with reference counts.

    A block is held (by one or several sequences), cached (held by none, but its content can still be hit) or free.
    Blocks are handed out in this order: free ones, last freed first; unused ones; cached ones, first released first;
    pinned cached ones, first released first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, NULL_BLOCK, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._pinned: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that are handed out last."""
        self._refs = [0] * (num_blocks + 1)
        self.num_allocated = 0
        self.num_released = 0
        """Number of blocks handed out, and number released by their last holder, since the start."""

    @property
    def num_free(self) -> int:
        """Number of blocks without a holder and without content that can be hit."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of blocks without a holder whose content can be hit."""
        return len(self._cached) + len(self._pinned)

    @property
    def num_available(self) -> int:
        """Number of blocks that can be handed out."""
        return len(self._free) + len(self._cached) + len(self._pinned)

    def refs(self, block: int) -> int:
        """Number of sequences that hold the block."""
        return self._refs[block]

    def free_order(self) -> tuple[int, ...]:
        """Every available block in the order in which it would be handed out."""
        return (*reversed(self._free), *self._cached, *self._pinned)

    def allocate(self, count: int) -> Allocation | None:
        """Hand out ``count`` blocks, each with one holder; None, with nothing changed: there are too few."""
        if count > self.num_available:
            return None
        free: tuple[int, ...] = ()
        if self._free:
            cut = max(0, len(self._free) - count)
            free = tuple(self._free[: cut - 1 if cut else None : -1])
            del self._free[cut:]
        evicted = _take_first(self._cached, count - len(free))
        if len(free) + len(evicted) < count:
            evicted += _take_first(self._pinned, count - len(free) - len(evicted))
        blocks = free + evicted
        refs = self._refs
        for block in blocks:
            refs[block] = 1
        self.num_allocated += count
        return Allocation(blocks, evicted)

    def take(self, blocks: Sequence[int]) -> None:
        """Add a holder to cached or held blocks."""
        for block in blocks:
            if self._refs[block] == 0:
                self._uncache(block)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int], hashes: Sequence[object], pinned: Container[int]) -> None:
        """Remove a holder from a sequence's blocks (first position first). The deepest block is released first.

        Args:
            hashes: by block, the key of content that can be hit. Such a block is cached when its last holder releases
                it.
            pinned: blocks that are handed out last.
        """
        refs, free, cached = self._refs, self._free, self._cached
        num_held = 0
        for block in reversed(blocks):
            left = refs[block] = refs[block] - 1
            if left:
                assert left > 0, f"block {block} is released but has no holder"
                num_held += 1
            elif hashes[block] is None:
                free.append(block)
            elif block in pinned:
                self._pinned[block] = None
            else:
                cached[block] = None
        self.num_released += len(blocks) - num_held

    def free_cached(self, blocks: Sequence[int]) -> None:
        """Free cached blocks whose content is no longer valid."""
        for block in blocks:
            self._uncache(block)
            self._free.append(block)

    def pin_cached(self, blocks: Sequence[int]) -> None:
        """Hand out these cached blocks last."""
        for block in blocks:
            self._uncache(block)
            self._pinned[block] = None

    def touch(self, blocks: Sequence[int]) -> None:
        """Hand out the cached ones of these blocks after all other cached ones."""
        for block in blocks:
            if block in self._cached:
                self._cached.move_to_end(block)

    def restore(self, free: Iterable[int], cached: Iterable[int], pinned: Iterable[int], held: Iterable[int]) -> None:
        """Restore the available blocks, in these orders, and the holders of blocks."""
        self._free = list(free)
        self._cached = OrderedDict.fromkeys(cached)
        self._pinned = OrderedDict.fromkeys(pinned)
        for block in held:
            self._refs[block] += 1

    def orders(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Free, cached and pinned blocks, in the form of `restore`."""
        return tuple(self._free), tuple(self._cached), tuple(self._pinned)

    def _uncache(self, block: int) -> None:
        del (self._pinned if block in self._pinned else self._cached)[block]

    def check(self, held: dict[int, int]) -> None:
        """Assert conservation: free + held + cached == total, and references add up.

        Args:
            held: block to number of sequences that have it in their table.
        """
        free, cached = set(self._free), {*self._cached, *self._pinned}
        assert len(free) == len(self._free), "a block is free twice"
        assert NULL_BLOCK not in free | cached | held.keys(), "the null block was handed out"
        assert not free & cached, "a block is both free and cached"
        assert not (free | cached) & held.keys(), "an available block is held"
        assert len(free) + len(held) + self.num_cached == self.num_blocks, "free + held + cached != total"
        assert {block: count for block, count in enumerate(self._refs) if count} == held, "references do not add up"


def _take_first(cached: OrderedDict[int, None], most: int) -> tuple[int, ...]:
    """Remove the blocks that were cached first, at most ``most``."""
    if most == 1 and cached:
        return (cached.popitem(last=False)[0],)
    blocks = tuple(islice(cached, most))
    for block in blocks:
        del cached[block]
    return blocks


class HostPool:
    """Host blocks 0..num_blocks-1, each held by one sequence.

    A block that a plan reads stays held until that plan is complete (``settle``). Within a plan, swapping out comes
    before swapping in, so reusing the block at once would overwrite content that is still to be read.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._leaving: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Hand out ``count`` blocks. The caller has checked ``num_free``."""
        assert count <= len(self._free), f"{count} host blocks wanted, {len(self._free)} free"
        return tuple(self._free.pop() for _ in range(count))

    def release(self, blocks: Sequence[int]) -> None:
        """Free blocks whose content is not needed."""
        self._free.extend(reversed(blocks))

    def release_after_plan(self, blocks: Sequence[int]) -> None:
        """Free blocks that the current plan reads, once it is complete."""
        self._leaving.extend(reversed(blocks))

    def restore(self, free: Iterable[int], leaving: Iterable[int]) -> None:
        """Restore the free blocks, and those that will be free."""
        self._free, self._leaving = list(free), list(leaving)

    def orders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Free and leaving blocks, in the form of `restore`."""
        return tuple(self._free), tuple(self._leaving)

    def settle(self) -> None:
        """Free the blocks that the completed plan has read."""
        if self._leaving:
            self._free.extend(self._leaving)
            self._leaving.clear()

    def check(self, held: list[int]) -> None:
        """Assert conservation: free + leaving + held == total, each block once."""
        blocks = [*self._free, *self._leaving, *held]
        assert sorted(blocks) == list(range(self.num_blocks)), "host blocks do not add up"
