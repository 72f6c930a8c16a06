"""The device worker: one device, its replicas, and one loop that hands out their steps.

Four kinds of threads meet here. The receiving thread calls `handle`: it checks and queues requests, and answers what
must be answered while a step runs. The step thread runs `run`: it alone touches schedulers and executors. One loading
thread opens replicas while others serve; few preparing threads build grammars, so that a slow one delays no abort.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from lockstep.core.step import StepEvents, StepPlan, StepResult
from lockstep.engine.clock import Clock, SystemClock
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.sessions import SessionChange
from lockstep.errors import (
    ExecutorError,
    LockstepError,
    QueueFullError,
    RequestFailedError,
    UnavailableError,
    UsageError,
)
from lockstep.worker.flight.options import TraceOptions, open_recorder
from lockstep.worker.messages import (
    Abort,
    AskHealth,
    AskMetrics,
    AskSessions,
    Check,
    Checked,
    Command,
    EndSession,
    Event,
    HealthReport,
    Load,
    LoadFailed,
    Loading,
    MetricsReport,
    Outputs,
    PrefixCacheReset,
    Prioritise,
    Refused,
    ResetPrefixCache,
    SessionsChanged,
    SessionsReport,
    SessionsSwept,
    Stop,
    Submit,
    Sweep,
    Unload,
    Unloaded,
    WatchSteps,
)
from lockstep.worker.replica import Listeners, Replica, open_replica, throttled
from lockstep.worker.steps import StepReport, StepSampler
from lockstep.worker.turns import Turns

log = logging.getLogger(__name__)

Emit = Callable[[Event], None]
"""Called by several threads; must not block."""
Order = Unload | Check | ResetPrefixCache | AskSessions | Sweep | EndSession
"""What the step thread does between two steps."""
IDLE_WAIT_S = 1.0
NUM_PREPARERS = 2
MAX_PREPARING = 1024
"""Requests whose grammar is being built or waits for it."""


class DeviceWorker:
    """Obeys commands and emits events; see `lockstep.worker.messages`.

    Args:
        emit: where events go.
        clock: measures steps.
        trace: what is recorded of them; None: nothing.
    """

    def __init__(self, emit: Emit, clock: Clock | None = None, trace: TraceOptions | None = None) -> None:
        self._emit = emit
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._replicas: dict[str, Replica] = {}
        """In order of loading; replaced and never changed, so that any thread may look."""
        self._taken: set[str] = set()
        """Keys that are loading or loaded."""
        self._priorities: dict[str, int] = {}
        """Their classes; replaced like the replicas."""
        self._classes: dict[str, int] = {}
        """Those of the replicas, as the step thread saw them last."""
        self._classes_of: tuple[dict[str, Replica], dict[str, int]] = {}, {}
        self._orders: deque[Order] = deque()
        """As many as were asked; each is answered once."""
        self._preparing: dict[int, bool] = {}
        """Requests that no engine has yet, and whether they were aborted meanwhile."""
        self._accepted: list[int] = []
        self._outputs: list[TokenOutput] = []
        self._changes: list[SessionChange] = []
        """Of the sessions of the replica that steps or obeys."""
        self._plan: StepPlan | None = None
        """Of the step that has just been committed."""
        self._turns = Turns()
        self._recorder = None if trace is None else open_recorder(trace, self._turns)
        self._sampler = StepSampler()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._is_idle = True
        self._progress_s = 0.0
        self._loads = ThreadPoolExecutor(1, "lockstep-load")
        self._preparers = ThreadPoolExecutor(NUM_PREPARERS, "lockstep-prepare")

    # -- the receiving thread -------------------------------------------------------------------------------------

    def handle(self, command: Command) -> None:
        """Obey, or see to it that another thread does; never waits for a step."""
        if self._stopping.is_set():
            return
        match command:
            case Submit():
                self._take(command)
            case Abort(replica, request_ids):
                self._abort(replica, request_ids)
            case AskMetrics(ask_id):
                reports = {key: replica.metrics() for key, replica in self._replicas.items()}
                self._emit(MetricsReport(ask_id, reports))
            case AskHealth(ask_id):
                self._emit(self._health(ask_id))
            case Load():
                self._start_loading(command)
            case Prioritise(replica, priority):
                if replica in self._taken:
                    self._prioritise(replica, priority)
            case Unload():  # behind the load that it may have to wait for
                self._loads.submit(self._order, command)
            case Check() | ResetPrefixCache() | AskSessions() | Sweep() | EndSession():
                self._order(command)
            case WatchSteps(max_per_s):
                self._sampler.watch(max_per_s)
            case Stop():
                self.stop()

    def stop(self) -> None:
        """Make the step thread end: it frees everything on its way out."""
        self._stopping.set()
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._preparers.shutdown(wait=False, cancel_futures=True)
        self._wake.set()

    def _prioritise(self, replica: str, priority: int) -> None:
        with self._lock:
            self._priorities = {**self._priorities, replica: priority}

    def _order(self, command: Order) -> None:
        self._orders.append(command)
        self._wake.set()

    def _take(self, submit: Submit) -> None:
        replica, constraint = self._replicas.get(submit.replica), submit.request.params.constraint
        if replica is None:
            self._emit(Refused(submit.request_id, _not_loaded(submit.replica)))
        elif constraint is None or replica.engine.model.grammars.is_ready(constraint):
            self._submit(replica, submit)
        elif len(self._preparing) >= MAX_PREPARING:
            error = QueueFullError(f"{MAX_PREPARING} requests already wait for their grammars; try again later")
            self._emit(Refused(submit.request_id, error))
        else:
            with self._lock:
                self._preparing[submit.request_id] = False
            self._preparers.submit(self._prepare, replica, submit).add_done_callback(_log_defect)

    def _prepare(self, replica: Replica, submit: Submit) -> None:
        """On a preparing thread: as `_submit`, unless the request was aborted meanwhile."""
        if not self._preparing[submit.request_id]:
            self._submit(replica, submit)
        with self._lock:
            was_aborted = self._preparing.pop(submit.request_id)
        if was_aborted:
            replica.engine.abort(submit.request_id)
            self._wake.set()

    def _submit(self, replica: Replica, submit: Submit) -> None:
        try:
            replica.engine.submit(submit.request, self._outputs.append, request_id=submit.request_id)
        except LockstepError as error:
            self._emit(Refused(submit.request_id, error))
        except Exception as error:  # a defect of ours or a wrong type: that request's end, and nobody else's
            log.exception("request %d cannot be prepared", submit.request_id)
            self._emit(Refused(submit.request_id, RequestFailedError(f"it cannot be prepared: {error!r}")))
        if self._replicas.get(submit.replica) is not replica:  # unloaded meanwhile: nobody will look into its inbox
            self._emit(Refused(submit.request_id, _not_loaded(submit.replica)))
        self._wake.set()

    def _abort(self, key: str, request_ids: tuple[int, ...]) -> None:
        with self._lock:
            for request_id in request_ids:
                if request_id in self._preparing:
                    self._preparing[request_id] = True
        replica = self._replicas.get(key)
        if replica is not None:
            for request_id in request_ids:
                replica.engine.abort(request_id)
            self._wake.set()

    def _health(self, ask_id: int) -> HealthReport:
        engines = [replica.engine for replica in self._replicas.values()]
        is_waiting = not self._is_idle and any(engine.has_work for engine in engines)
        return HealthReport(
            ask_id,
            max(0.0, time.monotonic() - self._progress_s) if is_waiting else 0.0,
            sum(engine.scheduler.num_running for engine in engines),
            sum(engine.scheduler.num_waiting for engine in engines),
            "" if self._recorder is None else self._recorder.report().fault,
        )

    # -- the loading thread ---------------------------------------------------------------------------------------

    def _start_loading(self, load: Load) -> None:
        if load.replica in self._taken:
            self._emit(LoadFailed(load.replica, UsageError(f"a replica {load.replica!r} is there already")))
            return
        self._taken.add(load.replica)
        self._prioritise(load.replica, load.priority)
        self._loads.submit(self._load, load).add_done_callback(_log_defect)

    def _load(self, load: Load) -> None:
        report = throttled(lambda stage, fraction: self._emit(Loading(load.replica, stage, fraction)))
        try:
            listeners = Listeners(self._accepted.append, self._stepped, self._changes.append)
            replica, loaded = open_replica(load, report, listeners, self._recorder)
        except Exception as error:
            self._taken.discard(load.replica)
            if not isinstance(error, LockstepError):  # whatever a reader or a library raises, loading is what failed
                log.exception("loading %s failed", load.source)
                error = ExecutorError(f"{load.source}: loading failed: {error!r}")
            self._emit(LoadFailed(load.replica, error))
            return
        with self._lock:
            is_wanted = not self._stopping.is_set()
            if is_wanted:
                self._replicas = {**self._replicas, load.replica: replica}
        if is_wanted:
            self._emit(loaded)
        else:
            replica.close()

    # -- the step thread ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Hand out steps until told to stop.

        Raises:
            Exception: a defect of ours; every request has been told, and the worker is of no use any more.
        """
        try:
            while not self._stopping.is_set():
                self._turn()
            self._close()
        except Exception as error:
            log.exception("the device worker broke")
            for key, replica in self._replicas.items():
                replica.engine.abandon(RequestFailedError(f"the device worker broke: {error!r}"))
                self._publish(key)
            self.stop()
            for replica in self._replicas.values():
                replica.close()
            raise

    def _turn(self) -> None:
        """Obey what was ordered, then run one step of one replica, or wait for work."""
        self._wake.clear()
        if self._recorder is not None:
            self._recorder.begin_turn()
        while self._orders:
            self._obey(self._orders.popleft())
        replicas, priorities = self._replicas, self._priorities
        if self._classes_of[0] is not replicas or self._classes_of[1] is not priorities:
            self._classes = {key: priorities[key] for key in replicas}
            self._classes_of = replicas, priorities
        with_work = {key for key, replica in replicas.items() if replica.engine.has_work}
        chosen = self._turns.choose(self._classes, with_work)
        if chosen is None:
            self._is_idle = True
            if self._recorder is not None:
                self._recorder.idle(self._classes)
            self._wake.wait(IDLE_WAIT_S)
            self._progress_s, self._is_idle = time.monotonic(), False
            return
        started_s = self._clock.now_s()
        replicas[chosen].engine.step()
        ended_s = self._clock.now_s()
        started_us, ended_us = int(started_s * 1e6), int(ended_s * 1e6)
        self._turns.spend(chosen, ended_us - started_us)
        if self._recorder is not None:
            self._recorder.turn(self._classes, with_work, chosen, started_us, ended_us)
        self._progress_s = time.monotonic()
        plan, self._plan = self._plan, None
        report = None if plan is None else self._sampler.report(chosen, plan, ended_s - started_s, ended_s)
        self._publish(chosen, report)

    def _stepped(self, plan: StepPlan, result: StepResult, events: StepEvents) -> None:
        self._plan = plan

    def _publish(self, key: str, step: StepReport | None = None) -> None:
        """One event for all that a step brought, and one for what it meant to its replica's sessions."""
        if self._accepted or self._outputs or step is not None:
            self._emit(Outputs(self._accepted.copy(), self._outputs.copy(), step))
            self._accepted.clear()
            self._outputs.clear()
        if self._changes:
            self._emit(SessionsChanged(key, self._changes.copy()))
            self._changes.clear()

    def _obey(self, order: Order) -> None:
        match order:
            case Unload(key):
                self._unload(key)
            case Check(ask_id):
                self._emit(self._checked(ask_id))
            case ResetPrefixCache(ask_id):
                schedulers = [replica.engine.scheduler for replica in self._replicas.values()]
                num_blocks = sum(scheduler.reset_prefix_cache() for scheduler in schedulers)
                self._emit(PrefixCacheReset(ask_id, num_blocks))
            case AskSessions(ask_id):
                engines = {key: replica.engine for key, replica in self._replicas.items()}
                self._emit(SessionsReport(ask_id, {key: engine.session_reports() for key, engine in engines.items()}))
            case Sweep() | EndSession():
                self._sweep(order)

    def _sweep(self, order: Sweep | EndSession) -> None:
        replica = self._replicas.get(order.replica)
        if replica is None:
            self._emit(SessionsSwept(order.ask_id, 0, 0))
            return
        sessions = replica.engine.sessions
        do = sessions.sweep if isinstance(order, Sweep) else sessions.end
        swept = do(order.session_id, order.owner)
        self._publish(order.replica)
        self._emit(SessionsSwept(order.ask_id, *swept))

    def _unload(self, key: str) -> None:
        replica = self._replicas.get(key)
        if replica is not None:
            with self._lock:
                self._replicas = {other: kept for other, kept in self._replicas.items() if other != key}
                self._priorities = {other: kept for other, kept in self._priorities.items() if other != key}
            self._sampler.forget(key)
            self._empty(key, replica)
            replica.close()
            self._taken.discard(key)
        self._emit(Unloaded(key))

    def _empty(self, key: str, replica: Replica) -> None:
        replica.engine.abort_all()
        replica.engine.sessions.end(reason="unloaded")
        self._publish(key)
        if self._recorder is not None:
            self._recorder.closed(key)

    def _checked(self, ask_id: int) -> Checked:
        num_open = len(self._preparing) + sum(replica.engine.num_open for replica in self._replicas.values())
        try:
            for replica in self._replicas.values():
                replica.engine.scheduler.check()
        except AssertionError as fault:
            return Checked(ask_id, repr(fault), num_open)
        return Checked(ask_id, "", num_open)

    def _close(self) -> None:
        with self._lock:
            replicas, self._replicas = self._replicas, {}
        for key, replica in replicas.items():
            self._empty(key, replica)
        for replica in replicas.values():
            replica.close()
        if self._recorder is not None:
            self._recorder.close()


def _log_defect(work: Future[None]) -> None:
    """What ends the work of a side thread is a defect of ours, since all that can be expected was told."""
    error = None if work.cancelled() else work.exception()
    if error is not None:
        log.error("a side thread broke", exc_info=error)


def _not_loaded(key: str) -> UnavailableError:
    return UnavailableError(f"{key} is not loaded")
