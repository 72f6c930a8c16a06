"""Step loop of one replica: drains the inbox, then schedules, executes, samples, commits and publishes.

One thread owns all state: the one that calls ``step``, or ``run``, which calls it. Other threads reach it only through
the bounded inbox. The engine depends on neither a recorder nor HTTP; it calls an observer and passes outputs to sinks.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Callable

from lockstep.artifacts.model import Adapter
from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepEvents, StepPlan, StepResult
from lockstep.engine.adapters import EngineAdapters
from lockstep.engine.deadlines import Clock
from lockstep.engine.drafter import Drafter
from lockstep.engine.generation import Sink
from lockstep.engine.input_processing import prepare
from lockstep.engine.kv_store import KVStore
from lockstep.engine.kv_transfer import KVTransfer
from lockstep.engine.loading import LoadedModel
from lockstep.engine.metrics import EngineMetrics, MetricsSnapshot, Unscheduled, cache_config_labels, snapshot
from lockstep.engine.open_requests import OpenRequests, RecorderHook, SequenceFollower
from lockstep.engine.output_processing import OutputProcessor
from lockstep.engine.outputs import Published, RequestOutput, StepOutputs, TokenOutput
from lockstep.engine.queues import AbortCommand, Inbox, LoopMailboxes
from lockstep.engine.request import GenerationRequest
from lockstep.engine.sessions import EngineSessions, SessionChange, SessionReport
from lockstep.errors import LockstepError, RequestFailedError, UsageError
from lockstep.system import SYSTEM

log = logging.getLogger(__name__)

Observer = Callable[[StepPlan, StepResult, StepEvents], None]
OutputStream = AsyncGenerator[TokenOutput, None]
IDLE_WAIT_S = 1.0
"""Longest wait of `Engine.run` before it checks for work again."""


class Engine:
    """Serves one loaded model.

    Args:
        model: the loaded model; the engine does not close it.
        config: limits and policy of the scheduler; ``lockstep.engine.options.plan_config`` derives one from the
            geometry.
        clock: source of durations and deadlines.
        observer: called after each committed step, once its outputs are published, with the plan, its result and
            events.
        on_session: called on the engine's thread with each change of a session.
        recorder: records everything that decides a step.
        store: KV store outside of the device; None: there is none.
        kv_class: priority of this engine's blocks in the store; larger numbers are evicted first.
        drafter: source of drafts for speculative decoding; None: there are no drafts.
        wake: called by any thread when there is work that no client submitted.
        idle_wait_s: longest wait of `run` before it checks for work again.
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
        drafter: Drafter | None = None,
        wake: Callable[[], None] | None = None,
        idle_wait_s: float = IDLE_WAIT_S,
    ) -> None:
        self.model = model
        self._idle_wait_s = idle_wait_s
        self.config = config
        self.scheduler = Scheduler(config, recorder)
        self._inbox = Inbox()
        kv = None
        if store is not None and config.enable_prefix_caching:
            kv = KVTransfer(self.scheduler, model, store, kv_class, wake or self._inbox.wake)
        self.sessions = EngineSessions(self.scheduler, on_session or (lambda change: None), kv)
        self.adapters = EngineAdapters(model.adapters, config.max_num_queued_reqs)
        self._now_s = (clock or SYSTEM).now_s
        self._observer = observer
        self._metrics = EngineMetrics()
        self._fingerprint = Fingerprint()
        self._recorder = recorder
        if recorder is not None:
            recorder.opened(self.scheduler, self._fingerprint)
        self._requests = OpenRequests(
            model, self.scheduler, self.sessions, self.adapters, self._metrics, recorder, self._now_s
        )
        self._drafter = self._requests.drafter = drafter
        self._metrics.has_drafts = drafter is not None
        self._processor = OutputProcessor(model, self._metrics, self._requests.generations, self.adapters)
        self._running_thread_id = 0
        """Id of the thread in ``run``; 0: none."""
        self._ids = itertools.count()
        longest = model.text_limit(config) - (model.task != "generate")
        num_stages = model.executor.geometry.num_stages
        self._info = {"cache_config_info": cache_config_labels(config, num_stages, longest)}
        self._mailboxes = LoopMailboxes()

    def follow(self, follower: SequenceFollower) -> None:
        """Attach an observer of every sequence, and record the changes of the cache. Call this before the first
        request."""
        self._requests.follower = follower
        self.scheduler.follow_contents()

    # -- any thread -----------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, callback: Sink | None = None, *, request_id: int | None = None) -> int:
        """Queue a request and return its id at once.

        Without a callback, the whole answer is kept for ``result``. With one, every ``TokenOutput`` is passed to it on
        the engine's thread, and nothing is kept.

        Args:
            request_id: id from a caller that numbers requests across several engines; then all requests of this engine
                need one. Such a caller takes the outputs of each step as a whole, and nothing is kept for ``result``.

        Raises:
            InvalidParameterError, PromptTooLongError: the request can never be served as it is.
            QueueFullError: too many requests wait.
            UsageError: the engine was stopped.
        """
        adapter = self.adapters.find(request.adapter) if request.adapter else None
        live = prepare(self.model, self.config, request, adapter)
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
        except BaseException:  # an interrupt: the caller never receives this id
            self.abort(request_id)
            raise
        return request_id

    async def submit_async(self, request: GenerationRequest) -> RequestOutput:
        """Return the whole answer. Cancelling the await aborts the request."""
        async for output in self.stream(request):
            if output.request is not None:
                return output.request
        raise RequestFailedError("the stream ended without its last output; this is a bug in Lockstep")

    async def stream(self, request: GenerationRequest) -> OutputStream:
        """Yield the output of each step, and raise the request's error. Leaving the loop aborts the request."""
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

    def load_adapter(self, adapter: Adapter) -> None:
        """Make an adapter available to requests. It is loaded between two steps, when a request first needs it.

        Raises:
            UsageError: the model was loaded without adapters, or has no room for this one.
        """
        self.adapters.add(adapter)
        self._inbox.wake()

    def unload_adapter(self, name: str) -> None:
        """Make an adapter unavailable to further requests. It is unloaded when its open requests have ended.

        Raises:
            InvalidParameterError: there is no adapter of this name.
        """
        self.adapters.remove(name)
        self._inbox.wake()

    def abort(self, request_id: int) -> None:
        """End a request before its next step. Unknown and ended requests are ignored."""
        if request_id in self._requests.by_id:
            self._inbox.abort(request_id)

    def is_complete(self, request_id: int) -> bool:
        return request_id not in self._requests.by_id

    def result(self, request_id: int) -> RequestOutput | None:
        """Take the answer to a request that was submitted without a callback; None while it runs or once it was
        taken."""
        return self._requests.results.take(request_id)

    def drain_finished(self) -> tuple[RequestOutput, ...]:
        """Take every answer that ``result`` would return, in the order in which the requests ended."""
        return self._requests.results.take_all()

    def stop(self) -> None:
        """Reject new requests, and make ``run`` end after its step and abort the open requests. Does not wait."""
        self._inbox.close("this engine was stopped and takes no requests")

    @property
    def is_stopped(self) -> bool:
        """True when the engine takes no more requests, since it was stopped or ``run`` failed."""
        return self._inbox.is_closed

    def wait(self, timeout_s: float) -> None:
        """Sleep until a request is submitted or aborted, a deadline is due, the engine is stopped, or the timeout
        ends."""
        due_s = self._requests.deadlines.next_s
        if due_s is not None:
            timeout_s = min(timeout_s, max(0.0, due_s - self._now_s()))
        self._inbox.wait(timeout_s)

    def metrics(self) -> MetricsSnapshot:
        """A copy of all counters, consistent enough for monitoring. May be called from any thread."""
        num_waiting = self._inbox.num_requests + self.sessions.num_waiting + self.adapters.num_waiting
        unscheduled = Unscheduled(num_waiting, self._inbox.num_rejected)
        return snapshot(self._metrics, self.scheduler.stats(), unscheduled, self._info, self.adapters.use)

    @property
    def num_open(self) -> int:
        """Number of requests that were submitted and have not ended."""
        return len(self._requests.by_id)

    @property
    def num_running(self) -> int:
        """Number of sequences that are being computed. A request has ``n`` of them."""
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Number of sequences that are queued or preempted, plus requests that are not yet in the scheduler."""
        outside = self.sessions.num_waiting + self.adapters.num_waiting
        return self.scheduler.num_waiting + self._inbox.num_requests + outside

    @property
    def fingerprint(self) -> str:
        """Fingerprint of every decision so far, 16 hex digits; equal for equal runs."""
        return self._fingerprint.hexdigest()

    # -- the engine's thread --------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        is_busy = self.scheduler.has_unfinished or self.sessions.has_work or self.adapters.has_work
        return bool(self._inbox) or is_busy

    @property
    def num_free_places(self) -> int:
        """Number of sequences that the queue still accepts. Valid between steps, when the inbox is empty."""
        return self.config.max_num_queued_reqs - self.scheduler.num_waiting

    def session_reports(self) -> tuple[SessionReport, ...]:
        """All sessions, least recently used first. Call this between steps."""
        return self.sessions.reports(self._now_s())

    def run(self) -> None:
        """Run steps until ``stop``, waiting while there is no work. Requests that are then open end with ``abort``.

        Needs a thread of its own; raises UsageError if another thread runs the engine. Interrupts from executors and
        callbacks are logged, except on the main thread, where they are raised. A failure of the loop itself, or of an
        observer, is raised on any thread. Then every open request has ended with an error, and no more requests are
        accepted.
        """
        self._check_thread()
        if self._running_thread_id:
            raise UsageError("this engine is running; a callback or observer cannot call run() again")
        self._running_thread_id = threading.get_ident()
        try:
            while not self._inbox.is_closed:
                if not self._advance() and not self.sessions.has_work and not self.adapters.has_work:
                    self.wait(self._idle_wait_s)  # returns at once if a request came since the last wait
            self.abort_all()
        except BaseException as error:
            self._inbox.close(f"this engine failed and takes no requests ({error!r}); load the model again")
            self.abandon(RequestFailedError(f"the engine failed: {error!r}; load the model again"))
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
            # The step is over, its requests have their error, and no caller of this thread could handle it.
            log.exception("interrupted in the engine's thread")
            return True

    def _check_thread(self) -> None:
        if self._running_thread_id and self._running_thread_id != threading.get_ident():
            raise UsageError("another thread runs this engine's steps; submit requests and read their results instead")

    def run_until_idle(self) -> None:
        """Run steps until no work is left."""
        while self.has_work or self.num_waiting:
            if self.has_work:
                self.step()
            else:  # the store is still loading blocks
                self.wait(self._idle_wait_s)

    def abort_all(self) -> None:
        """Abort every request, waiting or running, because the engine is about to stop."""
        self.drain()
        for request_id in list(self._requests.by_id):
            self._requests.abort(request_id)
        self._mailboxes.dispatch(on_lost=self._requests.abort)

    def abandon(self, error: LockstepError) -> None:
        """Fail every request after a failure of the loop itself. The scheduler is not called, as its state may be
        inconsistent."""
        self.sessions.abandon()
        self.adapters.abandon()
        self._requests.abandon(error)
        self._mailboxes.dispatch(on_lost=lambda request_id: None)

    def step(self) -> StepOutputs:
        """Drain the inbox, then plan, execute and publish one step. Returns the outputs of all requests.

        An exception of the executor, the sampler or a grammar fails the step: its requests end with the reason, and the
        next step can run. Interrupts (not `Exception`) in the step or in callbacks, and exceptions of the observer, are
        raised here after the step. An exception of a signal handler may interrupt a decision; run steps on another
        thread to be safe from it.
        """
        self._check_thread()
        self.take()
        outputs = self._requests.outputs
        self.drain()
        if self._drafter is not None:
            self._propose(self._drafter)
        plan = self._requests.waits.schedule()
        if plan.has_work:
            self._run_plan(plan)
        else:
            assert not self.scheduler.has_unfinished, "sequences wait, but the plan is empty: the engine would hang"
        self._mailboxes.dispatch(on_lost=self._requests.abort)
        self._requests.raise_interrupt()
        return StepOutputs(plan if plan.has_work else None, outputs)

    def _propose(self, drafter: Drafter) -> None:
        """Propose the drafts of the next step."""
        drafts = self._processor.drafts = drafter.propose(self._requests.generations.values())
        if drafts:
            if self._recorder is not None:
                self._recorder.drafted(drafts)
            self.scheduler.propose({seq_id: len(tokens) for seq_id, tokens in drafts.items()})

    def take(self) -> Published:
        """Take what was published since the last call. Each step first discards what was not taken."""
        started, self._processor.started = self._processor.started, []
        return self._requests.take(started)

    def _run_plan(self, plan: StepPlan) -> None:
        try:
            samples = self._processor.compute(plan, self._now_s())
            now_s = self._now_s()
            result, touched = self._processor.accept(plan, samples, now_s)
            self._requests.name_answers(touched)
        except BaseException as error:  # an error of a step ends its requests with the reason, not the engine
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
        failed = self._processor.undo_finishes(plan)
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
        """Take in order: requests that waited for a session or for an adapter, submitted requests and aborts, due
        deadlines. Once per step."""
        now_s = self._now_s()
        if self.sessions.has_work:
            for live in self.sessions.ready(now_s):
                self._requests.schedule(live, now_s)
        for live in self.adapters.ready():
            self._requests.schedule(live, now_s)
        for command in self._inbox.take():
            if isinstance(command, AbortCommand):
                self._requests.end(command.request_id, FinishReason.ABORT)
            else:
                self._requests.add(command, now_s)
        self._requests.expire(now_s)
