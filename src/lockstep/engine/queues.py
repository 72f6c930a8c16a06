"""Queues between an engine's thread and others: carry requests and aborts in, answers and outputs out; all are bounded.

Inbox and results have no lock. Each operation on a queue is atomic in Python, so that an interrupt of the caller leaves
no partial state, and no thread waits for the engine except on the wake-up event.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from lockstep.engine.generation import LiveRequest
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.errors import QueueFullError, UsageError

if TYPE_CHECKING:
    import asyncio

    OutputQueue = asyncio.Queue[TokenOutput]
    """Queue of a request's outputs, limited to one output per token of its ``n`` completions."""


MAX_COMMANDS = 65_536
"""Maximum number of commands that wait for the next step."""


class AbortCommand(NamedTuple):
    """Command to end a request."""

    request_id: int


class Inbox:
    """Requests and aborts in order of arrival."""

    def __init__(self) -> None:
        self._commands: deque[LiveRequest | AbortCommand] = deque()
        self._wakeup = threading.Event()
        """Set when there may be work. The waiting thread clears it before it checks."""
        self._counting = threading.Lock()
        self.num_rejected = 0
        """Number of requests that were rejected because the inbox was full, since the start."""
        self._closed_because = ""

    # -- any thread ---------------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Check that a request may be added.

        Raises:
            QueueFullError: too many commands wait.
            UsageError: the inbox is closed.
        """
        if self._closed_because:
            raise UsageError(self._closed_because)
        if len(self._commands) >= MAX_COMMANDS:
            with self._counting:
                self.num_rejected += 1
            raise QueueFullError(f"{MAX_COMMANDS} commands already wait for the next step; try again later")

    def put(self, live: LiveRequest) -> None:
        """Queue a request for the next step.

        Raises:
            UsageError: the inbox is closed, and no step would take it.
        """
        self._commands.append(live)
        if self._closed_because:
            try:
                self._commands.remove(live)
            except ValueError:  # already taken, so it ends like the requests before it
                return
            raise UsageError(self._closed_because)
        self.wake()

    def abort(self, request_id: int) -> None:
        """Queue the end of a request for the next step."""
        self._commands.append(AbortCommand(request_id))
        self.wake()

    def close(self, why: str) -> None:
        """Reject requests from now on with this reason; the first reason stays. Commands in the inbox are still
        taken."""
        self._closed_because = self._closed_because or why
        self.wake()

    @property
    def is_closed(self) -> bool:
        return bool(self._closed_because)

    def wake(self) -> None:
        """End the current or the next ``wait``."""
        if not self._wakeup.is_set():
            self._wakeup.set()

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def num_requests(self) -> int:
        return sum(type(command) is LiveRequest for command in self._commands.copy())

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def take(self) -> Iterator[LiveRequest | AbortCommand]:
        """Take the commands that are here at the time of the call."""
        for _ in range(len(self._commands)):
            try:
                command = self._commands.popleft()
            except IndexError:  # `put` has removed its request after a close
                return
            yield command

    def wait(self, timeout_s: float) -> None:
        """Sleep until a command arrives or the timeout ends."""
        self._wakeup.wait(timeout_s)
        self._wakeup.clear()


class Results:
    """Answers of requests without a callback, until they are read. The oldest are dropped first.

    Args:
        most: maximum number of answers.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._outputs: OrderedDict[int, RequestOutput] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outputs)

    def keep(self, output: RequestOutput) -> None:
        """Add an answer. Only the engine's thread may call this."""
        self._outputs[output.request_id] = output
        if len(self._outputs) > self._most:
            self._take_oldest()

    def take(self, request_id: int) -> RequestOutput | None:
        """Take one answer; None: it is not here."""
        return self._outputs.pop(request_id, None)

    def take_all(self) -> tuple[RequestOutput, ...]:
        """Take all answers that are here now, oldest first."""
        taken = [self._take_oldest() for _ in range(len(self._outputs))]
        return tuple(output for output in taken if output is not None)

    def _take_oldest(self) -> RequestOutput | None:
        with suppress(KeyError):  # another thread took the last one meanwhile
            return self._outputs.popitem(last=False)[1]
        return None


class LoopMailboxes:
    """Outputs of one step, grouped by event loop: each loop is woken once per step, not once per token. Engine thread
    only."""

    def __init__(self) -> None:
        self._batches: dict[asyncio.AbstractEventLoop, list[tuple[OutputQueue, TokenOutput]]] = {}

    def post(self, loop: asyncio.AbstractEventLoop, queue: OutputQueue, output: TokenOutput) -> None:
        self._batches.setdefault(loop, []).append((queue, output))

    def dispatch(self, on_lost: Callable[[int], None]) -> None:
        """Send each loop its batch. Calls ``on_lost`` with the ids of requests whose loop is closed."""
        if not self._batches:
            return
        batches, self._batches = self._batches, {}
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop is closed, so these streams have no reader
                for _, output in batch:
                    on_lost(output.request_id)


def _deliver(batch: list[tuple[OutputQueue, TokenOutput]]) -> None:
    for queue, output in batch:
        queue.put_nowait(output)
