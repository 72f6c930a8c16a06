"""A device worker as the server sees it: requests in, mailboxes out, and a new worker when one is lost.

Everything here runs on one event loop. What a worker had loaded is loaded again by the next one; requests that were in
flight end with `WorkerLostError`, and until the next one serves, requests are refused with `UnavailableError`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal, TypeVar

from lockstep.engine.loading import LoadOptions, Progress
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.outputs import GenerationRequest
from lockstep.errors import LockstepError, UnavailableError, WorkerLostError
from lockstep.worker.health import HealthLimits, trouble
from lockstep.worker.link import Link
from lockstep.worker.mailbox import Mailbox
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
    Loaded,
    LoadFailed,
    Loading,
    MetricsReport,
    Outputs,
    PrefixCacheReset,
    Refused,
    ResetPrefixCache,
    Submit,
    TrialOptions,
    Unload,
    Unloaded,
)
from lockstep.worker.process import ProcessLink
from lockstep.worker.restarts import Restarts
from lockstep.worker.thread import ThreadLink

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 1.0
ANSWER_LIMIT_S = 5.0
"""For what is answered without waiting for a step."""
CHECK_LIMIT_S = 60.0
"""For what is answered between two steps."""
MIN_RETRY_AFTER_S = 1.0
PROCESS_START_S = 1.0
"""About what a worker needs before it can load."""
_Answer = TypeVar("_Answer", MetricsReport, Checked, PrefixCacheReset)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Where a device worker runs, and when it counts as healthy."""

    kind: Literal["thread", "process"] = "thread"
    """``process`` for servers: a native crash then ends requests, and not the server."""
    health: HealthLimits = field(default_factory=HealthLimits)
    trial: TrialOptions = field(default_factory=TrialOptions)
    """Only a worker process tries what it does not know: a thread's user sees the crash anyway."""
    log_level: str = "WARNING"
    """Of the worker process, which logs to standard error."""


class WorkerState(Enum):
    """Whether there is somebody to talk to."""

    NEW = auto()
    UP = auto()
    """Running; whether a replica is loaded is another question."""
    LOST = auto()
    """It ended, and the next one is not there yet."""
    CLOSED = auto()


_MOVES = {
    WorkerState.NEW: (WorkerState.UP, WorkerState.CLOSED),
    WorkerState.UP: (WorkerState.LOST, WorkerState.CLOSED),
    WorkerState.LOST: (WorkerState.UP, WorkerState.CLOSED),
    WorkerState.CLOSED: (),
}


