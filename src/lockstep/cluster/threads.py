"""Background threads: runs blocking work off the event loop, with a limit on the number of threads.

They are daemon threads: a server that is stopped while it hashes files, downloads gigabytes or tokenises a book ends at
once. The interpreter would first join asyncio's own threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from lockstep.errors import QueueFullError
from lockstep.system import SYSTEM, System

T = TypeVar("T")

LONG_BYTES = 256 << 10
"""Amount of data above which work counts as long: it takes tenths of a second, and memory that is released
afterwards."""
SHORT_THREADS, LONG_THREADS = 2, 1
"""Number of threads for short and for long work. A long text occupies a core and takes a hundred times its size in
memory."""
TRIM_AFTER_S = 0.5
"""Delay in seconds after the last work before memory is released; by then the work's data has been freed."""


async def in_thread(work: Callable[[], T], system: System = SYSTEM) -> T:
    """Run a function on its own thread, and return its value or raise its error.

    If the caller is cancelled, the function runs to its end, or to the end of the process.
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
        except BaseException as error:  # native code that panics raises no `Exception`; callers still wait for it
            call_on(loop, settle, done, done.set_exception, _as_error(error))
        else:
            call_on(loop, settle, done, done.set_result, value)
        del done  # as below: the frames of an error refer to it

    system.start_thread(partial(body, done), "lockstep-aside")
    try:
        return await done
    finally:
        del done  # break the cycle of the error and its frames, which would keep the work's data alive


def _as_error(error: BaseException) -> RuntimeError:
    """Wrap the error of a panic in an ordinary one that callers can catch."""
    failure = RuntimeError(f"background work failed: {error!r}")
    failure.__cause__ = error
    return failure


def call_on(loop: asyncio.AbstractEventLoop, what: Callable[..., object], *arguments: object) -> None:
    """Schedule a call on a loop from another thread; does nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what, *arguments)


class WorkerThreads:
    """A few threads for work that would block an event loop, first come, first served. Used from one loop.

    Short work has its own threads, so it never waits for long work.

    Args:
        max_waiting_bytes: maximum amount of data of all waiting work together.
    """

    def __init__(self, max_waiting_bytes: int, system: System = SYSTEM) -> None:
        self._system = system
        self._short, self._long = asyncio.Semaphore(SHORT_THREADS), asyncio.Semaphore(LONG_THREADS)
        self._max_waiting_bytes = max_waiting_bytes
        self._num_waiting_bytes = 0
        self._num_kept_bytes = 0
        """Amount of processed data since memory was last released; many short texts take as much memory as a long
        one."""
        self._trimming: asyncio.TimerHandle | None = None

    async def do(self, work: Callable[[], T], num_bytes: int) -> T:
        """Run a function as soon as a thread is free, and return its value or raise its error. If the caller is
        cancelled, waiting work is dropped and running work continues.

        Args:
            num_bytes: amount of data that the work processes.

        Raises:
            QueueFullError: too much work waits already.
        """
        slots = self._long if num_bytes > LONG_BYTES else self._short
        await self._enter(slots, num_bytes)
        working = asyncio.get_running_loop().create_task(in_thread(work, self._system))
        working.add_done_callback(lambda ended: self._end(ended, slots, num_bytes))
        try:
            return await asyncio.shield(working)
        finally:
            del working  # as `done` in `in_thread`

    async def _enter(self, slots: asyncio.Semaphore, num_bytes: int) -> None:
        if not slots.locked():
            await slots.acquire()  # does not wait
            return
        if self._num_waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise QueueFullError(
                f"{self._num_waiting_bytes} of at most {self._max_waiting_bytes} bytes of requests already wait to be "
                "processed; try again later"
            )
        self._num_waiting_bytes += num_bytes
        try:
            await slots.acquire()
        finally:
            self._num_waiting_bytes -= num_bytes

    def _end(self, ended: asyncio.Task[Any], slots: asyncio.Semaphore, num_bytes: int) -> None:
        if not ended.cancelled():
            ended.exception()  # mark the error as retrieved even if the caller was cancelled
        slots.release()
        self._num_kept_bytes += num_bytes
        if self._num_kept_bytes > LONG_BYTES:
            self._trim_soon()

    def _trim_soon(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        self._trimming = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trimming, self._num_kept_bytes = None, 0
        self._system.start_thread(release_memory, "lockstep-trim")


def release_memory() -> None:
    """Return the free memory of the C library's heaps to the system. glibc would keep it, and a tokenised book leaves a
    gigabyte. Does nothing with other C libraries."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
