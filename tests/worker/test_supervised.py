"""What a cluster asks of a supervised worker beside answers: sessions, sweeps, classes, and steps to look at."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import psutil
import pytest

from lockstep.core.request import Priority
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.engine.sessions import SweepResult
from lockstep.errors import RequestFailedError, WorkerLostError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.system import SYSTEM, System
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.health import HealthLimits
from lockstep.worker.lifecycle import WorkerLost, WorkerRestarted
from lockstep.worker.link import SpawnedWorker, WorkerOptions
from lockstep.worker.messages import SessionsChanged, StepReport
from lockstep.worker.pending import Mailbox
from lockstep.worker.supervised import Notice, SupervisedWorker
from tests.systems import WatchedSystem
from tests.waiting import HANG_S, eventually

Kind = Literal["thread", "process"]
SMALL = LoadOptions(EngineOptions(num_blocks=256))
PROCESS = pytest.param(
    "process", marks=pytest.mark.skipif(sys.platform == "win32", reason="worker processes need a Unix system")
)


@asynccontextmanager
async def running(
    kind: Kind, notices: list[Notice], system: System = SYSTEM, health: HealthLimits | None = None
) -> AsyncIterator[SupervisedWorker]:
    """A worker with the replicas a and b."""
    worker = SupervisedWorker(WorkerOptions(kind, health=health or HealthLimits(), system=system), notices.append)
    await worker.start()
    try:
        await worker.load("a", "stub://alpha", SMALL, priority=Priority.CRITICAL)
        await worker.load("b", "stub://beta", SMALL)
        yield worker
    finally:
        await asyncio.wait_for(worker.close(), HANG_S)


async def answer(worker: SupervisedWorker, replica: str, text: str, session: str, owner: str = "") -> RequestOutput:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    request = GenerationRequest(tuple(text.encode()), params, session_id=session, session_owner=owner)
    mailbox = worker.submit(replica, request)
    try:
        async with asyncio.timeout(HANG_S):
            while True:
                for output in await mailbox.take():
                    if output.request is not None:
                        return output.request
    finally:
        worker.leave(mailbox)


async def read_to_the_end(mailbox: Mailbox) -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            await mailbox.take()


@pytest.mark.parametrize("kind", ["thread", PROCESS])
async def test_sessions_are_listed_evicted_ended_and_reported(kind: Kind) -> None:
    notices: list[Notice] = []
    async with running(kind, notices) as worker:
        await answer(worker, "a", "x" * 40, "s", "billing")
        assert (await answer(worker, "a", "x" * 70, "s", "billing")).num_cached_tokens == 32
        await answer(worker, "a", "y" * 40, "s", "legal")
        await answer(worker, "b", "z" * 40, "other")
        listed = await worker.sessions()
        assert {key: [(r.owner, r.num_tokens) for r in reports] for key, reports in listed.items()} == {
            "a": [("billing", 80), ("legal", 48)],
            "b": [("", 48)],
        }
        assert all(report.idle_s >= 0 and report.age_s >= report.idle_s for report in listed["a"])
        assert await worker.sweep("a", "s", "legal") == SweepResult(1, 3)
        assert await worker.end_session("a", "s") == SweepResult(1, 5)
        assert await worker.sweep("b") == SweepResult(1, 3)
        assert await worker.sweep("nobody") == SweepResult(0, 0)
        assert await worker.sessions() == {"a": (), "b": ()}
        checked = await worker.check()
        assert checked is not None
        assert checked.fault == ""
    told = [
        (notice.replica, change.owner, change.what, change.reason)
        for notice in notices
        if isinstance(notice, SessionsChanged)
        for change in notice.changes
        if change.what != "kept"
    ]
    assert told == [
        ("a", "billing", "admitted", None),
        ("a", "legal", "admitted", None),
        ("b", "", "admitted", None),
        ("a", "legal", "swept", "idle"),
        ("a", "billing", "swept", "ended"),
        ("b", "", "swept", "idle"),
    ]


@pytest.mark.parametrize("kind", [PROCESS])
async def test_a_new_worker_keeps_the_step_watch_and_has_no_session(kind: Kind) -> None:
    notices: list[Notice] = []
    async with running(kind, notices) as worker:
        worker.prioritise("b", Priority.LOW)
        worker.prioritise("nobody", Priority.LOW)
        worker.watch_steps(1000.0)
        await answer(worker, "a", "x" * 40, "s")
        await eventually(lambda: any(isinstance(notice, StepReport) for notice in notices))
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        await eventually(lambda: any(isinstance(notice, WorkerLost) for notice in notices))
        assert [notice for notice in notices if isinstance(notice, WorkerLost)] == [WorkerLost("signal 9 (SIGKILL)")]
        assert not any((await worker.sessions()).values())
        await eventually(lambda: any(isinstance(notice, WorkerRestarted) for notice in notices))
        assert worker.loaded("a") is None
        await worker.load("a", "stub://alpha", SMALL, priority=Priority.CRITICAL)
        notices.clear()
        assert (await answer(worker, "a", "x" * 70, "s")).num_cached_tokens == 0
        await eventually(lambda: any(isinstance(notice, StepReport) for notice in notices))
        worker.watch_steps(0.0)
        await worker.check()
        notices.clear()
        await answer(worker, "a", "x" * 70, "s")
        assert not any(isinstance(notice, StepReport) for notice in notices)


@pytest.mark.parametrize("kind", ["thread", PROCESS])
async def test_session_calls_on_a_closed_worker_return_nothing(kind: Kind) -> None:
    async with running(kind, []) as worker:
        pass
    assert await worker.sessions() == {}
    assert await worker.sweep("a") == SweepResult(0, 0)
    assert await worker.end_session("a", "s") == SweepResult(0, 0)


@pytest.mark.skipif(sys.platform == "win32", reason="worker processes need a Unix system")
async def test_prestarted_process_is_used_for_the_first_worker_only() -> None:
    ahead = SpawnedWorker("text", "warning")
    notices: list[Notice] = []
    worker = SupervisedWorker(WorkerOptions("process", prestarted=ahead), notices.append)
    await worker.start()
    try:
        assert not ahead.is_free
        ahead.discard()  # too late: it is the worker's
        await worker.load("a", "stub://alpha", SMALL)
        assert (await answer(worker, "a", "abc", "s")).text == "[stub:alpha] ok len=3 max=20"
        first = worker.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: WorkerRestarted() in notices)
        assert worker.pid not in (first, None)
    finally:
        await asyncio.wait_for(worker.close(), HANG_S)


@pytest.mark.skipif(sys.platform == "win32", reason="worker processes need a Unix system")
async def test_process_ends_although_the_first_close_was_cancelled() -> None:
    worker = SupervisedWorker(WorkerOptions("process"))
    await worker.start()
    pid = worker.pid
    assert pid is not None
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait_for(worker.close(), HANG_S)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(sys.platform == "win32", reason="worker processes need a Unix system")
def test_an_unused_worker_process_writes_nothing_and_ends(tmp_path: Path) -> None:
    """However long it waited: one that is refused its start must not write into another server's recording."""
    ahead = SpawnedWorker("text", "warning", TraceOptions(str(tmp_path / "flight")))
    process, sock = ahead.take()
    sock.close()
    assert process.wait(HANG_S) == 0
    assert not (tmp_path / "flight").exists()
    before = psutil.Process().children()
    unused = SpawnedWorker("text", "warning")
    [child] = [each for each in psutil.Process().children() if each not in before]
    unused.discard()
    assert not child.is_running()