class SupervisedWorker:
    """One device worker and its successors."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._state = WorkerState.NEW
        self._link: Link | None = None
        self._ids = itertools.count()
        self._mailboxes: dict[int, Mailbox] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._loads: dict[str, Load] = {}
        """What is to be there, in order of loading."""
        self._loaded: dict[str, Loaded] = {}
        """What is there."""
        self._loading: dict[str, tuple[asyncio.Future[Loaded], Progress]] = {}
        self._unloading: dict[str, asyncio.Future[None]] = {}
        self._failures: dict[str, LockstepError] = {}
        """Why what was there could not be loaded again."""
        self._restarts = Restarts()
        self._start_at_s = 0.0
        """When the next worker is started, after one was lost."""
        self._back_at_s = 0.0
        """When it will have loaded everything, as far as one can tell."""
        self._load_s: dict[str, float] = {}
        """How long each load took."""
        self._report: HealthReport | None = None
        self._report_s = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the worker, with nothing loaded.

        Raises:
            ExecutorError: no process can be started.
        """
        await self._open()
        self._tasks["health"] = asyncio.get_running_loop().create_task(self._ask_health())

    async def close(self) -> None:
        """End the worker and what is open; within a bounded time."""
        if self._state is WorkerState.CLOSED:
            return
        self._move_to(WorkerState.CLOSED)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._end_everything(UnavailableError("the server is closing"))
        if self._link is not None:
            await self._link.close()

    @property
    def state(self) -> WorkerState:
        return self._state

    @property
    def pid(self) -> int | None:
        """Of the worker's process; None: there is none."""
        return None if self._link is None else self._link.pid

    # -- replicas -------------------------------------------------------------------------------------------------

    async def load(self, replica: str, source: str, options: LoadOptions, progress: Progress | None = None) -> Loaded:
        """Load a model, while others serve; from then on every successor of this worker has it too.

        Raises:
            LockstepError: it cannot be loaded, or the worker was lost over it.
        """
        trial = self._options.trial if self._options.kind == "process" else TrialOptions(enabled=False)
        load = Load(replica, source, options, trial)
        loaded = await self._load(load, progress)
        self._loads[replica] = load
        self._restarts.up(time.monotonic())
        return loaded

    async def unload(self, replica: str) -> None:
        """End a replica's requests with ``abort`` and free it; one that is not there is gone already."""
        if self._loads.pop(replica, None) is None or self._loaded.pop(replica, None) is None:
            return
        future = self._unloading.setdefault(replica, asyncio.get_running_loop().create_future())
        self._send(Unload(replica))
        await future

    def loaded(self, replica: str) -> Loaded | None:
        """What loading measured; None: it is not there now."""
        return self._loaded.get(replica)

    def tier(self, replica: str) -> str:
        """``resident``, ``loading`` or ``failed``."""
        if replica in self._loaded:
            return "resident"
        return "failed" if replica in self._failures else "loading"

    def trouble(self, replica: str) -> str:
        """Why requests to a replica would not be answered now, in one sentence; empty: they would."""
        if replica not in self._loaded:
            return self._absence(replica)
        age_s = time.monotonic() - self._report_s
        return trouble(self._options.health, self._report, age_s)

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, replica: str, request: GenerationRequest) -> Mailbox:
        """Send a request; every mailbox goes back by `leave`.

        Raises:
            UnavailableError: the replica is not there now.
            QueueFullError: the worker takes no more requests now.
            InvalidParameterError: the request holds a number that no message can.
        """
        link = self._link
        if link is None or replica not in self._loaded:
            raise UnavailableError(self._absence(replica), retry_after_s=self.retry_after_s())
        mailbox = Mailbox(next(self._ids), replica)
        link.send(Submit(mailbox.request_id, replica, request))
        self._mailboxes[mailbox.request_id] = mailbox
        return mailbox

    def leave(self, mailbox: Mailbox) -> None:
        """Nobody reads this mailbox any more: its request is aborted if it has not ended."""
        if self._mailboxes.pop(mailbox.request_id, None) is not None and not mailbox.is_ended:
            self._send(Abort(mailbox.replica, (mailbox.request_id,)))

    def abort_all(self, error: LockstepError) -> None:
        """End every open request with this error."""
        by_replica: dict[str, list[int]] = {}
        for mailbox in self._mailboxes.values():
            if not mailbox.is_ended:
                mailbox.fail(error)
                by_replica.setdefault(mailbox.replica, []).append(mailbox.request_id)
        for replica, request_ids in by_replica.items():
            self._send(Abort(replica, tuple(request_ids)))

    # -- questions ------------------------------------------------------------------------------------------------

    async def metrics(self) -> Mapping[str, MetricsSnapshot]:
        """By replica; empty while there is no worker, or none that answers."""
        report = await self._ask(AskMetrics, MetricsReport, ANSWER_LIMIT_S)
        return {} if report is None else report.replicas

    async def check(self) -> Checked | None:
        """Whether blocks and sequences are conserved, between two steps; None: there is nobody to ask."""
        return await self._ask(Check, Checked, CHECK_LIMIT_S)

    async def reset_prefix_cache(self) -> int:
        """Forget all cached content; returns how many blocks that were."""
        report = await self._ask(ResetPrefixCache, PrefixCacheReset, CHECK_LIMIT_S)
        return 0 if report is None else report.num_blocks

    async def _ask(self, question: Callable[[int], Command], answer: type[_Answer], limit_s: float) -> _Answer | None:
        if self._link is None:
            return None
        ask_id = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[ask_id] = future
        self._send(question(ask_id))
        try:
            report = await asyncio.wait_for(future, limit_s)
        except (TimeoutError, LockstepError):
            return None
        finally:
            self._asked.pop(ask_id, None)
        assert isinstance(report, answer), f"{question} is answered by {answer}"
        return report

    async def _ask_health(self) -> None:
        while True:
            self._send(AskHealth(next(self._ids)))
            await asyncio.sleep(HEALTH_INTERVAL_S)

    # -- link.Handler ---------------------------------------------------------------------------------------------

    def received(self, event: Event) -> None:
        """Take over what the worker says: one call, and one wake-up of the loop, per step."""
        match event:
            case Outputs(accepted, outputs):
                mailboxes = self._mailboxes
                for request_id in accepted:
                    if (mailbox := mailboxes.get(request_id)) is not None:
                        mailbox.accept()
                for output in outputs:
                    if (mailbox := mailboxes.get(output.request_id)) is not None:
                        mailbox.put(output)
            case HealthReport():
                self._report, self._report_s = event, time.monotonic()
            case MetricsReport(ask_id) | Checked(ask_id) | PrefixCacheReset(ask_id):
                _resolve(self._asked.get(ask_id), event)
            case Refused(request_id, error):
                if (mailbox := self._mailboxes.get(request_id)) is not None:
                    mailbox.fail(error)
            case Loading(replica, stage, fraction):
                if replica in self._loading:
                    self._loading[replica][1](stage, fraction)
            case Loaded(replica):
                self._loaded[replica] = event
                self._load_s[replica] = event.load_s
                _resolve(self._loading[replica][0], event)
            case LoadFailed(replica, error):
                _fail(self._loading[replica][0], error)
            case Unloaded(replica):
                _resolve(self._unloading.pop(replica, None), None)

    def lost(self, reason: str) -> None:
        """The worker is gone: tell everybody who waits for it, and start the next."""
        if self._state is WorkerState.CLOSED:
            return
        log.error("the device worker ended with %s", reason)
        self._link = None
        self._move_to(WorkerState.LOST)
        self._loaded.clear()
        if "return" not in self._tasks and self._loads:
            self._await_return()
            self._tasks["return"] = asyncio.get_running_loop().create_task(self._come_back())
        message = f"the device worker ended with {reason} while it was at work on this; send the request again"
        self._end_everything(WorkerLostError(message, retry_after_s=self.retry_after_s()))

    # -- coming back ----------------------------------------------------------------------------------------------

    async def _come_back(self) -> None:
        """Start workers until one has all that its predecessor had."""
        try:
            while missing := [load for key, load in self._loads.items() if key not in self._loaded]:
                await asyncio.sleep(self._start_at_s - time.monotonic())
                try:
                    if self._link is None:
                        await self._open()
                    for load in missing:
                        await self._load(load, None)
                        self._failures.pop(load.replica, None)
                except LockstepError as error:
                    log.error("the device worker did not come back: %s", error)
                    self._failures |= {load.replica: error for load in missing if load.replica not in self._loaded}
                    self._await_return()
            self._restarts.up(time.monotonic())
            log.warning("the device worker is back")
        finally:
            del self._tasks["return"]

    def _await_return(self) -> None:
        """Decide when the next start is, and guess when it will have loaded everything."""
        now_s = time.monotonic()
        self._start_at_s = now_s + self._restarts.delay_s(now_s)
        self._back_at_s = self._start_at_s + PROCESS_START_S + sum(self._load_s.values())

    async def _open(self) -> None:
        if self._options.kind == "process":
            self._link = await ProcessLink.open(self, self._options.log_level)
        else:
            self._link = ThreadLink(self)
        self._move_to(WorkerState.UP)
        self._report, self._report_s = None, time.monotonic()

    async def _load(self, load: Load, progress: Progress | None) -> Loaded:
        if self._link is None:
            raise UnavailableError(self._absence(load.replica), retry_after_s=self.retry_after_s())
        future: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._loading[load.replica] = future, progress or (lambda stage, fraction: None)
        self._send(load)
        try:
            return await future
        finally:
            self._loading.pop(load.replica, None)

    def _send(self, command: Command) -> None:
        if self._link is not None:
            self._link.send(command)

    def _move_to(self, state: WorkerState) -> None:
        assert state in _MOVES[self._state], f"a worker does not go from {self._state} to {state}"
        self._state = state

    def _end_everything(self, error: LockstepError) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
        for future in [*self._asked.values(), *(future for future, _ in self._loading.values())]:
            _fail(future, error)
        for unloaded in self._unloading.values():
            _resolve(unloaded, None)
        self._unloading.clear()

    def _absence(self, replica: str) -> str:
        if self._state is WorkerState.CLOSED:
            return "the server is closing"
        failure = self._failures.get(replica)
        if failure is not None:
            return f"the model could not be loaded again: {failure}"
        return "the device worker is being restarted" if replica in self._loads else "the model is loading"

    def retry_after_s(self) -> float:
        """Whole seconds until what is not there is likely to be."""
        return max(MIN_RETRY_AFTER_S, math.ceil(self._back_at_s - time.monotonic()))


def _resolve(future: asyncio.Future[Any] | None, value: object) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: LockstepError) -> None:
    if not future.done():
        future.set_exception(error)
