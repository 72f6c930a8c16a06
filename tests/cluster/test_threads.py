"""Work on a thread that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref

import pytest

from lockstep.cluster.threads import LONG_BYTES, WorkerThreads, in_thread, release_memory
from lockstep.errors import ConfigError, QueueFullError
from tests.systems import WatchedSystem
from tests.waiting import HANG_S


def _faulty() -> None:
    raise ConfigError("wrong")


async def test_result_or_error_of_the_work_is_returned() -> None:
    assert await in_thread(lambda: threading.current_thread().daemon)
    with pytest.raises(ConfigError, match="wrong"):
        await in_thread(_faulty)


def test_a_loop_ends_while_the_work_goes_on() -> None:
    """And what the work gives afterwards is nobody's."""
    may_end, has_ended = threading.Event(), threading.Event()

    def work() -> None:
        may_end.wait(30.0)
        has_ended.set()

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_thread(work), 0.05)

    asyncio.run(leave())
    assert not has_ended.is_set()
    before = [thread for thread in threading.enumerate() if thread.name == "lockstep-aside"]
    may_end.set()
    for thread in before:
        thread.join(30.0)
    assert has_ended.is_set()


class _BookError(Exception):
    pass


@pytest.mark.parametrize("benched", [False, True])
async def test_a_raised_error_is_freed_without_garbage_collection(benched: bool) -> None:
    """Its frames hold what they worked on; a cycle would leave that to the next full collection."""
    told: list[weakref.ref[_BookError]] = []

    def work() -> None:
        error = _BookError()
        told.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    async def leave() -> None:
        with contextlib.suppress(_BookError):
            await (WorkerThreads(LONG_BYTES).do(work, 10) if benched else in_thread(work))

    gc.disable()
    try:
        await leave()
        await _turns()
        await asyncio.to_thread(_join_all)
        assert [error() for error in told] == [None]
    finally:
        gc.enable()


def _join_all() -> None:
    for thread in threading.enumerate():
        if thread.name == "lockstep-aside":
            thread.join(HANG_S)


class _Held:
    """Work that ends when it is told to."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(HANG_S)
        return "done"


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_long_work_is_done_one_by_one_and_short_work_beside_it() -> None:
    bench, first, second = WorkerThreads(10 * LONG_BYTES), _Held(), _Held()
    long = [asyncio.create_task(bench.do(work, LONG_BYTES + 1)) for work in (first, second)]
    assert await bench.do(lambda: "short", 10) == "short"
    assert first.has_begun.wait(HANG_S)
    assert not second.has_begun.is_set()
    first.may_end.set()
    assert await long[0] == "done"
    assert await asyncio.to_thread(second.has_begun.wait, HANG_S)
    second.may_end.set()
    assert await long[1] == "done"


async def test_waiting_work_is_limited_in_bytes() -> None:
    bench, running = WorkerThreads(5 * LONG_BYTES), _Held()
    tasks = [asyncio.create_task(bench.do(running, 2 * LONG_BYTES)) for _ in range(3)]
    await _turns()
    with pytest.raises(QueueFullError, match="try again later"):
        await bench.do(running, 2 * LONG_BYTES)
    tasks[1].cancel()
    await _turns()
    tasks.append(asyncio.create_task(bench.do(running, 2 * LONG_BYTES)))
    running.may_end.set()
    assert [await task for task in tasks if task is not tasks[1]] == ["done"] * 3
    assert tasks[1].cancelled()


async def test_cancelled_running_work_keeps_its_slot_and_cancelled_waiting_work_takes_none() -> None:
    bench, abandoned, unborn, next_ = WorkerThreads(10 * LONG_BYTES), _Held(), _Held(), _Held()
    tasks = [asyncio.create_task(bench.do(work, LONG_BYTES + 1)) for work in (abandoned, unborn, next_)]
    assert await asyncio.to_thread(abandoned.has_begun.wait, HANG_S)
    for task in tasks[:2]:
        task.cancel()
    await _turns()
    assert not next_.has_begun.is_set(), "a thread that nobody waits for is a thread all the same"
    next_.may_end.set()
    abandoned.may_end.set()
    assert await tasks[2] == "done"
    assert not unborn.has_begun.is_set()


async def test_an_error_of_the_work_is_raised_and_its_slot_released() -> None:
    bench = WorkerThreads(LONG_BYTES)
    for _ in range(3):
        with pytest.raises(ConfigError, match="wrong"):
            await bench.do(_faulty, 2 * LONG_BYTES)


async def test_a_panic_of_the_work_is_raised_and_its_slot_released() -> None:
    """As the libraries in Rust do: what they raise then is no `Exception`."""

    class PanicException(BaseException):
        pass

    def panic() -> None:
        raise PanicException("index out of bounds")

    bench = WorkerThreads(LONG_BYTES)
    async with asyncio.timeout(HANG_S):
        for _ in range(3):
            with pytest.raises(RuntimeError, match="index out of bounds"):
                await bench.do(panic, 2 * LONG_BYTES)


async def test_a_thread_that_cannot_be_started_fails_its_work_and_releases_the_slot() -> None:
    hindrances = [RuntimeError("can't start new thread")]

    def hinder(call: str, name: str) -> None:
        if hindrances:
            raise hindrances.pop()

    bench = WorkerThreads(LONG_BYTES, WatchedSystem(hinder))
    async with asyncio.timeout(HANG_S):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await bench.do(lambda: 1, 2 * LONG_BYTES)
        assert await bench.do(lambda: 2, 2 * LONG_BYTES) == 2


async def test_an_error_of_cancelled_work_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench, may_end = WorkerThreads(LONG_BYTES), threading.Event()

    def work() -> None:
        assert may_end.wait(HANG_S)
        raise ConfigError("wrong")

    left = asyncio.create_task(bench.do(work, 10))
    await _turns()
    left.cancel()
    await _turns()
    may_end.set()
    await asyncio.to_thread(_join_all)
    await _turns()
    gc.collect()
    assert not caplog.records


def test_memory_is_given_back_where_the_system_supports_it() -> None:
    release_memory()
