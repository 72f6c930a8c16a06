"""The shell around the planner, on a worker in this process: measuring, waiting, closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from lockstep.cluster.backend import Backend, served_by
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.planner import Phase
from lockstep.cluster.replica_state import MAX_BACKOFF_S, MAX_LOST_LOADS, WARM_TIME_S, ReplicaSpec, ReplicaState
from lockstep.cluster.replicas import MAX_WAITING_CALLS, Replicas
from lockstep.cluster.resolve import open_manifest
from lockstep.engine.options import LoadOptions
from lockstep.errors import ChatTemplateError, NotLoadableError, QueueFullError, UnavailableError, WorkerLostError
from lockstep.system import SYSTEM, System
from lockstep.worker.link import WorkerOptions
from lockstep.worker.supervised import SupervisedWorker
from tests.cluster.clusters import QUICK
from tests.systems import ClockedSystem
from tests.waiting import ENDLESS_MS, HANG_S, Gate, eventually

TEXT = "cluster: c\nmodels:\n  a: {source: 'stub://a?load_ms=50'}\n  b: {source: 'stub://b'}\n"


def spec_of(id_: str, measure: Callable[[object], int] = lambda loaded: 800_000_000, load_ms: int = 50) -> ReplicaSpec:
    text = TEXT.replace("load_ms=50", f"load_ms={load_ms}")
    opened = open_manifest(served_by(parse(text), Backend.AUTO), LoadOptions())
    return replace(opened.specs[id_], measure=measure)


@asynccontextmanager
async def shell(
    budget_bytes: int | None = None,
    on_resident: Callable[[], object] = lambda: None,
    system: System = SYSTEM,
    worker: SupervisedWorker | None = None,
) -> AsyncIterator[tuple[Replicas, list[tuple[Phase, Phase, str]]]]:
    moves: list[tuple[Phase, Phase, str]] = []

    def moved(held: ReplicaState, before: Phase, reason: str, duration_s: float) -> None:
        moves.append((before, held.phase, reason))
        if held.phase is Phase.RESIDENT:
            on_resident()

    worker = worker or SupervisedWorker(WorkerOptions())
    await worker.start()
    replicas = Replicas(worker, QUICK, moved, system=system)
    replicas.budget_bytes = budget_bytes
    try:
        yield replicas, moves
    finally:
        await asyncio.wait_for(replicas.close(), HANG_S)
        await worker.close()


async def test_load_above_its_predicted_size_and_the_budget_fails_and_is_unloaded() -> None:
    async with shell(1_000_000_000) as (replicas, moves):
        held = replicas.of(spec_of("b", lambda loaded: 1_200_000_000))
        with pytest.raises(UnavailableError, match=r"takes 1\.2 GB, where 800 MB were expected; of gpu_budget's 1 GB"):
            await replicas.acquire(held)
        assert [(before, after) for before, after, _ in moves] == [
            (Phase.ABSENT, Phase.LOADING),
            (Phase.LOADING, Phase.UNLOADING),
            (Phase.UNLOADING, Phase.ABSENT),
        ]
        assert held.bytes == held.measured_bytes == 1_200_000_000, "what was measured is known from now on"
        assert held.retry_at_s > 0


async def test_load_below_its_predicted_size_leaves_room_for_others() -> None:
    async with shell(1_000_000_000) as (replicas, _):
        small, other = replicas.of(spec_of("a", lambda loaded: 100_000_000)), replicas.of(spec_of("b"))
        await replicas.acquire(small)
        await replicas.acquire(other)
        assert small.phase is other.phase is Phase.RESIDENT
        replicas.release(small)
        replicas.release(other)


@pytest.mark.parametrize(("waited_s", "is_loaded"), [(WARM_TIME_S - 1, True), (WARM_TIME_S + 1, False)])
async def test_warming_uses_memory_that_becomes_free_within_the_warm_time_only(
    waited_s: float, is_loaded: bool
) -> None:
    now_s = 100.0
    async with shell(1_000_000_000, system=ClockedSystem(lambda: now_s)) as (replicas, _):
        busy, warm = replicas.of(spec_of("b")), replicas.of(spec_of("a"))
        await replicas.acquire(busy)
        assert replicas.warm(warm)
        assert not replicas.warm(warm), "it is wanted already"
        assert warm.phase is Phase.ABSENT, "there is no room"
        replicas.release(busy)
        now_s += waited_s
        replicas.retire(busy)
        await replicas.drain(busy, HANG_S, "by hand")
        assert (warm.phase is not Phase.ABSENT) == is_loaded


async def test_replica_that_never_fits_is_refused_at_once() -> None:
    async with shell(500_000_000) as (replicas, moves):
        with pytest.raises(NotLoadableError, match="cannot be loaded: it needs 800 MB; of the budget of 500 MB"):
            await replicas.acquire(replicas.of(spec_of("b")))
        assert moves == []


async def test_waiting_calls_are_limited_in_number_and_ended_by_closing(gate: Gate) -> None:
    async with shell() as (replicas, _):
        held = replicas.of(spec_of("a", load_ms=ENDLESS_MS))
        waiting = [asyncio.create_task(replicas.acquire(held)) for _ in range(MAX_WAITING_CALLS)]
        await eventually(lambda: len(held.waiting) == MAX_WAITING_CALLS)
        with pytest.raises(QueueFullError):
            await replicas.acquire(held)
        await replicas.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert {str(result) for result in results} == {"the server is closing"}
        assert held.num_busy == 0


async def test_call_cancelled_at_its_admission_is_not_counted() -> None:
    leaving: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    # Its turn in the loop comes after the admission, and before the one who waited for it learns of it.
    async with shell(on_resident=lambda: loop.call_soon(leaving[0].cancel)) as (replicas, _):
        held = replicas.of(spec_of("a"))
        leaving.append(asyncio.create_task(replicas.acquire(held)))
        await asyncio.gather(*leaving, return_exceptions=True)
        assert leaving[0].cancelled()
        assert (held.num_busy, len(held.waiting), held.phase) == (0, 0, Phase.RESIDENT)


async def test_a_defect_while_loading_fails_the_waiting_requests_and_leaves_nothing_loaded() -> None:
    def broken(loaded: object) -> int:
        raise KeyError("a defect")

    async with shell() as (replicas, _):
        held = replicas.of(spec_of("b", broken))
        with pytest.raises(UnavailableError, match="a defect"):
            await asyncio.wait_for(replicas.acquire(held), HANG_S)
        assert held.phase is Phase.ABSENT
        assert replicas.held_bytes == 0


async def test_error_after_a_load_unloads_the_model() -> None:
    """A text side that cannot be read, say: the error is none of ours, and nobody may keep the memory."""

    def unreadable(loaded: object) -> int:
        raise ChatTemplateError("the template cannot be read")

    worker = SupervisedWorker(WorkerOptions())
    async with shell(worker=worker) as (replicas, _):
        spec = spec_of("b", unreadable)
        replica = replicas.of(spec)
        with pytest.raises(UnavailableError, match="the template cannot be read"):
            await asyncio.wait_for(replicas.acquire(replica), HANG_S)
        assert replica.phase is Phase.ABSENT
        assert worker.loaded(spec.key) is None
        assert await worker.metrics() == {}, "nor does the worker hold it"


async def test_a_load_that_was_lost_with_its_worker_is_the_models_own_failure_only_after_many() -> None:
    async with shell() as (replicas, _):
        held = replicas.of(spec_of("b"))
        for _ in range(100):
            assert not held.lost(WorkerLostError("it waited for its turn"))
        for _ in range(MAX_LOST_LOADS):
            assert not held.lost(WorkerLostError("it was being loaded", is_suspect=True))
            assert held.must_reload
        assert held.refusal(0.0) is None
        assert held.lost(WorkerLostError("once more", is_suspect=True))
        assert not held.must_reload
        assert held.failed(WorkerLostError("once more"), 0.0) == MAX_BACKOFF_S, "each try takes all others down"


def test_loaded_bytes_count_as_free_for_a_replacing_manifest() -> None:
    manifest = parse("cluster: c\nresources: {gpu_budget: 100TB}\nmodels:\n  a: {source: 'pocket://'}\n")
    alone, beside = (open_manifest(manifest, LoadOptions(), held).table.budgets.gpu for held in (0, 7 << 40))
    assert alone.is_cut
    assert beside.effective_bytes is not None
    assert alone.effective_bytes is not None
    assert beside.effective_bytes - alone.effective_bytes > 3 << 40
