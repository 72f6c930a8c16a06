"""Threads for work that no one has to wait for, and a bounded number of places for it.

A server that is stopped while it hashes, fetches gigabytes or tokenises a book ends at once, where one of asyncio's
own threads would be joined first.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from lockstep.errors import QueueFullError

T = TypeVar("T")

LONG_BYTES = 256 << 10
"""Work on more than this is long: it takes tenths of a second, and memory that is given back afterwards."""
SHORT_PLACES, LONG_PLACES = 2, 1
"""Threads at once. A long text takes a core, and a hundred times its size in memory."""
TRIM_AFTER_S = 0.5
"""After the last work of a long time; what it was about is gone by then as well."""


async def in_thread(work: Callable[[], T]) -> T:
    """Run work on a thread of its own, and return or raise what it does.

    Leaving early leaves it to its end, or to the end of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(done: asyncio.Future[T], answer: Callable[[Any], None], value: object) -> None:
        if not done.done():
            answer(value)

    def body(done: asyncio.Future[T]) -> None:
        try:
            value = work()
        except Exception as error:
            call_on(loop, settle, done, done.set_exception, error)
        except BaseException as error:  # native code that panics raises no `Exception`; it is still waited for
            call_on(loop, settle, done, done.set_exception, _given_up(error))
        else:
            call_on(loop, settle, done, done.set_result, value)
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


def call_on(loop: asyncio.AbstractEventLoop, what: Callable[..., object], *arguments: object) -> None:
    """Call something on a loop from another thread; do nothing where the loop has ended meanwhile."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what, *arguments)


class Workbench:
    """A few places for work that would hold up an event loop, first come first served. Used from one loop.

    Short work has places of its own, so that it does not stand behind long work.

    Args:
        max_waiting_bytes: what the work that waits may be about in all.
    """

    def __init__(self, max_waiting_bytes: int) -> None:
        self._short, self._long = asyncio.Semaphore(SHORT_PLACES), asyncio.Semaphore(LONG_PLACES)
        self._max_waiting_bytes = max_waiting_bytes
        self._num_waiting_bytes = 0
        self._num_kept_bytes = 0
        """That work was about since memory was given back: many short texts leave as much as a long one."""
        self._trimming: asyncio.TimerHandle | None = None

    async def do(self, work: Callable[[], T], num_bytes: int) -> T:
        """Run work as soon as there is a place, and return or raise what it does. Who leaves early gives up its turn;
        what has begun keeps its place to its end.

        Args:
            num_bytes: what it is about.

        Raises:
            QueueFullError: too much waits.
        """
        lane = self._long if num_bytes > LONG_BYTES else self._short
        await self._enter(lane, num_bytes)
        working = asyncio.get_running_loop().create_task(in_thread(work))
        working.add_done_callback(lambda ended: self._end(ended, lane, num_bytes))
        try:
            return await asyncio.shield(working)
        finally:
            del working  # as `done` in `in_thread`

    async def _enter(self, lane: asyncio.Semaphore, num_bytes: int) -> None:
        if not lane.locked():
            await lane.acquire()  # at once
            return
        if self._num_waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise QueueFullError(
                f"{self._num_waiting_bytes} bytes of long requests wait to be read, of {self._max_waiting_bytes} that "
                "may; try again later"
            )
        self._num_waiting_bytes += num_bytes
        try:
            await lane.acquire()
        finally:
            self._num_waiting_bytes -= num_bytes

    def _end(self, ended: asyncio.Task[Any], lane: asyncio.Semaphore, num_bytes: int) -> None:
        if not ended.cancelled():
            ended.exception()  # seen, also where its asker has left: no fault to be logged
        lane.release()
        self._num_kept_bytes += num_bytes
        if self._num_kept_bytes > LONG_BYTES:
            self._trim_soon()

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
