"""Blocks of sessions are stored and restored with equal bytes, or recomputed.

The model is the embedded one, whose answers depend on every bit of its KV.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from lockstep.engine import kv_transfer
from lockstep.engine.engine import Engine
from lockstep.engine.kv_files import BlockKey
from lockstep.engine.kv_tiers import KVTierName
from lockstep.engine.kv_transfer import environment_of
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import RequestFailedError
from tests.engine.conftest import OpenStore, Pocket
from tests.engine.hybrid_engines import answers, hybrid_engine, request, text
from tests.engine.kv_sessions import BLOCK, OWNER, answer, ask, hashes_of, kv_of, leave, prompt, tokens_of
from tests.systems import WatchedSystem
from tests.waiting import until
from tools.random_models import write_huggingface
from tools.random_shapes import SHAPES


def test_an_evicted_session_is_restored_bit_by_bit(pocket: Pocket, open_store: OpenStore) -> None:
    engine = Engine(*pocket, store=open_store())
    first = answer(engine, ask(prompt(1), "s"))
    assert first.num_cached_tokens == 0
    hashes = hashes_of(engine, "s")
    before = engine.model.executor.read_blocks([b for each in engine.scheduler.cached_blocks(hashes) for b in each])
    assert engine.sessions.sweep() == (1, 4)
    assert engine.scheduler.stats().num_cached_blocks == 0
    kv_of(engine).store.flush(10.0)
    longer = (*prompt(1), *prompt(2, 40))
    back = answer(engine, ask(longer, "s"))
    assert back.num_cached_tokens == 4 * BLOCK
    assert tokens_of(back) == tokens_of(answer(Engine(*pocket), ask(longer)))
    after = engine.model.executor.read_blocks([b for each in engine.scheduler.cached_blocks(hashes) for b in each])
    assert np.array_equal(before, after)
    assert kv_of(engine).store.tiers.num_loaded == {KVTierName.HOST: 4}
    engine.scheduler.check()


def test_a_session_is_restored_from_disk_without_host_memory(
    pocket: Pocket, open_store: OpenStore, tmp_path: Path
) -> None:
    first = answer(Engine(*pocket, store=open_store(disk_bytes=1 << 26)), ask(prompt(1), "s"))
    store = open_store(disk_bytes=1 << 26)
    for path in (tmp_path / "host").rglob("*.kv"):
        path.unlink()
    engine = Engine(*pocket, store=store)
    assert [(c.session_id, c.num_stored_tokens) for c in engine.sessions.stored()] == [("s", 4 * BLOCK)]
    back = answer(engine, ask(prompt(1), "s"))
    assert (back.num_cached_tokens, tokens_of(back)) == (4 * BLOCK, tokens_of(first))
    assert store.tiers.num_rejected == {KVTierName.HOST: 4}, "each file of the host that is gone is one"
    assert kv_of(engine).store.tiers.num_loaded == {KVTierName.DISK: 4}
    until(lambda: store.tiers.stats()[KVTierName.HOST].num_blocks == 4, "they are in host memory again")


def test_blocks_are_copied_while_the_session_is_on_the_device(pocket: Pocket, open_store: OpenStore) -> None:
    """A killed worker therefore loses nothing of an idle session."""
    store = open_store()
    engine = Engine(*pocket, store=store)
    answer(engine, ask(prompt(1), "s"))
    assert store.flush(10.0)
    hashes = hashes_of(engine, "s")
    assert store.count_by_tier(environment_of(engine.model), hashes) == {KVTierName.HOST: 4}
    assert engine.sessions.reports(0.0)[0].num_blocks == 4, "and they are still there"


def test_a_damaged_block_cuts_the_chain_and_the_rest_is_computed(
    pocket: Pocket, open_store: OpenStore, faults: list[str], tmp_path: Path
) -> None:
    store = open_store()
    engine = Engine(*pocket, store=store)
    answer(engine, ask(prompt(1), "s"))
    hashes = hashes_of(engine, "s")
    leave(engine)
    [path] = (tmp_path / "host").rglob(f"{hashes[2].hex()}.kv")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    back = answer(engine, ask(prompt(1), "s"))
    assert back.num_cached_tokens == 2 * BLOCK
    assert tokens_of(back) == tokens_of(answer(Engine(*pocket), ask(prompt(1))))
    assert [fault.endswith(" does not match its checksum") for fault in faults] == [True]
    leave(engine)
    assert answer(engine, ask(prompt(1), "s")).num_cached_tokens == 4 * BLOCK, "computed again, it was kept again"


def test_another_environment_has_no_hits_and_warns_once(
    pocket: Pocket, open_store: OpenStore, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    engine = Engine(*pocket, store=store)
    for number in (1, 2, 3):
        answer(engine, ask(prompt(number), f"s{number}"))
    leave(engine)
    other = dict(pocket[0].executor.environment) | {"bits": "another version"}
    monkeypatch.setattr(pocket[0].executor, "environment", other)
    engine = Engine(*pocket, store=store)
    assert engine.sessions.stored() == ()
    answer(engine, ask(prompt(7)))
    assert faults == [], "a request without a session misses nothing"
    for number in (1, 2):
        assert answer(engine, ask(prompt(number), f"s{number}")).num_cached_tokens == 0
    assert faults == [
        "the stored KV of 3 sessions of 'm' belongs to another artifact, precision or library version;"
        " it is computed again"
    ]
    leave(engine)
    engine = Engine(*pocket, store=store)
    assert answer(engine, ask(prompt(2), "s2")).num_cached_tokens == 4 * BLOCK
    assert len(faults) == 2
    assert " 1 sessions of 'm' belongs " in faults[1], "two came back and are known here"


def test_requests_without_a_session_hit_blocks_of_sessions(pocket: Pocket, open_store: OpenStore) -> None:
    engine = Engine(*pocket, store=open_store())
    answer(engine, ask(prompt(1), "s"))
    leave(engine)
    assert answer(engine, ask((*prompt(1)[:100], *prompt(3)))).num_cached_tokens == 3 * BLOCK


def test_ending_a_session_removes_every_block_that_no_other_session_shares(
    pocket: Pocket, open_store: OpenStore, tmp_path: Path
) -> None:
    """Also if its blocks were not written yet, or were evicted before."""
    store = open_store(disk_bytes=1 << 26)
    engine = Engine(*pocket, store=store)
    answer(engine, ask(prompt(1), "s"))
    answer(engine, ask((*prompt(1)[:70], *prompt(2)), "t"))
    engine.sessions.end("s", OWNER)
    assert store.flush(10.0)
    shared, own = hashes_of(engine, "t")[:2], hashes_of(engine, "t")[2:]
    for folder in (tmp_path / "host", tmp_path / "disk"):
        assert {path.stem for path in folder.rglob("*.kv")} == {each.hex() for each in (*shared, *own)}
    engine.sessions.sweep()
    store.end("t")
    assert store.flush(10.0)
    assert not list(tmp_path.rglob("*.kv"))
    assert not list((tmp_path / "disk" / "sessions").iterdir())


def test_a_request_that_ends_while_it_waits_for_blocks_uses_none(pocket: Pocket, open_store: OpenStore) -> None:
    engine = Engine(*pocket, store=open_store())
    answer(engine, ask(prompt(1), "s"))
    leave(engine)
    request_id = engine.submit(ask(prompt(1), "s"))
    engine.drain()
    assert (engine.num_waiting, kv_of(engine).num_waiting) == (1, 1)
    engine.abort(request_id)
    engine.run_until_idle()
    output = engine.result(request_id)
    assert output is not None
    assert output.error is not None
    assert (engine.num_open, kv_of(engine).num_waiting) == (0, 0)
    engine.scheduler.check()


def test_a_stream_continues_while_blocks_are_loaded(pocket: Pocket, open_store: OpenStore) -> None:
    engine = Engine(*pocket, store=open_store())
    answer(engine, ask(prompt(1, 1900), "s"))
    leave(engine)
    stream = engine.submit(ask(prompt(2), max_tokens=60))
    for _ in range(3):
        engine.step()
    back = engine.submit(ask(prompt(1, 1900), "s"))
    engine.run_until_idle()
    streamed, restored = engine.result(stream), engine.result(back)
    assert streamed is not None
    assert restored is not None
    assert tokens_of(streamed) == tokens_of(answer(Engine(*pocket), ask(prompt(2), max_tokens=60)))
    assert restored.num_cached_tokens == 1898 // BLOCK * BLOCK


def test_blocks_without_room_on_the_device_are_recomputed(open_store: OpenStore) -> None:
    model, config = load_model("pocket://", LoadOptions(EngineOptions(num_blocks=12, max_model_len=320)))
    engine = Engine(model, config, store=open_store())
    answer(engine, ask(prompt(1, 290), "s"))
    leave(engine)
    busy = engine.submit(ask(prompt(2, 250), max_tokens=30))
    engine.step()
    back = engine.submit(ask(prompt(1, 290), "s"))
    engine.run_until_idle()
    output, other = engine.result(back), engine.result(busy)
    assert output is not None
    assert other is not None
    assert output.error is None
    engine.scheduler.check()
    model.close()


@pytest.mark.parametrize("count", [24, pytest.param(1000, marks=pytest.mark.slow)])
def test_restored_sessions_answer_like_recomputed_ones(count: int, pocket: Pocket, open_store: OpenStore) -> None:
    """In each round all of a few sessions are evicted from the device and restored while others run."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    engine, plain = Engine(*pocket, store=open_store(1 << 22, 1 << 30)), Engine(*pocket)
    histories = {f"s{n}": prompt(n, rng.randrange(40, 400)) for n in range(max(8, count // 10))}
    num_restored = 0
    while num_restored < count:
        those = rng.sample(sorted(histories), 6)
        ids = {name: engine.submit(ask(histories[name], name)) for name in those}
        engine.run_until_idle()
        for name, request_id in ids.items():
            output = engine.result(request_id)
            assert output is not None
            plain.scheduler.reset_prefix_cache()
            assert tokens_of(output) == tokens_of(answer(plain, ask(histories[name]))), name
            num_restored += (output.num_cached_tokens or 0) > 0
            if len(histories[name]) < 600:
                histories[name] += tokens_of(output) + prompt(rng.randrange(1 << 30), rng.randrange(1, 60))
        engine.sessions.sweep()
        engine.scheduler.check()
    assert kv_of(engine).store.tiers.num_loaded[KVTierName.HOST] > 0
    assert not kv_of(engine).store.tiers.num_rejected


def test_saving_waits_if_the_store_is_behind(pocket: Pocket, open_store: OpenStore) -> None:
    store = open_store()
    engine = Engine(*pocket, store=store)
    usual, store.options = store.options, structs.replace(store.options, max_saving_bytes=0)
    answer(engine, ask(prompt(1), "s"))
    assert not engine.has_work, "or the loop would spin"
    store.options = usual
    engine.run_until_idle()
    assert store.flush(10.0)
    assert store.tiers.stats()[KVTierName.HOST].num_blocks == 4


def test_many_evicted_blocks_are_copied_within_the_stores_bound(
    pocket: Pocket, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unloading a replica with a full pool neither blocks the step loop for long nor doubles its memory."""
    may_write = threading.Event()
    store = open_store(system=WatchedSystem(lambda call, path: call != "open" or may_write.wait()))
    engine = Engine(*pocket, store=store)
    size = engine.model.executor.geometry.bytes_per_block
    store.options = structs.replace(store.options, max_saving_bytes=0)
    answer(engine, ask(prompt(1, 600), "s"))
    hashes = hashes_of(engine, "s")
    store.options = structs.replace(store.options, max_saving_bytes=3 * size)
    monkeypatch.setattr(kv_transfer, "MAX_MOVED_BYTES", 2 * size)
    kept = kv_of(engine).keep_now(hashes, ())
    assert store._saving_bytes == 4 * size, "two portions: the bound, and what the last one is beyond it"
    assert kept == 4
    may_write.set()
    assert store.flush(10.0)
    assert store.find(environment_of(engine.model), hashes) == kept


def test_an_abandoned_engine_cancels_its_loads(pocket: Pocket, open_store: OpenStore) -> None:
    engine = Engine(*pocket, store=open_store())
    answer(engine, ask(prompt(1), "s"))
    leave(engine)
    engine.submit(ask(prompt(1), "s"))
    engine.drain()
    engine.drain()  # its blocks are being read
    [load] = kv_of(engine).store._loads
    engine.abandon(RequestFailedError("it broke"))
    assert load.is_done
    assert (kv_of(engine).num_waiting, engine.num_open) == (0, 0)


def test_no_column_of_a_window_gets_blocks_without_content(open_store: OpenStore, tmp_path: Path) -> None:
    """A window is restored around a column that the device still has, and that is evicted meanwhile."""
    shape = replace(SHAPES["tiny-gemma3"], windows=tuple(3 * BLOCK * bool(w) for w in SHAPES["tiny-gemma3"].windows))
    path, window = write_huggingface(tmp_path / "model", shape, "F32"), 1
    session = request(text(random.Random(1), 150), num_lasting_tokens=150, session_id="s", session_owner=OWNER)
    may_write, is_writing = threading.Event(), threading.Event()
    may_write.set()

    def before(call: str, path: str) -> None:
        if call == "write":
            is_writing.set()
            may_write.wait()

    with hybrid_engine(path, store=open_store(system=WatchedSystem(before))) as engine:
        [expected] = answers(engine, [session])
        scheduler, executor, hashes = engine.scheduler, engine.model.executor, hashes_of(engine, "s")[:4]

        def contents() -> list[bytes | None]:
            columns = scheduler.cached_blocks(hashes, window)
            return [executor.read_blocks(blocks).tobytes() if blocks else None for blocks in columns]

        _, *stored = contents()  # the columns with which the session continues
        leave(engine)
        may_write.clear()
        is_writing.clear()
        answers(engine, [request(text(random.Random(2), 40), session_id="other", session_owner=OWNER)])
        engine.run_until_idle()
        until(is_writing.is_set, "the store's thread is busy, so that no block is read yet")
        scheduler.reset_prefix_cache()
        [(place, _)] = scheduler.fill(hashes[:3], 2, window)
        engine.submit(session)
        engine.drain()
        transfer = kv_of(engine)
        assert (place, transfer.num_waiting, transfer.move(0.0)) == (2, 1, []), "columns 1 and 3 will be read"
        scheduler.reset_prefix_cache()
        may_write.set()
        until(lambda: bool(transfer.move(0.0)), "they were read")
        assert contents() == [None, stored[0], None, stored[2]]
        assert answers(engine, [session])[0].bits == expected.bits
        scheduler.check()


def test_the_number_of_stored_tokens_excludes_removed_blocks(pocket: Pocket, open_store: OpenStore) -> None:
    """Blocks may have been evicted since the session's last request."""
    engine = Engine(*pocket, store=open_store())
    answer(engine, ask(prompt(1), "s"))
    store = kv_of(engine).store
    assert store.flush(10.0)
    tier = store.tiers._files[KVTierName.HOST]
    assert tier.remove(BlockKey(environment_of(engine.model), hashes_of(engine, "s")[1]))
    [session] = Engine(*pocket, store=open_store()).sessions.stored()
    assert session.num_stored_tokens == BLOCK
