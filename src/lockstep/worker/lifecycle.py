"""Lifecycle of a supervised worker: started, checked, lost or killed for hanging, and started again.

A worker exists as long as there is a link to it. Each replica that it has, loads or frees has a `LoadState`, as the
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
    """The command to load it was sent, and the worker is loading others."""
    LOADING = auto()
    """The worker has begun."""
    LOADED = auto()
    UNLOADING = auto()
    """The command to free it was sent; it takes effect now or at the end of the load under way."""
    GONE = auto()


LOAD_MOVES = {
    LoadState.QUEUED: (LoadState.LOADING, LoadState.LOADED, LoadState.UNLOADING, LoadState.GONE),
    LoadState.LOADING: (LoadState.LOADED, LoadState.UNLOADING, LoadState.GONE),
    LoadState.LOADED: (LoadState.UNLOADING, LoadState.GONE),
    LoadState.UNLOADING: (LoadState.GONE,),
    LoadState.GONE: (),
}
"""To gone without unloading: the load failed, or the worker was lost."""


@dataclass(slots=True, eq=False)
class WorkerReplica:
    """One replica of the present worker, changed by `WorkerLifecycle` alone."""

    key: str
    progress: Progress
    answer: asyncio.Future[Loaded | LockstepError]
    """What becomes of its load."""
    gone: asyncio.Future[None]
    state: LoadState = LoadState.QUEUED
    loaded: Loaded | None = None
    """What loading measured, while it is there."""

    def move_to(self, state: LoadState) -> None:
        """A move that the table does not have is a programming error."""
        assert state in LOAD_MOVES[self.state], f"{self.key} does not go from {self.state.name} to {state.name}"
        self.state = state
        if state is not LoadState.LOADED:
            self.loaded = None
        if state is LoadState.GONE:
            resolve(self.gone, None)


@dataclass(frozen=True, slots=True)
class Lost:
    """Notice that the worker ended, with its sessions and all that it had loaded; the next one is on its way."""

    reason: str
    """What it ended with."""


@dataclass(frozen=True, slots=True)
class Back:
    """Notice that the next worker is there, with nothing loaded."""


class WorkerLifecycle:
    """One worker after the other, and what each has loaded; implements `lockstep.worker.link.Handler`.

    Args:
        on_event: called with events of requests, sessions and queries.
        on_lost: called with the way in which a worker ended.
        on_back: called when the next one is there.
    """

    def __init__(
        self,
        options: WorkerOptions,
        on_event: Callable[[Event], None],
        on_lost: Callable[[str], None],
        on_back: Callable[[], None],
    ) -> None:
        self._options = options
        self.now_s = options.clock
        self._level = logging.DEBUG if options.kind == "network" else logging.ERROR
        """Of lines about lost workers; the owner of links to other workers logs their changes by name."""
        self._on_event = on_event
        self._on_lost = on_lost
        self._on_back = on_back
        self.is_closed = False
        """Whether no more workers are started."""
        self.link_fault = ""
        """Why the last attempt to start or reach a worker failed, in one sentence; empty: it did not."""
        self._replicas: dict[str, WorkerReplica] = {}
        """In the order of the commands, in which the worker executes them; what is gone is not kept."""
        self.link: Link | None = None
        """None: there is no worker now."""
        self.pulse = Pulse(options.health, self.now_s())
        self._first_id = 0
        """Of our ids for the present worker."""
        self.restarts = Restarts(is_link=options.kind == "network")
        self._hang = ""
        """How the worker hangs that is being killed for it; empty: none is."""
        self._asking: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the first worker.

        Raises:
            UsageError, ExecutorError: no process can be started.
        """
        try:
            await self._start_link()
        except UnavailableError as error:  # on a network: it is not there yet, or not any more
            self.link_fault = str(error)
            log.debug("%s; it is tried again", error)
            self.restarts.schedule(self.now_s(), 0.0)
            self._returning = asyncio.get_running_loop().create_task(self._come_back(0.0))
        self._asking = asyncio.get_running_loop().create_task(self._ask_health())

    async def end(self, error: LockstepError) -> Link | None:
        """Start no more workers, and end every load with an error; the last worker, which is the caller's to close."""
        self.is_closed = True
        tasks = [task for task in (self._asking, self._returning) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        link, self.link = self.link, None
        self._forget_replicas(error, error)
        return link

    @property
    def trouble(self) -> str:
        """The reason why no request would be answered now, in one sentence; empty: loaded replicas answer."""
        if self.is_closed:
            return "the server is closing"
        return "the device worker is being restarted" if self.link is None else self.pulse.trouble(self.now_s())

    @property
    def away_s(self) -> float:
        """Seconds until the next worker is started; 0: it is there, or on its way."""
        return 0.0 if self.link is not None else max(0.0, self.restarts.start_at_s - self.now_s())

    def send(self, command: Command) -> None:
        """Send to the worker; without one, the command is dropped."""
        if self.link is not None:
            self.link.send(command)

    # -- replicas -------------------------------------------------------------------------------------------------

    def replica(self, key: str) -> WorkerReplica | None:
        """A replica that the present worker has, loads or frees; None: there is none."""
        return self._replicas.get(key)

    def begin_load(self, key: str, progress: Progress | None) -> WorkerReplica:
        """Enter a replica whose load was just sent to the worker, under a key that is free."""
        new_future = asyncio.get_running_loop().create_future
        replica = WorkerReplica(key, progress or (lambda stage, fraction: None), new_future(), new_future())
        self._replicas[key] = replica
        return replica

    def begin_unload(self, key: str) -> None:
        """Have the worker free a replica, now or at the end of the load under way; further calls change nothing."""
        replica = self._replicas.get(key)
        if self.link is not None and replica is not None and replica.state is not LoadState.UNLOADING:
            replica.move_to(LoadState.UNLOADING)
            self.send(Unload(key))

    @property
    def num_loading(self) -> int:
        """Loads that the worker has begun or was sent."""
        return sum(replica.state in (LoadState.QUEUED, LoadState.LOADING) for replica in self._replicas.values())

    @property
    def _loaded(self) -> list[Loaded]:
        return [replica.loaded for replica in self._replicas.values() if replica.loaded is not None]

    def _replica_event(self, event: Loading | Loaded | LoadFailed | Unloaded) -> None:
        """Apply what the worker reports of a replica; reports of a load without a waiter are ignored."""
        replica = self._replicas.get(event.replica)
        if replica is None and isinstance(event, Loaded) and self._options.kind == "network":
            replica = self.begin_load(event.replica, None)  # its owner had it loaded
        if replica is None:
            return
        is_wanted = replica.state in (LoadState.QUEUED, LoadState.LOADING)
        match event:
            case Unloaded():
                self._remove(replica)
            case Loading(_, stage, fraction) if is_wanted:
                if replica.state is LoadState.QUEUED:
                    replica.move_to(LoadState.LOADING)
                replica.progress(stage, fraction)
            case LoadFailed(_, error):
                resolve(replica.answer, error)
                if is_wanted:
                    self._remove(replica)
            case Loaded():
                resolve(replica.answer, event)
                if is_wanted:
                    replica.move_to(LoadState.LOADED)
                    replica.loaded = event

    def _remove(self, replica: WorkerReplica) -> None:
        replica.move_to(LoadState.GONE)
        del self._replicas[replica.key]

    def _forget_replicas(self, error: LockstepError, suspected: LockstepError) -> None:
        """The worker is gone, and all that it had.

        Args:
            error: ends the loads that waited for their turn.
            suspected: ends the load that the worker was executing.
        """
        for replica in tuple(self._replicas.values()):
            resolve(replica.answer, suspected if replica.state is LoadState.LOADING else error)
            self._remove(replica)

    # -- link.Handler ---------------------------------------------------------------------------------------------

    def received(self, event: Event) -> None:
        """Take over an event; whatever the worker states is a sign of life."""
        self.pulse.count_word()
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
        """The worker is gone: start the next."""
        if self.is_closed:
            return
        if self._hang:
            reason, self._hang = f"{reason} after {self._hang}", ""
        log.log(self._level, "the device worker ended with %s", reason)
        self.link = None
        load_s = sum(loaded.load_s for loaded in self._loaded)
        self.restarts.schedule(self.now_s(), load_s)
        self._returning = asyncio.get_running_loop().create_task(self._come_back(load_s))
        self._forget_replicas(
            self.lost_error(reason, "loaded the model"), self.lost_error(reason, "loaded the model", is_suspect=True)
        )
        self._on_lost(reason)

    def lost_error(self, reason: str, what: str, *, is_suspect: bool = False) -> WorkerLostError:
        """The error of what ended with a worker."""
        text = f"the device worker ended with {reason} while it {what}"
        retry_after_s = self.restarts.retry_after_s(self.now_s())
        return WorkerLostError(text, retry_after_s=retry_after_s, is_suspect=is_suspect)

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _come_back(self, load_s: float) -> None:
        """Start workers until there is one."""
        while self.link is None:
            await asyncio.sleep(self.restarts.start_at_s - self.now_s())
            try:
                await self._start_link()
            except Exception as error:  # whatever it is, nothing else would ever start one
                defect = None if isinstance(error, LockstepError) else error
                self.link_fault = str(error)
                level = self._level if defect is None else logging.ERROR
                log.log(level, "the device worker did not come back: %s", error, exc_info=defect)
                self.restarts.schedule(self.now_s(), load_s)
        log.log(min(self._level, logging.WARNING), "the device worker is back")
        self._on_back()

    async def _start_link(self) -> None:
        self.link = await open_link(self._options, self)
        self.link_fault = ""
        self.pulse = Pulse(self._options.health, self.now_s())

    async def _ask_health(self) -> None:
        while True:
            if self.link is not None:
                self.link.send(Ask(self._first_id, AskHealth()))
                self.pulse.count_question()
                self._kill_if_hanging(self.link)
            await asyncio.sleep(ASK_INTERVAL_S)

    def _kill_if_hanging(self, link: Link) -> None:
        if self._hang or self._options.kind == "thread":
            return
        self._hang = self.pulse.hang(is_loading=self.num_loading > 0)
        if not self._hang:
            return
        log.log(
            self._level,
            "the device worker (%s) hangs, %s, and is given up; %s; it has %s loaded and %d loads under way",
            link.name,
            self._hang,
            self.pulse.last_words,
            ", ".join(loaded.name for loaded in self._loaded) or "nothing",
            self.num_loading,
        )
        link.kill()
