"""What every handler works with: the cluster and the server's options, put on the application by `create_app`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from lockstep.cluster.aside import Workbench
from lockstep.cluster.base import Cluster
from lockstep.server.lifecycle import Lifecycle, Traffic
from lockstep.server.options import ServerOptions
from lockstep.server.record import record_of

T = TypeVar("T")

MAX_INLINE_BYTES = 64 << 10
"""What is done with a longer body is done on another thread, so that it delays nobody's tokens."""
MAX_LONG_BODIES = 32
"""Long bodies that are held at once: as many bytes as so many of the largest have."""


@dataclass(frozen=True, slots=True)
class Serving:
    """One server."""

    cluster: Cluster
    options: ServerOptions
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    traffic: Traffic = field(default_factory=Traffic)
    bench: Workbench = field(init=False)
    """Where long bodies are read and translated."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bench", Workbench(self.max_held_bytes))

    @property
    def max_held_bytes(self) -> int:
        """Of long bodies."""
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
    num_bytes = record_of(request).num_body_bytes
    return work() if num_bytes <= max_inline_bytes else await serving_of(request).bench.do(work, num_bytes)
