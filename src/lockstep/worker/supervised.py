"""Supervised device worker: requests in, mailboxes out, and a new worker when one is lost.

Everything here runs on one event loop. Requests and loads that were in flight end with `WorkerLostError`. The next
worker begins with nothing loaded: the receiver of the notice decides what it loads. One that hangs is killed, and is
then lost like any other.
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
from lockstep.engine.options import LoadOptions, Progress
from lockstep.engine.request import GenerationRequest
from lockstep.engine.sessions import SessionReport, Swept
from lockstep.errors import LockstepError, UnavailableError, UsageError, WorkerLostError
from lockstep.worker.lifecycle import Back, LoadState, Lost, WorkerLifecycle
from lockstep.worker.link import WorkerOptions
from lockstep.worker.messages import (
    Abort,
    Answer,
    Answered,
    AnswerShown,
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
    OpenStore,
    Outputs,
    PrefixCacheReset,
    Prioritise,
    Question,
    Refused,
    ResetPrefixCache,
    SessionsChanged,
    SessionsReport,
    SessionsSwept,
    StepReport,
    Submit,
    Sweep,
    TrialOptions,
    Unloaded,
    WatchSteps,
    Welcome,
)
from lockstep.worker.pending import Mailbox, PendingRequests

log = logging.getLogger(__name__)

Report = TypeVar("Report", bound=Answer)
Notice = SessionsChanged | ContentsChanged | KVRejected | StepReport | Loaded | Unloaded | Lost | Back
"""What a worker and its life bring unasked; replicas that come and go by themselves, where others own the worker."""
ANSWER_LIMIT_S = 5.0
"""For what is answered without waiting for a step."""
MAX_AWAY_S = 5.0
"""Calls wait for a worker that is started within this time; where it is later, they end with an error and a
`Retry-After`."""
CHECK_LIMIT_S = 60.0
"""For what is answered between two steps."""


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
        """Where the present worker listens for gateways, by its own word."""
        self.kv_tiers: Mapping[str, TierStats] = {}
        """Tiers of the KV store, host and disk, as of the last metrics."""
        self._open = PendingRequests(options.stream_interval_s)
        self._life = WorkerLifecycle(options, self._received, self._lost, self._back)
        self._reason = ""
        """What the last worker ended with."""
        self._closing: asyncio.Task[None] | None = None

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the worker, with nothing loaded.

        Raises:
            UsageError, ExecutorError: no process can be started.
        """
        await self._life.start()

    async def close(self, error: LockstepError | None = None) -> None:
        """End the worker and what is open; within a bounded time. Every caller waits until that is done.

        Args:
            error: of the requests that are open; None: the server is closing.
        """
        if self._closing is None:
            error = error or UnavailableError("the server is closing")
            self._closing = asyncio.get_running_loop().create_task(self._close(error))
        await asyncio.shield(self._closing)  # who waits may be cancelled; the process ends all the same

    async def _close(self, error: LockstepError) -> None:
        link = await self._life.end(error)
        self._open.end(error)
        if link is not None:
            await link.close()

    @property
    def pid(self) -> int | None:
        """Id of the worker's process; None: there is none."""
        return None if self._life.link is None else self._life.link.pid

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
        """Load a model into the present worker, while others serve.

        Args:
            priority: its class where replicas take turns on the device.
            is_suspect: workers ended over it, so that it is tried in a throw-away process first.

        Raises:
            LockstepError: it cannot be loaded.
            WorkerLostError: the worker was lost over it, or is not there.
        """
        is_process = self._options.kind == "process"
        trial = replace(self._options.trial, is_forced=is_suspect) if is_process else TrialOptions(enabled=False)
        life = self._life
        await self._unloaded(replica)
        if not self.is_up:
            raise WorkerLostError(self.trouble, retry_after_s=self.retry_after_s)
        if life.replica(replica) is not None:
            raise UsageError(f"a replica {replica!r} is there already")
        life.send(Load(replica, source, options, trial, priority))
        try:
            loaded = await life.begin_load(replica, progress).answer
        except asyncio.CancelledError:
            life.begin_unload(replica)
            raise
        if isinstance(loaded, LockstepError):
            raise loaded
        life.restarts.up(life.now_s())
        return loaded

    def prioritise(self, replica: str, priority: int) -> None:
        """Change the class of a replica that is there or is being loaded; others have none."""
        self._life.send(Prioritise(replica, priority))

    async def unload(self, replica: str) -> None:
        """End a replica's requests with ``abort`` and free it; one that is not there is gone already."""
        self._life.begin_unload(replica)
        await self._unloaded(replica)

    async def _unloaded(self, key: str) -> None:
        """Wait until a replica that is on its way out is gone."""
        while (replica := self._life.replica(key)) is not None and replica.state is LoadState.UNLOADING:
            await asyncio.shield(replica.gone)

    def loaded(self, replica: str) -> Loaded | None:
        """Measurements of a loaded replica; None: it is not there now."""
        found = self._life.replica(replica)
        return None if found is None else found.loaded

    @property
    def is_up(self) -> bool:
        """True if there is a worker to talk to."""
        return self._life.link is not None

    @property
    def trouble(self) -> str:
        """The reason why no request would be answered now, in one sentence; empty: loaded replicas answer."""
        return self._life.trouble

    def absence(self, replica: str, since_s: float | None = None) -> UnavailableError | None:
        """The error of calls where waiting for a replica is of no use, as the next worker starts too late; None: they
        may wait.

        Args:
            replica: unused: one worker has all replicas.
            since_s: unused: the schedule of restarts decides.
        """
        if self._life.away_s <= MAX_AWAY_S:
            return None
        return UnavailableError(self.trouble, retry_after_s=self.retry_after_s)

    @property
    def link_fault(self) -> str:
        """Reason why the last attempt to start or reach the worker failed, in one sentence; empty: it did not."""
        return self._life.link_fault

    @property
    def retry_after_s(self) -> float:
        """Seconds after which the next worker is likely to have all that the last one had."""
        return self._life.restarts.retry_after_s(self._life.now_s())

    @property
    def recording_fault(self) -> str:
        """The reason why nothing is recorded now, by the worker's last word; empty: it is, or nothing is to be."""
        report = self._life.pulse.report
        return "" if report is None else report.recording_fault

    @property
    def kv_fault(self) -> str:
        """The reason why less KV is kept outside of the device than its budgets allow; empty: it is as they allow."""
        report = self._life.pulse.report
        return "" if report is None else report.kv_fault

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, replica: str, request: GenerationRequest) -> Mailbox:
        """Send a request; every mailbox goes back by `leave`.

        Raises:
            WorkerLostError: the replica is not there any more.
            QueueFullError: the worker takes no more requests now.
            InvalidParameterError: the request holds a number that no message can.
        """
        link = self._life.link
        if link is None or self.loaded(replica) is None:
            raise self._life.lost_error(self._reason, "was about to answer; send the request again")
        mailbox = self._open.open(replica)
        try:
            link.send(Submit(mailbox.request_id, replica, request))
        except LockstepError:
            self._open.leave(mailbox)
            raise
        return mailbox

    def leave(self, mailbox: Mailbox) -> None:
        """Give a mailbox back; its request is aborted if it has not ended."""
        if self._open.leave(mailbox):
            self._life.send(Abort(mailbox.replica, (mailbox.request_id,)))

    @contextmanager
    def open_mailbox(self, replica: str, request: GenerationRequest) -> Iterator[Mailbox]:
        """The mailbox of a request for a block, as `submit`; leaving the block early aborts it."""
        mailbox = self.submit(replica, request)
        try:
            yield mailbox
        finally:
            self.leave(mailbox)

    def abort_all(self, error: LockstepError, of_replica: str | None = None) -> None:
        """End every open request, or every one of a replica, with this error."""
        by_replica: dict[str, list[int]] = {}
        for mailbox in self._open.unended():
            if of_replica not in (None, mailbox.replica):
                continue
            mailbox.fail(error)
            by_replica.setdefault(mailbox.replica, []).append(mailbox.request_id)
        for replica, request_ids in by_replica.items():
            self._life.send(Abort(replica, tuple(request_ids)))

    @property
    def num_open(self) -> int:
        """Mailboxes that were not left."""
        return self._open.num_requests

    # -- questions ------------------------------------------------------------------------------------------------

    async def metrics(self) -> Mapping[str, MetricsSnapshot]:
        """Metrics by replica; empty while there is no worker, or none that answers."""
        report = await self._ask(AskMetrics(), MetricsReport, ANSWER_LIMIT_S)
        self.kv_tiers = {} if report is None else report.tiers
        return {} if report is None else report.replicas

    async def check(self) -> Checked | None:
        """Check between two steps that blocks and sequences are conserved; None: the worker does not answer."""
        return await self._ask(Check(), Checked)

    async def reset_prefix_cache(self) -> int:
        """Forget all cached content; returns how many blocks that were."""
        report = await self._ask(ResetPrefixCache(), PrefixCacheReset)
        return 0 if report is None else report.num_blocks

    async def sessions(self) -> Mapping[str, tuple[SessionReport, ...]]:
        """Sessions by replica, least recently used first; empty while there is no worker, or none that answers."""
        report = await self._ask(AskSessions(), SessionsReport)
        return {} if report is None else report.replicas

    async def session_locations(self, environments: Sequence[bytes]) -> tuple[SessionsReport | None, KeptReport | None]:
        """Sessions on the device by replica, and those that are kept outside by environment; None: the worker
        does not answer in a few seconds."""
        return await asyncio.gather(
            self._ask(AskSessions(), SessionsReport, ANSWER_LIMIT_S),
            self._ask(AskKept(tuple(environments)), KeptReport, ANSWER_LIMIT_S),
        )

    async def sweep(self, replica: str, session_id: str | None = None, owner: str | None = None) -> Swept:
        """Free what idle sessions keep: that of one id, of one owner, or of all; busy ones stay as they are."""
        return await self._sweep(Sweep(replica, session_id, owner))

    async def end_session(self, replica: str, session_id: str, owner: str | None = None) -> Swept:
        """Free what a session keeps, and let it keep nothing when what it is busy with ends."""
        return await self._sweep(EndSession(replica, session_id, owner))

    def open_store(self, options: KVStoreOptions) -> None:
        """Have this worker and its successors keep what sessions come back for outside of the device."""
        self._store = OpenStore(options)
        self._life.send(self._store)

    def watch_steps(self, max_per_s: float) -> None:
        """Be notified of so many steps of each replica in a second at most, by this worker and its successors."""
        self._watched_per_s = max_per_s
        self._life.send(WatchSteps(max_per_s))

    def shown(self, shown: AnswerShown) -> None:
        """Have the worker record how an answer was shown."""
        self._life.send(shown)

    async def _sweep(self, question: Sweep | EndSession) -> Swept:
        report = await self._ask(question, SessionsSwept)
        return Swept(0, 0) if report is None else Swept(report.num_sessions, report.num_blocks)

    async def _ask(self, question: Question, kind: type[Report], limit_s: float = CHECK_LIMIT_S) -> Report | None:
        """The answer, of the kind that the question has; None: the worker does not answer."""
        if not self.is_up:
            return None
        ask_id = self._open.next_id()
        self._life.send(Ask(ask_id, question))
        answer = await self._open.answer(ask_id, limit_s)
        return answer if isinstance(answer, kind) else None

    # -- what the worker says ------------------------------------------------------------------------------------

    def _received(self, event: Event) -> None:
        """One call, and one wake-up of the loop, per step."""
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
                self._open.count_from(first_id)
            case Listening():
                self.listening = event

    def _lost(self, reason: str) -> None:
        self._reason, self.listening = reason, None
        self._open.end(self._life.lost_error(reason, "answered; send the request again"))
        self._notify(Lost(reason))

    def _back(self) -> None:
        if self._watched_per_s:
            self._life.send(WatchSteps(self._watched_per_s))
        if self._store is not None:
            self._life.send(self._store)
        self._notify(Back())
