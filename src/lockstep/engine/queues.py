"""Queues between an engine's thread and all others: requests and aborts in, answers out, each step's outputs to the
event loops that wait for them. All are bounded.

There is no lock around inbox and results: each operation on a queue is one that Python does whole, so that an interrupt
of the caller finds nothing half done, and no one waits for the engine but by the bell.
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
    """Bounded by the request itself: at most one output per token of its ``n`` completions."""


MAX_COMMANDS = 65_536
"""That may wait for the next step."""


class Abort(NamedTuple):
    """End a request."""

    request_id: int


class Inbox:
    """Requests and aborts in the order in which they came."""

    def __init__(self) -> None:
        self._commands: deque[LiveRequest | Abort] = deque()
        self._bell = threading.Event()
        """Set whenever there may be something to do; the waiting thread clears it before it looks."""
        self._counting = threading.Lock()
        self.num_rejected = 0
        """Requests for which there was no room, since the start."""
        self._closed_because = ""

    # -- any thread ---------------------------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Refuse a request before it is made.

        Raises:
            QueueFullError: too much waits.
            UsageError: nothing is taken any more.
        """
        if self._closed_because:
            raise UsageError(self._closed_because)
        if len(self._commands) >= MAX_COMMANDS:
            with self._counting:
                self.num_rejected += 1
            raise QueueFullError(f"{MAX_COMMANDS} commands already wait for the next step; try again later")

    def put(self, live: LiveRequest) -> None:
        """Leave a request for the next step; UsageError where no step would ever find it."""
        self._commands.append(live)
        if self._closed_because:
            try:
                self._commands.remove(live)
            except ValueError:  # it was taken before the inbox was closed, and ends as those before it
                return
            raise UsageError(self._closed_because)
        self.wake()

    def abort(self, request_id: int) -> None:
        """Have a request ended before the next step."""
        self._commands.append(Abort(request_id))
        self.wake()

    def close(self, why: str) -> None:
        """Refuse requests from now on with this reason; the first one counts. What is in here is still to be taken."""
        self._closed_because = self._closed_because or why
        self.wake()

    @property
    def is_closed(self) -> bool:
        return bool(self._closed_because)

    def wake(self) -> None:
        """End a ``wait``, the one under way or the next."""
        if not self._bell.is_set():
            self._bell.set()

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def num_requests(self) -> int:
        return sum(type(command) is LiveRequest for command in self._commands.copy())

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def take(self) -> Iterator[LiveRequest | Abort]:
        """Take what is there now, and not what comes meanwhile."""
        for _ in range(len(self._commands)):
            try:
                command = self._commands.popleft()
            except IndexError:  # whoever put the last one found this closed, and took it back
                return
            yield command

    def wait(self, timeout_s: float) -> None:
        """Sleep until something is left here or the time is up."""
        self._bell.wait(timeout_s)
        self._bell.clear()


class Results:
    """Answers without a callback, until they are read; the oldest are dropped first.

    Args:
        most: that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._outputs: OrderedDict[int, RequestOutput] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outputs)

    def keep(self, output: RequestOutput) -> None:
        """Called by the engine's thread alone."""
        self._outputs[output.request_id] = output
        if len(self._outputs) > self._most:
            self._take_oldest()

    def take(self, request_id: int) -> RequestOutput | None:
        """One answer, once; None: it is not here."""
        return self._outputs.pop(request_id, None)

    def take_all(self) -> tuple[RequestOutput, ...]:
        """Take what is here now, oldest first."""
        taken = [self._take_oldest() for _ in range(len(self._outputs))]
        return tuple(output for output in taken if output is not None)

    def _take_oldest(self) -> RequestOutput | None:
        with suppress(KeyError):  # another thread took the last one meanwhile
            return self._outputs.popitem(last=False)[1]
        return None


class LoopMailboxes:
    """Outputs of one step, grouped by the event loop that waits for them: one wake-up per loop and step, never one per
    token. Engine thread only."""

    def __init__(self) -> None:
        self._batches: dict[asyncio.AbstractEventLoop, list[tuple[OutputQueue, TokenOutput]]] = {}

    def post(self, loop: asyncio.AbstractEventLoop, queue: OutputQueue, output: TokenOutput) -> None:
        self._batches.setdefault(loop, []).append((queue, output))

    def dispatch(self, on_lost: Callable[[int], None]) -> None:
        """Hand each loop its batch; ``on_lost`` gets the ids of requests whose loop is closed."""
        if not self._batches:
            return
        batches, self._batches = self._batches, {}
        for loop, batch in batches.items():
            try:
                loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop is closed: nobody can read these streams any more
                for _, output in batch:
                    on_lost(output.request_id)


def _deliver(batch: list[tuple[OutputQueue, TokenOutput]]) -> None:
    for queue, output in batch:
        queue.put_nowait(output)
