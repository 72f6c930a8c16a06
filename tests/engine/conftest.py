"""Engines on the stub model: real loop, real scheduler, no weights. KV stores, and the embedded model for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.core.policy import SchedulerConfig
from lockstep.engine.deadlines import ManualClock
from lockstep.engine.engine import Engine
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
    """`make_engine("stub://name?option=value", num_blocks=…, max_num_seqs=…)`."""

    def make(source: str = "stub://alpha", clock: ManualClock = clock, **options: object) -> Engine:
        engine_options = EngineOptions(**{"num_blocks": 512, **options})  # type: ignore[arg-type]  # fields by name
        model, config = load_model(source, LoadOptions(engine=engine_options))
        return Engine(model, config, clock=clock)

    return make


@pytest.fixture(scope="module")
def pocket() -> Iterator[Pocket]:
    """The embedded model, whose answers depend on every bit of its KV, and a config for engines on it."""
    model, config = load_model("pocket://", LoadOptions(EngineOptions(num_blocks=96)))
    yield model, config
    model.close()


@pytest.fixture
def faults() -> list[str]:
    """Sentences of stores on what was not as it should be."""
    return []


@pytest.fixture
def open_store(tmp_path: Path, faults: list[str]) -> Iterator[OpenStore]:
    """Stores on the test's folders, one at a time: who opens the next closes the one before, as a restart does."""
    opened: list[KVStore] = []

    def open_store(
        host_bytes: int = 1 << 26, disk_bytes: int = 0, check_share: float = 0.0, system: System = SYSTEM
    ) -> KVStore:
        while opened:
            opened.pop().close(10.0)
        folders = str(tmp_path / "host"), str(tmp_path / "disk")
        options = KVStoreOptions(folders[0], host_bytes, folders[1], disk_bytes, check_share)
        opened.append(KVStore(options, faults.append, system))
        return opened[0]

    yield open_store
    for store in opened:
        store.close(10.0)
