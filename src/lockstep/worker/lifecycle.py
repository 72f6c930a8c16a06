"""Lifecycle of a supervised worker: starts, checks and restarts a worker, and kills it when it hangs.

A worker exists as long as there is a link to it. Each replica that it has, loads or unloads has a `LoadState`, as the
worker reports it. Event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from lockstep.engine.options import Progress
from lockstep.errors import LockstepError, UnavailableError, WorkerLostError
from lockstep.worker.health import ASK_INTERVAL_S, Pulse, Restarts
from lockstep.worker.link import Link, WorkerOptions, open_link
from lockstep.worker.messages import (
    Answered,
    Ask,
    AskHealth,
    Command,
    Event,
    HealthReport,
    Loaded,
    LoadFailed,
    Loading,
    Unload,
    Unloaded,
    Welcome,
)
from lockstep.worker.pending import resolve

log = logging.getLogger(__name__)


class LoadState(Enum):
    """State of a replica at the present worker."""

    QUEUED = auto()
    """The load command was sent, and the worker is loading others."""
    LOADING = auto()
    """The worker has begun to load it."""
    LOADED = auto()
    UNLOADING = auto()
    """The unload command was sent. It takes effect now or at the end of the current load."""
    GONE = auto()


LOAD_MOVES = {
    LoadState.QUEUED: (LoadState.LOADING, LoadState.LOADED, LoadState.UNLOADING, LoadState.GONE),
    LoadState.LOADING: (LoadState.LOADED, LoadState.UNLOADING, LoadState.GONE),
    LoadState.LOADED: (LoadState.UNLOADING, LoadState.GONE),
    LoadState.UNLOADING: (LoadState.GONE,),
    LoadState.GONE: (),
}
"""Allowed state changes. GONE without UNLOADING means that the load failed or the worker was lost."""


@dataclass(slots=True, eq=False)
class WorkerReplica:
    """One replica of the present worker. Only `WorkerLifecycle` changes it."""

    key: str
    progress: Progress
    answer: asyncio.Future[Loaded | LockstepError]
    """Result of its load."""
    gone: asyncio.Future[None]
    state: LoadState = LoadState.QUEUED
    loaded: Loaded | None = None
    """Measurements of loading, while it is loaded."""

    def move_to(self, state: LoadState) -> None:
        """Change the state. A change that the table does not allow is a programming error."""
        assert state in LOAD_MOVES[self.state], f"{self.key} does not go from {self.state.name} to {state.name}"
        self.state = state
        if state is not LoadState.LOADED:
            self.loaded = None
        if state is LoadState.GONE:
            resolve(self.gone, None)


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Notice that the worker ended, with its sessions and all that it had loaded. The next one is being started."""

    reason: str
    """The reason why it ended."""


@dataclass(frozen=True, slots=True)
class WorkerRestarted:
    """Notice that the next worker has started, with nothing loaded."""


