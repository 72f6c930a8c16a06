"""The KV store's thread and its callers: no caller waits forever, and no wrong block is returned."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.engine.kv_files import BlockFiles
from lockstep.engine.kv_load import ChainLoad
from lockstep.engine.kv_records import SessionRecord
from lockstep.engine.kv_store import KVStore
from lockstep.engine.kv_tiers import KVTierName
from lockstep.errors import UsageError
from lockstep.executors.base import Blocks
from tests.engine.conftest import OpenStore
from tests.systems import WatchedSystem
from tests.waiting import HANG_S, until

SIZE = 5000
PAGES = 8192
"""Bytes of one block's file, in whole pages."""
ENVIRONMENT, OTHER = b"e" * 16, b"o" * 16


def nothing() -> None:
    return


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content_of(number: int) -> Blocks:
    return np.full(SIZE, number % 256, np.uint8)


def save(store: KVStore, *numbers: int, environment: bytes = ENVIRONMENT, class_: int = 0) -> None:
    content = np.stack([content_of(number) for number in numbers])
    store.save(environment, [hash_of(number) for number in numbers], content, class_, nothing)


def save_and_note(store: KVStore, number: int) -> None:
    save(store, number)
    store.remember(SessionRecord("m", str(number), ENVIRONMENT, (hash_of(number),), 0.0))
    assert store.flush(10.0)


def present(store: KVStore, count: int, environment: bytes = ENVIRONMENT) -> set[int]:
    return {number for number in range(count) if store.has(environment, hash_of(number))}


# -- between two threads ----------------------------------------------------------------------------------------------


def test_blocks_read_after_a_cancelled_load_are_ignored() -> None:
    """An engine cancels while the store's thread reads a block: that content belongs to a later index."""
    load = ChainLoad(ENVIRONMENT, [hash_of(number) for number in range(4)], [SIZE] * 4, nothing, 4 * SIZE)
    for number in range(2):
        load.put(content_of(number))
    assert load.take(SIZE)[0][0] == 0
    load.cancel()
    load.put(content_of(2))
    assert load.is_done
    assert load.take(SIZE) == []


def test_pending_bytes_are_counted_correctly_by_many_threads(open_store: OpenStore) -> None:
    """Otherwise saving would stop permanently, or would be unbounded."""
    store = open_store(host_bytes=1)

    def save_many() -> None:
        for number in range(500):
            save(store, number)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=save_many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.flush(60.0)
    finally:
        sys.setswitchinterval(interval_s)
    assert store._saving_bytes == 0


# -- who waits is woken -----------------------------------------------------------------------------------------------


def test_closing_the_store_ends_waiting_loads(open_store: OpenStore) -> None:
    store = open_store(max_ahead_bytes=1)
    save(store, *range(8))
    assert store.flush(10.0)
    woken = threading.Event()
    load = store.load(ENVIRONMENT, [hash_of(number) for number in range(8)], [SIZE] * 8, woken.set)
    until(lambda: load.is_ready, "the first block came")
    woken.clear()
    store.close(10.0)
    assert woken.is_set()
    assert load.is_done
    assert store.load(ENVIRONMENT, [hash_of(0)], [SIZE], nothing).is_done, "and who comes then waits for nothing"


