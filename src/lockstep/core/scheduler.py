"""The scheduler: every step's decision, and the life of every sequence.

Owns all sequences. Knows no tokens, no time and no model: lengths, hashes and commands come in, plans go out. The
order of calls is commit, commands (add, abort, sweep, reset), schedule.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import replace
from operator import attrgetter

from lockstep.core.draft import StepDraft
from lockstep.core.kv import KVCache
from lockstep.core.policy import SchedulerConfig, output_limit, prefill_budget
from lockstep.core.queue import TenantLedger, WaitingQueue
from lockstep.core.request import FinishReason, Request
from lockstep.core.sequence import (
    FinishedSequence,
    Sequence,
    SequenceState,
    SequenceView,
    finished_of,
    view_of,
)
from lockstep.core.step import Finish, StepEvents, StepPlan, StepResult
from lockstep.core.victims import choose_tails

_by_rank = attrgetter("rank")
_by_turn = attrgetter("turn")


class Scheduler:
    """Decides step by step who computes what, in which blocks."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._kv = KVCache(config)
        self._ledger = TenantLedger(config.max_num_tenants)
        self._queue = WaitingQueue(config, self._ledger)
        self._sequences: dict[int, Sequence] = {}
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._preempted: list[Sequence] = []
        """Running ones whose prompt is not through, running ones whose prompt is, and preempted ones; all by rank."""
        self._finished: deque[FinishedSequence] = deque(maxlen=config.max_finished)
        self._next_id = 0
        self._step = 0
        self._pending: StepPlan | None = None
        self._pending_seqs: list[Sequence] = []
        self._aborting: dict[int, FinishReason] = {}
        """Ended by a command while their step was under way."""

    # -- commands ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Queue a request; returns the id of its sequence.

        Raises:
            InvalidParameterError, PromptTooLongError: it can never be served as it is.
            QueueFullError: too much waits already.
        """
        max_output = output_limit(self.config, request)
        self._queue.check_room(request.num_prompt_tokens)
        num_hashed = len(request.block_hashes) * self.config.block_size
        assert num_hashed <= request.num_prompt_tokens, "more hashes than full prompt blocks"
        assert request.sibling_of is None or request.sibling_of < self._next_id, "a sibling follows its first"
        if not self.config.enable_prefix_caching or request.num_prompt_tokens == 1:
            # A prompt of one token is computed by the kernel for single queries: nobody else may read it.
            request = replace(request, block_hashes=())
        seq = Sequence(self._next_id, request, max_output, self._step)
        self._next_id += 1
        self._sequences[seq.seq_id] = seq
        self._ledger.arrive(request.tenant)
        self._queue.add(seq)
        return seq.seq_id

    def abort(self, seq_id: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a sequence; False when there is none of that id, or it has ended.

        One that is in the step under way ends with that step's commit: its token is committed, but not to be published.
        """
        seq = self._sequences.get(seq_id)
        if seq is None or seq_id in self._aborting:
            return False
        if self._pending is not None and seq in self._pending_seqs:
            self._aborting[seq_id] = reason
        else:
            self._end(seq, reason)
        return True

    # -- the step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide the next step. A plan with rows is committed or failed before the next; one without needs neither."""
        assert self._pending is None, "the step before is neither committed nor failed"
        draft = self._open_draft()
        chosen, spare = self._choose_who_samples(draft)
        self._grow(draft, chosen, spare)
        self._advance_prompts(draft)
        self._resume(draft)
        self._admit(draft)
        return self._close_draft(draft)

    def _open_draft(self) -> StepDraft:
        num_waiting = len(self._queue) + len(self._preempted) + len(self._prefilling)
        return StepDraft(self.config, self._step, prefill_budget(self.config, num_waiting, len(self._decoding)))

    def _choose_who_samples(self, draft: StepDraft) -> tuple[list[Sequence], list[Sequence]]:
        """Reserve budgets for those who sample or replay: whose last turn is longest ago, class by class.

        Returns:
            Who got them, by rank, and who did not, by turn. Ends of prompts are not among the first: they hold their
            place in the draft.
        """
        decoding = self._decoding
        room = draft.chunk_room
        endings = [
            seq for seq in self._prefilling if seq.prompt_left <= room and seq.num_known == seq.num_prompt
        ]
        slots = self.config.max_num_seqs - len(decoding) - len(self._prefilling)
        prompt_waits = bool(self._prefilling) or (slots > 0 and len(self._queue) > 0)
        draft.num_kept_places = 1 if prompt_waits and draft.num_places > 1 else 0
        rows = len(decoding) + max(len(endings), draft.num_kept_places)
        num_tokens = sum([seq.segment_length(seq.num_computed) for seq in decoding])
        if rows <= min(draft.num_width, draft.num_places) and num_tokens <= draft.num_tokens:
            draft.num_width -= len(decoding)
            draft.num_places -= len(decoding)
            draft.num_tokens -= num_tokens
            for seq in endings:
                draft.reserve_ending(seq)
            return decoding.copy(), []
        chosen, spare = [], []
        for seq in sorted(decoding + endings, key=_by_turn):
            if seq.prompt_left > 0:
                if not draft.reserve_ending(seq):
                    spare.append(seq)
            elif draft.reserve_output(seq.segment_length(seq.num_computed)):
                chosen.append(seq)
            else:
                spare.append(seq)
        chosen.sort(key=_by_rank)
        return chosen, spare

    def _grow(self, draft: StepDraft, chosen: list[Sequence], spare: list[Sequence]) -> None:
        """Write the rows of those who sample or replay, with blocks for what they compute; whoever gets none waits, and
        its place goes to the next in turn."""
        for seq in chosen:
            self._add_output(draft, seq)
        for seq in spare:
            if seq.state is not SequenceState.RUNNING:
                continue
            if seq.prompt_left > 0:
                draft.reserve_ending(seq)
            elif draft.reserve_output(seq.segment_length(seq.num_computed)):
                self._add_output(draft, seq)

    def _add_output(self, draft: StepDraft, seq: Sequence) -> None:
        length = seq.segment_length(seq.num_computed)
        if seq.state is not SequenceState.RUNNING:
            draft.return_output(length)
            return
        end = seq.num_computed + length
        if end > len(seq.table) * self.config.block_size and not self._hold_by_force(draft, seq, end):
            draft.return_output(length)
            draft.is_someone_left_out = True
            return
        draft.add_output(seq, length)

    def _advance_prompts(self, draft: StepDraft) -> None:
        """Chunks for admitted prompts that are not through."""
        for seq in self._prefilling:
            draft.return_ending(seq)
            if not draft.add_prompt(seq, seq.num_computed):
                draft.is_someone_left_out = True

    def _resume(self, draft: StepDraft) -> None:
        """Let preempted sequences run again when all their blocks and one more fit; strictly by rank."""
        config = self.config
        for seq in list(self._preempted):
            if draft.is_someone_left_out or self._num_running >= config.max_num_seqs or seq.seq_id in draft.preempted:
                return
            positions = seq.max_known if config.admission == "reserve" else seq.num_known
            most = config.blocks_for(config.kv_positions(seq.max_known))
            spare = min(1, most - config.blocks_for(positions))
            if not self._fits_by_force(draft, seq, positions, spare):
                return
            hits = self._kv.hits(seq)
            self._kv.hold(seq, hits, positions)
            seq.num_recomputed_tokens -= len(hits) * config.block_size
            seq.move_to(SequenceState.RUNNING)
            self._preempted.remove(seq)
            insort(self._prefilling if seq.prompt_left > 0 else self._decoding, seq, key=_by_rank)
            draft.resumed.append(seq.seq_id)
            if seq.prompt_left > 0:
                draft.add_prompt(seq, seq.num_computed)
            elif draft.reserve_output(length := seq.segment_length(seq.num_computed)):
                draft.add_output(seq, length)

    def _admit(self, draft: StepDraft) -> None:
        """Let requests run that wait, in the order of the queue, while slots, budgets and blocks last."""
        config, queue = self.config, self._queue
        if draft.is_someone_left_out or not len(queue):
            return
        blocked_from = self._preempted[0].request.priority if self._preempted else None
        passed: list[Sequence] = []
        admitted: list[Sequence] = []
        for seq in queue.in_order(draft.step):
            if self._num_running >= config.max_num_seqs or draft.num_places < 1 or draft.chunk_room < 1:
                break
            if not self._is_sibling_ready(seq):
                continue
            seq_class = queue.effective_class(seq, draft.step)
            if (blocked_from is None or seq_class < blocked_from) and self._start(draft, seq):
                admitted.append(seq)
                for other in passed:
                    other.num_skips += 1
                continue
            passed.append(seq)
            if seq.num_skips >= config.max_skips:
                blocked_from = seq_class if blocked_from is None else min(blocked_from, seq_class)
            if len(passed) > config.max_skips:
                break
        for seq in admitted:
            queue.remove(seq)

    def _start(self, draft: StepDraft, seq: Sequence) -> bool:
        """Admit one request, if its first chunk and its blocks fit."""
        hits = self._kv.hits(seq)
        num_cached = len(hits) * self.config.block_size
        if not draft.add_prompt(seq, num_cached, dry=True):
            return False
        if not self._kv.hold(seq, hits, seq.max_known if self.config.admission == "reserve" else seq.num_prompt):
            return False
        draft.add_prompt(seq, num_cached)
        seq.move_to(SequenceState.RUNNING)
        seq.num_published = len(hits)
        seq.num_cached_tokens = num_cached
        seq.admitted_step = seq.last_sampled_step = draft.step
        insort(self._prefilling, seq, key=_by_rank)
        self._ledger.charge(seq.request.tenant, seq.num_prompt)
        draft.admitted.append(seq.seq_id)
        return True

    def _close_draft(self, draft: StepDraft) -> StepPlan:
        plan = draft.plan(self._kv.take_moves())
        if plan.seq_ids:
            self._pending, self._pending_seqs = plan, draft.seqs
            self._step += 1
        else:
            assert not self._sequences, "an empty plan while someone is unfinished"
        return plan

    # -- victims ----------------------------------------------------------------------------------------------------

    def _hold_by_force(self, draft: StepDraft, seq: Sequence, num_positions: int) -> bool:
        """Give a running sequence its blocks, from victims if need be."""
        missing = self._kv.num_needed(seq, (), num_positions) - self._kv.pool.num_available
        if missing > 0:
            running = sorted(self._decoding + self._prefilling, key=_by_rank, reverse=True)
            worse = [other for other in running if other.rank > seq.rank]
            if not self._take_blocks(draft, [*self._preempted_holders(), *worse], missing):
                return False
        return self._kv.hold(seq, (), num_positions)

    def _fits_by_force(self, draft: StepDraft, seq: Sequence, num_positions: int, spare: int) -> bool:
        """Whether a preempted sequence fits, after taking from preempted ones behind it if need be."""
        while True:
            needed = self._kv.num_needed(seq, self._kv.hits(seq), num_positions) + spare
            missing = needed - self._kv.pool.num_available
            if missing <= 0:
                return True
            worse = [other for other in self._preempted_holders() if other.rank > seq.rank]
            if not self._take_blocks(draft, worse, missing):
                return False

    def _preempted_holders(self) -> list[Sequence]:
        return [seq for seq in reversed(self._preempted) if seq.table]

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
                    self._preempt(victim)
                self._kv.take_tail(victim, count)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._stop_running(seq)
        seq.move_to(SequenceState.PREEMPTED)
        seq.num_preemptions += 1
        insort(self._preempted, seq, key=_by_rank)

    # -- after the step ---------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> StepEvents:
        """Take over what a step brought: what is computed and known, who ended, which blocks can be hit."""
        assert plan is self._pending, "commit answers the plan that schedule gave last"
        self._pending = None
        self._kv.settle()
        finished: list[Finish] = []
        got: list[int] = []
        answers = zip(result.num_tokens, result.finishes, strict=True)
        for seq, length, samples in zip(self._pending_seqs, plan.lengths, plan.samples, strict=True):
            was_prompt = seq.prompt_left > 0
            seq.num_computed += length
            if was_prompt:
                self._kv.publish(seq)
                if seq.prompt_left <= 0:
                    self._prefilling.remove(seq)
                    insort(self._decoding, seq, key=_by_rank)
            reason = self._aborting.pop(seq.seq_id, None) if self._aborting else None
            if samples:
                num_tokens, ended = next(answers)
                got.append(self._accept(seq, num_tokens, plan.step))
                reason = reason or ended or (FinishReason.LENGTH if seq.num_known == seq.max_known else None)
            if reason is not None:
                finished.append(Finish(seq.seq_id, reason))
                self._end(seq, reason)
        assert next(answers, None) is None, "more answers than sampling rows"
        return StepEvents(plan.step, tuple(finished), tuple(got))

    def _accept(self, seq: Sequence, num_tokens: int, step: int) -> int:
        """Make sampled tokens known, up to the output limit."""
        assert 1 <= num_tokens <= (self.config.max_forced_tokens if seq.request.allows_forced else 1), (
            f"sequence {seq.seq_id} got {num_tokens} tokens in one step"
        )
        num_tokens = min(num_tokens, seq.max_known - seq.num_known)
        if seq.first_token_step < 0:
            seq.first_token_step = step
        seq.append(num_tokens)
        seq.last_sampled_step = step
        self._ledger.charge(seq.request.tenant, num_tokens)
        return num_tokens

    def fail(self, plan: StepPlan) -> tuple[int, ...]:
        """The step did not run to its end: withdraw the blocks that it took, and drop what it moved.

        Its sequences are preempted, so they may be aborted or, left alone, try again.

        Returns:
            Ids of the plan's sequences.
        """
        assert plan is self._pending, "fail answers the plan that schedule gave last"
        self._pending = None
        came_back = self._kv.fail()
        for seq in dict.fromkeys([*self._pending_seqs, *came_back]):
            self._kv.drop_unwritten(seq)
            self._preempt(seq)
        for seq_id, reason in self._aborting.items():
            self._end(self._sequences[seq_id], reason)
        self._aborting.clear()
        return plan.seq_ids

    def drain_finished(self) -> tuple[FinishedSequence, ...]:
        """What ended since the last call, at most ``max_finished``."""
        finished = tuple(self._finished)
        self._finished.clear()
        return finished

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.state is SequenceState.WAITING:
            self._queue.remove(seq)
        elif seq.state is SequenceState.PREEMPTED:
            self._preempted.remove(seq)
        else:
            self._stop_running(seq)
        seq.move_to(SequenceState.FINISHED)
        self._kv.release(seq)
        self._ledger.leave(seq.request.tenant)
        del self._sequences[seq.seq_id]
        self._finished.append(finished_of(seq, reason, self._step))

    def _stop_running(self, seq: Sequence) -> None:
        (self._decoding if seq in self._decoding else self._prefilling).remove(seq)

    def _is_sibling_ready(self, seq: Sequence) -> bool:
        """Whether the first of its siblings has committed its prompt or has ended."""
        first = seq.request.sibling_of
        if first is None or first not in self._sequences:
            return True
        leader = self._sequences[first]
        return leader.num_known > leader.num_prompt

    # -- what others may know -----------------------------------------------------------------------------------------

    @property
    def _num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences)

    has_work = has_unfinished

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Queued and preempted."""
        return len(self._queue) + len(self._preempted)

    def view(self, seq_id: int) -> SequenceView | None:
        """A copy of what is known of an unfinished sequence."""
        seq = self._sequences.get(seq_id)
        return None if seq is None else view_of(seq)

    def reset_prefix_cache(self) -> int:
        """Forget all cached content; blocks in use stay in use. Returns how many blocks were cached."""
        return self._kv.reset_prefix_cache()

    def check(self) -> None:
        """Assert conservation of blocks and sequences."""
        self._kv.check(self._sequences.values())