class WorkerLifecycle:
    """The present worker, its successors, and what each has loaded. Implements `lockstep.worker.link.Handler`.

    Args:
        on_event: called with events of requests, sessions and queries.
        on_lost: called with the reason when a worker has ended.
        on_back: called when the next one has started.
    """

    def __init__(
        self,
        options: WorkerOptions,
        on_event: Callable[[Event], None],
        on_lost: Callable[[str], None],
        on_back: Callable[[], None],
    ) -> None:
        self._options = options
        self.system, self.now_s = options.system, options.system.now_s
        self._level = logging.DEBUG if options.kind == "network" else logging.ERROR
        """Level of log lines about lost workers. For network links, the creator of the link logs the changes by
        name."""
        self._on_event = on_event
        self._on_lost = on_lost
        self._on_back = on_back
        self.is_closed = False
        """True if no more workers are started."""
        self.link_fault = ""
        """The reason why the last attempt to start or reach a worker failed, in one sentence; empty: it succeeded."""
        self._replicas: dict[str, WorkerReplica] = {}
        """Replicas in the order of their commands, which is the order of execution. Replicas that are gone are
        removed."""
        self.link: Link | None = None
        """Link to the present worker; None: there is none."""
        self.pulse = Pulse(options.health, self.now_s())
        self._first_id = 0
        """First id for our queries to the present worker."""
        self.restarts = Restarts(options.health, is_link=options.kind == "network")
        self._hang = ""
        """Description of the hang for which the worker is being killed; empty: it is not."""
        self._checking: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the first worker.

        Raises:
            UsageError, ExecutorError: no process can be started.
        """
        try:
            await self._start_link()
        except UnavailableError as error:  # on a network, the worker may not be running at the moment
            self.link_fault = str(error)
            log.debug("%s; trying again", error)
            self.restarts.schedule(self.now_s(), 0.0)
            self._restarting = asyncio.get_running_loop().create_task(self._restart(0.0))
        self._checking = asyncio.get_running_loop().create_task(self._ask_health())

    async def end(self, error: LockstepError) -> Link | None:
        """Start no more workers, and end every load with an error. Returns the last worker's link, which the caller
        closes."""
        self.is_closed = True
        tasks = [task for task in (self._checking, self._restarting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        link, self.link = self.link, None
        self._forget_replicas(error, error)
        return link

    @property
    def trouble(self) -> str:
        """The reason why requests cannot be answered now, in one sentence; empty: loaded replicas answer."""
        if self.is_closed:
            return "the server is closing"
        return "the device worker is being restarted" if self.link is None else self.pulse.trouble(self.now_s())

    @property
    def away_s(self) -> float:
        """Seconds until the next worker is started; 0: it is running or being started."""
        return 0.0 if self.link is not None else max(0.0, self.restarts.start_at_s - self.now_s())

    def send(self, command: Command) -> None:
        """Send a command to the worker. Without a worker, the command is dropped."""
        if self.link is not None:
            self.link.send(command)

    # -- replicas -------------------------------------------------------------------------------------------------

    def replica(self, key: str) -> WorkerReplica | None:
        """A replica that the present worker has, loads or unloads; None: there is none."""
        return self._replicas.get(key)

    def begin_load(self, key: str, progress: Progress | None) -> WorkerReplica:
        """Add a replica whose load command was just sent to the worker. The key must be free."""
        new_future = asyncio.get_running_loop().create_future
        replica = WorkerReplica(key, progress or (lambda stage, fraction: None), new_future(), new_future())
        self._replicas[key] = replica
        return replica

    def begin_unload(self, key: str) -> None:
        """Unload a replica, now or at the end of the current load. Further calls have no effect."""
        replica = self._replicas.get(key)
        if self.link is not None and replica is not None and replica.state is not LoadState.UNLOADING:
            replica.move_to(LoadState.UNLOADING)
            self.send(Unload(key))

    @property
    def num_loading(self) -> int:
        """Number of loads that the worker has begun or that are queued."""
        return sum(replica.state in (LoadState.QUEUED, LoadState.LOADING) for replica in self._replicas.values())

    @property
    def _loaded(self) -> list[Loaded]:
        return [replica.loaded for replica in self._replicas.values() if replica.loaded is not None]

    def _replica_event(self, event: Loading | Loaded | LoadFailed | Unloaded) -> None:
        """Apply the worker's report about a replica. Reports of unknown loads are ignored."""
        replica = self._replicas.get(event.replica)
        if replica is None and isinstance(event, Loaded) and self._options.kind == "network":
            replica = self.begin_load(event.replica, None)  # the worker's parent has loaded it
        if replica is None:
            return
        is_expected = replica.state in (LoadState.QUEUED, LoadState.LOADING)
        match event:
            case Unloaded():
                self._remove(replica)
            case Loading(_, stage, fraction) if is_expected:
                if replica.state is LoadState.QUEUED:
                    replica.move_to(LoadState.LOADING)
                replica.progress(stage, fraction)
            case LoadFailed(_, error):
                resolve(replica.answer, error)
                if is_expected:
                    self._remove(replica)
            case Loaded():
                resolve(replica.answer, event)
                if is_expected:
                    replica.move_to(LoadState.LOADED)
                    replica.loaded = event

    def _remove(self, replica: WorkerReplica) -> None:
        replica.move_to(LoadState.GONE)
        del self._replicas[replica.key]

    def _forget_replicas(self, error: LockstepError, suspected: LockstepError) -> None:
        """Remove all replicas after the worker was lost.

        Args:
            error: ends the loads that were queued.
            suspected: ends the load that the worker was executing.
        """
        for replica in tuple(self._replicas.values()):
            resolve(replica.answer, suspected if replica.state is LoadState.LOADING else error)
            self._remove(replica)

    # -- link.Handler ---------------------------------------------------------------------------------------------

    def received(self, event: Event) -> None:
        """Handle an event. Every event shows that the worker is alive."""
        self.pulse.count_message()
        match event:
            case Answered(_, HealthReport() as report):
                self.pulse.reported(report, self.now_s())
            case Loading() | Loaded() | LoadFailed() | Unloaded():
                self._replica_event(event)
                if self._options.kind == "network":
                    self._on_event(event)
            case Welcome(first_id):
                self._first_id = first_id
                self._on_event(event)
            case _:
                self._on_event(event)

    def lost(self, reason: str) -> None:
        """Start the next worker after this one was lost."""
        if self.is_closed:
            return
        if self._hang:
            reason, self._hang = f"{reason} after {self._hang}", ""
        log.log(self._level, "the device worker ended with %s", reason)
        self.link = None
        load_s = sum(loaded.load_s for loaded in self._loaded)
        self.restarts.schedule(self.now_s(), load_s)
        self._restarting = asyncio.get_running_loop().create_task(self._restart(load_s))
        self._forget_replicas(
            self.lost_error(reason, "loaded the model"), self.lost_error(reason, "loaded the model", is_suspect=True)
        )
        self._on_lost(reason)

    def lost_error(self, reason: str, what: str, *, is_suspect: bool = False) -> WorkerLostError:
        """The error for a request or load that ended with a worker."""
        text = f"the device worker ended with {reason} while it {what}"
        retry_after_s = self.restarts.retry_after_s(self.now_s())
        return WorkerLostError(text, retry_after_s=retry_after_s, is_suspect=is_suspect)

    # -- restarts and health---------------------------------------------------------------------------------------

    async def _restart(self, load_s: float) -> None:
        """Start workers until one is running."""
        while self.link is None:
            await self.system.sleep(self.restarts.start_at_s - self.now_s())
            try:
                await self._start_link()
            except Exception as error:  # keep trying after any error, as nothing else starts a worker
                defect = None if isinstance(error, LockstepError) else error
                self.link_fault = str(error)
                level = self._level if defect is None else logging.ERROR
                log.log(level, "the device worker did not restart: %s", error, exc_info=defect)
                self.restarts.schedule(self.now_s(), load_s)
        log.log(min(self._level, logging.WARNING), "the device worker has restarted")
        self._on_back()

    async def _start_link(self) -> None:
        self.link = await open_link(self._options, self)
        self.link_fault = ""
        self.pulse = Pulse(self._options.health, self.now_s())

    async def _ask_health(self) -> None:
        while True:
            if self.link is not None:
                self.link.send(Ask(self._first_id, AskHealth()))
                self.pulse.count_check()
                self._kill_if_hanging(self.link)
            await self.system.sleep(ASK_INTERVAL_S)

    def _kill_if_hanging(self, link: Link) -> None:
        if self._hang or self._options.kind == "thread":
            return
        self._hang = self.pulse.hang(is_loading=self.num_loading > 0)
        if not self._hang:
            return
        log.log(
            self._level,
            "killing the device worker (%s), which hangs: %s; %s; it has %s loaded and %d loads in progress",
            link.name,
            self._hang,
            self.pulse.last_report,
            ", ".join(loaded.name for loaded in self._loaded) or "nothing",
            self.num_loading,
        )
        link.kill()
