"""Shared state of one server: its cluster and options, its lifecycle phase, and the number of open requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from starlette.requests import Request

from lockstep.cluster.base import ModelCard
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.threads import WorkerThreads
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import context_of


class ServerPhase(Enum):
    """Lifecycle phase. Requests are admitted from the start; while a model is loading, the cluster rejects them."""

    ADMITTING = "admitting"
    DRAINING = "draining"
    """New requests are rejected; open requests can finish."""
    ENDING = "ending"
    """Open requests end with an error."""
    FORCED = "forced"
    """Connections are closed immediately."""


AFTER_SIGNAL: Mapping[ServerPhase, ServerPhase] = {
    ServerPhase.ADMITTING: ServerPhase.DRAINING,
    ServerPhase.DRAINING: ServerPhase.ENDING,
    ServerPhase.ENDING: ServerPhase.FORCED,
    ServerPhase.FORCED: ServerPhase.FORCED,
}
"""Phase after a SIGTERM or SIGINT, by current phase. Each further signal speeds up the shutdown."""


class Lifecycle:
    """Phase of one server. It only moves forward. Used from one event loop."""

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
        """Handle SIGTERM or SIGINT."""
        self._phase = AFTER_SIGNAL[self._phase]
        self._changed.set()
        self._drains.set()

    def end(self) -> None:
        """Enter `ServerPhase.ENDING`, because the time limit for open requests is reached."""
        if self._phase is ServerPhase.DRAINING:
            self._phase = ServerPhase.ENDING

    async def drains(self) -> None:
        """Wait until new requests are no longer admitted. Any number of tasks can wait."""
        await self._drains.wait()

    async def changed(self) -> ServerPhase:
        """Wait for a signal. A signal since the last wait counts."""
        await self._changed.wait()
        self._changed.clear()
        return self._phase


class Traffic:
    """Counts open requests, including streams."""

    def __init__(self) -> None:
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.watcher: Callable[[], None] | None = None
        """Called when a request arrives and when the last open one has ended."""

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
        """Wait until no request is open."""
        await self._idle.wait()


T = TypeVar("T")

MAX_INLINE_BYTES = 64 << 10
"""Maximum size of a body that is processed on the event loop. Longer ones use another thread, so that tokens of other
requests are not delayed."""
MAX_LONG_BODIES = 32
"""Limit on long bodies in memory, as a number of bodies of the maximum size."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Shared state of one server."""

    cluster: Cluster
    options: ServerOptions
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    traffic: Traffic = field(default_factory=Traffic)
    bench: WorkerThreads = field(init=False)
    """Worker for parsing and translating long bodies."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bench", WorkerThreads(self.max_held_bytes))

    @property
    def max_held_bytes(self) -> int:
        """Maximum total size of long bodies in memory."""
        return MAX_LONG_BODIES * self.options.max_body_bytes


def serving_of(request: Request) -> Serving:
    """Shared state of the server that received a request."""
    serving: Serving = request.app.state.serving
    return serving


def card_of(request: Request, model: str | None) -> ModelCard:
    """Look up the model that a request names, and record it in the request's context.

    Raises:
        ModelNotFoundError: no model has this name.
    """
    card = serving_of(request).cluster.card(model)
    context_of(request).model = card.name
    return card


async def translated(request: Request, work: Callable[[], T], max_inline_bytes: int = MAX_INLINE_BYTES) -> T:
    """Run work on a request's body: on the event loop if the body is short, otherwise on another thread.

    Raises:
        QueueFullError: too much work on long bodies is queued.
    """
    num_bytes = context_of(request).num_body_bytes
    return work() if num_bytes <= max_inline_bytes else await serving_of(request).bench.do(work, num_bytes)
