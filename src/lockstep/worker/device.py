"""Device worker: runs the replicas of one device in one step loop.

It has four kinds of threads. A receiving thread calls `handle`: it checks and queues requests, and answers the queries
that must be answered while a step runs. If gateways connect over a network, there are two receiving threads. The step
thread runs `run`. One loading thread opens replicas while others serve. A few preparing threads compile grammars.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lockstep.engine.kv_store import KVStore
from lockstep.engine.kv_tiers import KVStoreOptions, TierStats
from lockstep.errors import (
    ExecutorError,
    LockstepError,
    QueueFullError,
    ReplicaGoneError,
    RequestFailedError,
    UsageError,
)
from lockstep.system import SYSTEM, System
from lockstep.worker.device_scheduler import DeviceScheduler
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.kv_events import KVEventPublisher, KVEventsOptions
from lockstep.worker.messages import (
    Abort,
    AdaptersUsed,
    Answered,
    AnswerShown,
    Ask,
    AskHealth,
    AskKept,
    AskMetrics,
    Command,
    DispatchDecided,
    HealthReport,
    KeptReport,
    KVRejected,
    Load,
    LoadFailed,
    Loading,
    MetricsReport,
    OpenStore,
    Prioritise,
    Refused,
    SessionsChanged,
    Stop,
    Submit,
    Unload,
    UseAdapters,
    WatchSteps,
)
from lockstep.worker.replica import Replica, ReplicaRegistry, open_replica, throttled, use_adapters
from lockstep.worker.step_loop import Emit, StepLoop

if TYPE_CHECKING:
    from lockstep.worker.flight.recorder import Recorder

log = logging.getLogger(__name__)

NUM_PREPARERS = 2
STORE_ATTEMPTS, STORE_RETRY_S = 10, 0.2
FLUSH_LIMIT_S = 2.0
"""Time limit for unfinished writes of the KV store when the worker ends."""
MAX_PREPARING = 1024
"""Maximum number of requests that wait for their grammar."""


class DeviceWorker:
    """A device that executes commands and emits events; see `lockstep.worker.messages`.

    Args:
        emit: receives the events.
        system: passed on to all parts of the device.
        trace: options of the recording; None: nothing is recorded.
        reports_contents: whether events report the contents of each prefix cache.
        kv_events: where the contents are published in vLLM's format; None: nowhere.
    """

    def __init__(
        self,
        emit: Emit,
        system: System = SYSTEM,
        trace: TraceOptions | None = None,
        *,
        reports_contents: bool = False,
        kv_events: KVEventsOptions | None = None,
    ) -> None:
        self._emit = emit
        self._system = system
        self._publisher = None if kv_events is None else KVEventPublisher(kv_events, system)
        self._reports_contents = reports_contents
        self._registry = ReplicaRegistry()
        self._scheduler = DeviceScheduler()
        self._recorder = None if trace is None else _recorder(trace, self._scheduler, system)
        self._steps = StepLoop(
            emit,
            self._registry,
            self._scheduler,
            system,
            self._recorder,
            lambda: self._admission.num_preparing,
            reports_contents,
        )
        self._admission = RequestAdmission(self._registry, emit, self._steps.wake, system)
        self._loads = system.pool(1, "lockstep-load")
        self._store: KVStore | None = None
        self._has_opened_store = False
        """True once a store was opened, or opening it has failed."""

    @property
    def registry(self) -> ReplicaRegistry:
        """Replicas of the device."""
        return self._registry

    @property
    def admission(self) -> RequestAdmission:
        """Requests on their way to their engines."""
        return self._admission

    # -- the receiving thread -------------------------------------------------------------------------------------

    def handle(self, command: Command) -> None:
        """Execute a command, or queue it for another thread. Never waits for a step."""
        if self._steps.is_stopping:
            return
        match command:
            case Submit():
                self._admission.take(command)
            case Abort(replica, request_ids):
                self._admission.abort(replica, request_ids)
            case Ask(ask_id, AskMetrics()):
                reports = {key: replica.metrics() for key, replica in self._registry.present.replicas.items()}
                self._emit(Answered(ask_id, MetricsReport(reports, self._tiers())))
            case Ask(ask_id, AskHealth()):
                self._emit(Answered(ask_id, self._health()))
            case Ask(ask_id, AskKept(environments)):  # slow with many sessions, so it gets its own thread
                self._system.start_thread(partial(self._report_kept, ask_id, environments), "lockstep-kept")
            case Ask(ask_id, UseAdapters() as wanted):  # after the loads before it
                self._loads.submit(self._use_adapters, ask_id, wanted).add_done_callback(_log_defect)
            case Load():
                self._start_loading(command)
            case OpenStore(options):  # on the loading thread, so that later loads find it
                self._loads.submit(self._open_store, options).add_done_callback(_log_defect)
            case Prioritise(replica, priority):
                self._prioritise(replica, priority)
            case Unload():  # queued after the load that it may have to wait for
                self._loads.submit(self._steps.order, command)
            case Ask() | AnswerShown() | DispatchDecided():
                self._steps.order(command)
            case WatchSteps(max_per_s):
                self._steps.sampler.watch(max_per_s)
            case Stop():
                self.stop()

    def stop(self) -> None:
        """Make the step thread end. It frees everything before it exits."""
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._admission.close()
        self._steps.stop()

    def _prioritise(self, key: str, priority: int) -> None:
        self._registry.prioritise(key, priority)
        replica = self._registry.find(key)
        kv = None if replica is None else replica.engine.sessions.kv
        if kv is not None and kv.class_ != priority:
            kv.prioritise(priority)

    def _health(self) -> HealthReport:
        engines = [replica.engine for replica in self._registry.present.replicas.values()]
        return HealthReport(
            self._steps.waiting_s(),
            sum(engine.scheduler.num_running for engine in engines),
            sum(engine.scheduler.num_waiting for engine in engines),
            "" if self._recorder is None else self._recorder.report().fault,
            "" if self._store is None else self._store.tiers.fault,
        )

    def _tiers(self) -> dict[str, TierStats]:
        return {} if self._store is None else {str(tier): stats for tier, stats in self._store.tiers.stats().items()}

    def _report_kept(self, ask_id: int, environments: tuple[bytes, ...]) -> None:
        store = self._store
        known = tuple(() if store is None else store.kept(each) for each in environments)
        self._emit(Answered(ask_id, KeptReport(known if self._has_opened_store else None)))

    # -- the loading thread ---------------------------------------------------------------------------------------

    def _open_store(self, options: KVStoreOptions) -> None:
        if self._store is not None:
            self._store.resize(options)
            return
        reason = ""
        for left in reversed(range(STORE_ATTEMPTS)):  # the previous worker may still be exiting
            try:
                each = options if left else replace(options, disk_dir="")
                self._store = self._steps.store = KVStore(
                    each, lambda reason: self._emit(KVRejected(reason)), self._system
                )
                break
            except UsageError as error:
                reason = str(error)
                self._system.pause(STORE_RETRY_S)
        self._has_opened_store = True
        if self._store is None:
            log.error("%s; sessions are kept on the device only", reason)
        elif reason and not left:
            log.error("%s; sessions are kept on the device and in host memory only", reason)

    def _use_adapters(self, ask_id: int, wanted: UseAdapters) -> None:
        """Open adapters from their files. A replica that is gone needs none."""
        replica, error = self._registry.find(wanted.replica), None
        if replica is not None:
            try:
                use_adapters(replica.engine, wanted.adapters)
            except LockstepError as refused:
                error = refused
            except Exception as defect:  # any error of a reader is a refused adapter
                log.exception("adapters of %s cannot be opened", wanted.replica)
                error = ExecutorError(f"the adapters cannot be opened: {defect!r}")
            self._steps.wake(wanted.replica)
        self._emit(Answered(ask_id, AdaptersUsed(error)))

    def _start_loading(self, load: Load) -> None:
        if self._registry.claim(load.replica, load.priority):
            self._loads.submit(self._load, load).add_done_callback(_log_defect)
        else:
            self._emit(LoadFailed(load.replica, UsageError(f"replica {load.replica!r} is already loaded")))

    def _load(self, load: Load) -> None:
        report = throttled(
            lambda stage, fraction: self._emit(Loading(load.replica, stage, fraction)), self._system.now_s
        )
        report("open", 0.0)  # if the process dies after this, this load may be the cause
        try:
            steps, key = self._steps, load.replica
            replica, loaded = open_replica(
                load,
                report,
                steps.on_session,
                self._recorder,
                self._store,
                lambda: steps.wake(key),
                self._publisher,
                self._system,
            )
        except Exception as error:
            self._registry.release(load.replica)
            if not isinstance(error, LockstepError):  # any error of a reader or a library is a failed load
                log.exception("loading %s failed", load.source)
                error = ExecutorError(f"{load.source}: loading failed: {error!r}")
            self._emit(LoadFailed(load.replica, error))
            return
        if self._reports_contents:
            replica.engine.scheduler.follow_contents()
        if stored := replica.engine.sessions.stored():  # before the first request, so that later changes follow
            self._emit(SessionsChanged(key, list(stored)))
        if self._registry.add(replica):
            self._emit(loaded)
        else:
            replica.close()

    # -- the step thread ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run steps until `stop`.

        Raises:
            Exception: a bug; every request has ended with an error, and the worker cannot continue.
        """
        try:
            self._steps.run()
        finally:
            self.stop()
            if self._publisher is not None:
                self._publisher.close()
            if self._store is not None:
                self._store.close(FLUSH_LIMIT_S)


