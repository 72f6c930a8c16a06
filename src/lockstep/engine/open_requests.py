"""Open requests of one engine: gives each its sequences and ends it. Engine thread only, except `by_id`.

A request ends once, with its last sequence or before it has any. When it ends, its sink gets the last output, its
session keeps its blocks, and its result is stored before the request is removed from `by_id`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.prefix import block_hashes
from lockstep.core.request import CommandListener, FinishReason
from lockstep.core.scheduler import Scheduler
from lockstep.core.sequence import FinishedSequence
from lockstep.core.step import Finish, StepResult
from lockstep.engine.adapters import EngineAdapters
from lockstep.engine.deadlines import Deadlines
from lockstep.engine.detokenizer import Detokenizer
from lockstep.engine.drafter import Drafter, Drafts
from lockstep.engine.generation import Generation, LiveRequest
from lockstep.engine.loading import LoadedModel
from lockstep.engine.metrics import EngineMetrics
from lockstep.engine.outputs import Published, Started, TokenOutput
from lockstep.engine.queues import Results
from lockstep.engine.sessions import EngineSessions
from lockstep.engine.wait_reasons import ADAPTER, WaitSampler
from lockstep.errors import LockstepError, QueueFullError, RequestFailedError
from lockstep.executors.base import SequenceObserver
from lockstep.executors.sampling import SamplerState

log = logging.getLogger(__name__)


class RecorderHook(CommandListener, Protocol):
    """Observer of everything that decides an engine's steps. The scheduler reports commands, the engine the rest.

    Called in order on the engine's thread; never raises.
    """

    def opened(self, scheduler: Scheduler, fingerprint: Fingerprint) -> None:
        """Report the scheduler whose decisions follow. Called once, before all other methods, on any thread."""
        ...

    def joined(self, generation: Generation, waited_s: float) -> None:
        """Report a sequence that was just added to the scheduler, and how long it waited for that."""
        ...

    def committed(self, record: bytes | None, result: StepResult, touched: Sequence[Generation]) -> None:
        """Report a step's result. ``record`` is what it closed, ``touched`` are the sequences that sampled."""
        ...

    def ended(self, generation: Generation) -> None:
        """Report a sequence that has ended, in a step or outside; its last token and reason are set."""
        ...

    def drafted(self, drafts: Drafts) -> None:
        """Report the tokens of the drafts whose numbers are proposed next."""
        ...

    def failed(self, record: bytes | None) -> None:
        """Report a failed step; ``record`` is what it closed."""
        ...


class SequenceFollower(Protocol):
    """Observer of sequences, called on the engine's thread. It never raises."""

    def joined(self, generation: Generation) -> None:
        """Report a new sequence."""
        ...

    def ended(self, generation: Generation) -> None:
        """Report a sequence that has ended; all of its blocks that can be hit have hashes."""
        ...


