"""One server's shared state: its cluster and options, its phase of life, and how many requests it is answering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from starlette.requests import Request

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.threads import WorkerThreads
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import context_of


class ServerPhase(Enum):
    """From the first moment on requests are admitted: while the model loads it is the cluster that refuses them."""

    ADMITTING = "admitting"
    DRAINING = "draining"
    """Nothing new; what is in flight may finish."""
    ENDING = "ending"
    """What is in flight ends with an error."""
    FORCED = "forced"
    """Connections are closed as they are."""


AFTER_SIGNAL: Mapping[ServerPhase, ServerPhase] = {
    ServerPhase.ADMITTING: ServerPhase.DRAINING,
    ServerPhase.DRAINING: ServerPhase.ENDING,
    ServerPhase.ENDING: ServerPhase.FORCED,
    ServerPhase.FORCED: ServerPhase.FORCED,
}
"""Every further SIGTERM or SIGINT hurries."""


class Lifecycle:
    """One server's phase. Moves forward only; used from one event loop."""

    def __init__(self) -> None:
        self._phase = ServerPhase.ADMITTING
        self._changed = asyncio.Event()
        self._drains = asyncio.Event()

    @property
    def phase(self) -> ServerPhase:
        return self._phase

    @property
    def is_admitting(self) -> bool:
        return self._phase is ServerPhase.ADMITTING

    def on_signal(self) -> None:
        """SIGTERM or SIGINT came."""
        self._phase = AFTER_SIGNAL[self._phase]
        self._changed.set()
        self._drains.set()

    def end(self) -> None:
        """Time is up for what is in flight."""
        if self._phase is ServerPhase.DRAINING:
            self._phase = ServerPhase.ENDING

    async def drains(self) -> None:
        """Wait until nothing new is admitted; any number may wait."""
        await self._drains.wait()

    async def changed(self) -> ServerPhase:
        """Wait for a signal; one that came since the last wait counts."""
        await self._changed.wait()
        self._changed.clear()
        return self._phase


class Traffic:
    """Requests that are being answered, streams and others."""

    def __init__(self) -> None:
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.watcher: Callable[[], None] | None = None
        """Called when a request came, and when the last one has ended."""

    @property
    def num_open(self) -> int:
        return self._num_open

    def enter(self) -> None:
        self._num_open += 1
        self._idle.clear()
        if self.watcher is not None:
            self.watcher()

    def leave(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._idle.set()
            if self.watcher is not None:
                self.watcher()

    async def idle(self) -> None:
        """Wait until nothing is being answered."""
        await self._idle.wait()


T = TypeVar("T")

MAX_INLINE_BYTES = 64 << 10
"""What is done with a longer body is done on another thread, so that it does not delay the tokens of others."""
MAX_LONG_BODIES = 32
"""Long bodies that are held at once: as many bytes as so many of the largest have."""


@dataclass(frozen=True, slots=True)
class Serving:
    """One server."""

    cluster: Cluster
    options: ServerOptions
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    traffic: Traffic = field(default_factory=Traffic)
    bench: WorkerThreads = field(init=False)
    """Where long bodies are read and translated."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bench", WorkerThreads(self.max_held_bytes))

    @property
    def max_held_bytes(self) -> int:
        """Bytes of long bodies that are held at once."""
        return MAX_LONG_BODIES * self.options.max_body_bytes


def serving_of(request: Request) -> Serving:
    """The server that a request came to."""
    serving: Serving = request.app.state.serving
    return serving


async def translated(request: Request, work: Callable[[], T], max_inline_bytes: int = MAX_INLINE_BYTES) -> T:
    """The result of work on a request's body, done here if it is short.

    Raises:
        QueueFullError: too much long work waits.
    """
    num_bytes = context_of(request).num_body_bytes
    return work() if num_bytes <= max_inline_bytes else await serving_of(request).bench.do(work, num_bytes)
