"""Further KV groups: blocks of sequences in all groups but the first one, which hold windows and states."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice

from lockstep.core.blocks import BlockPool
from lockstep.core.groups import (
    GroupBlocks,
    KVGroup,
    StateBlocks,
    WindowBlocks,
    content_key,
    contents_to_continue,
    no_blocks,
    snapshot_positions,
)
from lockstep.core.policy import SchedulerConfig
from lockstep.core.prefix import PrefixCache
from lockstep.core.sequence import Sequence


class OtherGroups:
    """Assigns blocks of the pool in the groups after the first one."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, prefix: PrefixCache) -> None:
        self._config = config
        self._block_size = config.block_size
        self._groups = config.groups
        self._pool = pool
        self._prefix = prefix
        self.nothing = no_blocks(config.groups)
        """Blocks of a sequence that has none."""
        intervals = [group.snapshot_interval for group in config.groups if group.is_state]
        self._interval = intervals[0] if intervals else 0
        self._keeps_answers = config.enable_prefix_caching

    def __bool__(self) -> bool:
        """True if there is any such group."""
        return bool(self.nothing)

    def _pairs(self, seq: Sequence) -> Iterator[tuple[int, KVGroup, GroupBlocks]]:
        """Number of each group, the group, and the sequence's blocks."""
        return zip(range(1, len(self._groups)), self._groups[1:], seq.others, strict=True)

    # -- hits ---------------------------------------------------------------------------------------------------------

    def hits(self, hashes: Seq[bytes], num_columns: int) -> tuple[GroupBlocks, ...] | None:
        """Cached blocks of all groups with which a sequence can continue after these columns; None: some are
        missing."""
        found: list[GroupBlocks] = []
        for number, needed in contents_to_continue(self._groups, num_columns, self._block_size):
            columns: list[tuple[int, ...]] = []
            for column in reversed(needed):
                blocks = self._prefix.find(content_key(hashes[column], number))
                if not blocks:
                    return None
                columns.append(blocks)
            if self._groups[number].is_state:
                found.append(StateBlocks(columns[0]))
                continue
            found.append(
                WindowBlocks(needed.start, tuple([block for each in reversed(columns) for block in each]), num_columns)
            )
        return tuple(reversed(found))

    def stops(self, seq: Sequence, num_computed: int, num_matched: int) -> tuple[int, ...]:
        """Positions at which the sequence's state is to be published."""
        config = self._config
        if not (self._interval and seq.request.block_hashes and config.chunking):
            return ()
        assert not any(each % self._block_size for each in seq.request.snapshots), "a snapshot inside of a block"
        limit = min(seq.num_prompt, len(seq.request.block_hashes) * self._block_size + 1)
        return snapshot_positions(seq.request.snapshots, self._interval, num_matched, num_computed, limit)

    # -- blocks of a row ----------------------------------------------------------------------------------------------

    def num_needed(self, seq: Sequence, end: int) -> int:
        """Number of new blocks with which the sequence can compute its positions up to ``end``."""
        return sum([self._num_new(group, own, end) for _, group, own in self._pairs(seq)])

    def hold(self, seq: Sequence, end: int, fresh: Iterator[int]) -> None:
        """Give the sequence the blocks that `num_needed` has counted."""
        held: list[GroupBlocks] = []
        for _, group, own in self._pairs(seq):
            blocks = tuple(islice(fresh, self._num_new(group, own, end)))
            if isinstance(own, WindowBlocks):
                held.append(own._replace(blocks=own.blocks + blocks))
            elif not blocks:
                held.append(own)
            else:
                held.append(own._replace(target=blocks) if own.current else own._replace(current=blocks))
        seq.others = tuple(held)

    def _num_new(self, group: KVGroup, own: GroupBlocks, end: int) -> int:
        if isinstance(own, WindowBlocks):
            num_held = len(own.blocks) // group.num_parts
            return max(0, self._config.blocks_for(end) - own.first - num_held) * group.num_parts
        if own.current and (own.target or not self._must_stay(own)):
            return 0
        return group.num_parts

    def _must_stay(self, own: StateBlocks) -> bool:
        """True if the current state may not be overwritten."""
        first = own.current[0]
        is_shared = self._pool.refs(first) > 1  # a snapshot, even if the cache was reset since
        return is_shared or own.kept == own.current or self._prefix.hashes[first] is not None

    @staticmethod
    def tables(seq: Sequence) -> tuple[tuple[int, ...], ...]:
        """The tables of the sequence's row (`StepPlan.other_tables`), the same object until its blocks change."""
        if seq.listed_others is not seq.others:
            tables = [
                (own.first, *own.blocks) if isinstance(own, WindowBlocks) else own.current + own.target
                for own in seq.others
            ]
            seq.listed_others, seq.other_tables = seq.others, tuple(tables)
        return seq.other_tables

    # -- after a row --------------------------------------------------------------------------------------------------

    def commit(self, seq: Sequence, length: int) -> None:
        """Publish what the sequence has computed, and release what its next row does not need. A row inside a block
        changes nothing.

        Args:
            length: number of tokens of the row.
        """
        start = (seq.num_computed - length) % self._block_size
        if start and start + length < self._block_size:
            return
        seq.others = tuple(
            [
                self._commit_window(seq, number, group, own)
                if isinstance(own, WindowBlocks)
                else self._commit_state(seq, number, own)
                for number, group, own in self._pairs(seq)
            ]
        )

    def _commit_window(self, seq: Sequence, number: int, group: KVGroup, own: WindowBlocks) -> WindowBlocks:
        own = self._publish_columns(seq, number, group, own)
        border = seq.num_computed - seq.num_computed % self._block_size
        num_behind = (group.first_column(border, self._block_size) - own.first) * group.num_parts
        if num_behind <= 0:
            return own
        self._release(own.blocks[:num_behind])
        return own._replace(first=own.first + num_behind // group.num_parts, blocks=own.blocks[num_behind:])

    def _publish_columns(self, seq: Sequence, number: int, group: KVGroup, own: WindowBlocks) -> WindowBlocks:
        """Publish the full columns with hashes, as far as they are computed."""
        hashes, parts = seq.request.block_hashes, group.num_parts
        end = min(seq.num_computed // self._block_size, len(hashes))
        for column in range(max(own.first, own.num_published), end):
            at = (column - own.first) * parts
            self._prefix.publish_column(own.blocks[at : at + parts], content_key(hashes[column], number))
        return own._replace(num_published=max(own.num_published, end))

    def _commit_state(self, seq: Sequence, number: int, own: StateBlocks) -> StateBlocks:
        if own.target:
            if own.kept != own.current:
                self._release(own.current)
            own = own._replace(current=own.target, target=())
        position, hashes = seq.num_computed, seq.request.block_hashes
        column = position // self._block_size
        if position % self._block_size:
            return own
        if position in seq.stops:
            self._prefix.publish_column(own.current, content_key(hashes[column - 1], number))
        elif position >= seq.num_prompt and self._keeps_answers and len(hashes) >= seq.num_prompt // self._block_size:
            if own.kept:
                self._release(own.kept)
            own = own._replace(kept=own.current, kept_position=position)
        return own

    def publish_end(self, seq: Sequence) -> None:
        """Publish what the sequence has at its end, as far as the hashes of its answer are known."""
        others: list[GroupBlocks] = []
        for number, group, own in self._pairs(seq):
            if isinstance(own, WindowBlocks):
                others.append(self._publish_columns(seq, number, group, own))
                continue
            column, hashes = own.kept_position // self._block_size, seq.request.block_hashes
            if own.kept and column <= len(hashes):
                self._prefix.publish_column(own.kept, content_key(hashes[column - 1], number))
            others.append(own)
        seq.others = tuple(others)

    def drop_drafts(self, seq: Sequence, num_accepted: int) -> None:
        """Release the blocks of a row after the computed positions, and those that rows of one token each would have
        released on their way, so that the same columns can be published at the end."""
        num_columns = self._config.blocks_for(seq.num_computed)
        border = (seq.num_computed - 1) // self._block_size * self._block_size if num_accepted else 0
        others: list[GroupBlocks] = []
        for _, group, own in self._pairs(seq):
            assert isinstance(own, WindowBlocks), "a model with states has no drafts"
            end = (num_columns - own.first) * group.num_parts
            first = max(own.first, group.first_column(border, self._block_size))
            begin = (first - own.first) * group.num_parts
            self._release(own.blocks[:begin] + own.blocks[end:])
            others.append(own._replace(first=first, blocks=own.blocks[begin:end]))
        seq.others = tuple(others)

    # -- giving blocks up ---------------------------------------------------------------------------------------------

    def release(self, seq: Sequence) -> None:
        """Release all blocks of a sequence."""
        for own in seq.others:
            self._release(own.held)
        seq.others = self.nothing

    def computed(self, seq: Sequence) -> tuple[GroupBlocks, ...]:
        """The sequence's blocks without those that only a row would write, as if nothing were published."""
        num_columns = self._config.blocks_for(seq.num_computed)
        return tuple(
            [
                own._replace(blocks=own.blocks[: (num_columns - own.first) * group.num_parts], num_published=0)
                if isinstance(own, WindowBlocks)
                else own._replace(target=())
                for _, group, own in self._pairs(seq)
            ]
        )

    def touch(self, seq: Sequence, position: int) -> None:
        """Let contents with which a sequence can continue after this position be evicted after those that are released
        already."""
        hashes, column = seq.request.block_hashes, position // self._block_size
        if 0 < column <= len(hashes) and (found := self.hits(hashes, column)) is not None:
            for own in found:
                self._pool.touch(own.held)

    def _release(self, blocks: Seq[int]) -> None:
        self._pool.release(blocks, self._prefix.hashes, self._prefix.pinned)
