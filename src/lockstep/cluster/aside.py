"""Work on threads that nobody has to wait for: a server that is told to end while it hashes, fetches gigabytes or
tokenises a book ends at once, where one of asyncio's own threads would be joined first."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lockstep.errors import QueueFullError

T = TypeVar("T")

LONG_BYTES = 256 << 10
"""Work on more than this is long: it takes tenths of a second, and memory that is given back afterwards."""
SHORT_PLACES, LONG_PLACES = 2, 1
"""Threads at once. A long text takes a core, and a hundred times its size in memory."""
TRIM_AFTER_S = 0.5
"""After the last work of a long time; what it was about is gone by then as well."""


async def aside(work: Callable[[], T]) -> T:
    """What the work returns or raises. Leaving early leaves it to its end, or to the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(done: asyncio.Future[T], answer: Callable[[Any], None], value: object) -> None:
        if not done.done():
            answer(value)

    def body(done: asyncio.Future[T]) -> None:
        try:
            value = work()
        except Exception as error:
            tell(loop, settle, done, done.set_exception, error)
        except BaseException as error:  # native code that panics raises no `Exception`; it is still waited for
            tell(loop, settle, done, done.set_exception, _given_up(error))
        else:
            tell(loop, settle, done, done.set_result, value)
        del done  # as below: the frames that an error came through have this one

    threading.Thread(target=body, args=(done,), name="lockstep-aside", daemon=True).start()
    try:
        return await done
    finally:
        del done  # which has an error whose frames have it: they would keep each other, and all that the work was about


def _given_up(error: BaseException) -> RuntimeError:
    """An error that those who wait can catch as any other."""
    failure = RuntimeError(f"work aside gave up: {error!r}")
    failure.__cause__ = error
    return failure


def tell(loop: asyncio.AbstractEventLoop, what: Callable[..., object], *arguments: object) -> None:
    """Call something on a loop, from another thread; nothing where the loop has ended meanwhile."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what, *arguments)


@dataclass(slots=True)
class _Lane:
    num_free: int
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Workbench:
    """A few places for work that would hold up an event loop, first come first served. Used from one loop.

    Short work has places of its own, so that it does not stand behind long work.

    Args:
        max_waiting_bytes: what the work that waits may be about in all.
    """

    def __init__(self, max_waiting_bytes: int) -> None:
        self._short, self._long = _Lane(SHORT_PLACES), _Lane(LONG_PLACES)
        self._max_waiting_bytes = max_waiting_bytes
        self._num_waiting_bytes = 0
        self._num_kept_bytes = 0
        """That work was about since memory was given back: many short texts leave as much as a long one."""
        self._trimming: asyncio.TimerHandle | None = None

    async def do(self, work: Callable[[], T], num_bytes: int) -> T:
        """What the work returns or raises. Who leaves early gives up its turn; what has begun keeps its place to its
        end.

        Args:
            num_bytes: what it is about.

        Raises:
            QueueFullError: too much waits.
        """
        lane = self._long if num_bytes > LONG_BYTES else self._short
        await self._enter(lane, num_bytes)
        working = asyncio.get_running_loop().create_task(aside(work))
        working.add_done_callback(lambda ended: self._end(ended, lane, num_bytes))
        try:
            return await asyncio.shield(working)
        finally:
            del working  # as `done` in `aside`

    async def _enter(self, lane: _Lane, num_bytes: int) -> None:
        if lane.num_free:
            lane.num_free -= 1
            return
        if self._num_waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise QueueFullError(
                f"{self._num_waiting_bytes} bytes of long requests wait to be read, of {self._max_waiting_bytes} that "
                "may; try again later"
            )
        turn = asyncio.get_running_loop().create_future()
        lane.waiting.append(turn)
        self._num_waiting_bytes += num_bytes
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come
                self._leave(lane)
            else:
                lane.waiting.remove(turn)
            raise
        finally:
            self._num_waiting_bytes -= num_bytes

    def _end(self, ended: asyncio.Task[Any], lane: _Lane, num_bytes: int) -> None:
        if not ended.cancelled():
            ended.exception()  # seen, also where its asker has left: no fault to be logged
        self._leave(lane)
        self._num_kept_bytes += num_bytes
        if self._num_kept_bytes > LONG_BYTES:
            self._trim_soon()

    def _leave(self, lane: _Lane) -> None:
        """Give the place to who waits for it."""
        while lane.waiting:
            turn = lane.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        lane.num_free += 1

    def _trim_soon(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        self._trimming = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trimming, self._num_kept_bytes = None, 0
        threading.Thread(target=give_back_memory, name="lockstep-trim", daemon=True).start()


def give_back_memory() -> None:
    """Return what is free in the C library's heaps to the system, which glibc keeps: a tokenised book leaves a
    gigabyte. Elsewhere nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
