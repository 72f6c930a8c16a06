"""The life of a supervised worker: started, asked how it is, lost or killed for hanging, and started again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from lockstep.errors import LockstepError
from lockstep.worker.health import ASK_INTERVAL_S, Pulse
from lockstep.worker.link import Link
from lockstep.worker.messages import AskHealth, Command, Event, HealthReport
from lockstep.worker.options import WorkerOptions
from lockstep.worker.process import ProcessLink, SpawnedWorker
from lockstep.worker.replicas import Replicas
from lockstep.worker.restarts import Restarts
from lockstep.worker.thread import ThreadLink

log = logging.getLogger(__name__)


class WorkerState(Enum):
    """Whether there is somebody to talk to."""

    NEW = auto()
    UP = auto()
    """Running; whether a replica is loaded is another question."""
    LOST = auto()
    """It ended, and the next one is not there yet."""
    CLOSED = auto()


MOVES = {
    WorkerState.NEW: (WorkerState.UP, WorkerState.CLOSED),
    WorkerState.UP: (WorkerState.LOST, WorkerState.CLOSED),
    WorkerState.LOST: (WorkerState.UP, WorkerState.CLOSED),
    WorkerState.CLOSED: (),
}


@dataclass(frozen=True, slots=True)
class Lost:
    """Notice that the worker ended, with its sessions and all that it had loaded; the next one is on its way."""

    reason: str
    """What it ended with."""


@dataclass(frozen=True, slots=True)
class Back:
    """Notice that the next worker is there, with nothing loaded."""


class Life:
    """One worker after the other; implements `lockstep.worker.link.Handler`.

    Args:
        replicas: what the worker has and loads, which is read here.
        on_event: told what a worker says.
        on_lost: told how one ended.
        on_back: told that the next one is there.
    """

    def __init__(
        self,
        options: WorkerOptions,
        replicas: Replicas,
        on_event: Callable[[Event], None],
        on_lost: Callable[[str], None],
        on_back: Callable[[], None],
    ) -> None:
        self._options = options
        self._replicas = replicas
        self._on_event = on_event
        self._on_lost = on_lost
        self._on_back = on_back
        self._state = WorkerState.NEW
        self.link: Link | None = None
        """None: there is no worker now."""
        self.pulse = Pulse(options.health, time.monotonic())
        self.restarts = Restarts()
        self._hang = ""
        """How the worker hangs that is being killed for it; empty: none is."""
        self._asking: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the first worker.

        Raises:
            UsageError, ExecutorError: no process can be started.
        """
        await self._start_link()
        self._asking = asyncio.get_running_loop().create_task(self._ask_health())

    async def end(self) -> Link | None:
        """Start no more workers; the last one, which is the caller's to close."""
        self._move_to(WorkerState.CLOSED)
        tasks = [task for task in (self._asking, self._returning) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        link, self.link = self.link, None
        return link

    @property
    def is_closed(self) -> bool:
        return self._state is WorkerState.CLOSED

    @property
    def trouble(self) -> str:
        """Why nobody would be answered now, in one sentence; empty: whose replica is there is answered."""
        if self.is_closed:
            return "the server is closing"
        return "the device worker is being restarted" if self.link is None else self.pulse.trouble(time.monotonic())

    @property
    def away_s(self) -> float:
        """Seconds until the next worker is started; 0: it is there, or on its way."""
        return 0.0 if self.link is not None else max(0.0, self.restarts.start_at_s - time.monotonic())

    def send(self, command: Command) -> None:
        """To the worker; where there is none, to nobody."""
        if self.link is not None:
            self.link.send(command)

    # -- link.Handler ---------------------------------------------------------------------------------------------

    def received(self, event: Event) -> None:
        """Whatever the worker says is a sign of life."""
        self.pulse.heard()
        if isinstance(event, HealthReport):
            self.pulse.reported(event, time.monotonic())
        else:
            self._on_event(event)

    def lost(self, reason: str) -> None:
        """The worker is gone: start the next."""
        if self.is_closed:
            return
        if self._hang:
            reason, self._hang = f"{reason} after {self._hang}", ""
        log.error("the device worker ended with %s", reason)
        self.link = None
        self._move_to(WorkerState.LOST)
        load_s = sum(loaded.load_s for loaded in self._replicas.all())
        self.restarts.schedule(time.monotonic(), load_s)
        self._returning = asyncio.get_running_loop().create_task(self._come_back(load_s))
        self._on_lost(reason)

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _come_back(self, load_s: float) -> None:
        """Start workers until there is one."""
        while self.link is None:
            await asyncio.sleep(self.restarts.start_at_s - time.monotonic())
            try:
                await self._start_link()
            except Exception as error:  # whatever it is, nobody else would ever start one
                defect = None if isinstance(error, LockstepError) else error
                log.error("the device worker did not come back: %s", error, exc_info=defect)
                self.restarts.schedule(time.monotonic(), load_s)
        log.warning("the device worker is back")
        self._on_back()

    async def _start_link(self) -> None:
        options = self._options
        if options.kind == "process":
            spawned = options.ahead
            if spawned is None or not spawned.is_free:
                spawned = SpawnedWorker(options.log_format, options.log_level, options.trace)
            self.link = await ProcessLink.open(self, spawned)
        else:
            self.link = ThreadLink(self, options.trace)
        self._move_to(WorkerState.UP)
        self.pulse = Pulse(options.health, time.monotonic())

    async def _ask_health(self) -> None:
        while True:
            if self.link is not None:
                self.link.send(AskHealth(0))
                self.pulse.asked()
                self._look_whether_it_hangs(self.link)
            await asyncio.sleep(ASK_INTERVAL_S)

    def _look_whether_it_hangs(self, link: Link) -> None:
        if self._hang or link.pid is None:
            return
        self._hang = self.pulse.hang(is_loading=self._replicas.num_loading > 0)
        if not self._hang:
            return
        names = ", ".join(loaded.name for loaded in self._replicas.all()) or "nothing"
        log.error(
            "the device worker (process %d) hangs, %s, and is killed; %s; it has %s loaded and %d loads under way",
            link.pid,
            self._hang,
            self.pulse.last_words,
            names,
            self._replicas.num_loading,
        )
        link.kill()

    def _move_to(self, state: WorkerState) -> None:
        """A move that the table does not have is a programming error."""
        assert state in MOVES[self._state], f"a worker does not go from {self._state.name} to {state.name}"
        self._state = state
