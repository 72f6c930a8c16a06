"""Thousands of sessions that start, are stored, restored and ended leave nothing in this process."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.core import fingerprint
from lockstep.engine import sessions
from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from tests.engine.conftest import OpenStore
from tests.engine.kv_sessions import answer, ask, kv_of, leave


class Footprint(NamedTuple):
    """Measures of this process to which a leak would add."""

    num_bytes: int
    """Bytes of objects that Lockstep's code created."""
    num_files: int
    num_threads: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        ours = [tracemalloc.Filter(True, "*/lockstep/*")]
        found = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
        return cls(sum(each.size for each in found), len(os.listdir("/proc/self/fd")), threading.active_count())


@pytest.mark.parametrize(("count", "most"), [(200, 16), pytest.param(10_000, 1000, marks=pytest.mark.slow)])
def test_ended_sessions_leave_no_memory(
    count: int, most: int, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session is evicted and restored; every other one is ended, and of the rest the oldest are forgotten.

    Memory is compared when as many are known as may be: from then on, it grows by less than any object for each.
    """
    monkeypatch.setattr(sessions, "MAX_SESSIONS", most)
    model, config = load_model("stub://s", LoadOptions(EngineOptions(num_blocks=64)))
    store = open_store(64 << 12, (most + 64) << 12, max_records=most)
    engine = Engine(model, config, store=store)
    prints: list[Footprint] = []
    fingerprint.leb128(range(fingerprint.NUM_CODES))  # what it remembers of numbers is bounded, and full now
    tracemalloc.start()
    try:
        for number in range(count):
            tokens = tuple(number // 100**place % 100 for place in range(3)) * 20
            answer(engine, ask(tokens, f"s{number}"))
            leave(engine)
            assert answer(engine, ask((*tokens, 1, 2, 3), f"s{number}")).num_cached_tokens == 48
            if number % 2:
                engine.sessions.end(f"s{number}")
            if number + 1 in (count // 2, count):
                leave(engine)
                prints.append(Footprint.now())
    finally:
        tracemalloc.stop()
    before, after = prints
    print(before, after)
    assert after[1:] == before[1:]
    assert after.num_bytes - before.num_bytes < 16 * (count // 2) + 4096
    engine.scheduler.check()
    assert engine.scheduler.stats().num_cached_blocks == 0
    known = store.records(kv_of(engine).environment)
    assert most - 2 < len(known) <= most
    for record in known:
        engine.sessions.end(record.session_id)
        store.end(record.session_id)
    assert store.flush(10.0)
    assert not list(tmp_path.rglob("*.kv"))
    assert not [path for tier in ("host", "disk") for path in (tmp_path / tier / "sessions").glob("*")]
    assert {figures.num_bytes for figures in store.tiers.stats().values()} == {0}