def test_an_error_in_the_stores_thread_ends_the_load_and_not_the_store(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    save(store, 0, 1)
    assert store.flush(10.0)
    with monkeypatch.context() as patched:
        patched.setattr(BlockFiles, "read", lambda *arguments: 1 / 0)
        load = store.load(ENVIRONMENT, [hash_of(0)], [SIZE], nothing)
        until(lambda: load.is_done, "it waits no longer")
    load = store.load(ENVIRONMENT, [hash_of(0)], [SIZE], nothing)
    until(lambda: load.is_ready, "the store goes on")
    assert len(load.take(SIZE)) == 1


def test_an_engine_with_unsaved_blocks_is_woken_when_others_are_written(open_store: OpenStore) -> None:
    may_write, woken = threading.Event(), threading.Event()
    hanging = WatchedSystem(lambda call, path: call != "open" or may_write.wait())
    store = open_store(system=hanging, max_saving_bytes=SIZE)
    save(store, 0)
    assert not store.can_save
    store.call_when_ready(woken.set)
    assert not woken.is_set()
    may_write.set()
    assert woken.wait(10.0)
    woken.clear()
    store.call_when_ready(woken.set)
    assert woken.is_set(), "nobody else has to come where there is room"


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_store_that_fails_to_open_a_folder_releases_the_others(open_store: OpenStore, tmp_path: Path) -> None:
    """Otherwise a second attempt would find its own lock on the other folder for the rest of the process."""
    elsewhere = BlockFiles(tmp_path / "disk", 1 << 20)
    with pytest.raises(UsageError, match="another process"):
        open_store(disk_bytes=1 << 20)
    elsewhere.close()
    open_store(disk_bytes=1 << 20)


# -- whose blocks go first --------------------------------------------------------------------------------------------


def test_blocks_unused_since_the_start_are_evicted_first(open_store: OpenStore) -> None:
    """Blocks of an artifact that is no longer served must not prevent a model of low priority from storing blocks."""
    store = open_store(host_bytes=4 * PAGES)
    save(store, 0, 1, 2, 3, environment=OTHER)
    store = open_store(host_bytes=4 * PAGES)
    store.register_engine(ENVIRONMENT, nothing, 2)
    save(store, 0, 1, class_=2)
    assert store.flush(10.0)
    assert present(store, 4) == {0, 1}
    assert len(present(store, 4, OTHER)) == 2


def test_blocks_of_an_earlier_process_get_their_engines_priority(open_store: OpenStore) -> None:
    store = open_store(host_bytes=4 * PAGES)
    save(store, 0, 1, 2, 3, environment=OTHER)
    store = open_store(host_bytes=4 * PAGES)
    store.register_engine(OTHER, nothing, 0)
    save(store, 0, 1, class_=2)
    assert store.flush(10.0)
    assert present(store, 4) == set()
    assert len(present(store, 4, OTHER)) == 4


# -- what nobody will come back for -----------------------------------------------------------------------------------


def test_blocks_of_earlier_requests_and_of_forgotten_sessions_are_removed(
    open_store: OpenStore, tmp_path: Path
) -> None:
    """Otherwise, after its client ended it, blocks would remain that no command removes."""

    def come(session: str, *numbers: int) -> set[int]:
        save(store, *numbers)
        store.remember(SessionRecord("m", session, ENVIRONMENT, tuple(hash_of(number) for number in numbers), 0.0))
        assert store.flush(10.0)
        return present(store, 10)

    store = open_store(disk_bytes=1 << 20, max_records=2)
    assert come("a", 0, 1, 2) == {0, 1, 2}
    assert come("b", 0, 1, 3) == {0, 1, 2, 3}
    assert come("a", 0, 4) == {0, 1, 3, 4}, "b wants 1, too, and nobody wants 2"
    assert come("c", 5) == {0, 4, 5}, "b is forgotten"
    store.end("a")
    assert store.flush(10.0)
    assert {path.stem for path in tmp_path.rglob("*.kv")} == {hash_of(5).hex()}


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_a_block_that_a_session_needs_before_its_removal_stays(open_store: OpenStore) -> None:
    """One session ends and another begins to need its blocks while the store's thread is busy."""
    store = open_store()
    save(store, 0, 1)
    store.remember(SessionRecord("m", "first", ENVIRONMENT, (hash_of(0), hash_of(1)), 0.0))
    assert store.flush(10.0)
    is_busy, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        is_busy.set()
        assert may_go_on.wait(HANG_S)

    store.save(ENVIRONMENT, [hash_of(2)], np.stack([content_of(2)]), 0, wait)
    assert is_busy.wait(HANG_S)
    store.end("first")
    store.remember(SessionRecord("m", "second", ENVIRONMENT, (hash_of(0),), 1.0))
    may_go_on.set()
    assert store.flush(10.0)
    assert present(store, 2) == {0}, "the other block is wanted by nobody"


def test_records_count_against_the_budget_of_their_tier(open_store: OpenStore, tmp_path: Path) -> None:
    store = open_store(host_bytes=4 * PAGES)
    save(store, 0, 1, 2, 3)
    for number in range(3):
        store.remember(SessionRecord("m", str(number), ENVIRONMENT, (hash_of(number),), 0.0))
        assert store.flush(10.0)
        taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "host").rglob("*") if path.is_file())
        assert taken <= 4 * PAGES
    assert store.tiers.stats()[KVTierName.HOST].num_bytes <= 4 * PAGES
    assert len(present(store, 4)) == 2, "two blocks gave way to three files of a page"
    for number in range(3):
        store.end(str(number))
    assert store.flush(10.0)
    assert store.tiers.stats()[KVTierName.HOST].num_bytes == len(present(store, 4)) * PAGES


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_ended_sessions_leave_nothing(count: int, open_store: OpenStore, tmp_path: Path) -> None:
    """Each session starts, has two requests and ends."""
    store = open_store(host_bytes=1 << 24, disk_bytes=1 << 24)
    for number in range(count):
        save(store, number % 50)
        for turn in range(2):
            hashes = (hash_of(number % 50), hash_of(1000 + number + turn))
            store.remember(SessionRecord("m", str(number), ENVIRONMENT, hashes, 0.0))
        store.end(str(number), "m")
    assert store.flush(60.0)
    records = store._records
    assert (len(records._records), len(records._num_references), len(records._file_bytes)) == (0, 0, 0)
    assert (len(store._jobs), len(store.tiers._pending_copies), store._saving_bytes) == (0, 0, 0)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert {figures.num_bytes for figures in store.tiers.stats().values()} == {0}


