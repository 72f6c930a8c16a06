"""Decision of one step: the five lines of `StepPlanner.plan`, one function each, and the plan that they build."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from operator import attrgetter

from lockstep.core.kv import KVCache, Moves, choose_tails
from lockstep.core.policy import SchedulerConfig, prefill_budget, prompt_chunk
from lockstep.core.queue import TenantLedger, WaitingQueue
from lockstep.core.sequence import RunningLists, Sequence, SequenceState
from lockstep.core.step import StepPlan

Output = tuple[Sequence, int]
"""Who samples or replays, and the length of its segment."""

_by_turn = attrgetter("turn")


class StepPlanner:
    """Fills a builder. Changes who holds which blocks and who runs, but never what is computed or known.

    Args:
        sequences: all unfinished ones by id, to see how far the first of some siblings is.
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
        self._sequences = sequences
        self._reserves = config.admission == "reserve"
        self._order_is_fixed = config.order != "fair" and not config.priority_aging_steps
        self._nobody_fits_at: tuple[int, int, int] | None = None
        """What could be had when all that were asked lacked blocks, and nothing else."""

    def plan(self, step: int) -> StepBuilder:
        """Decide step number ``step``."""
        running = self._running
        num_waiting = len(self._queue) + len(running.preempted) + len(running.prefilling)
        builder = StepBuilder(self._config, step, prefill_budget(self._config, num_waiting, len(running.decoding)))
        chosen, spare = self._choose_who_samples(builder)
        self._grow(builder, chosen, spare)
        self._advance_prompts(builder)
        self._resume(builder)
        self._admit(builder)
        return builder

    # -- 1: who samples or replays ------------------------------------------------------------------------------------

    def _choose_who_samples(self, builder: StepBuilder) -> tuple[list[Output], list[Sequence]]:
        """Reserve budgets for those who sample or replay: whose last turn is longest ago, class by class.

        Returns:
            Who got them, by rank, and who did not, by turn. Ends of prompts are not among the first: they hold their
            place in the builder.
        """
        running = self._running
        decoding = running.decoding
        room = builder.chunk_room
        endings = [seq for seq in running.prefilling if seq.prompt_left <= room and seq.num_known == seq.num_prompt]
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
        for seq in sorted(decoding + endings, key=_by_turn):
            length = seq.segment_length(seq.num_computed)
            if not self._reserve(builder, seq, length):
                spare.append(seq)
            elif seq.prompt_left <= 0:
                chosen.append((seq, length))
        chosen.sort(key=lambda output: output[0].rank)
        return chosen, spare

    def _reserve(self, builder: StepBuilder, seq: Sequence, length: int) -> bool:
        return builder.reserve_ending(seq) if seq.prompt_left > 0 else builder.reserve_output(length)

    # -- 2: growing, by force if need be ------------------------------------------------------------------------------

    def _grow(self, builder: StepBuilder, chosen: list[Output], spare: list[Sequence]) -> None:
        """Write the rows of those who sample or replay, with blocks for what they compute; whoever gets none waits, and
        its place goes to the next in turn."""
        block_size = self._config.block_size
        running = SequenceState.RUNNING
        for seq, length in chosen:
            end = seq.num_computed + length
            if seq.state is not running:
                builder.return_output(length)
            elif end <= len(seq.table) * block_size or self._hold_by_force(builder, seq, end):
                builder.seqs.append(seq)
                builder.lengths.append(length)
            else:
                builder.return_output(length)
                builder.is_someone_left_out = True
        for seq in spare:
            length = seq.segment_length(seq.num_computed)
            if seq.state is SequenceState.RUNNING and self._reserve(builder, seq, length) and seq.prompt_left <= 0:
                self._grow(builder, [(seq, length)], [])

    def _hold_by_force(self, builder: StepBuilder, seq: Sequence, num_positions: int) -> bool:
        """Give a running sequence its blocks, from victims if need be."""
        missing = self._kv.num_needed(seq, (), num_positions) - self._kv.pool.num_available
        if missing > 0:
            victims = [*self._running.preempted_holders(), *self._running.running_behind(seq.rank)]
            if not self._take_blocks(builder, victims, missing):
                return False
        return self._kv.hold(seq, (), num_positions)

    def _take_blocks(self, builder: StepBuilder, victims: list[Sequence], missing: int) -> bool:
        """Take blocks from the victims' tails, first victim first; False, with nothing touched, when they lack."""
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

    def _advance_prompts(self, builder: StepBuilder) -> None:
        """Chunks for admitted prompts that are not through."""
        for seq in self._running.prefilling:
            builder.return_ending(seq)
            if not builder.add_prompt(seq) and not builder.lacks_only_a_turn(seq, seq.num_computed):
                builder.is_someone_left_out = True

    # -- 4: resuming --------------------------------------------------------------------------------------------------

    def _resume(self, builder: StepBuilder) -> None:
        """Let preempted sequences run again when all their blocks and one more fit; strictly by rank."""
        running = self._running
        for seq in running.preempted.copy():
            if builder.is_someone_left_out or running.num_running >= self._config.max_num_seqs:
                return
            if seq.seq_id in builder.victims or not self._bring_back(builder, seq):
                return
            running.run(seq)
            builder.resumed.append(seq.seq_id)
            if seq.prompt_left > 0:
                builder.add_prompt(seq)
            elif builder.reserve_output(length := seq.segment_length(seq.num_computed)):
                builder.seqs.append(seq)
                builder.lengths.append(length)

    def _bring_back(self, builder: StepBuilder, seq: Sequence) -> bool:
        """Give a preempted sequence all its blocks, after taking from preempted ones behind it if need be."""
        config, kv = self._config, self._kv
        positions = seq.max_known if self._reserves else seq.num_known
        most = config.blocks_for(config.kv_positions(seq.max_known))
        spare = min(1, most - config.blocks_for(positions))
        while True:
            hits = kv.hits(seq)
            missing = kv.num_needed(seq, hits, positions) + spare - kv.pool.num_available
            if missing <= 0:
                seq.num_recomputed_tokens -= len(hits) * config.block_size
                return kv.hold(seq, hits, positions)
            behind = [other for other in self._running.preempted_holders() if other.rank > seq.rank]
            if not self._take_blocks(builder, behind, missing):
                return False

    # -- 5: admitting -------------------------------------------------------------------------------------------------

    def _admit(self, builder: StepBuilder) -> None:
        """Let requests run that wait, in the order of the queue, while slots, budgets and blocks last.

        A preempted sequence that could not resume keeps out its own class and those below, and so does a request that
        was overtaken ``max_skips`` times.
        """
        config, queue, running = self._config, self._queue, self._running
        supply = self._supply()
        if builder.is_someone_left_out or not len(queue) or supply == self._nobody_fits_at:
            return
        blocked_from: float = running.preempted[0].request.priority if running.preempted else inf
        is_only_blocks = self._order_is_fixed and not running.preempted
        passed: list[Sequence] = []
        admitted: list[Sequence] = []
        for seq in queue.in_order(builder.step):
            if running.num_running >= config.max_num_seqs or builder.num_places < 1 or builder.chunk_room < 1:
                is_only_blocks = False
                break
            if not self._is_sibling_ready(seq):
                is_only_blocks = False
                continue
            if queue.effective_class(seq, builder.step) < blocked_from and self._start(builder, seq):
                admitted.append(seq)
                for other in passed:
                    other.num_skips += 1
                overtaken = passed
            else:
                passed.append(seq)
                overtaken = [seq]
            if len(passed) > config.max_skips:
                break
            for other in overtaken:
                if other.num_skips >= config.max_skips:
                    blocked_from = min(blocked_from, queue.effective_class(other, builder.step))
        for seq in admitted:
            queue.remove(seq)
        is_only_blocks = is_only_blocks and not admitted and not builder.is_budget_short
        self._nobody_fits_at = supply if is_only_blocks else None

    def _supply(self) -> tuple[int, int, int]:
        """What must have grown before anyone fits who lacked blocks before: taking blocks never helps the others."""
        return (self._kv.pool.num_released, self._kv.prefix.num_published, self._queue.num_changes)

    def _start(self, builder: StepBuilder, seq: Sequence) -> bool:
        """Admit one request, if its first chunk and its blocks fit.

        One that lacks but a place to sample is admitted without a row, so that it takes part in the turns.
        """
        hits = self._kv.hits(seq)
        start = len(hits) * self._config.block_size
        if not builder.chunk_length(seq, start) and not builder.lacks_only_a_turn(seq, start):
            builder.is_budget_short = True
            return False
        if not self._kv.hold(seq, hits, seq.max_known if self._reserves else seq.num_prompt):
            return False
        seq.num_published = len(hits)
        seq.num_cached_tokens = start
        seq.admitted_step = builder.step
        seq.last_sampled_step = builder.step - 1  # its turn is before those who sample in this step, behind all others
        self._running.run(seq)
        self._ledger.charge(seq.request.tenant, seq.num_prompt)
        if not builder.add_prompt(seq):
            builder.num_prefill -= seq.prompt_left
        builder.admitted.append(seq.seq_id)
        return True

    def _is_sibling_ready(self, seq: Sequence) -> bool:
        """Whether the first of its siblings has committed its prompt or has ended."""
        first = seq.request.sibling_of
        leader = None if first is None else self._sequences.get(first)
        return leader is None or leader.num_known > leader.num_prompt


