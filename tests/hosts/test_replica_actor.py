"""A placed replica: its worker listens, its model is there, and whoever asked for it is told all that changes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from lockstep.engine.kv_tiers import HostStore, KVStoreOptions
from lockstep.engine.options import AdapterSource, EngineOptions, LoadOptions
from lockstep.executors.stub import open_stub_adapter
from lockstep.hosts import replica_actor
from lockstep.hosts.replica_actor import LocalHost, ReplicaHost, RetryDelays
from lockstep.hosts.values import Demand, LinkOptions, ReplicaPhase, ReplicaStatus
from lockstep.worker.link import WorkerOptions
from tests.adapter_files import write_stub_adapter
from tests.hosts.support import answer, demand, gateway, write_secret
from tests.waiting import eventually


@asynccontextmanager
async def replica(
    demand: Demand,
    secret: str,
    tell: Callable[[ReplicaStatus], None],
    store: KVStoreOptions | None = None,
    **delays: float,
) -> AsyncIterator[ReplicaHost]:
    here = LocalHost("a_host", "0123", "127.0.0.1")
    host = ReplicaHost(demand, 2, WorkerOptions(), LinkOptions(secret), here, tell, store, RetryDelays(**delays))
    await host.start()
    try:
        yield host
    finally:
        await host.close()


async def ready(host: ReplicaHost, num_starts: int = 1) -> ReplicaStatus:
    await eventually(
        lambda: host.place.state is ReplicaPhase.READY and host.place.num_starts >= num_starts, repr(host.place)
    )
    return host.place


async def test_its_worker_starts_loads_listens_and_ends_with_it(tmp_path: Path) -> None:
    told: list[ReplicaStatus] = []
    secret = write_secret(tmp_path)
    async with replica(demand(), secret, told.append) as host:
        place = await ready(host)
        assert await answer(place, secret, "abc") == "[stub:alpha] ok len=3 max=40"
        await eventually(lambda: told[-1] == place)
        states = list(dict.fromkeys(each.state for each in told))
        assert states == [ReplicaPhase.STARTING, ReplicaPhase.LOADING, ReplicaPhase.READY]
        assert (place.key, place.number, place.host, place.node_id) == ("a", 2, "a_host", "0123")
        assert (place.actor_pid, place.num_starts, place.reason) == (os.getpid(), 1, "")
        assert place.port > 0
        worker = psutil.Process(place.pid)
        assert worker.is_running()
    assert not worker.is_running()


async def test_a_killed_worker_has_a_successor_that_listens_elsewhere_and_has_the_model(tmp_path: Path) -> None:
    told: list[ReplicaStatus] = []
    secret = write_secret(tmp_path)
    async with replica(demand(), secret, told.append) as host:
        first = await ready(host)
        os.kill(first.pid, signal.SIGKILL)
        second = await ready(host, 2)
        assert await answer(second, secret, "abcd") == "[stub:alpha] ok len=4 max=40"
        assert second.pid != first.pid
        await eventually(lambda: told[-1] == second)
        lost = next(each for each in told if each.state is ReplicaPhase.STARTING and each.reason)
        assert "SIGKILL" in lost.reason
        assert (lost.port, lost.pid) == (0, 0)


async def test_a_worker_with_an_unreadable_secret_has_failed_until_the_file_exists(tmp_path: Path) -> None:
    told: list[ReplicaStatus] = []
    async with replica(demand(), str(tmp_path / "secret"), told.append, first_load_s=0.01) as host:
        await eventually(lambda: any(each.state is ReplicaPhase.FAILED for each in told))
        failed = next(each for each in told if each.state is ReplicaPhase.FAILED)
        assert "the secret cannot be read: No such file" in failed.reason
        assert (failed.port, failed.pid) == (0, 0)
        secret = write_secret(tmp_path)
        place = await ready(host, 2)
        assert await answer(place, secret, "abc") == "[stub:alpha] ok len=3 max=40"


async def test_a_model_that_cannot_be_loaded_is_tried_again(tmp_path: Path) -> None:
    told: list[ReplicaStatus] = []
    source = str(tmp_path / "none.gguf")
    async with replica(demand(source=source), write_secret(tmp_path), told.append, first_load_s=0.01) as host:
        await eventually(lambda: host.place.num_starts >= 3)
        failed = next(each for each in told if each.state is ReplicaPhase.FAILED)
        assert failed.reason.startswith(f"{source}: no such file or directory")


async def test_a_replica_without_its_adapters_has_failed_until_their_files_are_copied(tmp_path: Path) -> None:
    told: list[ReplicaStatus] = []
    elsewhere = open_stub_adapter("billing", str(write_stub_adapter(tmp_path / "elsewhere", 1)))
    adapter = AdapterSource("billing", str(tmp_path / "billing"), elsewhere.fingerprint)
    options = LoadOptions(EngineOptions(num_blocks=64), adapters=(adapter,))
    wanted = Demand("a", "stub://alpha", options)
    async with replica(wanted, write_secret(tmp_path), told.append, first_load_s=0.01) as host:
        await eventually(lambda: any(each.state is ReplicaPhase.FAILED for each in told))
        failed = next(each for each in told if each.state is ReplicaPhase.FAILED)
        assert failed.reason.startswith(f"{adapter.path}: ")
        write_stub_adapter(tmp_path / "billing", 2)
        await eventually(lambda: elsewhere.fingerprint in host.place.reason)
        assert all(each.state is not ReplicaPhase.READY for each in told)
        write_stub_adapter(tmp_path / "billing", 1)
        await ready(host)


async def test_the_newest_status_is_reported_again_until_it_is_received(tmp_path: Path) -> None:
    is_deaf, told = True, []

    def tell(place: ReplicaStatus) -> None:
        if is_deaf:
            raise ConnectionError("nobody is there")
        told.append(place)

    async with replica(demand(), write_secret(tmp_path), tell, first_report_s=0.01, max_report_s=0.01) as host:
        place = await ready(host)
        assert not told
        is_deaf = False
        await eventually(lambda: told == [place])


async def test_each_replica_of_a_host_stores_session_kv_in_its_own_folder(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = KVStoreOptions(host_bytes=1 << 20, disk_dir=str(folder), disk_bytes=1 << 20)
    secret = write_secret(tmp_path)
    async with (
        replica(demand("a"), secret, lambda place: None, store) as first,
        replica(demand("b"), secret, lambda place: None, store) as second,
    ):
        for host in (first, second):
            place = await ready(host)
            async with gateway(place, secret) as worker:
                await worker.metrics()
                assert worker.kv_tiers.keys() == {"host", "disk"}
        names = {each.name for each in folder.iterdir()}
        assert len(names) == 2
    async with replica(demand("b"), secret, lambda place: None, store) as again:
        await ready(again)
        assert {each.name for each in folder.iterdir()} == names, "it finds its own again"


async def test_one_store_is_opened_and_it_is_closed_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[HostStore] = []
    closers: list[threading.Thread] = []

    class Watched(HostStore):
        def __init__(self) -> None:
            super().__init__()
            stores.append(self)

        def close(self) -> None:
            closers.append(threading.current_thread())
            super().close()

    monkeypatch.setattr(replica_actor, "HostStore", Watched)
    here = LocalHost("host", "id", "127.0.0.1")
    host = ReplicaHost(
        demand(), 0, WorkerOptions("process"), LinkOptions(write_secret(tmp_path)), here, lambda place: None
    )
    await host.close()
    assert len(stores) == len(closers) == 1
    assert closers[0] is not threading.main_thread()
