"""Scheduler: decides every step and manages the lifecycle of every sequence.

It owns all sequences. It depends on no tokens, no time and no model: lengths, hashes and commands go in, and plans come
out. The order of calls is commit, commands (add, name_answer, abort, pin, sweep, fill, reset, propose), schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import compress

from lockstep.core.decode_run import DecodeRun
from lockstep.core.groups import content_key
from lockstep.core.kv import KVCache
from lockstep.core.planner import StepPlanner
from lockstep.core.policy import SchedulerConfig, output_limit
from lockstep.core.prefix import ContentNews
from lockstep.core.queue import TenantLedger, WaitingQueue
from lockstep.core.request import CommandListener, FinishReason, Request
from lockstep.core.sequence import FinishedSequence, RunningLists, Sequence, SequenceState, SequenceView
from lockstep.core.state import SchedulerState, restored, saved
from lockstep.core.stats import Counters, SchedulerStats, stats_of
from lockstep.core.step import Explain, Finish, StepEvents, StepPlan, StepResult


class Scheduler:
    """Decides for each step which sequences compute which tokens, in which blocks.

    Args:
        listener: called after every command that may have an effect.
    """

    def __init__(self, config: SchedulerConfig, listener: CommandListener | None = None) -> None:
        self.config = config
        self._listener = listener
        self._kv = KVCache(config)
        self._ledger = TenantLedger(config.max_num_tenants)
        self._queue = WaitingQueue(config, self._ledger)
        self._running = RunningLists()
        self._sequences: dict[int, Sequence] = {}
        self._counters = Counters()
        self._next_id = 0
        self._step = 0
        self._pending: StepPlan | None = None
        self._proposed: dict[int, int] = {}
        """Sequence id to the number of drafts that were proposed for the next step."""
        self._aborting: dict[int, FinishReason] = {}
        """Sequences that were ended by a command during their step."""
        self._planner = StepPlanner(config, self._kv, self._queue, self._ledger, self._running, self._sequences)
        self._pending_seqs: list[Sequence] = []
        """Sequences of the rows of the current step, or of the last one."""
        self._run: DecodeRun | None = None
        self._is_settled = False
        """True if each sequence past its prompt got one token in the last step, and so has one to compute next."""
        self._finished: deque[FinishedSequence] = deque(maxlen=config.max_finished)

    # -- commands -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Queue a request and return the id of its sequence.

        Raises:
            InvalidParameterError, PromptTooLongError: it can never be served as it is.
            QueueFullError: too many requests or tokens wait already.
        """
        max_output = output_limit(self.config, request)
        self._queue.check_room(request.num_prompt_tokens)
        num_hashed = len(request.block_hashes) * self.config.block_size
        assert num_hashed <= request.num_prompt_tokens, "more hashes than full prompt blocks"
        assert request.sibling_of is None or request.sibling_of < self._next_id, "siblings come after the first one"
        kept = request
        if not self.config.enable_prefix_caching:
            kept = replace(kept, block_hashes=())
        if request.is_bulk and not self.config.chunking:  # a part may be too small for a whole prompt
            kept = replace(kept, is_bulk=False)
        self._write_back()
        seq = Sequence(self._next_id, kept, max_output, self._step, self._kv.others.nothing)
        self._next_id += 1
        self._sequences[seq.seq_id] = seq
        self._ledger.arrive(request.tenant)
        self._queue.add(seq)
        if self._listener is not None:
            self._listener.added(seq.seq_id, request, self._step)
        return seq.seq_id

    def abort(self, seq_id: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a sequence; False: there is no sequence with this id, or it has ended.

        A sequence of the current step ends with that step's commit; its token is committed but must not be published.
        """
        seq = self._sequences.get(seq_id)
        if seq is None or seq_id in self._aborting:
            return False
        if self._pending is not None and seq in self._pending_seqs:
            self._aborting[seq_id] = reason
        else:
            self._leave_run()
            self._end(seq, reason)
        if self._listener is not None:
            self._listener.aborted(seq_id, reason, self._step, in_step=self._pending is not None)
        return True

    def name_answer(self, seq_id: int, hashes: Seq[bytes]) -> None:
        """Set the hashes of the full blocks after the prompt of a sequence that ends with the current step or is about
        to be aborted. When it ends, the computed ones can be hit. This has no effect without prefix caching, or if the
        request came without the hashes of its prompt.
        """
        seq, size = self._sequences.get(seq_id), self.config.block_size
        if seq is None or not hashes or not self.config.enable_prefix_caching:
            return
        num_of_prompt = seq.num_prompt // size
        known = seq.request.block_hashes[:num_of_prompt]
        if len(known) < num_of_prompt:
            return
        assert (num_of_prompt + len(hashes)) * size <= seq.max_known, "more hashes than full blocks"
        seq.request = replace(seq.request, block_hashes=(*known, *hashes))
        if self._listener is not None:
            self._listener.answer_named(seq_id, hashes, self._step, in_step=self._pending is not None)

    def pin(self, hashes: Seq[bytes], borders: Seq[int] = ()) -> None:
        """Evict blocks of this content, which a session keeps, last, until each ``pin`` is undone by a ``sweep``.

        Args:
            borders: numbers of blocks after which the session may continue. Windows and states there are kept, too.
        """
        self._kv.pin(hashes, borders)
        if hashes and self._listener is not None:
            self._listener.pinned(hashes, borders, self._step)

    def sweep(self, hashes: Seq[bytes], borders: Seq[int] = ()) -> tuple[int, ...]:
        """Undo a ``pin``. Returns the freed blocks, which neither a sequence nor another pin needs."""
        freed = self._kv.sweep(hashes, borders)
        if hashes and self._listener is not None:
            self._listener.unpinned(hashes, borders, self._step)
        return freed

    def fill(self, hashes: Seq[bytes], start: int = 0, group: int = 0) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Assign blocks to those of the contents ``hashes[start:]`` of a chain that are in no block of a KV group.
        Other content is evicted for that, but no block of the chain. Call this between two steps. If there are too few
        blocks, the first contents get them.

        Returns:
            (index in ``hashes``, device blocks) of each. They can be hit from now on; the caller must write their
            content before the next step is executed.
        """
        assert self._pending is None, "the current step may read the blocks that this would assign"
        self._leave_run()  # a repeated step moves nothing
        given = self._kv.fill(hashes, start, group)
        if hashes and self._listener is not None:
            self._listener.filled(hashes, start, group, self._step)
        return given

    def cached_blocks(self, hashes: Seq[bytes], group: int = 0) -> tuple[tuple[int, ...], ...]:
        """The device blocks of each content in a KV group, so that they can be copied before they are evicted; empty:
        it is in no block."""
        return tuple([self._kv.prefix.find(content_key(block_hash, group)) for block_hash in hashes])

    def follow_contents(self) -> None:
        """Start to collect changes of the prefix cache. Then ``drain_contents`` must be called every few steps."""
        keys = self._kv.prefix.blocks.values()
        self._kv.prefix.news = [(key, True) for key in keys if isinstance(key, bytes)]

    def drain_contents(self) -> tuple[ContentNews, ...]:
        """Take the changes of the prefix cache since the last call. The first call returns its whole content."""
        news = self._kv.prefix.news or []
        drained = tuple(news)
        news.clear()
        return drained

    def reset_prefix_cache(self) -> int:
        """Remove all cached content; blocks in use stay in use. Returns the number of cached blocks."""
        num_blocks = self._kv.reset_prefix_cache()
        if self._listener is not None:
            self._listener.cache_reset(self._step)
        return num_blocks

    def propose(self, drafts: Mapping[int, int]) -> None:
        """Propose drafts for the next step: tokens that a sequence may get in it, by sequence id their number. The plan
        has those for which budgets and free blocks suffice; the others are dropped, and so are those of sequences that
        do not sample in it."""
        assert self._pending is None, "drafts are proposed before a step is planned"
        assert self.config.allows_drafts, "a model with states has no drafts"
        assert all(count > 0 for count in drafts.values()), "a proposal has at least one draft"
        self._proposed = dict(drafts)
        if drafts and self._listener is not None:
            self._listener.proposed(drafts, self._step)

    # -- the step -----------------------------------------------------------------------------------------------------

    def schedule(self, explain: Explain | None = None) -> StepPlan:
        """Decide the next step. It must be committed or failed before the next call. If no sequence is unfinished, the
        plan is empty and needs neither, and creating it changes no later decision.

        Args:
            explain: called with each reason why a sequence is passed over or gets less than it could; decides nothing.
        """
        assert self._pending is None, "the last step was neither committed nor failed"
        if not self._sequences:
            return StepPlan(self._step, (), (), (), (), (), (), (), (), ())
        plan = self._repeat() if explain is None else None
        if plan is None:
            self._leave_run()
            builder = self._planner.plan(self._step, explain, self._proposed)
            plan = builder.plan(self._kv.take_moves())
            self._pending_seqs = builder.seqs
            self._counters.num_preemptions += len(builder.preempted)
            self._count_lookups(builder.admitted)
        assert plan.has_work, "an empty plan while a sequence is unfinished"
        self._counters.count_moves(plan)
        self._proposed.clear()
        self._pending = plan
        self._step += 1
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> StepEvents:
        """Apply a step's result: the computed and known tokens, the ended sequences, the blocks that can be hit."""
        assert plan is self._pending, "commit needs the last plan of schedule"
        self._pending = None
        self._kv.settle()
        if self._run is not None:
            if not self._aborting and self._run.commit(result):
                return StepEvents(plan.step, self._end_run(result), result.num_tokens)
            self._leave_run()
        finished: list[Finish] = []
        got: list[int] = []
        accepted = result.num_accepted or (0,) * len(result.num_tokens)
        drafts = plan.drafts or (0,) * len(plan.lengths)
        answers = zip(result.num_tokens, result.finishes, accepted, strict=True)
        for seq, length, samples, num_drafts in zip(
            self._pending_seqs, plan.lengths, plan.samples, drafts, strict=True
        ):
            if seq.num_computed < seq.num_prefill:
                self._commit_prompt(seq, length)
            seq.num_computed += length
            reason = None
            if samples:
                num_tokens, reason, num_accepted = next(answers)
                if num_drafts or num_accepted:
                    most = min(num_drafts, num_tokens - 1)
                    assert 0 <= num_accepted <= most, f"{num_accepted} accepted drafts of sequence {seq.seq_id}"
                    seq.num_computed -= num_drafts - num_accepted
                    self._kv.drop_drafts(seq, num_accepted)
                if num_tokens == 1:
                    seq.num_known += 1
                else:
                    num_tokens = self._cut_forced(seq, num_tokens, num_accepted)
                    seq.append(num_tokens, num_accepted)
                got.append(num_tokens)
                seq.last_sampled_step = plan.step
                if reason is None and seq.num_known == seq.max_known:
                    reason = FinishReason.LENGTH
            if self._kv.others:
                self._kv.others.commit(seq, length)
            if self._aborting:
                reason = self._aborting.pop(seq.seq_id, reason)
            if reason is not None:
                finished.append(Finish(seq.seq_id, reason))
        assert next(answers, None) is None, "more answers than sampling rows"
        self._charge(compress(self._pending_seqs, plan.samples), got)
        for finish in finished:
            self._end(self._sequences[finish.seq_id], finish.reason)
        num_left = len(plan.seq_ids) - len(finished)
        self._is_settled = len(got) == sum(got) == len(plan.seq_ids) and len(self._running.decoding) == num_left
        return StepEvents(plan.step, tuple(finished), tuple(got), result.num_accepted if plan.drafts else ())

    def fail(self, plan: StepPlan) -> tuple[int, ...]:
        """Undo a step that did not complete: release the blocks that it took, and drop what it moved.

        Its sequences are preempted. They may be aborted; otherwise they are tried again.

        Returns:
            Ids of the plan's sequences.
        """
        assert plan is self._pending, "fail needs the last plan of schedule"
        self._pending = None
        self._leave_run()
        self._is_settled = False
        self._counters.num_failed_steps += 1
        stopped = {seq.seq_id: seq for seq in (*self._pending_seqs, *self._kv.resumed)}
        for seq in stopped.values():
            self._running.preempt(seq)
        self._kv.fail(stopped.values())
        for seq_id, reason in self._aborting.items():
            self._end(self._sequences[seq_id], reason)
        self._aborting.clear()
        return plan.seq_ids

    # -- steps that repeat --------------------------------------------------------------------------------------------

    def num_quiet_steps(self) -> int:
        """Number of next steps that certainly repeat the last one without a new block, if no sequence is ended and no
        command comes. A simulator may ``skip`` them."""
        return self._run.num_quiet_steps if self._can_repeat() and self._run is not None else 0

    def skip(self, num_steps: int) -> None:
        """Commit repeats of the last step in which each sequence got one token and continued, at most
        ``num_quiet_steps`` of them."""
        assert 0 < num_steps <= self.num_quiet_steps(), "so many repeats are not certain"
        assert self._run is not None
        self._run.advance(num_steps)
        self._step += num_steps

    def _can_repeat(self) -> bool:
        """Start a run of repeated steps; True if there is nothing to decide but new blocks."""
        running = self._running
        if self._kv.others or not self._is_settled or self._pending is not None or self._proposed:
            return False
        if running.prefilling or running.preempted:
            return False
        if len(self._queue) and running.num_running < self.config.max_num_seqs:
            return False
        if self._run is None:
            if not running.decoding:
                return False
            self._run = DecodeRun(running.decoding.copy(), self._kv, self.config.block_size)
        return True

    def _repeat(self) -> StepPlan | None:
        if not self._can_repeat() or self._run is None:
            return None
        plan = self._run.plan(self._step)
        self._pending_seqs = self._run.seqs
        return plan

    def _write_back(self) -> None:
        """Update the sequences from the run. Called before each use of them; decides nothing."""
        if self._run is not None:
            self._charge(self._run.seqs, [self._run.write_back()] * len(self._run.seqs))

    def _leave_run(self) -> None:
        self._write_back()
        if self._run is not None:
            self._run, self._is_settled = None, False

    def _end_run(self, result: StepResult) -> tuple[Finish, ...]:
        """End the sequences whose last token was produced by a step of the run, and the run with them."""
        run = self._run
        if run is None or not run.is_over(result):
            return ()
        self._leave_run()
        self._is_settled = True
        finished = run.finishes(result)
        for finish in finished:
            self._end(self._sequences[finish.seq_id], finish.reason)
        return finished

    # -- the lifecycle of a sequence ----------------------------------------------------------------------------------

    def _commit_prompt(self, seq: Sequence, length: int) -> None:
        if length == seq.prompt_left:
            self._running.end_prompt(seq)
            if seq.num_known == seq.num_prompt:
                seq.first_token_step = self._step - 1
        self._counters.num_prompt_tokens += length
        self._kv.publish(seq, seq.num_computed + length)

    def _cut_forced(self, seq: Sequence, num_tokens: int, num_accepted: int) -> int:
        """Number of tokens that a sequence got, limited by the output limit."""
        most = num_accepted + (self.config.max_forced_tokens if seq.request.allows_forced else 1)
        least = num_accepted + 1
        assert least <= num_tokens <= most, f"sequence {seq.seq_id} got {num_tokens} tokens, not {least}..{most}"
        return min(num_tokens, seq.max_known - seq.num_known)

    def _charge(self, seqs: Iterable[Sequence], got: list[int]) -> None:
        """Count generated tokens; in the fair order also by tenant."""
        self._counters.num_generation_tokens += sum(got)
        if self.config.order == "fair":
            for seq, num_tokens in zip(seqs, got, strict=True):
                self._ledger.charge(seq.request.tenant, num_tokens)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.state is SequenceState.WAITING:
            self._queue.remove(seq)
        else:
            self._running.remove(seq)
        seq.move_to(SequenceState.FINISHED)
        if self.config.enable_prefix_caching:
            self._kv.publish_end(seq)
        self._kv.release(seq)
        self._ledger.leave(seq.request.tenant)
        del self._sequences[seq.seq_id]
        self._finished.append(seq.finished(reason, self._step))
        self._counters.count_finish(seq, reason)

    def _count_lookups(self, admitted: Seq[int]) -> None:
        for seq_id in admitted:
            self._counters.count_lookup(self._sequences[seq_id])

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> SchedulerState:
        """State that decides all later steps, as a plain value. May be called between two steps, or during one."""
        self._write_back()
        contents: dict[bytes, int] = {}
        tenants: dict[str, int] = {}
        sequences = tuple([saved(seq, contents, tenants) for seq in self._sequences.values()])
        kv = self._kv.state(contents)
        served = tuple([(tenants.setdefault(name, len(tenants)), tokens) for name, tokens in self._ledger.items()])
        return SchedulerState(
            tuple(contents),
            tuple(tenants),
            self._next_id,
            self._step,
            self._planner.shares.clock,
            self._pending,
            tuple(self._proposed.items()),
            tuple(self._aborting.items()),
            sequences,
            kv,
            served,
            self._counters.copy(),
        )

    @classmethod
    def from_state(cls, config: SchedulerConfig, state: SchedulerState) -> Scheduler:
        """Create a scheduler that continues from a state, which must come from a scheduler with the same config."""
        core = cls(config)
        core._next_id, core._step, core._counters = state.next_id, state.step, state.counters.copy()
        core._planner.shares.clock = state.decode_clock
        for one in state.sequences:
            seq = core._sequences[one.seq_id] = restored(one, state.contents, state.tenants, config.groups)
            if seq.state is SequenceState.WAITING:
                core._queue.add(seq)
            else:
                core._running.insert(seq)
        core._kv.restore(state.kv, state.contents, core._sequences)
        served = [(state.tenants[place], tokens) for place, tokens in state.served]
        core._ledger.restore(served, [seq.request.tenant for seq in core._sequences.values()])
        if state.pending is not None:
            core._pending = state.pending
            core._pending_seqs = [core._sequences[seq_id] for seq_id in state.pending.seq_ids]
        core._proposed.update(state.proposed)
        core._aborting.update(state.aborting)
        return core

    # -- views and counts ---------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """True if a sequence waits, runs or is preempted."""
        return bool(self._sequences)

    @property
    def has_work(self) -> bool:
        """Same as `has_unfinished`: while a sequence is unfinished, no plan is empty."""
        return bool(self._sequences)

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that wait, run or are preempted."""
        return len(self._sequences)

    @property
    def num_running(self) -> int:
        return self._running.num_running

    @property
    def num_waiting(self) -> int:
        """Number of queued and preempted sequences."""
        return len(self._queue) + len(self._running.preempted)

    @property
    def num_held_blocks(self) -> int:
        """Number of device blocks that sequences hold."""
        return self._kv.pool.num_blocks - self._kv.pool.num_available

    def view(self, seq_id: int) -> SequenceView | None:
        """A copy of the public state of an unfinished sequence; None: there is no sequence with this id."""
        self._write_back()
        seq = self._sequences.get(seq_id)
        return None if seq is None else seq.view()

    def stats(self) -> SchedulerStats:
        """Counts and gauges. Changes nothing, so another thread may call it for approximate numbers."""
        unwritten = 0 if self._run is None else self._run.num_unwritten_tokens
        sizes = self._running.num_running, len(self._queue), len(self._running.preempted), self._queue.num_tokens
        return stats_of(self._counters, self._kv.pool, self._kv.host, sizes, self._step, unwritten)

    def drain_finished(self) -> tuple[FinishedSequence, ...]:
        """Take the sequences that ended since the last call, at most ``max_finished``."""
        finished = tuple(self._finished)
        self._finished.clear()
        return finished

    def check(self) -> None:
        """Assert conservation: every block and every sequence is in exactly one list."""
        self._write_back()
        self._kv.check(self._sequences.values())
        self._running.check(self._sequences, self._queue.sequences())
