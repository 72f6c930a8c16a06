"""KV blocks of sequences: assigns blocks on the device and on the host, and plans the moves that a step needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from typing import NamedTuple

from lockstep.core.blocks import BlockPool, HostPool
from lockstep.core.groups import ContentKey, GroupBlocks, WindowBlocks, content_key, contents_of_chain
from lockstep.core.other_groups import OtherGroups
from lockstep.core.policy import SchedulerConfig
from lockstep.core.prefix import PrefixCache
from lockstep.core.sequence import Sequence
from lockstep.core.state import KVState


class Moves(NamedTuple):
    """Moves of blocks that the executor makes before the forward pass; see StepPlan."""

    evicted: tuple[int, ...]
    swap_out: tuple[tuple[int, int], ...]
    swap_in: tuple[tuple[int, int], ...]


_NO_MOVES = Moves((), (), ())


class Hits(NamedTuple):
    """Cached blocks with which a sequence can continue."""

    blocks: tuple[int, ...] = ()
    """Blocks of the first KV group."""
    others: tuple[GroupBlocks, ...] = ()
    """Blocks of the other groups; empty: none."""
    num_matched: int = 0
    """Number of blocks of the first group that are cached, at least as many as `blocks`."""


NO_HITS = Hits()


class KVCache:
    """The block pools and the prefix cache, from the view of sequences.

    No sequence writes to a block that another may read: only full blocks are shared, and a sequence computes only
    positions after those that it took.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.host = HostPool(config.num_host_blocks if config.preemption == "swap" else 0)
        self.prefix = PrefixCache(config.num_blocks)
        self.others = OtherGroups(config, self.pool, self.prefix)
        self._evicted: list[int] = []
        self._swap_out: dict[int, int] = {}
        """Host block to the device block that this step saves there."""
        self._swap_in: list[tuple[int, int]] = []
        self._moved_out: dict[int, Sequence] = {}
        self._moved_in: dict[int, tuple[Sequence, int]] = {}
        """Sequences that this step moves. `_moved_in` also has the number of blocks that each had on the device
        before."""

    def take_moves(self) -> Moves:
        """Take the moves planned so far for the current step."""
        if not (self._evicted or self._swap_out or self._swap_in):
            return _NO_MOVES
        moves = Moves(tuple(self._evicted), tuple((d, h) for h, d in self._swap_out.items()), tuple(self._swap_in))
        self._evicted.clear()
        self._swap_out.clear()
        self._swap_in.clear()
        return moves

    def settle(self) -> None:
        """Mark the moves of a completed step as done."""
        self.host.settle()
        self._moved_in.clear()
        self._moved_out.clear()

    @property
    def resumed(self) -> list[Sequence]:
        """Sequences whose blocks the current step moves back from the host."""
        return [seq for seq, _ in self._moved_in.values()]

    def fail(self, stopped: Iterable[Sequence]) -> None:
        """Drop all moves of a step that did not complete, since it is unknown which were made, and the blocks that its
        sequences did not write. With several KV groups, these lose everything, as states may have changed."""
        if self.others:
            for seq in {each.seq_id: each for each in (*stopped, *self._moved_out.values())}.values():
                self._give_up(seq, to_host=False)
            self.settle()
            return
        for seq in self._moved_out.values():
            self._keep(seq, len(seq.table), 0)
        for seq, trusted in self._moved_in.values():
            self._keep(seq, trusted, 0)
        self.settle()
        for seq in stopped:
            self._keep(seq, len(seq.table), 0)

    # -- holding blocks ---------------------------------------------------------------------------------------------

    def hits(self, seq: Sequence) -> Hits:
        """Cached blocks that continue the sequence's blocks, leaving at least one token to compute."""
        request = seq.request
        held = len(seq.table) + len(seq.host_table)
        if not request.reads_cache or not request.block_hashes or seq.num_computed != held * self._block_size:
            return NO_HITS
        blocks = self.prefix.match(request.block_hashes, held, self._config.usable_blocks(seq.num_prefill))
        if not self.others:
            return Hits(blocks, (), len(blocks))
        if held:  # other groups continue at its last position only
            return NO_HITS
        for count in range(len(blocks), 0, -1):
            others = self.others.hits(request.block_hashes, count)
            if others is not None:
                return Hits(blocks[:count], others, len(blocks))
        return Hits((), (), len(blocks))

    def num_needed(self, seq: Sequence, hits: Hits, num_positions: int) -> int:
        """Number of available blocks that ``hold`` would use, and those that rows up to this position use at a time."""
        found = hits.blocks
        needed = self._config.blocks_for(num_positions) - len(seq.table) - len(found)
        if self.others:
            found += tuple([block for own in hits.others for block in own.held])
            num_held = sum([len(own.held) for own in seq.others]) + len(found) - len(hits.blocks)
            needed += self._config.other_blocks(num_positions) - num_held
        return needed + sum([self.pool.refs(block) == 0 for block in found]) if found else needed

    def hold(self, seq: Sequence, hits: Hits, num_positions: int) -> bool:
        """Give the sequence blocks of the first group for ``num_positions``: its own, those that come back from the
        host, the hits, and new ones; and in the other groups those that it has or that are hits. False, with nothing
        changed: there are too few."""
        if self.num_needed(seq, hits, num_positions) > self.pool.num_available:
            return False
        self.pool.take(hits.blocks)
        for own in hits.others:
            self.pool.take(own.held)
        num_others = sum([len(own.held) for own in seq.host_others]) if seq.host_table else 0
        num_main = self._config.blocks_for(num_positions) - len(seq.table) - len(hits.blocks)
        blocks = self._allocate(num_main + num_others)
        if seq.host_table:
            blocks = self._move_in(seq, blocks)
        elif hits.others:
            seq.others = hits.others
        seq.table = seq.table + hits.blocks + blocks
        seq.num_computed += len(hits.blocks) * self._block_size
        return True

    def _move_in(self, seq: Sequence, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Use the first of some blocks for what comes back from the host. Returns the rest."""
        self._moved_in[seq.seq_id] = (seq, len(seq.table))
        places = [seq.host_table, *[own.held for own in seq.host_others]]
        pairs = [host for each in places for host in each]
        count = len(pairs)
        self._swap_in.extend(zip(pairs, blocks, strict=False))
        self.host.release_after_plan(pairs)
        moved = dict(zip(pairs, blocks, strict=False))
        seq.table += tuple([moved[block] for block in seq.host_table])
        seq.others = tuple([_renamed(own, moved) for own in seq.host_others])
        seq.host_table, seq.host_others = (), self.others.nothing
        return blocks[count:]

    def _allocate(self, count: int) -> tuple[int, ...]:
        """Take new blocks. The caller has checked how many are available."""
        allocation = self.pool.allocate(count)
        assert allocation is not None
        if allocation.evicted:
            further = self.prefix.forget(*allocation.evicted)
            self.pool.free_cached(further)
            self._evicted.extend((*allocation.evicted, *further))
        return allocation.blocks

    def stops(self, seq: Sequence, hits: Hits) -> tuple[int, ...]:
        """Positions at which the prompt's chunks end, so that the state there can be published."""
        if not self.others:
            return ()
        size = self._block_size
        return self.others.stops(seq, seq.num_computed + len(hits.blocks) * size, hits.num_matched * size)

    def most_blocks(self, seq: Sequence) -> int:
        """Maximum number of blocks that a sequence holds at a time."""
        return self._config.blocks_for(seq.max_known) + self._config.other_blocks(seq.max_known)

    def num_for_row(self, seq: Sequence, end: int) -> int:
        """Number of new blocks with which a sequence can compute its positions up to ``end``."""
        missing = max(0, self._config.blocks_for(end) - len(seq.table))
        return missing + self.others.num_needed(seq, end) if self.others else missing

    def hold_row(self, seq: Sequence, end: int) -> None:
        """Give the sequence these blocks. The caller has checked how many are available."""
        count = self.num_for_row(seq, end)
        if count:
            blocks = iter(self._allocate(count))
            missing = max(0, self._config.blocks_for(end) - len(seq.table))
            seq.table += tuple(islice(blocks, missing))
            self.others.hold(seq, end, blocks)

    def hold_drafts(self, seq: Sequence, end: int, count: int) -> int:
        """Give a row that ends at ``end`` the blocks for up to ``count`` drafts after it. Only blocks without content
        are taken, so that drafts evict nothing. Returns the number of drafts that have blocks."""
        while count and self.num_for_row(seq, end + count) > self.pool.num_free:
            count -= 1
        if count:
            self.hold_row(seq, end + count)
        return count

    def drop_drafts(self, seq: Sequence, num_accepted: int) -> None:
        """Release the blocks of a row's drafts that were rejected, as if each accepted one had had its own row."""
        if self._config.admission == "optimistic":
            keep = self._config.blocks_for(seq.num_computed)
            self._release(seq.table[keep:])
            seq.table = seq.table[:keep]
        self.others.drop_drafts(seq, num_accepted)

    def release(self, seq: Sequence) -> None:
        """Release the blocks of a sequence that ended. They become free, or cached if they were published. Windows and
        snapshots are evicted just before the blocks of the positions that they have seen."""
        end = len(seq.table)
        if self.others:
            self.others.release(seq)
            for position in sorted({seq.num_cached_tokens, *seq.stops}, reverse=True):
                column = min(position // self._block_size, end)
                self._release(seq.table[column:end])
                self.others.touch(seq, position)
                end = column
        self._release(seq.table[:end])
        self._drop_host([*seq.host_table, *[block for own in seq.host_others for block in own.held]])
        self._moved_in.pop(seq.seq_id, None)
        self._moved_out.pop(seq.seq_id, None)
        seq.table = seq.host_table = ()
        seq.host_others = self.others.nothing

    def _release(self, blocks: Seq[int]) -> None:
        self.pool.release(blocks, self.prefix.hashes, self.prefix.pinned)

    # -- taking blocks away -----------------------------------------------------------------------------------------

    def take_tail(self, seq: Sequence, count: int) -> None:
        """Take the last ``count`` device blocks from a victim, and those that are still empty.

        Their content moves to the host, in front of what is already there. If the host has no room, the end of the
        sequence is dropped. Shared blocks stay where they are, so nothing after them is kept.
        """
        if self.others:
            self._give_up(seq, to_host=True)
            return
        keep = len(seq.table) - count
        on_device = seq.table[keep : self._config.blocks_for(seq.num_computed)]
        if any(self.pool.refs(block) > 1 for block in seq.table[keep:]):
            self._keep(seq, keep, 0)
        else:
            room = self.host.num_free + len(seq.host_table)
            self._keep(seq, keep, min(room, len(on_device) + len(seq.host_table)))

    def _give_up(self, seq: Sequence, *, to_host: bool) -> None:
        """Take all blocks from a sequence with several KV groups, as it could not continue from a part of them. Their
        content moves to the host if all of it fits."""
        table = seq.table[: self._config.blocks_for(seq.num_computed)]
        others = self.others.computed(seq)
        pairs = [*table, *[block for own in others for block in own.held]]
        self._drop_host([*seq.host_table, *[block for own in seq.host_others for block in own.held]])
        if to_host and seq.num_computed and len(pairs) <= self.host.num_free:
            saved = self.host.allocate(len(pairs))
            self._swap_out.update(zip(saved, pairs, strict=True))
            self._moved_out[seq.seq_id] = seq
            moved = dict(zip(pairs, saved, strict=True))
            seq.host_table = tuple([moved[block] for block in table])
            seq.host_others = tuple([_renamed(own, moved) for own in others])
        else:
            if self._config.chunking and seq.num_computed:
                seq.prefill_known()
            seq.host_table, seq.host_others = (), self.others.nothing
            seq.cut_to(0)
        self._release(seq.table)
        self.others.release(seq)
        seq.table, seq.num_published = (), 0

    def _keep(self, seq: Sequence, num_device: int, num_host: int) -> None:
        """Keep the sequence's first ``num_device`` blocks on the device and the ``num_host`` after them on the host,
        and drop the rest.

        The dropped part is computed again in chunks, answer and prompt alike. Without chunking it may exceed what a
        step computes, so the answer is then computed again segment by segment.
        """
        position = min(seq.num_computed, (num_device + num_host) * self._block_size)
        if position < seq.num_computed and self._config.chunking:
            seq.prefill_known()
        kept = self._config.blocks_for(position)
        num_device = min(num_device, kept)
        num_host = kept - num_device
        moving = seq.table[num_device:kept]
        staying = num_host - len(moving)
        self._drop_host(seq.host_table[staying:])
        saved = self.host.allocate(len(moving))
        self._swap_out.update(zip(saved, moving, strict=True))
        if saved:
            self._moved_out[seq.seq_id] = seq
        self.pool.release(seq.table[num_device:], self.prefix.hashes, self.prefix.pinned)
        seq.table = seq.table[:num_device]
        seq.host_table = (*saved, *seq.host_table[:staying])
        seq.num_published = min(seq.num_published, num_device)
        seq.cut_to(position)

    def _drop_host(self, blocks: Seq[int]) -> None:
        for block in blocks:
            self._swap_out.pop(block, None)
        self.host.release(blocks)

    # -- the prefix cache -------------------------------------------------------------------------------------------

    def publish(self, seq: Sequence, num_computed: int) -> None:
        """Make the sequence's full blocks with hashes available to hits, as far as they are computed and on the
        device."""
        hashes = seq.request.block_hashes
        full = min(num_computed // self._block_size, len(hashes), len(seq.table))
        known = seq.num_published
        if full > known:
            self.prefix.publish(seq.table[known:full], hashes[known:full])
            seq.num_published = full

    def publish_end(self, seq: Sequence) -> None:
        """Make all full blocks of a sequence that ends available to hits."""
        self.publish(seq, seq.num_computed)
        if seq.table:
            self.others.publish_end(seq)

    def _keys(self, hashes: Seq[bytes], borders: Seq[int]) -> list[ContentKey]:
        """Keys of the contents of these hashes, and of those with which a sequence can continue after each border."""
        found = contents_of_chain(self._config.groups, hashes, borders, self._block_size)
        return [content_key(block_hash, group) for block_hash, group in found]

    def pin(self, hashes: Seq[bytes], borders: Seq[int]) -> None:
        """Evict this content last."""
        self.pool.pin_cached(self._idle(self.prefix.pin(self._keys(hashes, borders))))

    def sweep(self, hashes: Seq[bytes], borders: Seq[int]) -> tuple[int, ...]:
        """Undo a pin. Frees the blocks that only it kept, deepest first, so that the first block is handed out last."""
        idle = self._idle(self.prefix.unpin(self._keys(hashes, borders)))[::-1]
        self.prefix.forget(*idle)
        self.pool.free_cached(idle)
        return tuple(idle)

    def fill(self, hashes: Seq[bytes], start: int, group: int = 0) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Publish blocks for those of the contents ``hashes[start:]`` of a chain that are in no block of the group. The
        chain's own blocks in this group and the first one are not evicted for that. If there are too few blocks, the
        first contents get them.

        Returns:
            (index in ``hashes``, blocks) of each. The caller must write the content there before the next step.
        """
        keys = [content_key(each, group) for each in hashes]
        found = [self.prefix.find(key) for key in keys]
        first = [block for each in hashes for block in self.prefix.find(each)] if group else []
        self.pool.take([*first, *[block for blocks in found for block in blocks]])
        parts = self._config.groups[group].num_parts
        missing = [place for place in range(start, len(found)) if not found[place]]
        missing = missing[: self.pool.num_available // parts]
        blocks = self._allocate(len(missing) * parts)
        given = {place: blocks[at * parts : (at + 1) * parts] for at, place in enumerate(missing)}
        for place, column in given.items():
            self.prefix.publish_column(column, keys[place])
        chain = [block for place, held in enumerate(found) for block in given.get(place, held)]
        self._release([*first, *chain])
        return tuple(given.items())

    def reset_prefix_cache(self) -> int:
        """Remove all cached content; blocks in use stay in use, unpublished. Returns the number of cached blocks."""
        blocks = list(self.prefix.blocks)
        self.prefix.clear()
        self.pool.free_cached(self._idle(blocks))
        return len(blocks)

    def _idle(self, blocks: Seq[int]) -> list[int]:
        return [block for block in blocks if self.pool.refs(block) == 0]

    # -- state ------------------------------------------------------------------------------------------------------

    def state(self, contents: dict[bytes, int]) -> KVState:
        """State of everything except the blocks held by sequences.

        Args:
            contents: index of each block hash; new hashes are added.
        """
        return KVState(
            *self.pool.orders(),
            self.pool.num_allocated,
            *self.host.orders(),
            tuple([(block, *_indexed(key, contents)) for block, key in self.prefix.blocks.items()]),
            tuple([(*_indexed(key, contents), count) for key, count in self.prefix.pins.items()]),
            tuple(self._moved_out),
            tuple([(seq_id, trusted) for seq_id, (_, trusted) in self._moved_in.items()]),
        )

    def restore(self, state: KVState, contents: Seq[bytes], sequences: Mapping[int, Sequence]) -> None:
        """Restore a state.

        Args:
            contents: block hashes by index.
            sequences: the unfinished sequences by id, with their blocks.
        """
        held = [block for seq in sequences.values() for block in self.held(seq)]
        self.pool.restore(state.free, state.cached, state.pinned, held)
        self.pool.num_allocated = state.num_allocated
        self.host.restore(state.free_on_host, state.leaving_host)
        published = [(block, content_key(contents[place], group)) for block, place, group in state.published]
        pins = [(content_key(contents[place], group), count) for place, group, count in state.pins]
        self.prefix.restore(published, pins)
        self._moved_out = {seq_id: sequences[seq_id] for seq_id in state.moved_out}
        self._moved_in = {seq_id: (sequences[seq_id], trusted) for seq_id, trusted in state.moved_in}

    @staticmethod
    def held(seq: Sequence) -> list[int]:
        """Device blocks of a sequence in all groups."""
        return [*seq.table, *[block for own in seq.others for block in own.held]]

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert conservation on the device and on the host."""
        held: dict[int, int] = {}
        on_host: list[int] = []
        for seq in sequences:
            blocks = self.held(seq)
            assert len(set(blocks)) == len(blocks), f"sequence {seq.seq_id} holds a block twice"
            num_others = len(blocks) - len(seq.table)
            assert num_others <= self._config.other_blocks(seq.max_known), f"sequence {seq.seq_id} has too many blocks"
            capacity = (len(seq.table) + len(seq.host_table)) * self._block_size
            assert seq.num_computed <= capacity, f"sequence {seq.seq_id} has content without blocks"
            on_host.extend([*seq.host_table, *[block for own in seq.host_others for block in own.held]])
            for block in blocks:
                held[block] = held.get(block, 0) + 1
        self.pool.check(held)
        self.host.check(on_host)
        self.prefix.check()
        published = self.prefix.hashes
        for block in self.pool.free_order()[: self.pool.num_free]:
            assert published[block] is None, f"free block {block} is still published"


def _renamed(own: GroupBlocks, names: Mapping[int, int]) -> GroupBlocks:
    """The same blocks in another memory."""
    if isinstance(own, WindowBlocks):
        return own._replace(blocks=tuple([names[block] for block in own.blocks]))
    current = tuple([names[block] for block in own.current])
    kept = current if own.kept == own.current else tuple([names[block] for block in own.kept])
    return own._replace(current=current, kept=kept)


def _indexed(key: ContentKey, contents: dict[bytes, int]) -> tuple[int, int]:
    """Index of a key's hash, and its KV group."""
    block_hash, group = (key, 0) if isinstance(key, bytes) else key
    return contents.setdefault(block_hash, len(contents)), group
