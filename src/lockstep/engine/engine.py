"""Step loop of one replica: inbox, schedule, execute, sample, commit, publish.

One thread owns all state: the one that calls ``step``, or ``run``, which calls it. Other threads reach it through the
bounded inbox only. The engine depends on no recorder and no HTTP; it takes an observer and hands outputs to sinks.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Callable

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepEvents, StepPlan, StepResult
from lockstep.engine.deadlines import Clock, SystemClock
from lockstep.engine.generation import Sink
from lockstep.engine.input_processing import prepare
from lockstep.engine.kv_store import KVStore
from lockstep.engine.kv_transfer import KVTransfer
from lockstep.engine.loading import LoadedModel
from lockstep.engine.metrics import EngineMetrics, MetricsSnapshot, Unscheduled, cache_config_labels, snapshot
from lockstep.engine.open_requests import OpenRequests, RecorderHook, SequenceFollower
from lockstep.engine.output_processing import OutputProcessor
from lockstep.engine.outputs import Published, RequestOutput, StepOutputs, TokenOutput
from lockstep.engine.queues import Abort, Inbox, LoopMailboxes
from lockstep.engine.request import GenerationRequest
from lockstep.engine.sessions import SessionChange, SessionReport, Sessions
from lockstep.errors import LockstepError, RequestFailedError, UsageError

log = logging.getLogger(__name__)

Observer = Callable[[StepPlan, StepResult, StepEvents], None]
OutputStream = AsyncGenerator[TokenOutput, None]
IDLE_WAIT_S = 1.0
"""Longest sleep of `Engine.run` before it looks for work unasked."""


class Engine:
    """Serves one loaded model.

    Args:
        model: what loading produced; the engine does not close it.
        config: limits and policy of the scheduler; ``lockstep.engine.options.plan_config`` makes one from the geometry.
        clock: where durations and deadlines come from.
        observer: called after each committed step, when its outputs are told, with the plan, its result and its events.
        on_session: called on the engine's thread with each change of a session.
        recorder: listens to all that decides a step.
        store: where blocks are kept outside of the device; None: nowhere.
        kv_class: priority of what is kept there; larger numbers are given up first.
        wake: called by any thread when there is something to do that nobody submitted.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: SchedulerConfig,
        *,
        clock: Clock | None = None,
        observer: Observer | None = None,
        on_session: Callable[[SessionChange], None] | None = None,
        recorder: RecorderHook | None = None,
        store: KVStore | None = None,
        kv_class: int = 0,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.scheduler = Scheduler(config, recorder)
        self._inbox = Inbox()
        kv = None
        if store is not None and config.enable_prefix_caching:
            kv = KVTransfer(self.scheduler, model, store, kv_class, wake or self._inbox.wake)
        self.sessions = Sessions(self.scheduler, on_session or (lambda change: None), kv)
        self._now_s = (clock or SystemClock()).now_s
        self._observer = observer
        self._metrics = EngineMetrics()
        self._fingerprint = Fingerprint()
        self._recorder = recorder
        if recorder is not None:
            recorder.opened(self.scheduler, self._fingerprint)
        self._requests = OpenRequests(model, self.scheduler, self.sessions, self._metrics, recorder, self._now_s)
        self._processor = OutputProcessor(model, self._metrics, self._requests.generations)
        self._running_thread_id = 0
        """Id of the thread in ``run``; 0: none."""
        self._ids = itertools.count()
        self._info = {"cache_config_info": cache_config_labels(config)}
        self._mailboxes = LoopMailboxes()

    def follow(self, follower: SequenceFollower) -> None:
        """Attach an observer of every sequence, and keep the changes of the cache; before the first request."""
        self._requests.follower = follower
        self.scheduler.follow_contents()

    # -- any thread -----------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, callback: Sink | None = None, *, request_id: int | None = None) -> int:
        """Queue a request; returns its id at once.

        Without a callback the whole answer is kept for ``result``; with one, every ``TokenOutput`` is handed to it on
        the engine's thread, and nothing is kept.

        Args:
            request_id: for a caller who counts requests over several engines, and then for all of this one's. Such a
                caller takes what every step brought, as a whole, and nothing is kept for ``result``.

        Raises:
            InvalidParameterError, PromptTooLongError: the request can never be served as it is.
            QueueFullError: too many requests wait.
            UsageError: the engine was stopped.
        """
        live = prepare(self.model, self.config, request)
        self._inbox.check_room()
        live.is_kept = callback is None and request_id is None
        live.request_id = request_id = next(self._ids) if request_id is None else request_id
        live.arrival_s, live.sink = self._now_s(), callback
        self._requests.by_id[request_id] = live
        try:
            self._inbox.put(live)
        except UsageError:
            self._requests.by_id.pop(request_id, None)
            raise
        except BaseException:  # an interrupt: nobody will ever know this id
            self.abort(request_id)
            raise
        return request_id

    async def submit_async(self, request: GenerationRequest) -> RequestOutput:
        """The whole answer; leaving the await aborts the request."""
        async for output in self.stream(request):
            if output.request is not None:
                return output.request
        raise RequestFailedError("the stream ended without its last output; this is a bug in Lockstep")

    async def stream(self, request: GenerationRequest) -> OutputStream:
        """Yield what each step brings; an error of the request is raised; leaving the loop aborts the request."""
        import asyncio

        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[TokenOutput] = asyncio.Queue()
        request_id = self.submit(request, lambda output: self._mailboxes.post(loop, queue, output))
        try:
            while True:
                output = await queue.get()
                if output.error is not None:
                    raise output.error
                yield output
                if output.request is not None:
                    return
        finally:
            if not self.is_complete(request_id):
                self.abort(request_id)

    def abort(self, request_id: int) -> None:
        """End a request before its next step; an unknown or ended one is left alone."""
        if request_id in self._requests.by_id:
            self._inbox.abort(request_id)

    def is_complete(self, request_id: int) -> bool:
        return request_id not in self._requests.by_id

    def result(self, request_id: int) -> RequestOutput | None:
        """The answer to a request that was submitted without a callback, once; None while it runs or when read."""
        return self._requests.results.take(request_id)

    def drain_finished(self) -> tuple[RequestOutput, ...]:
        """Every answer that ``result`` would give, in the order in which they ended; they count as read then."""
        return self._requests.results.take_all()

    def stop(self) -> None:
        """Refuse requests from now on, and have ``run`` end with its step and abort what is open; does not wait."""
        self._inbox.close("this engine was stopped and takes no requests")

    @property
    def is_stopped(self) -> bool:
        """True when no more requests are taken, since it was stopped or ``run`` broke."""
        return self._inbox.is_closed

    def wait(self, timeout_s: float) -> None:
        """Sleep until something is submitted or aborted, a deadline is due, it is stopped, or the time is up."""
        due_s = self._requests.deadlines.next_s
        if due_s is not None:
            timeout_s = min(timeout_s, max(0.0, due_s - self._now_s()))
        self._inbox.wait(timeout_s)

    def metrics(self) -> MetricsSnapshot:
        """A consistent enough copy of all counters; may be called from any thread."""
        unscheduled = Unscheduled(self._inbox.num_requests + self.sessions.num_waiting, self._inbox.num_rejected)
        return snapshot(self._metrics, self.scheduler.stats(), unscheduled, self._info)

    @property
    def num_open(self) -> int:
        """Requests that were submitted and have not ended."""
        return len(self._requests.by_id)

    @property
    def num_running(self) -> int:
        """Sequences that are being computed; a request has ``n`` of them."""
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that are queued or preempted, and requests that the scheduler has not seen yet."""
        return self.scheduler.num_waiting + self._inbox.num_requests + self.sessions.num_waiting

    @property
    def fingerprint(self) -> str:
        """16 hex digits over every decision so far; equal for equal runs."""
        return self._fingerprint.hexdigest()

    # -- the engine's thread --------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._inbox) or self.scheduler.has_unfinished or self.sessions.has_work

    @property
    def num_free_places(self) -> int:
        """Sequences that the queue takes before it refuses; between steps, when the inbox is drained."""
        return self.config.max_num_queued_reqs - self.scheduler.num_waiting

    def session_reports(self) -> tuple[SessionReport, ...]:
        """All sessions, least recently used first; between steps."""
        return self.sessions.reports(self._now_s())

    def run(self) -> None:
        """Step while there is work and wait while there is none, until ``stop``; what is open then ends with ``abort``.

        For a thread of its own; UsageError where another has it. Interrupts out of executors and callbacks are logged
        there, and come out on the main thread. So does on any what breaks the loop itself, or what an observer raises:
        every open request has ended with an error then, and no more are taken.
        """
        self._check_thread()
        if self._running_thread_id:
            raise UsageError("this engine is running; a callback or observer cannot run it once more")
        self._running_thread_id = threading.get_ident()
        try:
            while not self._inbox.is_closed:
                if not self._advance() and not self.sessions.has_work:
                    self.wait(IDLE_WAIT_S)  # not at all where somebody came since the last wait
            self.abort_all()
        except BaseException as error:
            self._inbox.close(f"this engine broke and takes no requests ({error!r}); load the model again")
            self.abandon(RequestFailedError(f"the engine broke: {error!r}; load the model again"))
            raise
        finally:
            self._running_thread_id = 0

    def _advance(self) -> bool:
        """Make one step of ``run``; False: there was nothing to compute."""
        try:
            return self.step().plan is not None
        except Exception:
            raise
        except BaseException:
            if threading.current_thread() is threading.main_thread():
                raise
            # The step is over, its requests know, and nobody above this thread can be interrupted.
            log.exception("an interrupt in an engine's thread")
            return True

    def _check_thread(self) -> None:
        if self._running_thread_id and self._running_thread_id != threading.get_ident():
            raise UsageError("another thread runs this engine's steps; submit to it, and take results from it")

    def run_until_idle(self) -> None:
        """Step until nothing is left to do."""
        while self.has_work or self.num_waiting:
            if self.has_work:
                self.step()
            else:  # blocks are on their way back
                self.wait(IDLE_WAIT_S)

    def abort_all(self) -> None:
        """End every request, waiting or running: the engine is about to stop."""
        self.drain()
        for request_id in list(self._requests.by_id):
            self._requests.abort(request_id)
        self._mailboxes.dispatch(on_lost=self._requests.abort)

    def abandon(self, error: LockstepError) -> None:
        """The loop itself broke: tell every caller, without a word to a scheduler that cannot be trusted any more."""
        self.sessions.abandon()
        self._requests.abandon(error)
        self._mailboxes.dispatch(on_lost=lambda request_id: None)

    def step(self) -> StepOutputs:
        """Drain the inbox, then plan, execute and publish one step; returns what it did, for all requests.

        Whatever the executor, the sampler or a grammar raises fails the step: its requests end with the reason and the
        next step can come. Interrupts (no `Exception`) among it or out of callbacks, and what the observer raises, come
        out of here when the step is over. A signal's may come amid a decision: to go on then, step on another thread.
        """
        self._check_thread()
        self.take()
        outputs = self._requests.outputs
        self.drain()
        plan = self._requests.waits.schedule()
        if plan.has_work:
            self._run_plan(plan)
        else:
            assert not self.scheduler.has_unfinished, "sequences wait, but the plan is empty: nothing would ever change"
        self._mailboxes.dispatch(on_lost=self._requests.abort)
        self._requests.raise_interrupt()
        return StepOutputs(plan if plan.has_work else None, outputs)

    def take(self) -> Published:
        """Take what was published since the last call, or since the last step began, which throws away what is left."""
        started, self._processor.started = self._processor.started, []
        return self._requests.take(started)

    def _run_plan(self, plan: StepPlan) -> None:
        try:
            samples = self._processor.compute(plan, self._now_s())
            now_s = self._now_s()
            result, touched = self._processor.accept(plan, samples, now_s)
            self._requests.name_answers(touched)
        except BaseException as error:  # whatever a step raises ends its requests with the reason, never the engine
            log.exception("step %d failed", plan.step)
            self._fail_step(plan, error)
            return
        events = self.scheduler.commit(plan, result)
        record = self._fingerprint.observe(plan, events)
        if self._recorder is not None:
            self._recorder.committed(record, result, touched)
        self._requests.settle(events.finished, touched, now_s)
        if self._observer is not None:
            try:
                self._observer(plan, result, events)
            except BaseException as error:
                self._requests.interrupt = error

    def _fail_step(self, plan: StepPlan, error: BaseException) -> None:
        self._metrics.num_failed_steps += 1
        if not isinstance(error, Exception):
            self._requests.interrupt = error
        failed = self._processor.take_back(plan)
        self.scheduler.fail(plan)
        record = self._fingerprint.observe_failure(plan)
        if self._recorder is not None:
            self._recorder.failed(record)
        if not isinstance(error, LockstepError):
            error, cause = RequestFailedError(f"step {plan.step} failed: {error!r}"), error
            error.__cause__ = cause
        for request_id in failed:
            self._requests.end(request_id, FinishReason.ERROR, error)

    def drain(self) -> None:
        """Take what waited for a session, then what was submitted, in order, then what is due; once per step."""
        now_s = self._now_s()
        if self.sessions.has_work:
            for live in self.sessions.ready(now_s):
                self._requests.schedule(live, now_s)
        for command in self._inbox.take():
            if isinstance(command, Abort):
                self._requests.end(command.request_id, FinishReason.ABORT)
            else:
                self._requests.add(command, now_s)
        self._requests.expire(now_s)
