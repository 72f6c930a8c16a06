"""KV of a device's replicas in one small store: whose blocks stay where not all can."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from lockstep.core.request import Priority
from lockstep.engine.kv_files import HEADER_BYTES, pages
from lockstep.engine.kv_store import KVStore
from lockstep.engine.kv_tiers import KVStoreOptions
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.messages import OpenStore, Prioritise, Stop, Submit, Sweep, SweepReport
from tests.waiting import HANG_S, until
from tests.worker.support import Bench

BLOCK, PER_SESSION = 32, 4
NOTES = 8 << 12
"""Bytes of the sessions' records, a page each."""


class Crowd:
    """Sessions of as many blocks each that come to a device and leave it, of a low model and of a critical one."""

    def __init__(self, folder: Path) -> None:
        self._options = KVStoreOptions(host_dir=str(folder))
        self._ids = itertools.count()
        self.bench = Bench()
        self.bench.tell(OpenStore(self._options))
        self.size = {
            name: PER_SESSION * pages(HEADER_BYTES + self.load(name, precision, priority))
            for name, precision, priority in (("low", "f16", Priority.LOW), ("critical", "f32", Priority.CRITICAL))
        }
        """Bytes that a session takes in the store."""

    def load(self, name: str, precision: str, priority: int) -> int:
        """Load the embedded model with KV of its own where the precision is; returns the bytes of a block."""
        options = LoadOptions(EngineOptions(num_blocks=96), ExecutorOptions(kv_cache_precision=precision))
        return self.bench.ready(name, "pocket://", options, priority).geometry.bytes_per_block

    @property
    def store(self) -> KVStore:
        store = self.bench.worker._store
        assert store is not None
        return store

    def make_room(self, num_bytes: int) -> None:
        self.bench.tell(OpenStore(replace(self._options, host_bytes=num_bytes + NOTES)))
        until(lambda: bool(self.store.tiers), "the tier is there")

    def come(self, model: str, number: int) -> int:
        """A session asks and leaves the device; returns how many of its blocks were there."""
        rng = random.Random(f"{model} {number}")
        prompt = tuple(rng.randrange(300, 4000) for _ in range(PER_SESSION * BLOCK + 5))
        params = SamplingParams(max_tokens=1, temperature=0.0)
        id_ = next(self._ids)
        asked = GenerationRequest(prompt, params, session_id=f"{number}", session_owner=model)
        self.bench.tell(Submit(id_, model, asked))
        answer = self.bench.answer(id_).request
        assert answer is not None
        self.bench.ask(Sweep(model), SweepReport)
        assert self.store.flush(HANG_S)
        return (answer.num_cached_tokens or 0) // BLOCK

    def kept(self, model: str, count: int) -> list[int]:
        """Blocks that the store has of a model's first sessions."""
        replica = self.bench.worker.registry.find(model)
        assert replica is not None
        assert replica.engine.sessions.kv is not None
        environment = replica.engine.sessions.kv.environment
        hashes = {record.session_id: record.hashes for record in self.store.records(environment)}
        return [self.store.find(environment, hashes[str(number)]) for number in range(count)]


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    crowd = Crowd(tmp_path)
    yield crowd
    crowd.bench.tell(Stop())
    crowd.bench.steps.join(HANG_S)


def test_sessions_of_the_lowest_class_give_way_first_and_critical_ones_last(crowd: Crowd) -> None:
    """Of one class the least recently used; a low one displaces nobody better, however long that was away."""
    crowd.make_room(2 * crowd.size["critical"] + crowd.size["low"])
    story = [
        ("critical", 0, [4], []),
        ("low", 0, [4], [4]),
        ("low", 1, [4], [4, 4]),
        ("critical", 1, [4, 4], [0, 4]),
        ("low", 2, [4, 4], [0, 0, 4]),
        ("critical", 2, [0, 4, 4], [0, 0, 0]),
        ("critical", 3, [0, 0, 4, 4], [0, 0, 0]),
        ("low", 0, [0, 0, 4, 4], [0, 0, 0]),
    ]
    for model, number, critical, low in story:
        assert crowd.come(model, number) == 0
        assert (crowd.kept("critical", len(critical)), crowd.kept("low", len(low))) == (critical, low), (model, number)
    assert [crowd.come("critical", number) for number in (3, 2)] == [4, 4]


def test_raised_priority_applies_to_the_stored_kv_of_a_model(crowd: Crowd) -> None:
    crowd.make_room(2 * crowd.size["low"])
    for number in range(2):
        crowd.come("low", number)
    crowd.bench.tell(Prioritise("low", Priority.CRITICAL - 1))
    crowd.come("critical", 0)
    assert (crowd.kept("critical", 1), crowd.kept("low", 2)) == ([0], [4, 4])


def test_shared_kv_of_two_replicas_has_the_higher_priority(crowd: Crowd) -> None:
    """Whichever of them was loaded last."""
    crowd.make_room(crowd.size["critical"])
    crowd.come("critical", 0)
    crowd.load("another", "f32", Priority.LOW)
    crowd.come("low", 0)
    assert (crowd.kept("critical", 1), crowd.kept("low", 1)) == ([4], [0])
