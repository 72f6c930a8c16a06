"""Restored KV is sometimes recomputed: differences are reported, and the model's stored blocks are removed."""

from __future__ import annotations

import numpy as np

from lockstep.engine.engine import Engine
from lockstep.engine.kv_files import BlockKey
from lockstep.engine.kv_store import KVStore
from lockstep.engine.kv_tiers import KVTierName
from tests.engine.conftest import OpenStore, Pocket
from tests.engine.kv_sessions import BLOCK, answer, ask, hashes_of, kv_of, leave, prompt, tokens_of


def tiers_of(store: KVStore) -> tuple[int, int]:
    """Number of recomputed blocks, and of those with a difference."""
    return store.tiers.num_checked[KVTierName.HOST], store.tiers.num_rejected[KVTierName.HOST]


def come(engine: Engine, number: int) -> tuple[tuple[int, ...], int | None]:
    """Tokens of a session's answer, and its number of cached prompt tokens."""
    output = answer(engine, ask(prompt(number), f"s{number}"))
    return tokens_of(output), output.num_cached_tokens


def test_unchanged_restored_blocks_are_checked_and_kept(
    pocket: Pocket, open_store: OpenStore, faults: list[str]
) -> None:
    store = open_store(check_share=1.0)
    engine = Engine(*pocket, store=store)
    first, _ = come(engine, 0)
    leave(engine)
    assert come(engine, 0) == (first, 4 * BLOCK)
    assert (tiers_of(store), faults) == ((1, 0), [])
    assert (engine.num_open, engine.scheduler.stats().num_cached_blocks) == (0, 4), "the check left nothing"
    engine.scheduler.check()
    leave(engine)
    assert come(engine, 0) == (first, 4 * BLOCK)
    assert tiers_of(store) == (2, 0)


def test_a_block_that_differs_from_the_computed_one_is_reported_and_the_models_blocks_removed(
    pocket: Pocket, open_store: OpenStore, faults: list[str]
) -> None:
    """A block that was written with wrong contents has a correct checksum."""
    store = open_store(check_share=1.0)
    engine = Engine(*pocket, store=store)
    first, _ = come(engine, 0)
    leave(engine)
    environment, hashes = kv_of(engine).environment, hashes_of(engine, "s0")
    files = store.tiers.slowest
    assert files is not None
    key, content = BlockKey(environment, hashes[0]), np.zeros(engine.model.executor.geometry.bytes_per_block, np.uint8)
    assert files.read(key, content)
    content[-1] ^= 1
    files.remove(key)
    assert files.write(key, content, 0)
    assert come(engine, 0)[1] == 4 * BLOCK
    assert tiers_of(store) == (1, 1)
    assert faults == ["a stored KV block differs from the computed one; all stored blocks of its model are removed"]
    assert store.flush(10.0)
    assert store.find(environment, hashes) == 0
    engine.scheduler.check()
    assert come(engine, 0) == (first, 0), "computed again, on the device too"


def test_every_nth_chain_is_checked_without_randomness(pocket: Pocket, open_store: OpenStore) -> None:
    store = open_store(check_share=0.25)
    engine = Engine(*pocket, store=store)
    counts = []
    for number in range(8):
        come(engine, number)
        leave(engine)
        come(engine, number)
        counts.append(tiers_of(store)[0])
    assert counts == [0, 0, 0, 1, 1, 1, 1, 2]


def test_nothing_is_checked_while_a_request_runs(pocket: Pocket, open_store: OpenStore) -> None:
    store = open_store(check_share=1.0)
    engine = Engine(*pocket, store=store)
    come(engine, 0)
    leave(engine)
    other = engine.submit(ask((1, 2, 3), max_tokens=60))
    engine.step()
    engine.submit(ask(prompt(0), max_tokens=60))
    while not engine.is_complete(other):
        engine.step()
        assert engine.num_open <= 2
        assert tiers_of(store) == (0, 0)
    engine.run_until_idle()
    assert tiers_of(store) == (1, 0)
