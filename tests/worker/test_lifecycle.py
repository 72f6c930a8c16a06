"""What the present worker has, loads and frees, by its own word: loads and unloads that meet, and workers that end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import ArtifactNotFoundError, UnavailableError, UsageError, WorkerLostError
from lockstep.worker.lifecycle import LOAD_MOVES, LoadState
from lockstep.worker.link import WorkerOptions
from lockstep.worker.supervised import SupervisedWorker
from tests.waiting import ENDLESS_MS, HANG_S, Gate, eventually

Kind = Literal["thread", "process"]
SMALL = LoadOptions(EngineOptions(num_blocks=64))
PROCESS = pytest.param(
    "process", marks=pytest.mark.skipif(sys.platform == "win32", reason="worker processes need a Unix system")
)
KINDS = pytest.mark.parametrize("kind", ["thread", PROCESS])


@asynccontextmanager
async def started(kind: Kind) -> AsyncIterator[SupervisedWorker]:
    worker = SupervisedWorker(WorkerOptions(kind))
    await worker.start()
    try:
        yield worker
    finally:
        await asyncio.wait_for(worker.close(), HANG_S)


def state_of(worker: SupervisedWorker, key: str) -> LoadState:
    replica = worker.lifecycle.replica(key)
    return LoadState.GONE if replica is None else replica.state


@KINDS
async def test_a_replica_is_queued_loading_loaded_unloading_and_gone(kind: Kind) -> None:
    async with started(kind) as worker:
        first = asyncio.create_task(worker.load("a", "stub://a?load_ms=100", SMALL))
        second = asyncio.create_task(worker.load("b", "stub://b", SMALL))
        await eventually(lambda: state_of(worker, "a") is LoadState.LOADING)
        assert state_of(worker, "b") is LoadState.QUEUED, "loads are done one after the other"
        assert worker.loaded("a") is None
        assert ((await first).name, (await second).name) == ("a", "b")
        assert state_of(worker, "a") is state_of(worker, "b") is LoadState.LOADED
        freeing = asyncio.create_task(worker.unload("a"))
        await asyncio.sleep(0)
        assert state_of(worker, "a") is LoadState.UNLOADING
        assert worker.loaded("a") is None, "nobody sends it a request any more"
        await freeing
        assert state_of(worker, "a") is LoadState.GONE
        assert worker.loaded("b") is not None


@KINDS
async def test_every_unload_call_returns_when_the_replica_is_unloaded(kind: Kind) -> None:
    """Loaded, or about to be; also where somebody asks again while it goes."""
    async with started(kind) as worker:
        await worker.load("a", "stub://a", SMALL)
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(worker.unload("a") for _ in range(3)))
        loading = asyncio.create_task(worker.load("a", "stub://a?load_ms=100", SMALL))
        await eventually(lambda: state_of(worker, "a") is LoadState.LOADING)
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(worker.unload("a") for _ in range(3)))
        assert (await loading).name == "a", "its load had come to its end"
        assert worker.loaded("a") is None


@KINDS
async def test_load_of_an_unloading_replica_waits_until_it_is_gone(kind: Kind) -> None:
    async with started(kind) as worker:
        await worker.load("a", "stub://old", SMALL)
        freeing = asyncio.create_task(worker.unload("a"))
        await asyncio.sleep(0)
        assert (await asyncio.wait_for(worker.load("a", "stub://new", SMALL), HANG_S)).name == "new"
        await freeing
        assert state_of(worker, "a") is LoadState.LOADED


@KINDS
async def test_load_with_a_used_key_is_rejected_and_its_replica_stays(kind: Kind) -> None:
    async with started(kind) as worker:
        await worker.load("a", "stub://a", SMALL)
        with pytest.raises(UsageError, match="replica 'a' is already loaded"):
            await worker.load("a", "stub://b", SMALL)
        loaded = worker.loaded("a")
        assert loaded is not None
        assert loaded.name == "a"


@KINDS
async def test_a_load_that_failed_leaves_its_key_free(kind: Kind, tmp_path: Path) -> None:
    async with started(kind) as worker:
        for _ in range(2):
            with pytest.raises(ArtifactNotFoundError):
                await worker.load("a", str(tmp_path / "absent.gguf"), SMALL)
            assert state_of(worker, "a") is LoadState.GONE
        await worker.unload("a")  # of nothing: at once
        await worker.load("a", "stub://a", SMALL)


@pytest.mark.skipif(sys.platform == "win32", reason="worker processes need a Unix system")
async def test_only_the_load_that_a_lost_worker_was_about_is_suspect() -> None:
    async with started("process") as worker:
        begun = asyncio.create_task(worker.load("a", f"stub://a?load_ms={ENDLESS_MS}", SMALL))
        queued = asyncio.create_task(worker.load("b", "stub://b", SMALL))
        await eventually(lambda: state_of(worker, "a") is LoadState.LOADING)
        going = asyncio.create_task(worker.unload("b"))
        await asyncio.sleep(0)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        lost = await asyncio.wait_for(asyncio.gather(begun, queued, return_exceptions=True), HANG_S)
        assert [isinstance(error, WorkerLostError) and error.is_suspect for error in lost] == [True, False]
        await asyncio.wait_for(going, HANG_S)
        assert state_of(worker, "a") is state_of(worker, "b") is LoadState.GONE
        await eventually(lambda: worker.is_up)
        assert (await worker.load("a", "stub://a", SMALL)).name == "a"


@KINDS
async def test_closing_ends_loads_and_waits_for_unloads(kind: Kind, gate: Gate) -> None:
    async with started(kind) as worker:
        loading = asyncio.create_task(worker.load("a", f"stub://a?load_ms={ENDLESS_MS}", SMALL))
        await eventually(lambda: state_of(worker, "a") is LoadState.LOADING)
        going = asyncio.create_task(worker.unload("a"))
        await asyncio.sleep(0)
        await asyncio.wait_for(worker.close(), HANG_S)
        gate.open()
        await asyncio.wait_for(going, HANG_S)
        with pytest.raises(UnavailableError, match="the server is closing"):
            await loading
        with pytest.raises(WorkerLostError, match="the server is closing"):
            await worker.load("a", "stub://a", SMALL)


def test_state_transitions_end_when_the_worker_is_gone() -> None:
    assert set(LOAD_MOVES) == set(LoadState)
    assert all(LoadState.GONE in moves for state, moves in LOAD_MOVES.items() if state is not LoadState.GONE)
    assert LOAD_MOVES[LoadState.GONE] == ()
