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

from lockstep.engine.clock import Clock, SystemClock
from lockstep.engine.outputs import TokenOutput
from lockstep.errors import (
    ExecutorError,
    LockstepError,
    QueueFullError,
    RequestFailedError,
    UnavailableError,
    UsageError,
)
from lockstep.worker.messages import (
    Abort,
    AskHealth,
    AskMetrics,
    Check,
    Checked,
    Command,
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
    Stop,
    Submit,
    Unload,
    Unloaded,
)
from lockstep.worker.replica import Replica, open_replica, throttled
from lockstep.worker.turns import Turns

log = logging.getLogger(__name__)

Emit = Callable[[Event], None]
"""Called by several threads; must not block."""
IDLE_WAIT_S = 1.0
NUM_PREPARERS = 2
MAX_PREPARING = 1024
"""Requests whose grammar is being built or waits for it."""


class DeviceWorker:
    """Obeys commands and emits events; see `lockstep.worker.messages`.

    Args:
        emit: where events go.
        clock: measures steps.
    """

    def __init__(self, emit: Emit, clock: Clock | None = None) -> None:
        self._emit = emit
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._replicas: dict[str, Replica] = {}
        """In order of loading; replaced and never changed, so that any thread may look."""
        self._taken: set[str] = set()
        """Keys that are loading or loaded."""
        self._priorities: dict[str, int] = {}
        """Their classes."""
        self._orders: deque[Unload | Check | ResetPrefixCache] = deque()
        """What the step thread is to do between two steps; as many as were asked, each is answered once."""
        self._preparing: dict[int, bool] = {}
        """Requests that no engine has yet, and whether they were aborted meanwhile."""
        self._accepted: list[int] = []
        self._outputs: list[TokenOutput] = []
        self._turns = Turns()
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
                reports = {key: replica.engine.metrics() for key, replica in self._replicas.items()}
                self._emit(MetricsReport(ask_id, reports))
            case AskHealth(ask_id):
                self._emit(self._health(ask_id))
            case Load():
                self._start_loading(command)
            case Prioritise(replica, priority):
                if replica in self._taken:
                    self._priorities[replica] = priority
            case Unload():  # behind the load that it may have to wait for
                self._loads.submit(self._order, command)
            case Check() | ResetPrefixCache():
                self._order(command)
            case Stop():
                self.stop()

    def stop(self) -> None:
        """Make the step thread end: it frees everything on its way out."""
        self._stopping.set()
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._preparers.shutdown(wait=False, cancel_futures=True)
        self._wake.set()

    def _order(self, command: Unload | Check | ResetPrefixCache) -> None:
        self._orders.append(command)
        self._wake.set()

    def _take(self, submit: Submit) -> None:
        replica = self._replicas.get(submit.replica)
        if replica is None:
            self._emit(Refused(submit.request_id, _not_loaded(submit.replica)))
        elif submit.request.params.constraint is None:
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
        except (
            Exception
        ) as error:  # a defect of ours, or a value of a wrong type: that request's end, and nobody else's
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
        )

    # -- the loading thread ---------------------------------------------------------------------------------------

    def _start_loading(self, load: Load) -> None:
        if load.replica in self._taken:
            self._emit(LoadFailed(load.replica, UsageError(f"a replica {load.replica!r} is there already")))
            return
        self._taken.add(load.replica)
        self._priorities[load.replica] = load.priority
        self._loads.submit(self._load, load).add_done_callback(_log_defect)

    def _load(self, load: Load) -> None:
        report = throttled(lambda stage, fraction: self._emit(Loading(load.replica, stage, fraction)))
        try:
            replica, loaded = open_replica(load, report, self._accepted.append)
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
            for replica in self._replicas.values():
                replica.engine.abandon(RequestFailedError(f"the device worker broke: {error!r}"))
            self._publish()
            self.stop()
            for replica in self._replicas.values():
                replica.close()
            raise

    def _turn(self) -> None:
        """Obey what was ordered, then run one step of one replica, or wait for work."""
        self._wake.clear()
        while self._orders:
            self._obey(self._orders.popleft())
        replicas = self._replicas
        priorities = {key: self._priorities[key] for key in replicas}
        chosen = self._turns.choose(priorities, [key for key, replica in replicas.items() if replica.engine.has_work])
        if chosen is None:
            self._is_idle = True
            self._wake.wait(IDLE_WAIT_S)
            self._progress_s, self._is_idle = time.monotonic(), False
            return
        started_s = self._clock.now_s()
        replicas[chosen].engine.step()
        self._turns.spend(chosen, round((self._clock.now_s() - started_s) * 1e9))
        self._progress_s = time.monotonic()
        self._publish()

    def _publish(self) -> None:
        """One event for all that a step brought."""
        if self._accepted or self._outputs:
            self._emit(Outputs(self._accepted.copy(), self._outputs.copy()))
            self._accepted.clear()
            self._outputs.clear()

    def _obey(self, order: Unload | Check | ResetPrefixCache) -> None:
        match order:
            case Unload(key):
                self._unload(key)
            case Check(ask_id):
                self._emit(self._checked(ask_id))
            case ResetPrefixCache(ask_id):
                schedulers = [replica.engine.scheduler for replica in self._replicas.values()]
                num_blocks = sum(scheduler.reset_prefix_cache() for scheduler in schedulers)
                self._emit(PrefixCacheReset(ask_id, num_blocks))

    def _unload(self, key: str) -> None:
        replica = self._replicas.get(key)
        if replica is not None:
            with self._lock:
                self._replicas = {other: kept for other, kept in self._replicas.items() if other != key}
            del self._priorities[key]
            self._taken.discard(key)
            replica.engine.abort_all()
            self._publish()
            replica.close()
        self._emit(Unloaded(key))

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
        for replica in replicas.values():
            replica.engine.abort_all()
        self._publish()
        for replica in replicas.values():
            replica.close()


def _log_defect(work: Future[None]) -> None:
    """What ends the work of a side thread is a defect of ours, since all that can be expected was told."""
    error = None if work.cancelled() else work.exception()
    if error is not None:
        log.error("a side thread broke", exc_info=error)


def _not_loaded(key: str) -> UnavailableError:
    return UnavailableError(f"{key} is not loaded")
