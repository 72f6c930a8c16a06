"""The seam between the server and a device worker: something that takes commands and gives events back."""

from __future__ import annotations

from typing import Protocol

from lockstep.worker.messages import Command, Event


class Handler(Protocol):
    """Who opened a link. Called on its event loop."""

    def received(self, event: Event) -> None: ...

    def lost(self, reason: str) -> None:
        """The worker is gone, and not because the link was closed; called once."""
        ...


class Link(Protocol):
    """One running device worker. Used from one event loop."""

    @property
    def pid(self) -> int | None:
        """Of the worker's process; None: it is a thread of this one."""
        ...

    def send(self, command: Command) -> None:
        """Queue a command; to a worker that is gone it goes nowhere.

        Raises:
            QueueFullError: the worker takes no more requests now.
            InvalidParameterError: the request holds a number that no message can.
        """
        ...

    def kill(self) -> None:
        """End a process that hangs, at once, so that it counts as lost; a thread cannot be ended, and goes on."""
        ...

    async def close(self) -> None:
        """End the worker, within a bounded time."""
        ...
