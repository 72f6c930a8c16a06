"""Stored responses: bounded, apart by tenant, the same in memory and in a file, and there after a restart."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, InvalidParameterError, RequestFailedError, ResponseNotFoundError
from lockstep.server.responses import store as store_module
from lockstep.server.responses.store import (
    MemoryStore,
    ResponseStore,
    SqliteStore,
    StoredResponse,
    StoreLimits,
    chain_to,
    encode,
)


def stored(number: int, previous: int | None = None, tenant: str = "a", text: str = "") -> StoredResponse:
    previous_id = None if previous is None else f"resp_{previous}"
    return StoredResponse(
        f"resp_{number}", tenant, {"previous_response_id": previous_id, "text": text}, ({"type": "message"},)
    )


@pytest.fixture(params=["memory", "sqlite"])
async def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def store(kind: str, tmp_path: Path) -> AsyncIterator[ResponseStore]:
    """Room for three responses."""
    limits = StoreLimits(3)
    made: ResponseStore = MemoryStore(limits) if kind == "memory" else SqliteStore(tmp_path / "r.db", limits)
    yield made
    made.close()


async def test_what_was_put_is_got(store: ResponseStore) -> None:
    await store.put(stored(1, text="süß 😀"))
    assert await store.get("resp_1", "a") == stored(1, text="süß 😀")
    assert await store.get("resp_2", "a") is None


async def test_another_tenant_finds_nothing(store: ResponseStore) -> None:
    await store.put(stored(1))
    assert await store.get("resp_1", "b") is None
    assert not await store.delete("resp_1", "b")
    assert await store.get("resp_1", "a") is not None


async def test_a_deleted_response_is_gone(store: ResponseStore) -> None:
    await store.put(stored(1))
    assert await store.delete("resp_1", "a")
    assert await store.get("resp_1", "a") is None
    assert not await store.delete("resp_1", "a")


async def test_the_oldest_are_forgotten_by_count(store: ResponseStore) -> None:
    for number in range(5):
        await store.put(stored(number))
    kept = [number for number in range(5) if await store.get(f"resp_{number}", "a")]
    assert kept == [2, 3, 4]


async def test_the_oldest_are_forgotten_by_bytes(kind: str, tmp_path: Path) -> None:
    size = len(encode(stored(0, text="x" * 1000)))
    limits = StoreLimits(100, max_bytes=2 * size)
    made: ResponseStore = MemoryStore(limits) if kind == "memory" else SqliteStore(tmp_path / "b.db", limits)
    for number in range(4):
        await made.put(stored(number, text="x" * 1000))
    assert [number for number in range(4) if await made.get(f"resp_{number}", "a")] == [2, 3]
    assert await made.delete("resp_3", "a")
    await made.put(stored(5, text="x" * 1000))
    assert await made.get("resp_2", "a") is not None, "what was deleted does not count"
    made.close()


async def test_a_chain_comes_oldest_first(store: ResponseStore) -> None:
    for number in range(3):
        await store.put(stored(number, number - 1 if number else None))
    assert [link.id for link in await chain_to(store, "resp_2", "a")] == ["resp_0", "resp_1", "resp_2"]


async def test_a_broken_chain_names_what_is_missing(store: ResponseStore) -> None:
    for number in range(4):
        await store.put(stored(number, number - 1 if number else None))
    with pytest.raises(ResponseNotFoundError, match="'resp_0'") as caught:
        await chain_to(store, "resp_3", "a")
    assert caught.value.param == "previous_response_id"


async def test_a_chain_is_bounded(store: ResponseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        await store.put(stored(number, number - 1 if number else None))
    monkeypatch.setattr(store_module, "MAX_CHAIN", 2)
    assert len(await chain_to(store, "resp_1", "a")) == 2
    with pytest.raises(InvalidParameterError, match="more than 2 responses"):
        await chain_to(store, "resp_2", "a")


async def test_a_file_survives_its_server_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    first = SqliteStore(path, StoreLimits(3))
    await first.put(stored(1))
    first.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = SqliteStore(path, StoreLimits(3))
    assert await second.get("resp_1", "a") == stored(1)
    second.close()


async def test_two_servers_share_a_file_and_its_limits(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "r.db", StoreLimits(3))
    second = SqliteStore(tmp_path / "r.db", StoreLimits(3))
    for number in range(4):
        await (first if number % 2 else second).put(stored(number))
    assert [number for number in range(4) if await first.get(f"resp_{number}", "a")] == [1, 2, 3]
    first.close()
    second.close()


async def test_another_programs_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE responses (x)")
    theirs.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"theirs\.db: a database of another program or version"):
        SqliteStore(path, StoreLimits(3))
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="cannot be stored there"):
        SqliteStore(tmp_path, StoreLimits(3))


async def test_a_response_that_cannot_be_stored_is_no_success(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "r.db", StoreLimits(3))
    await store.put(stored(1))
    with pytest.raises(RequestFailedError, match="could not be stored: UNIQUE"):
        await store.put(stored(1))
    await store.put(stored(2))
    assert await store.get("resp_2", "a") is not None, "the file is not locked by what failed"
    store.close()
