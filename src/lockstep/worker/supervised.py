"""A device worker as the server sees it: requests in, mailboxes out, and a new worker when one is lost.

Everything here runs on one event loop. What a worker had loaded is loaded again by the next one; requests that were in
flight end with `WorkerLostError`, and until the next one serves, requests are refused with `UnavailableError`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from lockstep.core.request import Priority
from lockstep.engine.loading import LoadOptions, Progress
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.outputs import GenerationRequest
from lockstep.engine.sessions import SessionReport, Swept
from lockstep.errors import LockstepError, UnavailableError, WorkerLostError
from lockstep.worker.correspondence import Correspondence
from lockstep.worker.health import trouble
from lockstep.worker.life import Life, Lost, WorkerState
from lockstep.worker.link import Link
from lockstep.worker.mailbox import Mailbox
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
    Loaded,
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
    Submit,
    Sweep,
    TrialOptions,
    Unload,
    Unloaded,
    WatchSteps,
)
from lockstep.worker.options import WorkerOptions
from lockstep.worker.process import ProcessLink
from lockstep.worker.replicas import Replicas
from lockstep.worker.restarts import Restarts
from lockstep.worker.steps import StepReport
from lockstep.worker.thread import ThreadLink

log = logging.getLogger(__name__)

Notice = SessionsChanged | StepReport | Lost
"""What nobody asked for."""
HEALTH_INTERVAL_S = 1.0
ANSWER_LIMIT_S = 5.0
"""For what is answered without waiting for a step."""
CHECK_LIMIT_S = 60.0
"""For what is answered between two steps."""


class SupervisedWorker:
    """One device worker and its successors; implements `lockstep.worker.link.Handler`.

    Args:
        notify: called with every notice.
    """

    def __init__(self, options: WorkerOptions, notify: Callable[[Notice], None] | None = None) -> None:
        self._options = options
        self._notify = notify or (lambda notice: None)
        self._watched_per_s = 0.0
        self._life = Life()
        self._link: Link | None = None
        self._open = Correspondence(options.stream_interval_s)
        self._replicas = Replicas()
        self._restarts = Restarts()
        self._report: HealthReport | None = None
        self._report_s = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the worker, with nothing loaded.

        Raises:
            UsageError, ExecutorError: no process can be started.
        """
        await self._start_link()
        self._asking = asyncio.get_running_loop().create_task(self._ask_health())

    async def close(self) -> None:
        """End the worker and what is open; within a bounded time."""
        if self._life.state is WorkerState.CLOSED:
            return
        self._life.move_to(WorkerState.CLOSED)
        tasks = [task for task in (self._asking, self._returning) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        link, self._link = self._link, None
        self._replicas.lost()
        error = UnavailableError("the server is closing")
        self._open.end(error)
        self._replicas.end_loads(error)
        if link is not None:
            await link.close()

    @property
    def pid(self) -> int | None:
        """Of the worker's process; None: there is none."""
        return None if self._link is None else self._link.pid

    # -- replicas -------------------------------------------------------------------------------------------------

    async def load(
        self,
        replica: str,
        source: str,
        options: LoadOptions,
        progress: Progress | None = None,
        priority: int = Priority.NORMAL,
    ) -> Loaded:
        """Load a model, while others serve; from then on every successor of this worker has it too.

        Args:
            priority: its class where replicas take turns on the device.

        Raises:
            LockstepError: it cannot be loaded, or the worker was lost over it.
        """
        trial = self._options.trial if self._options.kind == "process" else TrialOptions(enabled=False)
        load = Load(replica, source, options, trial, priority)
        await self._replicas.unloaded(replica)
        loaded = await self._load(load, progress)
        self._replicas.want(load)
        self._restarts.up(time.monotonic())
        return loaded

    def prioritise(self, replica: str, priority: int) -> None:
        """Change the class of a replica, here and in the worker's successors; one that is not wanted has none."""
        if self._replicas.prioritise(replica, priority):
            self._send(Prioritise(replica, priority))

    async def unload(self, replica: str) -> None:
        """End a replica's requests with ``abort`` and free it; one that is not there is gone already."""
        if self._replicas.forget(replica):
            self._unload(replica)
        await self._replicas.unloaded(replica)

    def loaded(self, replica: str) -> Loaded | None:
        """What loading measured; None: it is not there now."""
        return self._replicas.loaded(replica)

    def tier(self, replica: str) -> str:
        """``resident``, ``loading`` or ``failed``."""
        return self._replicas.tier(replica)

    def failure(self, replica: str) -> LockstepError | None:
        """Why a replica could not be loaded again after a loss; None: it was, or will be."""
        return self._replicas.failure(replica)

    def trouble(self, replica: str) -> str:
        """Why requests to a replica would not be answered now, in one sentence; empty: they would."""
        if self._life.state is WorkerState.CLOSED:
            return "the server is closing"
        if self._replicas.loaded(replica) is None:
            return self._replicas.absence(replica)
        return trouble(self._options.health, self._report, time.monotonic() - self._report_s)

    @property
    def recording_fault(self) -> str:
        """Why nothing is being recorded now, by the worker's last word; empty: it is, or nothing is to be."""
        return "" if self._report is None else self._report.recording_fault

    def unavailable(self, replica: str) -> UnavailableError:
        """The answer to requests to a replica that is not there, and when it is worth trying again."""
        return UnavailableError(self.trouble(replica), retry_after_s=self._retry_after_s())

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, replica: str, request: GenerationRequest) -> Mailbox:
        """Send a request; every mailbox goes back by `leave`.

        Raises:
            UnavailableError, QueueFullError: the replica is not there, or the worker takes no more requests, now.
            InvalidParameterError: the request holds a number that no message can.
        """
        link = self._link
        if link is None or self._replicas.loaded(replica) is None:
            raise self.unavailable(replica)
        mailbox = self._open.open(replica)
        try:
            link.send(Submit(mailbox.request_id, replica, request))
        except LockstepError:
            self._open.leave(mailbox)
            raise
        return mailbox

    def leave(self, mailbox: Mailbox) -> None:
        """Nobody reads this mailbox any more: its request is aborted if it has not ended."""
        if self._open.leave(mailbox):
            self._send(Abort(mailbox.replica, (mailbox.request_id,)))

    def abort_all(self, error: LockstepError, of_replica: str | None = None) -> None:
        """End every open request, or every one of a replica, with this error."""
        by_replica: dict[str, list[int]] = {}
        for mailbox in self._open.unended():
            if of_replica not in (None, mailbox.replica):
                continue
            mailbox.fail(error)
            by_replica.setdefault(mailbox.replica, []).append(mailbox.request_id)
        for replica, request_ids in by_replica.items():
            self._send(Abort(replica, tuple(request_ids)))

    @property
    def num_open(self) -> int:
        """Mailboxes that were not left."""
        return self._open.num_requests

    # -- questions ------------------------------------------------------------------------------------------------

    async def metrics(self) -> Mapping[str, MetricsSnapshot]:
        """By replica; empty while there is no worker, or none that answers."""
        report = await self._ask(AskMetrics, ANSWER_LIMIT_S)
        return report.replicas if isinstance(report, MetricsReport) else {}

    async def check(self) -> Checked | None:
        """Whether blocks and sequences are conserved, between two steps; None: nobody answers."""
        report = await self._ask(Check, CHECK_LIMIT_S)
        return report if isinstance(report, Checked) else None

    async def reset_prefix_cache(self) -> int:
        """Forget all cached content; returns how many blocks that were."""
        report = await self._ask(ResetPrefixCache, CHECK_LIMIT_S)
        return report.num_blocks if isinstance(report, PrefixCacheReset) else 0

    async def sessions(self) -> Mapping[str, tuple[SessionReport, ...]]:
        """By replica, least recently used first; empty while there is no worker, or none that answers."""
        report = await self._ask(AskSessions, CHECK_LIMIT_S)
        return report.replicas if isinstance(report, SessionsReport) else {}

    async def sweep(self, replica: str, session_id: str | None = None, owner: str | None = None) -> Swept:
        """Free what idle sessions keep: that of one id, of one owner, or of all; busy ones stay as they are."""
        return await self._sweep(lambda ask_id: Sweep(ask_id, replica, session_id, owner))

    async def end_session(self, replica: str, session_id: str, owner: str | None = None) -> Swept:
        """Free what a session keeps, and let it keep nothing when what it is busy with ends."""
        return await self._sweep(lambda ask_id: EndSession(ask_id, replica, session_id, owner))

    def watch_steps(self, max_per_s: float) -> None:
        """Be notified of so many steps of each replica in a second at most, by this worker and its successors."""
        self._watched_per_s = max_per_s
        self._send(WatchSteps(max_per_s))

    async def _sweep(self, order: Callable[[int], Command]) -> Swept:
        report = await self._ask(order, CHECK_LIMIT_S)
        return Swept(report.num_sessions, report.num_blocks) if isinstance(report, SessionsSwept) else Swept(0, 0)

    async def _ask(self, question: Callable[[int], Command], limit_s: float) -> object:
        if self._link is None:
            return None
        ask_id = self._open.next_id()
        self._send(question(ask_id))
        return await self._open.answer(ask_id, limit_s)

    async def _ask_health(self) -> None:
        while True:
            self._send(AskHealth(self._open.next_id()))
            await asyncio.sleep(HEALTH_INTERVAL_S)

    # -- link.Handler ---------------------------------------------------------------------------------------------

    def received(self, event: Event) -> None:
        """Take over what the worker says: one call, and one wake-up of the loop, per step."""
        match event:
            case Outputs():
                self._open.outputs(event)
                if event.step is not None:
                    self._notify(event.step)
            case SessionsChanged():
                self._notify(event)
            case HealthReport():
                self._report, self._report_s = event, time.monotonic()
            case MetricsReport() | Checked() | PrefixCacheReset() | SessionsReport() | SessionsSwept():
                self._open.answered(event)
            case Refused():
                self._open.refused(event)
            case Loading() | Loaded() | LoadFailed() | Unloaded():
                self._replicas.received(event)

    def lost(self, reason: str) -> None:
        """The worker is gone: tell everybody who waits for it, and start the next."""
        if self._life.state is WorkerState.CLOSED:
            return
        log.error("the device worker ended with %s", reason)
        self._link = None
        self._life.move_to(WorkerState.LOST)
        self._replicas.lost()
        if self._returning is None:
            self._restarts.schedule(time.monotonic(), self._replicas.load_s)
            self._returning = asyncio.get_running_loop().create_task(self._come_back())
        what, retry_after_s = f"the device worker ended with {reason} while it", self._retry_after_s()
        self._open.end(WorkerLostError(f"{what} answered; send the request again", retry_after_s=retry_after_s))
        self._replicas.end_loads(WorkerLostError(f"{what} loaded the model", retry_after_s=retry_after_s))
        self._notify(Lost(reason))

    # -- coming back ----------------------------------------------------------------------------------------------

    async def _come_back(self) -> None:
        """Start workers until one has all that is wanted."""
        while self._link is None or self._replicas.missing():
            await asyncio.sleep(self._restarts.start_at_s - time.monotonic())
            await self._restore(self._replicas.missing())
            if self._link is None or self._replicas.missing():
                self._restarts.schedule(time.monotonic(), self._replicas.load_s)
        self._restarts.up(time.monotonic())
        self._returning = None
        log.warning("the device worker is back")

    async def _restore(self, missing: list[Load]) -> None:
        """Start a worker if there is none, and load what can be loaded."""
        try:
            if self._link is None:
                await self._start_link()
            for load in missing:
                await self._load_again(load.replica)
        except LockstepError as error:
            log.error("the device worker did not come back: %s", error)

    async def _load_again(self, replica: str) -> None:
        """One that cannot be loaded keeps no other from it.

        Raises:
            UnavailableError: there is no worker any more.
        """
        load = next((load for load in self._replicas.missing() if load.replica == replica), None)
        if load is None:
            return
        try:
            await self._load(load, None)
        except UnavailableError:
            raise
        except LockstepError as error:
            log.error("%s could not be loaded again: %s", load.source, error)
            self._replicas.failed(load, error)

    def _retry_after_s(self) -> float:
        return self._restarts.retry_after_s(time.monotonic())

    async def _start_link(self) -> None:
        options = self._options
        if options.kind == "process":
            self._link = await ProcessLink.open(self, options.log_format, options.log_level, options.trace)
        else:
            self._link = ThreadLink(self, options.trace)
        if self._watched_per_s:
            self._link.send(WatchSteps(self._watched_per_s))
        self._life.move_to(WorkerState.UP)
        self._report, self._report_s = None, time.monotonic()

    async def _load(self, load: Load, progress: Progress | None) -> Loaded:
        if self._link is None:
            raise self.unavailable(load.replica)
        self._link.send(load)
        try:
            return await self._replicas.load(load, progress)
        except asyncio.CancelledError:
            self._unload(load.replica)
            raise

    def _unload(self, replica: str) -> None:
        """Free what is loaded, or will be when the load under way has come to its end."""
        if self._link is not None:
            self._replicas.unload(replica)
            self._link.send(Unload(replica))

    def _send(self, command: Command) -> None:
        if self._link is not None:
            self._link.send(command)
