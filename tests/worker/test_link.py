"""Links to real workers, in a process and in threads: what they carry, what they refuse, and how they end."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import ExecutorError, InvalidParameterError, QueueFullError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.link import Link, LinkLimits, ProcessLink, SpawnedWorker, ThreadLink, WorkerOptions, open_link
from lockstep.worker.messages import (
    Answered,
    Ask,
    AskHealth,
    Event,
    Load,
    Loaded,
    Outputs,
    Submit,
    TrialOptions,
    Unload,
    Unloaded,
)
from tests.systems import WatchedSystem
from tests.waiting import ENDLESS_MS, HANG_S, Gate, eventually
from tests.worker.support import SHORT, ask

SMALL = LoadOptions(EngineOptions(num_blocks=64))
needs_unix = pytest.mark.skipif(sys.platform == "win32", reason="worker processes need a Unix system")
PROCESS = pytest.param("process", marks=needs_unix)
KINDS = pytest.mark.parametrize("kind", ["thread", PROCESS])


class Heard:
    """What a link brings, in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.endings: list[str] = []

    def received(self, event: Event) -> None:
        self.events.append(event)

    def lost(self, reason: str) -> None:
        self.endings.append(reason)

    async def of(self, kind: type[Event]) -> Event:
        """The latest event of a kind, waited for."""
        await eventually(lambda: any(isinstance(event, kind) for event in self.events))
        return next(event for event in reversed(self.events) if isinstance(event, kind))


@asynccontextmanager
async def linked(
    kind: str, source: str = "stub://alpha", limits: LinkLimits | None = None
) -> AsyncIterator[tuple[Link, Heard]]:
    """A link to a worker that has one replica, ``a``."""
    heard = Heard()
    link = await open_link(
        WorkerOptions("process" if kind == "process" else "thread", link=limits or LinkLimits()), heard
    )
    try:
        link.send(Load("a", source, SMALL, TrialOptions(enabled=False)))
        await heard.of(Loaded)
        yield link, heard
    finally:
        await asyncio.wait_for(link.close(), HANG_S)


@KINDS
async def test_commands_go_in_and_events_come_out_in_their_order(kind: str) -> None:
    async with linked(kind) as (link, heard):
        assert (link.pid is None) == (kind == "thread")
        for number in range(3):
            link.send(Submit(number, "a", ask("abc", SHORT)))
        link.send(Ask(7, AskHealth()))
        report = await heard.of(Answered)
        assert isinstance(report, Answered)
        assert report.ask_id == 7
        await eventually(lambda: len(texts_of(heard)) == 3)
        assert set(texts_of(heard)) == {"[stub:alpha] ok len=3 max=40"}
        link.send(Unload("a"))
        await heard.of(Unloaded)
    assert heard.endings == [], "whoever closes a link is not told that the worker is gone"


def texts_of(heard: Heard) -> list[str]:
    outputs = [output for event in heard.events if isinstance(event, Outputs) for output in event.outputs]
    return [output.request.text for output in outputs if output.request is not None]


@KINDS
async def test_closed_link_ignores_commands(kind: str) -> None:
    async with linked(kind) as (link, heard):
        pass
    num_events = len(heard.events)
    link.send(Ask(1, AskHealth()))
    await asyncio.sleep(0.05)
    assert len(heard.events) == num_events


@KINDS
async def test_a_number_that_no_message_can_hold_is_the_requests_fault_and_no_others(kind: str) -> None:
    async with linked(kind) as (link, heard):
        if kind == "process":
            with pytest.raises(InvalidParameterError, match="does not fit 64 bits"):
                link.send(Submit(1, "a", ask("abc", SamplingParams(max_tokens=1 << 70))))
        link.send(Submit(2, "a", ask("abc", SHORT)))
        await eventually(lambda: len(texts_of(heard)) == 1)


def fill(link: Link) -> None:
    """Send more than is ever left unread."""
    for number in range(1000):
        link.send(Submit(number, "a", ask("x" * 20_000, SHORT)))


