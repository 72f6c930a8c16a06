"""Supervised device worker: sends requests, fills mailboxes, and restarts a worker that is lost.

Everything here runs on one event loop. When a worker is lost, its open requests and loads end with `WorkerLostError`.
The next worker starts with nothing loaded: the receiver of the notice decides what it loads. A worker that hangs is
killed, and then counts as lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from msgspec.structs import replace

from lockstep.core.request import Priority
from lockstep.engine.kv_tiers import KVStoreOptions, TierStats
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.options import AdapterSource, LoadOptions, Progress
from lockstep.engine.request import GenerationRequest
from lockstep.engine.sessions import SessionReport, SweepResult
from lockstep.errors import LockstepError, UnavailableError, UsageError, WorkerLostError
from lockstep.worker.lifecycle import LoadState, WorkerLifecycle, WorkerLost, WorkerRestarted
from lockstep.worker.link import WorkerOptions
from lockstep.worker.messages import (
    Abort,
    AdaptersUsed,
    Answer,
    Answered,
    Ask,
    AskKept,
    AskMetrics,
    AskSessions,
    Check,
    Checked,
    ContentsChanged,
    EndSession,
    Event,
    KeptReport,
    KVRejected,
    Listening,
    Load,
    Loaded,
    MetricsReport,
    Observation,
    OpenStore,
    Outputs,
    PrefixCacheReset,
    Prioritise,
    Question,
    Refused,
    ResetPrefixCache,
    SessionsChanged,
    SessionsReport,
    StepReport,
    Submit,
    Sweep,
    SweepReport,
    TrialOptions,
    Unloaded,
    UseAdapters,
    WatchSteps,
    Welcome,
)
from lockstep.worker.pending import Mailbox, PendingRequests

log = logging.getLogger(__name__)

Report = TypeVar("Report", bound=Answer)
Notice = SessionsChanged | ContentsChanged | KVRejected | StepReport | Loaded | Unloaded | WorkerLost | WorkerRestarted
"""Notices of a worker and its lifecycle. If another process started the worker, Loaded and Unloaded report its
replicas."""
ANSWER_LIMIT_S = 5.0
"""Time limit for queries that do not wait for a step."""
MAX_AWAY_S = 5.0
"""Calls wait for a worker that restarts within this time. If it takes longer, they end with an error and a
`Retry-After`."""
CHECK_LIMIT_S = 60.0
"""Time limit for queries that are answered between two steps."""


class SupervisedWorker:
    """One device worker and its successors: their requests, loads and queries. `WorkerLifecycle` starts and ends them.

    Args:
        notify: called with every notice.
    """

    def __init__(self, options: WorkerOptions, notify: Callable[[Notice], None] | None = None) -> None:
        self._options = options
        self._notify = notify or (lambda notice: None)
        self._watched_per_s = 0.0
        self._store: OpenStore | None = None
        self.listening: Listening | None = None
        """Address at which the present worker listens for gateways, as the worker reported it."""
        self.kv_tiers: Mapping[str, TierStats] = {}
        """Statistics of the KV store's tiers, host and disk, as of the last metrics."""
        self._open = PendingRequests(options.stream_interval_s)
        self.lifecycle = WorkerLifecycle(options, self._received, self._lost, self._back)
        """The present worker, and what it has loaded."""
        self._reason = ""
        """The reason why the last worker ended."""
        self._closing: asyncio.Task[None] | None = None

    # -- lifecycle ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the worker, with nothing loaded.

        Raises:
            UsageError, ExecutorError: no process can be started.
        """
        await self.lifecycle.start()

    async def close(self, error: LockstepError | None = None) -> None:
        """End the worker and all open requests, within a bounded time. Every caller waits until that is done.

        Args:
            error: ends the open requests; None: the server is closing.
        """
        if self._closing is None:
            error = error or UnavailableError("the server is closing")
            self._closing = asyncio.get_running_loop().create_task(self._close(error))
        await asyncio.shield(self._closing)  # a waiting caller may be cancelled; the process still ends

    async def _close(self, error: LockstepError) -> None:
        link = await self.lifecycle.end(error)
        self._open.end(error)
        if link is not None:
            await link.close()

    @property
    def pid(self) -> int | None:
        """Id of the worker's process; None: there is none."""
        return None if self.lifecycle.link is None else self.lifecycle.link.pid

    # -- replicas -------------------------------------------------------------------------------------------------

    async def load(
        self,
        replica: str,
        source: str,
        options: LoadOptions,
        progress: Progress | None = None,
        priority: int = Priority.NORMAL,
        *,
        is_suspect: bool = False,
    ) -> Loaded:
        """Load a model into the present worker, while other replicas serve.

        Args:
            priority: priority of its steps on the device.
            is_suspect: True if workers failed while loading it, so that it is first tried in a temporary process.

        Raises:
            LockstepError: it cannot be loaded.
            WorkerLostError: the worker was lost during the load, or is not running.
        """
        is_process = self._options.kind == "process"
        trial = replace(self._options.trial, is_forced=is_suspect) if is_process else TrialOptions(enabled=False)
        lifecycle = self.lifecycle
        await self._unloaded(replica)
        if not self.is_up:
            raise WorkerLostError(self.trouble, retry_after_s=self.retry_after_s)
        if lifecycle.replica(replica) is not None:
            raise UsageError(f"replica {replica!r} is already loaded")
        lifecycle.send(Load(replica, source, options, trial, priority))
        try:
            loaded = await lifecycle.begin_load(replica, progress).answer
        except asyncio.CancelledError:
            lifecycle.begin_unload(replica)
            raise
        if isinstance(loaded, LockstepError):
            raise loaded
        lifecycle.restarts.record_up(lifecycle.now_s())
        return loaded

    async def use_adapters(self, replica: str, adapters: tuple[AdapterSource, ...]) -> None:
        """Set the adapters that requests of a loaded replica can name. Open requests keep theirs.

        Raises:
            LockstepError: one of them cannot be used, and nothing was changed, or the worker does not answer.
        """
        used = await self._ask(UseAdapters(replica, adapters), AdaptersUsed)
        if used is None:
            raise WorkerLostError("the device worker does not answer", retry_after_s=self.retry_after_s)
        if used.error is not None:
            raise used.error

    def prioritise(self, replica: str, priority: int) -> None:
        """Change the priority of a replica that is loaded or loading. Other keys are ignored."""
        self.lifecycle.send(Prioritise(replica, priority))

    async def unload(self, replica: str) -> None:
        """Abort a replica's requests and free it. Does nothing if it is not loaded."""
        self.lifecycle.begin_unload(replica)
        await self._unloaded(replica)

    async def _unloaded(self, key: str) -> None:
        """Wait until a replica that is unloading is gone."""
        while (replica := self.lifecycle.replica(key)) is not None and replica.state is LoadState.UNLOADING:
            await asyncio.shield(replica.gone)

    def loaded(self, replica: str) -> Loaded | None:
        """Measurements of a loaded replica; None: it is not loaded now."""
        found = self.lifecycle.replica(replica)
        return None if found is None else found.loaded

    @property
    def is_up(self) -> bool:
        """True if a worker is running."""
        return self.lifecycle.link is not None

    @property
    def trouble(self) -> str:
        """The reason why requests cannot be answered now, in one sentence; empty: loaded replicas answer."""
        return self.lifecycle.trouble

    def absence(self, replica: str, since_s: float | None = None) -> UnavailableError | None:
        """The error for calls that should not wait for a replica, because the next worker starts too late; None: they
        may wait.

        Args:
            replica: unused: one worker has all replicas.
            since_s: unused: the schedule of restarts decides.
        """
        if self.lifecycle.away_s <= MAX_AWAY_S:
            return None
        return UnavailableError(self.trouble, retry_after_s=self.retry_after_s)

    @property
    def link_fault(self) -> str:
        """The reason why the last attempt to start or reach the worker failed, in one sentence; empty: it succeeded."""
        return self.lifecycle.link_fault

    @property
    def retry_after_s(self) -> float:
        """Seconds after which the next worker is likely to have loaded what the last one had."""
        return self.lifecycle.restarts.retry_after_s(self.lifecycle.now_s())

    @property
    def recording_fault(self) -> str:
        """The reason why nothing is recorded now, from the worker's last report; empty: recording works, or is
        disabled."""
        report = self.lifecycle.pulse.report
        return "" if report is None else report.recording_fault

    @property
    def kv_fault(self) -> str:
        """The reason why less KV is stored outside of the device than its budgets allow; empty: there is no such
        limit."""
        report = self.lifecycle.pulse.report
        return "" if report is None else report.kv_fault

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, replica: str, request: GenerationRequest) -> Mailbox:
        """Send a request. Every mailbox must be returned with `leave`.

        Raises:
            WorkerLostError: the replica is not loaded any more.
            QueueFullError: the worker takes no more requests now.
            InvalidParameterError: a number of the request does not fit a message.
        """
        link = self.lifecycle.link
        if link is None or self.loaded(replica) is None:
            raise self.lifecycle.lost_error(self._reason, "was about to answer; send the request again")
        mailbox = self._open.open(replica)
        try:
            link.send(Submit(mailbox.request_id, replica, request))
        except LockstepError:
            self._open.leave(mailbox)
            raise
        return mailbox

    def leave(self, mailbox: Mailbox) -> None:
        """Return a mailbox. Its request is aborted if it has not ended."""
        if self._open.leave(mailbox):
            self.lifecycle.send(Abort(mailbox.replica, (mailbox.request_id,)))

    @contextmanager
    def open_mailbox(self, replica: str, request: GenerationRequest) -> Iterator[Mailbox]:
        """Submit a request and yield its mailbox. Leaving the block early aborts the request."""
        mailbox = self.submit(replica, request)
        try:
            yield mailbox
        finally:
            self.leave(mailbox)

    def abort_all(self, error: LockstepError, of_replica: str | None = None) -> None:
        """End all open requests, or those of one replica, with this error."""
        by_replica: dict[str, list[int]] = {}
        for mailbox in self._open.open_mailboxes():
            if of_replica not in (None, mailbox.replica):
                continue
            mailbox.fail(error)
            by_replica.setdefault(mailbox.replica, []).append(mailbox.request_id)
        for replica, request_ids in by_replica.items():
            self.lifecycle.send(Abort(replica, tuple(request_ids)))

    @property
    def num_open(self) -> int:
        """Number of mailboxes that are in use."""
        return self._open.num_requests

    # -- queries --------------------------------------------------------------------------------------------------

    async def metrics(self) -> Mapping[str, MetricsSnapshot]:
        """Metrics by replica; empty if there is no worker or it does not answer."""
        report = await self._ask(AskMetrics(), MetricsReport, ANSWER_LIMIT_S)
        self.kv_tiers = {} if report is None else report.tiers
        return {} if report is None else report.replicas

    async def check(self) -> Checked | None:
        """Check between two steps that blocks and sequences are conserved; None: the worker does not answer."""
        return await self._ask(Check(), Checked)

    async def reset_prefix_cache(self) -> int:
        """Discard all cached content. Returns the number of discarded blocks."""
        report = await self._ask(ResetPrefixCache(), PrefixCacheReset)
        return 0 if report is None else report.num_blocks

    async def sessions(self) -> Mapping[str, tuple[SessionReport, ...]]:
        """Sessions by replica, least recently used first; empty if there is no worker or it does not answer."""
        report = await self._ask(AskSessions(), SessionsReport)
        return {} if report is None else report.replicas

    async def session_locations(self, environments: Sequence[bytes]) -> tuple[SessionsReport | None, KeptReport | None]:
        """Sessions on the device by replica, and stored sessions by environment; None: the worker does not answer in
        `ANSWER_LIMIT_S`."""
        return await asyncio.gather(
            self._ask(AskSessions(), SessionsReport, ANSWER_LIMIT_S),
            self._ask(AskKept(tuple(environments)), KeptReport, ANSWER_LIMIT_S),
        )

    async def sweep(self, replica: str, session_id: str | None = None, owner: str | None = None) -> SweepResult:
        """Free the blocks of idle sessions: of one id, of one owner, or of all. Busy sessions are left unchanged."""
        return await self._sweep(Sweep(replica, session_id, owner))

    async def end_session(self, replica: str, session_id: str, owner: str | None = None) -> SweepResult:
        """Free a session's blocks, and keep none when its busy requests end."""
        return await self._sweep(EndSession(replica, session_id, owner))

    def open_store(self, options: KVStoreOptions) -> None:
        """Open the KV store outside of the device in this worker and its successors."""
        self._store = OpenStore(options)
        self.lifecycle.send(self._store)

    def watch_steps(self, max_per_s: float) -> None:
        """Request notices of at most this many steps of each replica per second, from this worker and its
        successors."""
        self._watched_per_s = max_per_s
        self.lifecycle.send(WatchSteps(max_per_s))

    def record(self, observation: Observation) -> None:
        """Have the worker record what happened outside of it."""
        self.lifecycle.send(observation)

    async def _sweep(self, question: Sweep | EndSession) -> SweepResult:
        report = await self._ask(question, SweepReport)
        return SweepResult(0, 0) if report is None else SweepResult(report.num_sessions, report.num_blocks)

    async def _ask(self, question: Question, kind: type[Report], limit_s: float = CHECK_LIMIT_S) -> Report | None:
        """Send a query and return its answer, of the given type; None: the worker does not answer."""
        if not self.is_up:
            return None
        ask_id = self._open.next_id()
        self.lifecycle.send(Ask(ask_id, question))
        answer = await self._open.answer(ask_id, limit_s)
        return answer if isinstance(answer, kind) else None

    # -- events of the worker -------------------------------------------------------------------------------------

    def _received(self, event: Event) -> None:
        """Handle an event. There is one call, and one wake-up of the loop, per step."""
        match event:
            case Outputs():
                self._open.outputs(event)
                if event.step is not None:
                    self._notify(event.step)
            case SessionsChanged() | ContentsChanged() | KVRejected() | Loaded() | Unloaded():
                self._notify(event)
            case Answered():
                self._open.answered(event)
            case Refused():
                self._open.refused(event)
            case Welcome(first_id):
                self._open.start_ids_at(first_id)
            case Listening():
                self.listening = event

    def _lost(self, reason: str) -> None:
        self._reason, self.listening = reason, None
        self._open.end(self.lifecycle.lost_error(reason, "answered; send the request again"))
        self._notify(WorkerLost(reason))

    def _back(self) -> None:
        if self._watched_per_s:
            self.lifecycle.send(WatchSteps(self._watched_per_s))
        if self._store is not None:
            self.lifecycle.send(self._store)
        self._notify(WorkerRestarted())