def test_a_hanging_folder_loses_records_and_uses_bounded_memory(
    open_store: OpenStore, faults: list[str], tmp_path: Path
) -> None:
    """A hanging disk: pending writes are bounded, and the newest is written when the disk answers."""
    may_write = threading.Event()
    hanging = WatchedSystem(lambda call, path: call != "open" or may_write.wait())
    store = open_store(system=hanging, max_unwritten_records=20)
    save(store, 0)
    for turn in range(3):
        for number in range(15):
            store.remember(SessionRecord("m", f"{number}", ENVIRONMENT, (hash_of(number),), turn))
    assert (len(store._unwritten), store.num_lost_records) == (15, 0), "each is written once, as it is then"
    for number in range(15, 80):
        store.remember(SessionRecord("m", f"{number}", ENVIRONMENT, (hash_of(number),), 0.0))
        assert len(store._jobs) <= 1 + 20
    assert store.num_lost_records == 80 - 20
    assert faults == ["20 session records wait to be written; older ones are dropped (slow disk)" for _ in range(3)]
    may_write.set()
    assert store.flush(10.0)
    assert not store._unwritten
    assert len(list((tmp_path / "host" / "sessions").iterdir())) == 20
    known = {record.session_id for record in open_store().records(ENVIRONMENT)}
    assert known == {str(number) for number in range(60, 80)}


def test_tiers_are_added_with_budgets_and_removed_empty(
    open_store: OpenStore, tmp_path: Path, faults: list[str]
) -> None:
    """Session records are then written to the slowest tier, beside the records that it already has."""
    save_and_note(open_store(0, 1 << 20), 9)
    store = open_store(0, 0)
    options = store.options
    save_and_note(store, 0)
    assert (store.tiers.stats(), store.has(ENVIRONMENT, hash_of(0))) == ({}, False)
    store.resize(replace(options, host_bytes=1 << 20))
    save_and_note(store, 1)
    assert present(store, 10) == {1}
    notes = [tmp_path / tier / "sessions" for tier in ("host", "disk")]
    assert [len(list(folder.iterdir())) for folder in notes] == [2, 1]
    store.resize(replace(options, host_bytes=1 << 20, disk_bytes=1 << 20))
    save_and_note(store, 2)
    assert present(store, 10) == {1, 2, 9}
    assert list(store.tiers.stats()) == [KVTierName.HOST, KVTierName.DISK]
    assert [len(list(folder.iterdir())) for folder in notes] == [0, 4]
    assert store.tiers.stats()[KVTierName.HOST].num_bytes == 2 * PAGES, "notes are no longer charged there"
    store.resize(replace(options, host_bytes=0, disk_bytes=1 << 20))
    assert store.flush(10.0)
    assert present(store, 10) == {2, 9}
    assert faults == []
    known = {record.session_id for record in open_store(0, 1 << 20).records(ENVIRONMENT)}
    assert known == {"0", "1", "2", "9"}


def test_a_tier_that_cannot_be_added_is_reported_and_the_others_work(
    open_store: OpenStore, tmp_path: Path, faults: list[str]
) -> None:
    elsewhere = BlockFiles(tmp_path / "disk", 1 << 20)
    store = open_store()
    store.resize(replace(store.options, host_bytes=4 * PAGES, disk_bytes=1 << 20))
    assert store.flush(10.0)
    assert [fault.rpartition(": ")[2] for fault in faults] == [
        "another process stores its KV blocks there; use a separate folder for each process"
    ]
    assert [(place, each.budget_bytes) for place, each in store.tiers.stats().items()] == [(KVTierName.HOST, 4 * PAGES)]
    elsewhere.close()


def test_a_store_whose_thread_cannot_be_started_leaves_its_folders_to_the_next(open_store: OpenStore) -> None:
    def refuse(call: str, name: str) -> None:
        if call == "thread":
            raise RuntimeError("can't start new thread")

    with pytest.raises(UsageError, match="KV cannot be stored outside of the device: can't start new thread"):
        open_store(disk_bytes=1 << 20, system=WatchedSystem(refuse))
    store = open_store(disk_bytes=1 << 20)
    save(store, 0)
    assert store.flush(10.0)
    assert store.has(ENVIRONMENT, hash_of(0))