@needs_unix
async def test_requests_are_refused_that_a_worker_does_not_read_and_commands_are_not() -> None:
    async with linked("process", limits=LinkLimits(max_unsent_bytes=1 << 20)) as (link, heard):
        assert link.pid is not None
        os.kill(link.pid, signal.SIGSTOP)
        try:
            with pytest.raises(QueueFullError, match="1048576 bytes of requests already wait"):
                fill(link)
            link.send(Ask(9, AskHealth()))
        finally:
            os.kill(link.pid, signal.SIGCONT)
        report = await heard.of(Answered)
        assert isinstance(report, Answered)
        assert report.ask_id == 9


async def test_requests_are_refused_that_the_receiving_thread_does_not_take() -> None:
    async with linked("thread", limits=LinkLimits(max_commands=0)) as (link, heard):
        with pytest.raises(QueueFullError, match="0 commands already wait"):
            link.send(Submit(1, "a", ask("abc", SHORT)))
        link.send(Ask(9, AskHealth()))
        await heard.of(Answered)


@needs_unix
@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, "signal 9 (SIGKILL)"), (signal.SIGSEGV, "signal 11 (SIGSEGV)")]
)
async def test_ended_process_is_reported_as_lost_once_with_its_signal(number: int, how: str) -> None:
    async with linked("process") as (link, heard):
        assert link.pid is not None
        os.kill(link.pid, number)
        await eventually(lambda: bool(heard.endings))
        link.send(Ask(1, AskHealth()))  # to nobody
        await asyncio.sleep(0.05)
        assert heard.endings == [how]


@needs_unix
async def test_hanging_process_is_killed_and_reported_as_lost() -> None:
    async with linked("process") as (link, heard):
        assert link.pid is not None
        os.kill(link.pid, signal.SIGSTOP)
        link.kill()
        await eventually(lambda: bool(heard.endings))
        assert heard.endings == ["signal 9 (SIGKILL)"]


@needs_unix
async def test_closing_ends_a_process_that_does_not_stop() -> None:
    """Stopped, it reads neither the command nor the end of its stream: what is left is to kill it."""
    async with linked("process", limits=LinkLimits(stop_s=0.05, eof_s=0.05)) as (link, heard):
        assert link.pid is not None
        process = psutil.Process(link.pid)
        process.suspend()
    await eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert heard.endings == []


async def test_closing_threads_waits_for_the_step_under_way(gate: Gate) -> None:
    before = {*threading.enumerate()}
    async with linked("thread", f"stub://alpha?step_ms={ENDLESS_MS}") as (link, _):
        assert isinstance(link, ThreadLink)
        link.send(Submit(1, "a", ask("abc", SHORT)))
        await eventually(lambda: gate.num_held == 1)
        closing = asyncio.create_task(link.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        gate.open()
        await asyncio.wait_for(closing, HANG_S)
        assert not [each for each in {*threading.enumerate()} - before if each.name == "lockstep-steps"]


@needs_unix
async def test_cancelled_opening_of_a_link_leaves_no_process() -> None:
    spawned = SpawnedWorker("text", "warning")
    pid = spawned.pid
    opening = asyncio.create_task(ProcessLink.open(Heard(), spawned))
    await asyncio.sleep(0)
    opening.cancel()
    [opened] = await asyncio.gather(opening, return_exceptions=True)
    if isinstance(opened, ProcessLink):  # it was quicker
        await opened.close()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not spawned.is_free


@needs_unix
def test_a_worker_process_that_cannot_be_started_raises_an_error_with_the_reason() -> None:
    def refuse(call: str, about: str) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    before = psutil.Process().num_fds()
    with pytest.raises(ExecutorError, match=r"no worker process can be started: .*Resource temporarily unavailable"):
        SpawnedWorker("text", "warning", system=WatchedSystem(refuse))
    assert psutil.Process().num_fds() == before, "both ends of its socket are closed"
