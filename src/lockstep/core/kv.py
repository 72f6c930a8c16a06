"""KV blocks of sequences: assigns blocks on the device and on the host, and plans the moves that a step needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from lockstep.core.blocks import BlockPool, HostPool
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

    def fail(self) -> None:
        """Drop all moves of a step that did not complete, since it is unknown which were made."""
        for seq in self._moved_out.values():
            self._keep(seq, len(seq.table), 0)
        for seq, trusted in self._moved_in.values():
            self._keep(seq, trusted, 0)
        self.settle()

    # -- holding blocks ---------------------------------------------------------------------------------------------

    def hits(self, seq: Sequence) -> tuple[int, ...]:
        """Cached blocks that continue the sequence's blocks, leaving at least one token to compute."""
        request = seq.request
        held = len(seq.table) + len(seq.host_table)
        if not request.reads_cache or not request.block_hashes or seq.num_computed != held * self._block_size:
            return ()
        return self.prefix.match(request.block_hashes, held, self._config.usable_blocks(seq.num_prefill))

    def num_needed(self, seq: Sequence, hits: Seq[int], num_positions: int) -> int:
        """Number of available blocks that ``hold`` would use."""
        idle = sum([self.pool.refs(block) == 0 for block in hits]) if hits else 0
        return self._config.blocks_for(num_positions) - len(seq.table) - len(hits) + idle

    def hold(self, seq: Sequence, hits: tuple[int, ...], num_positions: int) -> bool:
        """Give the sequence blocks for ``num_positions``: its own, those that come back from the host, the hits, and
        new ones. False, with nothing changed: there are too few."""
        if self.num_needed(seq, hits, num_positions) > self.pool.num_available:
            return False
        self.pool.take(hits)
        allocation = self.pool.allocate(self._config.blocks_for(num_positions) - len(seq.table) - len(hits))
        assert allocation is not None
        if allocation.evicted:
            self.prefix.forget(*allocation.evicted)
            self._evicted.extend(allocation.evicted)
        num_back = len(seq.host_table)
        back, fresh = allocation.blocks[:num_back], allocation.blocks[num_back:]
        if back:
            self._moved_in[seq.seq_id] = (seq, len(seq.table))
            self._swap_in.extend(zip(seq.host_table, back, strict=True))
            self.host.release_after_plan(seq.host_table)
            seq.host_table = ()
        seq.table = seq.table + back + hits + fresh
        seq.num_computed += len(hits) * self._block_size
        return True

    def release(self, seq: Sequence) -> None:
        """Release the blocks of a sequence that ended. They become free, or cached if they were published."""
        self.pool.release(seq.table, self.prefix.hashes, self.prefix.pinned)
        self._drop_host(seq.host_table)
        self._moved_in.pop(seq.seq_id, None)
        self._moved_out.pop(seq.seq_id, None)
        seq.table = seq.host_table = ()

    # -- taking blocks away -----------------------------------------------------------------------------------------

    def take_tail(self, seq: Sequence, count: int) -> None:
        """Take the last ``count`` device blocks from a victim, and those that are still empty.

        Their content moves to the host, in front of what is already there. If the host has no room, the end of the
        sequence is dropped. Shared blocks stay where they are, so nothing after them is kept.
        """
        keep = len(seq.table) - count
        on_device = seq.table[keep : self._config.blocks_for(seq.num_computed)]
        if any(self.pool.refs(block) > 1 for block in seq.table[keep:]):
            self._keep(seq, keep, 0)
        else:
            room = self.host.num_free + len(seq.host_table)
            self._keep(seq, keep, min(room, len(on_device) + len(seq.host_table)))

    def drop_unwritten(self, seq: Sequence) -> None:
        """Release the blocks that are still empty."""
        self._keep(seq, len(seq.table), 0)

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

    def pin(self, hashes: Seq[bytes]) -> None:
        """Evict this content last."""
        self.pool.pin_cached(self._idle(self.prefix.pin(hashes)))

    def sweep(self, hashes: Seq[bytes]) -> tuple[int, ...]:
        """Undo a pin. Frees the blocks that only it kept, deepest first, so that the first block is handed out last."""
        idle = self._idle(self.prefix.unpin(hashes))[::-1]
        self.prefix.forget(*idle)
        self.pool.free_cached(idle)
        return tuple(idle)

    def fill(self, hashes: Seq[bytes], start: int) -> tuple[tuple[int, int], ...]:
        """Publish blocks for those of the contents ``hashes[start:]`` of a chain that are in no block. The chain's own
        blocks are not evicted for that. If there are too few blocks, the first contents get them.

        Returns:
            (index in ``hashes``, block) of each. The caller must write the content there before the next step.
        """
        found = [self.prefix.find(block_hash) for block_hash in hashes]
        own = [block for block in found if block is not None]
        self.pool.take(own)
        missing = [place for place in range(start, len(found)) if found[place] is None][: self.pool.num_available]
        allocation = self.pool.allocate(len(missing))
        assert allocation is not None, "only available blocks are requested"
        self.prefix.forget(*allocation.evicted)
        self._evicted.extend(allocation.evicted)
        self.prefix.publish(allocation.blocks, [hashes[place] for place in missing])
        given = dict(zip(missing, allocation.blocks, strict=True))
        chain = [given.get(place, block) for place, block in enumerate(found)]
        self.pool.release([block for block in chain if block is not None], self.prefix.hashes, self.prefix.pinned)
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
            tuple([(block, contents.setdefault(key, len(contents))) for block, key in self.prefix.blocks.items()]),
            tuple([(contents.setdefault(key, len(contents)), count) for key, count in self.prefix.pins.items()]),
            tuple(self._moved_out),
            tuple([(seq_id, trusted) for seq_id, (_, trusted) in self._moved_in.items()]),
        )

    def restore(self, state: KVState, contents: Seq[bytes], sequences: Mapping[int, Sequence]) -> None:
        """Restore a state.

        Args:
            contents: block hashes by index.
            sequences: the unfinished sequences by id, with their blocks.
        """
        held = [block for seq in sequences.values() for block in seq.table]
        self.pool.restore(state.free, state.cached, state.pinned, held)
        self.pool.num_allocated = state.num_allocated
        self.host.restore(state.free_on_host, state.leaving_host)
        published = [(block, contents[place]) for block, place in state.published]
        self.prefix.restore(published, [(contents[place], count) for place, count in state.pins])
        self._moved_out = {seq_id: sequences[seq_id] for seq_id in state.moved_out}
        self._moved_in = {seq_id: (sequences[seq_id], trusted) for seq_id, trusted in state.moved_in}

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert conservation on the device and on the host."""
        held: dict[int, int] = {}
        on_host: list[int] = []
        for seq in sequences:
            assert len(set(seq.table)) == len(seq.table), f"sequence {seq.seq_id} holds a block twice"
            capacity = (len(seq.table) + len(seq.host_table)) * self._block_size
            assert seq.num_computed <= capacity, f"sequence {seq.seq_id} has content without blocks"
            on_host.extend(seq.host_table)
            for block in seq.table:
                held[block] = held.get(block, 0) + 1
        self.pool.check(held)
        self.host.check(on_host)
        self.prefix.check()
        published = self.prefix.blocks
        for block in self.pool.free_order()[: self.pool.num_free]:
            assert block not in published, f"free block {block} is still published"


def choose_tails(tables: Seq[tuple[int, ...]], refs: Callable[[int], int], missing: int) -> list[int] | None:
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


def _shared_tails(tables: Seq[tuple[int, ...]], refs: Callable[[int], int], missing: int) -> list[int] | None:
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
