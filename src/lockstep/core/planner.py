"""Planner of one step: fills a step in six stages, each of which is a section of `StepPlanner`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from math import inf

from lockstep.core.decode_shares import DecodeShares
from lockstep.core.kv import KVCache
from lockstep.core.policy import SchedulerConfig, prefill_budget
from lockstep.core.queue import TenantLedger, WaitingQueue
from lockstep.core.sequence import RunningLists, Sequence, SequenceState
from lockstep.core.step import Explain, Limit, Reason
from lockstep.core.step_builder import Reached, StepBuilder
from lockstep.core.victims import choose_tails, choose_whole

Output = tuple[Sequence, int]
"""A sequence that samples or replays, and the length of its segment."""


class StepPlanner:
    """Fills a builder. It changes which sequences hold blocks and run, but never what is computed or known.

    Args:
        sequences: all unfinished sequences by id, to check the progress of the first of several siblings.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCache,
        queue: WaitingQueue,
        ledger: TenantLedger,
        running: RunningLists,
        sequences: Mapping[int, Sequence],
    ) -> None:
        self._config = config
        self._kv = kv
        self._queue = queue
        self._ledger = ledger
        self._running = running
        self.shares = DecodeShares(config)
        self._sequences = sequences
        self._reserves = config.admission == "reserve"
        self._order_is_fixed = config.order != "fair" and not config.priority_aging_steps
        self._nobody_fits_at: dict[bool, tuple[int, int, int] | None] = {False: None, True: None}
        """Supply at which all tried requests, bulk and others, lacked blocks and nothing else."""
        self._explain: Explain | None = None

    def plan(self, step: int, explain: Explain | None = None, proposed: Mapping[int, int] | None = None) -> StepBuilder:
        """Decide step number ``step``.

        Args:
            proposed: number of drafts of sequences by id.
            explain: called with each reason why a sequence is passed over or gets less than it could. It affects no
                decision.
        """
        running, self._explain = self._running, explain
        num_waiting = len(self._queue) + len(running.preempted) + len(running.prefilling)
        builder = StepBuilder(self._config, step, prefill_budget(self._config, num_waiting, len(running.decoding)))
        chosen, spare = self._choose_sampling(builder)
        self._grow(builder, chosen, spare)
        if spare:
            self.shares.charge(builder.seqs, spare[0], step)
        kept = builder.keep_back() if self._has_bulk() else 0
        self._advance_prompts(builder, is_bulk=False)
        self._resume(builder)
        self._admit(builder, is_bulk=False)
        if self._has_bulk():
            builder.give_back(kept)
            self._advance_prompts(builder, is_bulk=True)
            self._admit(builder, is_bulk=True)
        if builder.left_out and spare and self._kv.others:
            self._pass_on(builder, spare)
        if proposed:
            self._add_drafts(builder, proposed)
        return builder

    def _has_bulk(self) -> bool:
        return self._queue.num_bulk > 0 or any(seq.request.is_bulk for seq in self._running.prefilling)

    # -- 1: rows that sample or replay --------------------------------------------------------------------------------

    def _choose_sampling(self, builder: StepBuilder) -> tuple[list[Output], list[Sequence]]:
        """Reserve budgets for the sequences that sample or replay, in the order of their shares.

        Returns:
            Sequences that got budgets, by rank, and those that did not, in order. Prompts that end in this step are not
            in the first list; the builder holds their slots.
        """
        running = self._running
        decoding = running.decoding
        room = builder.chunk_room
        endings = [seq for seq in running.prefilling if seq.prompt_left <= room and seq.samples_next]
        slots = self._config.max_num_seqs - running.num_running
        prompt_waits = bool(running.prefilling) or (slots > 0 and len(self._queue) > 0)
        builder.num_kept_places = 1 if prompt_waits and builder.num_places > 1 else 0
        rows = len(decoding) + max(len(endings), builder.num_kept_places)
        lengths = [seq.forced.get(seq.num_computed, 1) for seq in decoding]
        if rows <= min(builder.num_width, builder.num_places) and sum(lengths) <= builder.num_tokens:
            builder.reserve_outputs(len(lengths), sum(lengths))
            for seq in endings:
                builder.reserve_ending(seq)
            return list(zip(decoding, lengths, strict=True)), []
        chosen: list[Output] = []
        spare: list[Sequence] = []
        for seq in self.shares.in_order(decoding + endings, builder.step):
            length = seq.segment_length(seq.num_computed)
            if not self._reserve(builder, seq, length):
                spare.append(seq)
                self._note_all([seq], builder.limits_on_output(length) if self._explain else ())
            elif seq.prompt_left <= 0:
                chosen.append((seq, length))
        chosen.sort(key=lambda output: output[0].rank)
        return chosen, spare

    def _reserve(self, builder: StepBuilder, seq: Sequence, length: int) -> bool:
        return builder.reserve_ending(seq) if seq.prompt_left > 0 else builder.reserve_output(length)

    # -- 2: growing, taking blocks from others if necessary -----------------------------------------------------------

    def _grow(self, builder: StepBuilder, chosen: list[Output], spare: list[Sequence]) -> None:
        """Write the rows of sequences that sample or replay, with blocks for what they compute. A sequence that gets no
        blocks waits, and its slot goes to the next one."""
        running, block_size = SequenceState.RUNNING, self._config.block_size
        for seq, length in chosen:
            inside = seq.num_computed % block_size
            if seq.state is not running:
                builder.return_output(length)
            elif (inside and inside + length <= block_size) or self._hold_by_force(builder, seq, length):
                builder.seqs.append(seq)
                builder.lengths.append(length)
            else:
                builder.return_output(length)
                builder.left_out.append(seq.seq_id)
        for seq in spare:
            length = seq.segment_length(seq.num_computed)
            if seq.state is SequenceState.RUNNING and self._reserve(builder, seq, length) and seq.prompt_left <= 0:
                self._grow(builder, [(seq, length)], [])

    def _hold_by_force(self, builder: StepBuilder, seq: Sequence, length: int) -> bool:
        """Give a running sequence the blocks of its row, taking them from victims if necessary. A row inside a block
        needs none."""
        end = seq.num_computed + length
        needed = self._kv.num_for_row(seq, end)
        if needed == 0:
            return True
        missing = needed - self._kv.pool.num_available
        if missing > 0:
            behind = [other for other in self._running.running_behind(seq.rank) if not builder.is_settled(other)]
            if not self._take_blocks(builder, [*self._running.preempted_holders(), *behind], missing):
                self._note_blocks(seq, needed)
                return False
        self._kv.hold_row(seq, end)
        return True

    def _take_blocks(self, builder: StepBuilder, victims: list[Sequence], missing: int) -> bool:
        """Take blocks from the victims' tails, first victim first; False, with nothing changed: they have too few."""
        if self._kv.others:
            counts = choose_whole([self._kv.held(victim) for victim in victims], self._kv.pool.refs, missing)
        else:
            counts = choose_tails([victim.table for victim in victims], self._kv.pool.refs, missing)
        if counts is None:
            return False
        for victim, count in zip(victims, counts, strict=True):
            if count:
                if victim.state is SequenceState.RUNNING:
                    builder.remove_row(victim)
                    builder.preempted.append(victim.seq_id)
                    self._running.preempt(victim)
                    victim.num_preemptions += 1
                builder.victims.add(victim.seq_id)
                self._kv.take_tail(victim, count)
        return True

    # -- 3: prompts ---------------------------------------------------------------------------------------------------

    def _advance_prompts(self, builder: StepBuilder, *, is_bulk: bool) -> None:
        """Add chunks of admitted prompts that are not complete: the bulk ones or all others. Waiting bulk requests of a
        higher priority are admitted before, as a few long prompts could take whole steps for a long time."""
        for seq in self._running.prefilling.copy():
            if seq.request.is_bulk != is_bulk or seq.seq_id in builder.resumed:
                continue
            if seq.state is not SequenceState.RUNNING:
                continue  # one before it took its blocks
            if is_bulk and self._config.order == "priority" and self._queue.num_bulk:
                self._admit(builder, is_bulk=True, before=seq.request.priority)
            builder.return_ending(seq)
            if self._add_prompt(builder, seq):
                self.shares.join(seq)
            elif not builder.lacks_only_a_turn(seq, seq.num_computed):
                builder.left_out.append(seq.seq_id)

    def _add_prompt(self, builder: StepBuilder, seq: Sequence) -> bool:
        if self._explain is not None:
            self._note_all([seq], builder.limits_on_prompt(seq, seq.num_computed))
        length = builder.chunk_length(seq, seq.num_computed)
        if length == 0 or not self._hold_by_force(builder, seq, length):
            return False
        builder.add_prompt(seq, length)
        return True

    def _pass_on(self, builder: StepBuilder, spare: list[Sequence]) -> None:
        """Give slots to sample to sequences that lacked one, since a prompt for which a slot was reserved may not have
        got the blocks of its chunk. A model with one KV group gives a prompt all blocks at admission."""
        late = [seq for seq in spare if seq.state is SequenceState.RUNNING and seq not in builder.seqs]
        for seq in late:
            length = seq.segment_length(seq.num_computed)
            if seq.prompt_left > 0:
                self._add_prompt(builder, seq)
            elif builder.reserve_output(length):
                self._grow(builder, [(seq, length)], [])
        outputs = [seq for seq in late if seq.prompt_left <= 0 and seq in builder.seqs]
        self.shares.charge(outputs, spare[0], builder.step)

    # -- 4: resuming --------------------------------------------------------------------------------------------------

    def _resume(self, builder: StepBuilder) -> None:
        """Resume preempted sequences while all their blocks and one more fit, strictly by rank."""
        running = self._running
        waiting = iter(running.preempted.copy())
        for seq in waiting:
            if not self._may_resume(builder, seq):
                if self._explain is not None:
                    self._note_all(waiting, [(Limit.PREEMPTED, 0, 0)], [seq.seq_id])
                return
            running.run(seq)
            self.shares.join(seq)
            builder.resumed.append(seq.seq_id)
            if seq.prompt_left > 0:
                self._add_prompt(builder, seq)
                continue
            length = seq.segment_length(seq.num_computed)
            self._note_all([seq], builder.limits_on_output(length) if self._explain else ())
            if builder.reserve_output(length):
                self._kv.hold_row(seq, seq.num_computed + length)  # it resumes only if these are available
                builder.seqs.append(seq)
                builder.lengths.append(length)

    def _may_resume(self, builder: StepBuilder, seq: Sequence) -> bool:
        """Give a preempted sequence its blocks; True: it runs again."""
        num_running, most = self._running.num_running, self._config.max_num_seqs
        if builder.left_out:
            self._note(seq, Limit.STALLED, others=builder.left_out)
        elif num_running >= most:
            self._note(seq, Limit.SEQS, num_running, most)
        elif seq.seq_id in builder.victims:
            self._note(seq, Limit.VICTIM)
        else:
            return self._bring_back(builder, seq)
        return False

    def _bring_back(self, builder: StepBuilder, seq: Sequence) -> bool:
        """Give a preempted sequence all its blocks, taking them from preempted ones of lower rank if necessary."""
        config, kv = self._config, self._kv
        positions = seq.max_known if self._reserves else seq.num_known
        most = config.blocks_for(config.kv_positions(seq.max_known))
        spare = min(1, most - config.blocks_for(positions))
        while True:
            hits = kv.hits(seq)
            missing = kv.num_needed(seq, hits, positions) + spare - kv.pool.num_available
            if missing <= 0:
                seq.num_recomputed_tokens -= len(hits.blocks) * config.block_size
                seq.stops = kv.stops(seq, hits)
                return kv.hold(seq, hits, positions)
            behind = [other for other in self._running.preempted_holders() if other.rank > seq.rank]
            if not self._take_blocks(builder, behind, missing):
                self._note_blocks(seq, kv.num_needed(seq, hits, positions) + spare)
                return False

    # -- 5: admitting -------------------------------------------------------------------------------------------------

    def _admit(self, builder: StepBuilder, *, is_bulk: bool, before: float = inf) -> None:
        """Admit waiting requests, the bulk ones or all others, in the order of the queue, while slots, budgets and
        blocks last; only those of a higher priority than ``before``.

        A preempted sequence that could not resume blocks its own priority and those below, and so does a request that
        was overtaken ``max_skips`` times. A bulk request that lacked blocks and was overtaken more often blocks all
        others.
        """
        config, queue, running = self._config, self._queue, self._running
        supply = self._supply()
        waiting = queue.in_order(builder.step, is_bulk=is_bulk)
        if builder.left_out:
            if self._explain is not None:
                self._note_all(waiting, [(Limit.STALLED, 0, 0)], builder.left_out)
            return
        if supply == self._nobody_fits_at[is_bulk] and self._explain is None:
            return
        if not is_bulk and (starved := self._starved_bulk(builder)) is not None:
            if self._explain is not None:
                self._note_all(waiting, [(Limit.OVERTAKEN, 0, config.max_skips)], [starved.seq_id])
            return
        blocked_from: float = running.preempted[0].request.priority if running.preempted else inf
        blockers = list(running.preempted)
        is_only_blocks = self._order_is_fixed and not running.preempted
        passed: list[Sequence] = []
        admitted: list[Sequence] = []
        admitted_before = tuple(builder.admitted)
        for seq in waiting:
            if queue.effective_priority(seq, builder.step) >= before:
                is_only_blocks = False
                break
            if running.num_running >= config.max_num_seqs or builder.num_places < 1 or builder.chunk_room < 1:
                is_only_blocks = False
                if self._explain is not None:
                    self._note_all([seq, *waiting], self._limits_on_all(builder))
                break
            if not self._is_sibling_ready(seq):
                is_only_blocks = False
                self._note(seq, Limit.SIBLING)
                continue
            is_blocked = queue.effective_priority(seq, builder.step) >= blocked_from
            if is_blocked:
                self._note_blockers(seq, blockers)
            if not is_blocked and self._start(builder, seq):
                admitted.append(seq)
                for other in passed:
                    other.num_skips += 1
                overtaken = passed
            else:
                seq.num_skips += sum(other > seq.seq_id for other in admitted_before)
                passed.append(seq)
                overtaken = [seq]
            if len(passed) > config.max_skips:
                if self._explain is not None:
                    self._note_all(waiting, [(Limit.OVERTAKEN, 0, config.max_skips)], [each.seq_id for each in passed])
                break
            for other in overtaken:
                if other.num_skips >= config.max_skips:
                    blocked_from = min(blocked_from, queue.effective_priority(other, builder.step))
                    blockers.append(other)
        for seq in admitted:
            queue.remove(seq)
        is_only_blocks = is_only_blocks and not admitted and not builder.is_budget_short
        self._nobody_fits_at[is_bulk] = supply if is_only_blocks else None

    def _starved_bulk(self, builder: StepBuilder) -> Sequence | None:
        """The first bulk request, if other requests have taken the blocks that it lacks too often."""
        first = next(self._queue.in_order(builder.step, is_bulk=True), None)
        return first if first is not None and first.num_skips > self._config.max_skips else None

    def _supply(self) -> tuple[int, int, int]:
        """Supply of blocks. It must grow before a sequence that lacked some can fit; taking blocks does not change
        it."""
        return (self._kv.pool.num_released, self._kv.prefix.num_published, self._queue.num_changes)

    def _start(self, builder: StepBuilder, seq: Sequence) -> bool:
        """Admit one request, if its first chunk and its blocks fit.

        A request that lacks only a slot to sample is admitted without a row, so that it takes part in the sampling
        order.
        """
        hits = self._kv.hits(seq)
        start = len(hits.blocks) * self._config.block_size
        if not builder.chunk_length(seq, start) and not builder.lacks_only_a_turn(seq, start):
            builder.is_budget_short = True
            self._note_all([seq], builder.limits_on_prompt(seq, start) if self._explain else ())
            return False
        positions, stops = seq.max_known if self._reserves else seq.num_prompt, self._kv.stops(seq, hits)
        if not (self._is_promised(seq) and self._kv.hold(seq, hits, positions)):
            self._note_blocks(seq, self._kv.num_needed(seq, hits, positions))
            return False
        seq.stops = stops
        seq.num_published = len(hits.blocks)
        seq.num_cached_tokens = start
        seq.admitted_step = builder.step
        seq.last_sampled_step = builder.step - 1  # after all sequences except those that sample in this step
        self.shares.join(seq)
        self._running.run(seq)
        self._ledger.charge(seq.request.tenant, seq.num_prompt)
        if not self._add_prompt(builder, seq):
            builder.num_prefill -= seq.prompt_left
        builder.admitted.append(seq.seq_id)
        return True

    def _is_promised(self, seq: Sequence) -> bool:
        """True unless blocks are reserved and, in a model with several KV groups, all that admitted sequences may hold
        at a time would exceed the pool. Blocks that they share are counted for each of them."""
        if not (self._reserves and self._kv.others):
            return True
        running = self._running
        admitted = [*running.prefilling, *running.decoding, *running.preempted, seq]
        return sum(map(self._kv.most_blocks, admitted)) <= self._kv.pool.num_blocks

    def _is_sibling_ready(self, seq: Sequence) -> bool:
        """True if the first of its siblings has committed its prompt or has ended."""
        first = seq.request.sibling_of
        leader = None if first is None else self._sequences.get(first)
        return leader is None or leader.num_known > leader.num_prompt

    # -- 6: drafts ----------------------------------------------------------------------------------------------------

    def _add_drafts(self, builder: StepBuilder, proposed: Mapping[int, int]) -> None:
        """Add drafts to the rows, in their order, as far as the step has tokens and free blocks left. So they take
        nothing from any row."""
        for index, seq in enumerate(builder.seqs):
            length = builder.lengths[index]
            room = min(proposed.get(seq.seq_id, 0), builder.draft_room(seq, length))
            count = self._kv.hold_drafts(seq, seq.num_computed + length, room)
            if count:
                builder.add_drafts(index, count)

    # -- explaining ---------------------------------------------------------------------------------------------------

    def _note(self, seq: Sequence, limit: Limit, used: int = 0, most: int = 0, others: Iterable[int] = ()) -> None:
        if self._explain is not None:
            self._explain(Reason(seq.seq_id, limit, used, most, others=tuple(others)))

    def _note_all(self, seqs: Iterable[Sequence], limits: Seq[Reached], others: Seq[int] = ()) -> None:
        for seq in seqs:
            for limit, used, most in limits:
                self._note(seq, limit, used, most, others)

    def _note_blocks(self, seq: Sequence, needed: int) -> None:
        if self._explain is not None:
            pool = self._kv.pool
            self._explain(
                Reason(seq.seq_id, Limit.BLOCKS, pool.num_blocks - pool.num_available, pool.num_blocks, needed)
            )

    def _note_blockers(self, seq: Sequence, blockers: list[Sequence]) -> None:
        if self._explain is not None:
            for limit, state in ((Limit.PREEMPTED, SequenceState.PREEMPTED), (Limit.OVERTAKEN, SequenceState.WAITING)):
                others = [each.seq_id for each in blockers if each.state is state]
                if others:
                    self._note(seq, limit, 0, self._config.max_skips, others)

    def _limits_on_all(self, builder: StepBuilder) -> list[Reached]:
        """Limits that prevent any further admission."""
        num_running, most = self._running.num_running, self._config.max_num_seqs
        slots = [(Limit.SEQS, num_running, most)] if num_running >= most else []
        return [*slots, *builder.spent()]