def test_a_worker_process_imports_no_event_loop_and_no_readers_at_its_start() -> None:
    """They would be a third of the time in which it starts; a time would be a flaky test."""
    code = "import sys, lockstep.worker.device, lockstep.worker.wire, lockstep.executors.stub; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"asyncio", "psutil", "tempfile", "tokenizers", "llguidance", "jinja2"} & set(loaded)
    assert "lockstep.artifacts.source" not in loaded


@pytest.mark.parametrize("kind", ["thread", PROCESS])
async def test_reports_of_a_worker_are_grouped_by_replica(kind: Kind) -> None:
    async with running(kind, []) as worker:
        await answer(worker, "a", "x" * 40, "s")
        metrics = await worker.metrics()
        assert metrics.keys() == {"a", "b"}
        assert metrics["a"].counters["generation_tokens"] == 20
        assert metrics["b"].counters["generation_tokens"] == 0
        assert await worker.reset_prefix_cache() > 0
        assert await worker.reset_prefix_cache() == 0
        assert worker.recording_fault == ""


async def test_calls_to_a_worker_that_is_not_up_return_empty_results() -> None:
    """Whoever asks gets what an empty device would say, and not an error."""
    worker = SupervisedWorker(WorkerOptions())
    assert not worker.is_up
    assert await worker.metrics() == {}
    assert await worker.check() is None
    assert await worker.reset_prefix_cache() == 0
    assert await worker.sessions() == {}
    assert await worker.end_session("a", "s") == SweepResult(0, 0)
    assert worker.pid is None
    assert worker.loaded("a") is None
    assert worker.trouble == "the device worker is being restarted"
    await worker.close()
    await worker.close()  # again: it is closed
    assert worker.trouble == "the server is closing"


async def test_requests_of_one_replica_are_ended_and_those_of_others_go_on() -> None:
    async with running("thread", []) as worker:
        params = SamplingParams(max_tokens=4000, ignore_eos=True)
        mine, other = (worker.submit(key, GenerationRequest((1, 2, 3), params)) for key in "ab")
        worker.abort_all(RequestFailedError("the manifest changed"), "a")
        with pytest.raises(RequestFailedError, match="the manifest changed"):
            await read_to_the_end(mine)
        assert not other.is_ended
        assert worker.num_open == 2
        for mailbox in (mine, other):
            worker.leave(mailbox)
        assert worker.num_open == 0


async def test_request_to_an_unloaded_replica_fails_before_it_is_sent() -> None:
    async with running("thread", []) as worker:
        with pytest.raises(WorkerLostError, match="send the request again"):
            worker.submit("nobody", GenerationRequest((1,)))
        assert worker.num_open == 0


@pytest.mark.parametrize("kind", [PROCESS])
async def test_a_worker_that_cannot_be_started_is_tried_again(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever hinders it: nobody else would ever start one."""
    notices: list[Notice] = []
    hindrances: list[Exception] = []

    def hinder(call: str, about: str) -> None:
        if hindrances:
            raise hindrances.pop()

    async with running(kind, notices, WatchedSystem(hinder), HealthLimits(first_delay_s=0.01)) as worker:
        hindrances += RuntimeError("a defect"), OSError("no more processes")
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        await eventually(lambda: any(isinstance(notice, WorkerRestarted) for notice in notices))
        assert worker.is_up
        assert worker.loaded("a") is None, "the next worker begins with nothing"
    assert not hindrances
    assert "the device worker did not restart: no worker process can be started: no more processes" in caplog.text
    assert "the device worker did not restart: a defect" in caplog.text
