"""How one step is decided: the five lines of ``plan``, one function each."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from operator import attrgetter

from lockstep.core.draft import StepDraft
from lockstep.core.kv import KVCache
from lockstep.core.policy import SchedulerConfig, prefill_budget
from lockstep.core.queue import TenantLedger, WaitingQueue
from lockstep.core.roster import Roster
from lockstep.core.sequence import Sequence, SequenceState
from lockstep.core.victims import choose_tails

Output = tuple[Sequence, int]
"""Who samples or replays, and the length of its segment."""

_by_turn = attrgetter("turn")


class StepPlanner:
    """Fills a draft. Changes who holds which blocks and who runs, but never what is computed or known.

    Args:
        sequences: all unfinished ones by id, to see how far the first of some siblings is.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCache,
        queue: WaitingQueue,
        ledger: TenantLedger,
        roster: Roster,
        sequences: Mapping[int, Sequence],
    ) -> None:
        self._config = config
        self._kv = kv
        self._queue = queue
        self._ledger = ledger
        self._roster = roster
        self._sequences = sequences
        self._reserves = config.admission == "reserve"
        self._order_is_fixed = config.order != "fair" and not config.priority_aging_steps
        self._nobody_fits_at: tuple[int, int, int] | None = None
        """What could be had when all that were asked lacked blocks, and nothing else."""

    def plan(self, step: int) -> StepDraft:
        """Decide step number ``step``."""
        roster = self._roster
        num_waiting = len(self._queue) + len(roster.preempted) + len(roster.prefilling)
        draft = StepDraft(self._config, step, prefill_budget(self._config, num_waiting, len(roster.decoding)))
        chosen, spare = self._choose_who_samples(draft)
        self._grow(draft, chosen, spare)
        self._advance_prompts(draft)
        self._resume(draft)
        self._admit(draft)
        return draft

    # -- 1: who samples or replays ------------------------------------------------------------------------------------

    def _choose_who_samples(self, draft: StepDraft) -> tuple[list[Output], list[Sequence]]:
        """Reserve budgets for those who sample or replay: whose last turn is longest ago, class by class.

        Returns:
            Who got them, by rank, and who did not, by turn. Ends of prompts are not among the first: they hold their
            place in the draft.
        """
        roster = self._roster
        decoding = roster.decoding
        room = draft.chunk_room
        endings = [seq for seq in roster.prefilling if seq.prompt_left <= room and seq.num_known == seq.num_prompt]
        slots = self._config.max_num_seqs - roster.num_running
        prompt_waits = bool(roster.prefilling) or (slots > 0 and len(self._queue) > 0)
        draft.num_kept_places = 1 if prompt_waits and draft.num_places > 1 else 0
        rows = len(decoding) + max(len(endings), draft.num_kept_places)
        lengths = [seq.forced.get(seq.num_computed, 1) for seq in decoding]
        if rows <= min(draft.num_width, draft.num_places) and sum(lengths) <= draft.num_tokens:
            draft.reserve_outputs(len(lengths), sum(lengths))
            for seq in endings:
                draft.reserve_ending(seq)
            return list(zip(decoding, lengths, strict=True)), []
        chosen: list[Output] = []
        spare: list[Sequence] = []
        for seq in sorted(decoding + endings, key=_by_turn):
            length = seq.segment_length(seq.num_computed)
            if not self._reserve(draft, seq, length):
                spare.append(seq)
            elif seq.prompt_left <= 0:
                chosen.append((seq, length))
        chosen.sort(key=lambda output: output[0].rank)
        return chosen, spare

    def _reserve(self, draft: StepDraft, seq: Sequence, length: int) -> bool:
        return draft.reserve_ending(seq) if seq.prompt_left > 0 else draft.reserve_output(length)

    # -- 2: growing, by force if need be ------------------------------------------------------------------------------

    def _grow(self, draft: StepDraft, chosen: list[Output], spare: list[Sequence]) -> None:
        """Write the rows of those who sample or replay, with blocks for what they compute; whoever gets none waits, and
        its place goes to the next in turn."""
        block_size = self._config.block_size
        running = SequenceState.RUNNING
        for seq, length in chosen:
            end = seq.num_computed + length
            if seq.state is not running:
                draft.return_output(length)
            elif end <= len(seq.table) * block_size or self._hold_by_force(draft, seq, end):
                draft.seqs.append(seq)
                draft.lengths.append(length)
            else:
                draft.return_output(length)
                draft.is_someone_left_out = True
        for seq in spare:
            length = seq.segment_length(seq.num_computed)
            if seq.state is SequenceState.RUNNING and self._reserve(draft, seq, length) and seq.prompt_left <= 0:
                self._grow(draft, [(seq, length)], [])

    def _hold_by_force(self, draft: StepDraft, seq: Sequence, num_positions: int) -> bool:
        """Give a running sequence its blocks, from victims if need be."""
        missing = self._kv.num_needed(seq, (), num_positions) - self._kv.pool.num_available
        if missing > 0:
            victims = [*self._roster.preempted_holders(), *self._roster.running_behind(seq.rank)]
            if not self._take_blocks(draft, victims, missing):
                return False
        return self._kv.hold(seq, (), num_positions)

    def _take_blocks(self, draft: StepDraft, victims: list[Sequence], missing: int) -> bool:
        """Take blocks from the victims' tails, first victim first; False, with nothing touched, when they lack."""
        counts = choose_tails([victim.table for victim in victims], self._kv.pool.refs, missing)
        if counts is None:
            return False
        for victim, count in zip(victims, counts, strict=True):
            if count:
                if victim.state is SequenceState.RUNNING:
                    draft.remove_row(victim)
                    draft.preempted.append(victim.seq_id)
                    self._roster.preempt(victim)
                    victim.num_preemptions += 1
                draft.victims.add(victim.seq_id)
                self._kv.take_tail(victim, count)
        return True

    # -- 3: prompts ---------------------------------------------------------------------------------------------------

    def _advance_prompts(self, draft: StepDraft) -> None:
        """Chunks for admitted prompts that are not through."""
        for seq in self._roster.prefilling:
            draft.return_ending(seq)
            if not draft.add_prompt(seq) and not draft.lacks_only_a_turn(seq, seq.num_computed):
                draft.is_someone_left_out = True

    # -- 4: resuming --------------------------------------------------------------------------------------------------

    def _resume(self, draft: StepDraft) -> None:
        """Let preempted sequences run again when all their blocks and one more fit; strictly by rank."""
        roster = self._roster
        for seq in roster.preempted.copy():
            if draft.is_someone_left_out or roster.num_running >= self._config.max_num_seqs:
                return
            if seq.seq_id in draft.victims or not self._bring_back(draft, seq):
                return
            roster.run(seq)
            draft.resumed.append(seq.seq_id)
            if seq.prompt_left > 0:
                draft.add_prompt(seq)
            elif draft.reserve_output(length := seq.segment_length(seq.num_computed)):
                draft.seqs.append(seq)
                draft.lengths.append(length)

    def _bring_back(self, draft: StepDraft, seq: Sequence) -> bool:
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
            behind = [other for other in self._roster.preempted_holders() if other.rank > seq.rank]
            if not self._take_blocks(draft, behind, missing):
                return False

    # -- 5: admitting -------------------------------------------------------------------------------------------------

    def _admit(self, draft: StepDraft) -> None:
        """Let requests run that wait, in the order of the queue, while slots, budgets and blocks last.

        A preempted sequence that could not resume keeps out its own class and those below, and so does a request that
        was overtaken ``max_skips`` times.
        """
        config, queue, roster = self._config, self._queue, self._roster
        supply = self._supply()
        if draft.is_someone_left_out or not len(queue) or supply == self._nobody_fits_at:
            return
        blocked_from: float = roster.preempted[0].request.priority if roster.preempted else inf
        is_only_blocks = self._order_is_fixed and not roster.preempted
        passed: list[Sequence] = []
        admitted: list[Sequence] = []
        for seq in queue.in_order(draft.step):
            if roster.num_running >= config.max_num_seqs or draft.num_places < 1 or draft.chunk_room < 1:
                is_only_blocks = False
                break
            if not self._is_sibling_ready(seq):
                is_only_blocks = False
                continue
            if queue.effective_class(seq, draft.step) < blocked_from and self._start(draft, seq):
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
                    blocked_from = min(blocked_from, queue.effective_class(other, draft.step))
        for seq in admitted:
            queue.remove(seq)
        is_only_blocks = is_only_blocks and not admitted and not draft.is_budget_short
        self._nobody_fits_at = supply if is_only_blocks else None

    def _supply(self) -> tuple[int, int, int]:
        """What must have grown before anyone fits who lacked blocks before: taking blocks never helps the others."""
        return (self._kv.pool.num_released, self._kv.prefix.num_published, self._queue.num_changes)

    def _start(self, draft: StepDraft, seq: Sequence) -> bool:
        """Admit one request, if its first chunk and its blocks fit.

        One that lacks but a place to sample is admitted without a row, so that it takes part in the turns.
        """
        hits = self._kv.hits(seq)
        start = len(hits) * self._config.block_size
        if not draft.chunk_length(seq, start) and not draft.lacks_only_a_turn(seq, start):
            draft.is_budget_short = True
            return False
        if not self._kv.hold(seq, hits, seq.max_known if self._reserves else seq.num_prompt):
            return False
        seq.num_published = len(hits)
        seq.num_cached_tokens = start
        seq.admitted_step = draft.step
        seq.last_sampled_step = draft.step - 1  # its turn is before those who sample in this step, behind all others
        self._roster.run(seq)
        self._ledger.charge(seq.request.tenant, seq.num_prompt)
        if not draft.add_prompt(seq):
            draft.num_prefill -= seq.prompt_left
        draft.admitted.append(seq.seq_id)
        return True

    def _is_sibling_ready(self, seq: Sequence) -> bool:
        """Whether the first of its siblings has committed its prompt or has ended."""
        first = seq.request.sibling_of
        leader = None if first is None else self._sequences.get(first)
        return leader is None or leader.num_known > leader.num_prompt
