"""Fixtures: engines on the stub model with the real loop and scheduler; KV stores; the embedded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.core.policy import SchedulerConfig
from lockstep.engine.deadlines import ManualClock
from lockstep.engine.engine import IDLE_WAIT_S, Engine, Observer
from lockstep.engine.kv_store import KVStore
from lockstep.engine.kv_tiers import KVStoreOptions
from lockstep.engine.loading import LoadedModel, load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.system import SYSTEM, System

MakeEngine = Callable[..., Engine]
OpenStore = Callable[..., KVStore]
Pocket = tuple[LoadedModel, SchedulerConfig]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def make_engine(clock: ManualClock) -> MakeEngine:
    """Factory `make_engine("stub://name?option=value", num_blocks=…, max_num_seqs=…)`."""

    def make(
        source: str = "stub://alpha",
        clock: ManualClock = clock,
        observer: Observer | None = None,
        idle_wait_s: float = IDLE_WAIT_S,
        **options: object,
    ) -> Engine:
        engine_options = EngineOptions(**{"num_blocks": 512, **options})  # type: ignore[arg-type]  # fields by name
        model, config = load_model(source, LoadOptions(engine=engine_options))
        return Engine(model, config, clock=clock, observer=observer, idle_wait_s=idle_wait_s)

    return make


@pytest.fixture(scope="module")
def pocket() -> Iterator[Pocket]:
    """The embedded model, whose answers depend on every bit of its KV, and a config for engines on it."""
    model, config = load_model("pocket://", LoadOptions(EngineOptions(num_blocks=96)))
    yield model, config
    model.close()


@pytest.fixture
def faults() -> list[str]:
    """Warnings of stores about faults."""
    return []


@pytest.fixture
def open_store(tmp_path: Path, faults: list[str]) -> Iterator[OpenStore]:
    """Factory of stores on the test's folders, one at a time: opening the next closes the previous one, like a
    restart."""
    opened: list[KVStore] = []

    def open_store(
        host_bytes: int = 1 << 26,
        disk_bytes: int = 0,
        check_share: float = 0.0,
        system: System = SYSTEM,
        **limits: int,
    ) -> KVStore:
        while opened:
            opened.pop().close(10.0)
        folders = str(tmp_path / "host"), str(tmp_path / "disk")
        options = KVStoreOptions(folders[0], host_bytes, folders[1], disk_bytes, check_share, **limits)
        opened.append(KVStore(options, faults.append, system))
        return opened[0]

    yield open_store
    for store in opened:
        store.close(10.0)
