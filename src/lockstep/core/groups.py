"""KV groups: layers whose memory a sequence keeps in the same way, and the blocks that a sequence has in each group.

All groups take blocks of one pool. The first group has a block for every `block_size` positions, from the first
position to the last. Layers with a window are in groups that release the blocks behind it. Recurrent layers are in a
group of states: a sequence has one state of a fixed number of blocks, whose content changes with every token.

Content that can be hit is identified by the chained hash of its positions (`lockstep.core.prefix`), for groups after
the first one together with the number of the group. A state's content is identified by the hash of the last block of
positions that it has seen. Such a published state is a snapshot: it never changes, and a sequence that continues from
it writes its next state to other blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

ContentKey = bytes | tuple[bytes, int]
"""Key of content in the prefix cache: a hash, for KV groups after the first one with the number of the group."""


class KVGroup(NamedTuple):
    """One group of layers."""

    num_parts: int = 1
    """Number of blocks of a column. A column holds `block_size` positions or, in a group of states, a whole state."""
    window: int = 0
    """Number of positions that a token sees, including its own; 0: all before it."""
    is_state: bool = False
    """True for states of recurrent layers."""
    snapshot_interval: int = 0
    """Of states: number of positions of a long prompt from one snapshot to the next, a multiple of `block_size`."""

    def first_column(self, position: int, block_size: int) -> int:
        """The first column that a token at this position sees."""
        return max(0, position + 1 - self.window) // block_size if self.window else 0


ONE_GROUP = (KVGroup(),)
"""The groups of a model without windows and states."""


class WindowBlocks(NamedTuple):
    """Blocks of a sequence in a group with a window."""

    first: int = 0
    """Number of the first column that it still has."""
    blocks: tuple[int, ...] = ()
    """Blocks of this column and of all after it."""
    num_published: int = 0
    """Columns before this one need no publishing: they are hits or published already."""

    @property
    def held(self) -> tuple[int, ...]:
        """All blocks that the sequence holds, each once."""
        return self.blocks


class StateBlocks(NamedTuple):
    """Blocks of a sequence in a group of states."""

    current: tuple[int, ...] = ()
    """The state after the computed positions; empty: nothing is computed."""
    target: tuple[int, ...] = ()
    """Destination of the state after the sequence's row in the current step; empty: `current` is updated in place."""
    kept: tuple[int, ...] = ()
    """The state at the last border of a block that the answer has passed; it may be `current`."""
    kept_position: int = 0

    @property
    def held(self) -> tuple[int, ...]:
        """All blocks that the sequence holds, each once."""
        return self.current + self.target + (() if self.kept == self.current else self.kept)


GroupBlocks = WindowBlocks | StateBlocks


def no_blocks(groups: Iterable[KVGroup]) -> tuple[GroupBlocks, ...]:
    """Blocks of a sequence that has none, in all groups after the first one."""
    return tuple([StateBlocks() if group.is_state else WindowBlocks() for group in groups][1:])


SavedBlocks = tuple[tuple[int | tuple[int, ...], ...], ...]


def saved_blocks(others: Sequence[GroupBlocks]) -> SavedBlocks:
    """Blocks as plain values."""
    return tuple([tuple(own) for own in others])


def restored_blocks(groups: Iterable[KVGroup], saved: SavedBlocks) -> tuple[GroupBlocks, ...]:
    """The blocks that `saved_blocks` has saved."""
    return tuple([type(own)._make(values) for own, values in zip(no_blocks(groups), saved, strict=True)])


def content_key(block_hash: bytes, group: int) -> ContentKey:
    """Key of a column's content in a group, counted from 0."""
    return (block_hash, group) if group else block_hash


def contents_to_continue(groups: Sequence[KVGroup], num_columns: int, block_size: int) -> Iterator[tuple[int, range]]:
    """Contents that a sequence needs, besides those of the first group, to continue after this many columns.

    Yields:
        By group, states first, its number and the indices of the columns; for a state that of the last column.
    """
    for number in range(len(groups) - 1, 0, -1):
        group = groups[number]
        first = num_columns - 1 if group.is_state else group.first_column(num_columns * block_size, block_size)
        yield number, range(first, num_columns)


def contents_of_chain(
    groups: Sequence[KVGroup], hashes: Sequence[bytes], borders: Sequence[int], block_size: int
) -> list[tuple[bytes, int]]:
    """Contents of a chain in the first group, and of the others those with which a sequence can continue after one of
    the borders (numbers of blocks), as pairs of hash and group, each once."""
    contents = [(each, 0) for each in hashes]
    for border in borders:
        for number, columns in contents_to_continue(groups, border, block_size):
            contents += [(hashes[at], number) for at in columns]
    return list(dict.fromkeys(contents))


def snapshot_positions(
    chosen: Sequence[int], interval: int, num_matched: int, num_computed: int, num_prompt: int
) -> tuple[int, ...]:
    """Positions of a prompt at which a chunk ends and its state is published, ascending.

    These are the chosen ones, the end of what another prompt has in common with this one, and every ``interval`` of a
    long prompt. The last kind is omitted shortly before another one.

    Args:
        chosen: borders of blocks that the request names.
        num_matched: number of positions whose KV is cached. If no state is cached there, this is the second prompt with
            this beginning, and more may follow.
        num_computed: number of positions whose KV and state the sequence has.
        num_prompt: number of positions of the prompt; nothing continues at its end.
    """
    wanted = [position for position in (*chosen, num_matched) if num_computed < position < num_prompt]
    regular = [position for position in range(interval, num_prompt, interval) if position > num_computed]
    wanted += [each for each in regular if not any(each < other <= each + interval // 2 for other in wanted)]
    return tuple(sorted({*wanted}))
