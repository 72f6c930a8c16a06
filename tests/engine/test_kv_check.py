"""KV that came back is computed again, now and then: what differs is told, and nothing of its model is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.engine.engine import Engine
from lockstep.engine.kv_files import BlockKey
from lockstep.engine.kv_store import KVStore, KVStoreOptions, Place
from lockstep.engine.kv_transfer import environment_of
from lockstep.engine.loading import LoadedModel, load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams

BLOCK = 32
Serve = Callable[[float], tuple[Engine, KVStore]]


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[LoadedModel, Any]]:
    model, config = load_model("pocket://", LoadOptions(EngineOptions(num_blocks=96)))
    yield model, config
    model.close()


@pytest.fixture
def faults() -> list[str]:
    return []


@pytest.fixture
def serve(loaded: tuple[LoadedModel, Any], tmp_path: Path, faults: list[str]) -> Iterator[Serve]:
    opened: list[KVStore] = []

    def serve(share: float) -> tuple[Engine, KVStore]:
        options = KVStoreOptions(str(tmp_path / "host"), 1 << 26, check_share=share)
        opened.append(KVStore(options, faults.append))
        return Engine(*loaded, store=opened[-1]), opened[-1]

    yield serve
    for store in opened:
        store.close(10.0)


def prompt(number: int) -> tuple[int, ...]:
    return tuple(300 + (number * 97 + place * 31) % 3000 for place in range(150))


def answer(engine: Engine, number: int) -> tuple[tuple[int, ...], int]:
    """The tokens of an answer, and how many of its prompt came from the cache."""
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    request_id = engine.submit(GenerationRequest(prompt(number), params, session_id=f"s{number}", session_owner="m"))
    engine.run_until_idle()
    output = engine.result(request_id)
    assert output is not None
    assert output.error is None
    return tuple(output.completions[0].token_ids), output.num_cached_tokens or 0


def leave(engine: Engine, store: KVStore) -> None:
    engine.sessions.sweep()
    assert store.flush(10.0)


def test_what_came_back_as_it_was_is_checked_and_kept(serve: Serve, faults: list[str]) -> None:
    engine, store = serve(1.0)
    first = answer(engine, 0)
    leave(engine, store)
    assert answer(engine, 0) == (first[0], 4 * BLOCK)
    assert (store.num_checked, store.num_rejected, faults) == ({Place.HOST: 1}, {}, [])
    assert (engine.num_open, engine.scheduler.stats().num_cached_blocks) == (0, 4), "the check left nothing"
    engine.scheduler.check()
    leave(engine, store)
    assert answer(engine, 0) == (first[0], 4 * BLOCK)
    assert store.num_checked == {Place.HOST: 2}


def test_what_is_not_what_is_computed_is_told_and_its_model_s_blocks_removed(
    serve: Serve, faults: list[str], loaded: tuple[LoadedModel, Any]
) -> None:
    """A block that was written wrong has a right checksum."""
    engine, store = serve(1.0)
    first = answer(engine, 0)
    leave(engine, store)
    environment = environment_of(loaded[0])
    [hashes] = [record.hashes for record in store.records(environment)]
    [tier] = store._tiers.values()
    key, content = BlockKey(environment, hashes[0]), np.zeros(engine.model.executor.geometry.bytes_per_block, np.uint8)
    assert tier.read(key, content)
    content[-1] ^= 1
    tier.remove(key)
    assert tier.write(key, content, 0)
    assert answer(engine, 0)[1] == 4 * BLOCK
    assert (store.num_checked, store.num_rejected) == ({Place.HOST: 1}, {Place.HOST: 1})
    assert faults == ["a KV block that came back is not what is computed; all that was kept of its model is removed"]
    assert store.flush(10.0)
    assert store.find(environment, hashes) == 0
    engine.scheduler.check()
    assert answer(engine, 0) == (first[0], 0), "computed again, on the device too"


def test_every_so_manieth_chain_is_checked_and_nobody_rolls_dice(serve: Serve) -> None:
    engine, store = serve(0.25)
    counts = []
    for number in range(8):
        answer(engine, number)
        leave(engine, store)
        answer(engine, number)
        counts.append(store.num_checked[Place.HOST])
    assert counts == [0, 0, 0, 1, 1, 1, 1, 2]


def test_nothing_is_checked_while_somebody_is_served(serve: Serve) -> None:
    engine, store = serve(1.0)
    answer(engine, 0)
    leave(engine, store)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    other = engine.submit(GenerationRequest((1, 2, 3), params))
    engine.step()
    engine.submit(GenerationRequest(prompt(0), params))
    while not engine.is_complete(other):
        engine.step()
        assert engine.num_open <= 2
        assert store.num_checked == {}
    engine.run_until_idle()
    assert store.num_checked == {Place.HOST: 1}
