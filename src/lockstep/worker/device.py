"""The device worker: one device, its replicas, and one loop that hands out their steps.

Four kinds of threads meet here. The receiving thread calls `handle`: it checks and queues requests, and answers what
must be answered while a step runs. The step thread runs `run`. One loading thread opens replicas while others serve;
few preparing threads build grammars.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from lockstep.engine.clock import Clock, SystemClock
from lockstep.errors import ExecutorError, LockstepError, UsageError
from lockstep.worker.entrance import Entrance, log_defect
from lockstep.worker.fleet import Fleet
from lockstep.worker.flight.options import TraceOptions, open_recorder
from lockstep.worker.messages import (
    Abort,
    AskHealth,
    AskMetrics,
    AskSessions,
    Check,
    Command,
    EndSession,
    HealthReport,
    Load,
    LoadFailed,
    Loading,
    MetricsReport,
    Prioritise,
    ResetPrefixCache,
    Stop,
    Submit,
    Sweep,
    Unload,
    WatchSteps,
)
from lockstep.worker.replica import open_replica, throttled
from lockstep.worker.step_loop import Emit, StepLoop
from lockstep.worker.turns import Turns

log = logging.getLogger(__name__)


class DeviceWorker:
    """Obeys commands and emits events; see `lockstep.worker.messages`.

    Args:
        emit: where events go.
        clock: measures steps.
        trace: what is recorded of them; None: nothing.
    """

    def __init__(self, emit: Emit, clock: Clock | None = None, trace: TraceOptions | None = None) -> None:
        self._emit = emit
        self._fleet = Fleet()
        self._turns = Turns()
        self._recorder = None if trace is None else open_recorder(trace, self._turns)
        self._steps = StepLoop(
            emit,
            self._fleet,
            self._turns,
            clock or SystemClock(),
            self._recorder,
            lambda: self._entrance.num_preparing,
        )
        self._entrance = Entrance(self._fleet, self._steps.sink, emit, self._steps.call)
        self._loads = ThreadPoolExecutor(1, "lockstep-load")

    # -- the receiving thread -------------------------------------------------------------------------------------

    def handle(self, command: Command) -> None:
        """Obey, or see to it that another thread does; never waits for a step."""
        if self._steps.is_stopping:
            return
        match command:
            case Submit():
                self._entrance.take(command)
            case Abort(replica, request_ids):
                self._entrance.abort(replica, request_ids)
            case AskMetrics(ask_id):
                reports = {key: replica.metrics() for key, replica in self._fleet.present.replicas.items()}
                self._emit(MetricsReport(ask_id, reports))
            case AskHealth(ask_id):
                self._emit(self._health(ask_id))
            case Load():
                self._start_loading(command)
            case Prioritise(replica, priority):
                self._fleet.prioritise(replica, priority)
            case Unload():  # behind the load that it may have to wait for
                self._loads.submit(self._steps.order, command)
            case Check() | ResetPrefixCache() | AskSessions() | Sweep() | EndSession():
                self._steps.order(command)
            case WatchSteps(max_per_s):
                self._steps.sampler.watch(max_per_s)
            case Stop():
                self.stop()

    def stop(self) -> None:
        """Make the step thread end: it frees everything on its way out."""
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._entrance.close()
        self._steps.stop()

    def _health(self, ask_id: int) -> HealthReport:
        engines = [replica.engine for replica in self._fleet.present.replicas.values()]
        return HealthReport(
            ask_id,
            self._steps.waiting_s(),
            sum(engine.scheduler.num_running for engine in engines),
            sum(engine.scheduler.num_waiting for engine in engines),
            "" if self._recorder is None else self._recorder.report().fault,
        )

    # -- the loading thread ---------------------------------------------------------------------------------------

    def _start_loading(self, load: Load) -> None:
        if self._fleet.claim(load.replica, load.priority):
            self._loads.submit(self._load, load).add_done_callback(log_defect)
        else:
            self._emit(LoadFailed(load.replica, UsageError(f"a replica {load.replica!r} is there already")))

    def _load(self, load: Load) -> None:
        report = throttled(lambda stage, fraction: self._emit(Loading(load.replica, stage, fraction)))
        report("open", 0.0)  # from now on, what ends this process may be this load
        try:
            replica, loaded = open_replica(load, report, self._steps.listeners, self._recorder)
        except Exception as error:
            self._fleet.release(load.replica)
            if not isinstance(error, LockstepError):  # whatever a reader or a library raises, loading is what failed
                log.exception("loading %s failed", load.source)
                error = ExecutorError(f"{load.source}: loading failed: {error!r}")
            self._emit(LoadFailed(load.replica, error))
            return
        if self._fleet.add(replica):
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
            self._steps.run()
        finally:
            self.stop()