class StepBuilder:
    """The plan in the making: what is left of its budgets, and its rows so far.

    Whoever samples or replays takes one of the ``num_width`` places.
    """

    def __init__(self, config: SchedulerConfig, step: int, prefill_budget: int) -> None:
        self._chunking = config.chunking
        self._max_chunk = config.max_chunk_tokens if config.chunking else config.max_num_batched_tokens
        self.step = step
        self.num_tokens = config.max_num_batched_tokens
        self.num_prefill = prefill_budget
        self.num_width = config.decode_limit
        self.num_places = config.step_limit
        self.num_kept_places = 0
        """Places that only a prompt may take."""
        self.endings: set[int] = set()
        """Ids that have a place to sample at the end of their prompt."""
        self.is_someone_left_out = False
        """Whether a running sequence lacks blocks or budget: then nobody new is admitted."""
        self.is_budget_short = False
        """Whether somebody in the queue lacked budget."""
        self.seqs: list[Sequence] = []
        self.lengths: list[int] = []
        """The rows; each starts where its sequence is computed to."""
        self.num_prompt_tokens = 0
        self.admitted: list[int] = []
        self.resumed: list[int] = []
        self.preempted: list[int] = []
        self.victims: set[int] = set()
        """Ids that lost blocks in this step, preempted now or before; they do not come back in the same step."""

    # -- sampling and replaying -------------------------------------------------------------------------------------

    def reserve_output(self, length: int) -> bool:
        """Take budgets for an output segment, if they last."""
        if self.num_width < 1 or self.num_tokens < length or self.num_places <= self.num_kept_places:
            return False
        self.num_width -= 1
        self.num_places -= 1
        self.num_tokens -= length
        return True

    def return_output(self, length: int) -> None:
        """Give back what ``reserve_output`` took."""
        self.num_width += 1
        self.num_places += 1
        self.num_tokens += length

    def reserve_outputs(self, count: int, num_tokens: int) -> None:
        """Take budgets for many output segments; the caller knows that they last."""
        self.num_width -= count
        self.num_places -= count
        self.num_tokens -= num_tokens

    # -- prompts ----------------------------------------------------------------------------------------------------

    @property
    def chunk_room(self) -> int:
        """Tokens that a prompt can get now."""
        return min(self.num_tokens, self.num_prefill, self._max_chunk)

    def reserve_ending(self, seq: Sequence) -> bool:
        """Take a place for a prompt that may end, and sample, in this step."""
        if self.num_width < 1 or self.num_places < 1:
            return False
        self.num_width -= 1
        self.num_places -= 1
        self.num_kept_places = 0
        self.endings.add(seq.seq_id)
        return True

    def return_ending(self, seq: Sequence) -> None:
        """Give back what ``reserve_ending`` took, if it did."""
        if seq.seq_id in self.endings:
            self.endings.remove(seq.seq_id)
            self.num_width += 1
            self.num_places += 1

    def chunk_length(self, seq: Sequence, start: int) -> int:
        """How long the next chunk of a prompt is, as far as budgets last; 0: there is none."""
        return self._chunk_length(seq, start, self.num_width > 0 or seq.num_known > seq.num_prompt)

    def lacks_only_a_turn(self, seq: Sequence, start: int) -> bool:
        """Whether nothing but a place to sample keeps a prompt from moving on: its turn will come."""
        return self.num_width < 1 and self._chunk_length(seq, start, True) > 0

    def _chunk_length(self, seq: Sequence, start: int, may_end: bool) -> int:
        left = seq.num_prompt - start
        room = self.chunk_room if self.num_places > 0 else 0
        if self._chunking:
            return prompt_chunk(left, room, may_end)
        return left if may_end and room >= left else 0

    def add_prompt(self, seq: Sequence) -> bool:
        """Write a row for the next chunk of a prompt, if there is one."""
        length = self.chunk_length(seq, seq.num_computed)
        if length == 0:
            return False
        self.num_width -= seq.num_computed + length == seq.num_known
        self.num_places -= 1
        self.num_tokens -= length
        self.num_prefill -= length
        self.num_prompt_tokens += length
        self.seqs.append(seq)
        self.lengths.append(length)
        return True

    # -- the whole --------------------------------------------------------------------------------------------------

    def remove_row(self, seq: Sequence) -> None:
        """Take a victim out of the plan, if it is in, and give its budgets back.

        Only output rows are written while victims are taken.
        """
        if seq in self.seqs:
            index = self.seqs.index(seq)
            self.return_output(self.lengths[index])
            del self.seqs[index], self.lengths[index]
        self.return_ending(seq)

    def plan(self, moves: Moves) -> StepPlan:
        """Freeze it."""
        seqs, lengths = self.seqs, self.lengths
        return StepPlan(
            self.step,
            moves.evicted,
            moves.swap_out,
            moves.swap_in,
            (),
            tuple([seq.seq_id for seq in seqs]),
            tuple([seq.num_computed for seq in seqs]),
            tuple(lengths),
            tuple([seq.table for seq in seqs]),
            tuple([seq.num_computed + length == seq.num_known for seq, length in zip(seqs, lengths, strict=True)]),
            tuple(self.admitted),
            tuple(self.resumed),
            tuple(self.preempted),
            self.num_prompt_tokens,
        )