class OpenRequests:
    """Owns the requests of an engine from their submission to their last output.

    Args:
        recorder: called when sequences begin and end.
    """

    def __init__(
        self,
        model: LoadedModel,
        scheduler: Scheduler,
        sessions: EngineSessions,
        adapters: EngineAdapters,
        metrics: EngineMetrics,
        recorder: RecorderHook | None,
        now_s: Callable[[], float],
    ) -> None:
        self._model = model
        self._observer = model.executor if isinstance(model.executor, SequenceObserver) else None
        self._scheduler = scheduler
        self._sessions = sessions
        self._adapters = adapters
        self._metrics = metrics
        self._recorder = recorder
        self._now_s = now_s
        self.follower: SequenceFollower | None = None
        """Observer of sequences, in addition to the recorder."""
        self.drafter: Drafter | None = None
        """Source of drafts, which gets the ended sequences."""
        self.by_id: dict[int, LiveRequest] = {}
        """Requests that have not ended; submission adds them here."""
        self.generations: dict[int, Generation] = {}
        """Unfinished sequences of the open requests."""
        self.waits = WaitSampler(scheduler, self.generations, now_s)
        sessions.on_return = self.waits.record_wait
        self._accepted: list[int] = []
        """Ids of requests that entered the queue since the last `take`."""
        self.outputs: list[TokenOutput] = []
        """Outputs since the last `take`, which starts a new list."""
        self.interrupt: BaseException | None = None
        """Interrupt that is raised when the step is over."""
        self.results = Results(scheduler.config.max_finished)
        self.deadlines = Deadlines()

    def take(self, started: list[Started]) -> Published:
        """Take all outputs and events since the last call, together with the requests that have started."""
        taken = Published(self._accepted, self.outputs, started, self.waits.take())
        self._accepted, self.outputs = [], []
        return taken

    def expire(self, now_s: float) -> None:
        """End the requests whose deadline has passed."""
        for due in self.deadlines.pop_due(now_s):
            live = self.by_id.get(due.request_id)
            if live is not None and (due.while_running or live.first_scheduled_s is None):
                self.end(due.request_id, FinishReason.DEADLINE, due.error())

    def add(self, live: LiveRequest, now_s: float) -> None:
        """Add a request to the queue. A rejected request ends with the reason."""
        try:
            is_admitted = self._sessions.enter(live, now_s)
        except QueueFullError as error:
            self._refuse(live, error)
            return
        if not is_admitted:
            self.waits.record_wait(live)
        elif not self.schedule(live, now_s):
            return
        request = live.request
        self.deadlines.add(live.request_id, live.arrival_s, request.queue_deadline_s, request.deadline_s)
        self.deadlines.forget_stale(self.by_id.keys())
        self._accepted.append(live.request_id)

    def schedule(self, live: LiveRequest, now_s: float) -> bool:
        """Add the request's sequences to the scheduler, or let the request wait for its adapter; False: it was
        rejected, which ended the request."""
        self.by_id.setdefault(live.request_id, live)  # an internal KV check was not submitted
        try:
            if not self._adapters.enter(live):
                self.waits.record_wait(live, ADAPTER)
                return True
        except LockstepError as error:
            self._refuse(live, error)
            return False
        first: int | None = None
        for index in range(live.num_open):
            try:
                seq_id = self._scheduler.add(live.core_request_of(first))
            except LockstepError as error:
                self._refuse(live, error)
                return False
            first = seq_id if first is None else first
            generation = self._open(live, index, seq_id)
            if self._recorder is not None:
                self._recorder.joined(generation, max(0.0, now_s - live.arrival_s))
            if self.follower is not None:
                self.follower.joined(generation)
        return True

    def name_answers(self, touched: Iterable[Generation]) -> None:
        """Name the blocks of answers that end with the current step, so that they can be hit."""
        if self._scheduler.config.enable_prefix_caching:
            for generation in touched:
                if generation.finish_reason is not None or generation.is_full:
                    self._name_answer(generation, generation.finish_reason)

    def _name_answer(self, generation: Generation, reason: FinishReason | None) -> None:
        """Name the blocks of an answer, unless its model has failed or the request is an embedding request."""
        if reason is not FinishReason.ERROR and generation.pooler is None:
            known, size = generation.block_hashes, self._scheduler.config.block_size
            live, ids = generation.live, generation.computed_ids
            generation.block_hashes = block_hashes(live.namespace, ids, size, known, live.adapter_start)
            self._scheduler.name_answer(generation.seq_id, generation.block_hashes[len(known) :])

    def end(self, request_id: int, reason: FinishReason, error: LockstepError | None = None) -> None:
        """End the unfinished sequences of a request, outside of a step."""
        live = self.by_id.get(request_id)
        if live is None:
            return
        live.error = error or live.error
        if not live.generations:  # it waited for a session or for its blocks
            self._refuse(live, error or RequestFailedError("the request was aborted before it began"), reason)
            return
        now_s = self._now_s()
        for generation in live.generations:
            if generation.finish_reason is None:
                if self._scheduler.config.enable_prefix_caching:
                    self._name_answer(generation, reason)
                self._scheduler.abort(generation.seq_id, reason)
                self._copy_counts(self._scheduler.drain_finished())
                self._close(generation, reason, now_s)
                self._deliver((generation,), now_s)
                self._retire(generation.seq_id)

    def abort(self, request_id: int) -> None:
        self.end(request_id, FinishReason.ABORT)

    def settle(self, finished: Sequence[Finish], touched: Iterable[Generation], now_s: float) -> None:
        """Publish a step's outputs and close its finished sequences. Requests whose sinks raise are aborted."""
        self._copy_counts(self._scheduler.drain_finished())
        for finish in finished:
            self._close(self.generations[finish.seq_id], finish.reason, now_s)
        lost = self._deliver(touched, now_s)
        for finish in finished:
            self._retire(finish.seq_id)
        for request_id in lost:
            self.abort(request_id)

    def abandon(self, error: LockstepError) -> None:
        """End all requests with an error, without calling the scheduler."""
        now_s = self._now_s()
        for live in list(self.by_id.values()):
            live.error = error
            for generation in live.generations:
                if generation.finish_reason is None:
                    self._close(generation, FinishReason.ERROR, now_s)
                    self._deliver((generation,), now_s)
            if not live.generations:
                self._refuse(live, error)

    def raise_interrupt(self) -> None:
        """Raise the interrupt that was held until the end of the step."""
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            raise interrupt

    def _refuse(self, live: LiveRequest, error: LockstepError, reason: FinishReason = FinishReason.ERROR) -> None:
        """End a request that the scheduler rejected, including siblings that it had accepted."""
        self._metrics.admission_rejections += isinstance(error, QueueFullError)
        if live.generations:
            live.num_open = len(live.generations)
            self.end(live.request_id, reason, error)
            return
        live.error, live.num_open = error, 0
        now_s = self._now_s()
        self._metrics.count_finished(reason)
        self._finish(live, now_s)
        request = live.output(now_s)
        self._publish(live, TokenOutput(live.request_id, 0, (), "", reason, error=error, request=request))

    def _open(self, live: LiveRequest, index: int, seq_id: int) -> Generation:
        """Create the state of one sequence of a request that was added to the scheduler."""
        model = self._model
        sampler = SamplerState(live.sampling, live.seed + index, live.prompt_ids, model.vocab_size)
        detokenizer = Detokenizer(
            model.tokenizer,
            after=live.prompt_ids[-1],
            verbatim=bool(live.grammars),
            shown=live.shown_ids,
        )
        generation = Generation(live, index, seq_id, sampler, detokenizer, self._scheduler.config.max_forced_tokens)
        live.generations.append(generation)
        self.generations[seq_id] = generation
        if self._observer is not None:
            self._observer.begin(seq_id, live.prompt_ids, live.max_output_tokens)
        return generation

    def _retire(self, seq_id: int) -> None:
        del self.generations[seq_id]
        if self._observer is not None:
            self._observer.end(seq_id)

    def _publish(self, live: LiveRequest, output: TokenOutput) -> bool:
        """Add an output to those of the step and call the request's sink; False: the sink raised, which must not affect
        the engine."""
        self.outputs.append(output)
        sink = live.sink
        if sink is None:
            return True
        try:
            sink(output)
        except BaseException as error:  # a caller's code may raise anything
            log.exception("the callback of request %d raised; the request is aborted", output.request_id)
            if not isinstance(error, Exception):
                self.interrupt = error
            return False
        return True

    def _deliver(self, touched: Iterable[Generation], now_s: float) -> list[int]:
        """Publish the output of each sequence. Returns the requests whose sink raised."""
        lost: list[int] = []
        for generation in touched:
            live = generation.live
            outputs, generation.early_outputs = [*generation.early_outputs, generation.take_output(now_s)], []
            for output in outputs:
                if live.sink is None:
                    self.outputs.append(output)
                elif not self._publish(live, output):
                    lost.append(live.request_id)
                    break
        return lost

    def _copy_counts(self, finished: tuple[FinishedSequence, ...]) -> None:
        """Copy the scheduler's counts for sequences that ended."""
        for sequence in finished:
            live = self.generations[sequence.seq_id].live
            live.num_preemptions += sequence.num_preemptions
            if sequence.seq_id == live.generations[0].seq_id:
                live.num_cached_tokens = sequence.num_cached_tokens

    def _close(self, generation: Generation, reason: FinishReason, now_s: float) -> None:
        """Update the metrics for a sequence that ended, and for its request if it was the last one."""
        generation.end(reason)
        if self._recorder is not None:
            self._recorder.ended(generation)
        if self.follower is not None:
            self.follower.ended(generation)
        if self.drafter is not None:
            self.drafter.ended(generation)
        live = generation.live
        live.num_open -= 1
        self._metrics.observe_finished(generation.span(), generation.finish_reason or reason, now_s)
        if live.num_open == 0:
            self._finish(live, now_s)

    def _finish(self, live: LiveRequest, now_s: float) -> None:
        self._sessions.leave(live, now_s)
        self._adapters.leave(live)
        if live.generations:
            self._metrics.observe_request([generation.num_output for generation in live.generations])
        if live.is_kept:
            self.results.keep(live.output(now_s))
        self.by_id.pop(live.request_id, None)  # after its result is stored, as is_complete reads this