class RequestAdmission:
    """Submits requests to the engines and aborts them.

    All methods are called on the receiving thread. A few preparing threads compile grammars, so that a slow grammar
    does not delay aborts.

    Args:
        registry: the loaded replicas.
        refuse: called, by any thread, for each request that no engine accepted.
        wake: called with the key of each replica that has new work.
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        refuse: Callable[[Refused], None],
        wake: Callable[[str], None],
        system: System,
    ) -> None:
        self._registry = registry
        self._refuse = refuse
        self._wake = wake
        self._lock = threading.Lock()
        self._preparing: dict[int, bool] = {}
        """Requests that are not in an engine yet; True: aborted meanwhile."""
        self._preparers = system.pool(NUM_PREPARERS, "lockstep-prepare")

    @property
    def num_preparing(self) -> int:
        """Number of requests that are not in an engine yet."""
        return len(self._preparing)

    def take(self, submit: Submit) -> None:
        """Submit a request to its engine, or queue it for a preparing thread."""
        replica, constraint = self._registry.find(submit.replica), submit.request.params.constraint
        if replica is None:
            self._refuse(Refused(submit.request_id, _not_loaded(submit.replica)))
        elif constraint is None or replica.engine.model.grammars.is_ready(constraint):
            self._submit(replica, submit)
        elif len(self._preparing) >= MAX_PREPARING:
            error = QueueFullError(f"{MAX_PREPARING} requests already wait for their grammars; try again later")
            self._refuse(Refused(submit.request_id, error))
        else:
            with self._lock:
                self._preparing[submit.request_id] = False
            self._preparers.submit(self._prepare, replica, submit).add_done_callback(_log_defect)

    def abort(self, key: str, request_ids: tuple[int, ...]) -> None:
        """Abort requests, whether prepared or submitted. Unknown ids are ignored."""
        with self._lock:
            for request_id in request_ids:
                if request_id in self._preparing:
                    self._preparing[request_id] = True
        replica = self._registry.find(key)
        if replica is not None:
            for request_id in request_ids:
                replica.engine.abort(request_id)
            self._wake(key)

    def close(self) -> None:
        """Stop preparing requests."""
        self._preparers.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, replica: Replica, submit: Submit) -> None:
        """Submit on a preparing thread, unless the request was aborted meanwhile."""
        if not self._preparing[submit.request_id]:
            self._submit(replica, submit)
        with self._lock:
            was_aborted = self._preparing.pop(submit.request_id)
        if was_aborted:
            replica.engine.abort(submit.request_id)
            self._wake(replica.key)

    def _submit(self, replica: Replica, submit: Submit) -> None:
        try:
            replica.engine.submit(submit.request, request_id=submit.request_id)
        except LockstepError as error:
            self._refuse(Refused(submit.request_id, error))
        except Exception as error:  # a bug or a wrong type fails only this request
            log.exception("request %d cannot be prepared", submit.request_id)
            self._refuse(Refused(submit.request_id, RequestFailedError(f"the request cannot be prepared: {error!r}")))
        if self._registry.find(replica.key) is not replica:  # unloaded meanwhile: its inbox is not read any more
            self._refuse(Refused(submit.request_id, _not_loaded(submit.replica)))
        self._wake(replica.key)


def _log_defect(work: Future[None]) -> None:
    """Log an exception of a side thread. It is a bug, since expected faults are reported as events."""
    error = None if work.cancelled() else work.exception()
    if error is not None:
        log.error("a side thread failed", exc_info=error)


def _not_loaded(key: str) -> ReplicaGoneError:
    return ReplicaGoneError(f"{key} is not loaded")


def _recorder(options: TraceOptions, turns: DeviceScheduler, system: System) -> Recorder:
    """Open the recorder. Its dependencies are imported only if recording is enabled."""
    from lockstep.worker.flight.recorder import Recorder

    return Recorder(options, turns, system)
