"""A device worker in threads of this process: for the Python API, tests and stubs. Same messages, no bytes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from lockstep.errors import QueueFullError
from lockstep.worker.device import DeviceWorker
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.link import Handler
from lockstep.worker.messages import Command, Event, Stop, Submit

MAX_COMMANDS = 65_536
"""Commands that may wait for the receiving thread before requests are refused."""
CLOSE_LIMIT_S = 10.0
"""For the step under way; a thread cannot be ended, so one that takes longer is left to itself."""


class ThreadLink:
    """Implements `lockstep.worker.link.Link`. Make it inside a running event loop."""

    pid = None

    def __init__(self, handler: Handler, trace: TraceOptions | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._worker = DeviceWorker(lambda event: self._tell(handler.received, event), trace=trace)
        self._steps = threading.Thread(target=self._run, name="lockstep-steps", daemon=True)
        self._steps.start()
        threading.Thread(target=self._receive, name="lockstep-receive", daemon=True).start()

    def send(self, command: Command) -> None:
        if isinstance(command, Submit) and self._commands.qsize() >= MAX_COMMANDS:
            raise QueueFullError(f"{MAX_COMMANDS} commands already wait for the worker; try again later")
        self._commands.put(command)

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        self._commands.put(Stop())
        await asyncio.to_thread(self._steps.join, CLOSE_LIMIT_S)

    def _receive(self) -> None:
        while True:
            command = self._commands.get()
            self._worker.handle(command)
            if isinstance(command, Stop):
                return

    def _run(self) -> None:
        try:
            self._worker.run()
        except Exception as error:  # it has been logged, and every request was told
            self._tell(self._handler.lost, repr(error))
            self._commands.put(Stop())

    def _tell(self, function: Callable[[Any], None], value: Event | str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, value)
