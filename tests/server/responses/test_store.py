"""Stored responses: bounded, apart by tenant, the same in memory and in a file, and there after a restart."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from lockstep.errors import ConfigError, InvalidParameterError, RequestFailedError, ResponseNotFoundError
from lockstep.server.responses.store import ResponseStore, StoredResponse


def stored(number: int, previous: int | None = None, tenant: str = "a", text: str = "") -> StoredResponse:
    previous_id = None if previous is None else f"resp_{previous}"
    return StoredResponse(
        f"resp_{number}", tenant, {"previous_response_id": previous_id, "text": text}, ({"type": "message"},)
    )


@pytest.fixture(params=["memory", "file"])
async def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "r.db"


@pytest.fixture
async def store(path: Path | None) -> AsyncIterator[ResponseStore]:
    """Room for three responses."""
    made = ResponseStore(path, 3)
    yield made
    made.close()


async def kept(store: ResponseStore, num: int) -> list[int]:
    """Numbers of the responses that are stored, out of the first ones."""
    found = []
    for number in range(num):
        with suppress(ResponseNotFoundError):
            await store.get(f"resp_{number}", "a")
            found.append(number)
    return found


async def test_stored_response_is_returned_unchanged(store: ResponseStore) -> None:
    await store.put(stored(1, text="süß 😀"))
    assert await store.get("resp_1", "a") == stored(1, text="süß 😀")
    with pytest.raises(ResponseNotFoundError) as caught:
        await store.get("resp_2", "a", "of_the_request")
    assert caught.value.param == "of_the_request"


async def test_another_tenant_finds_nothing(store: ResponseStore) -> None:
    await store.put(stored(1))
    with pytest.raises(ResponseNotFoundError):
        await store.get("resp_1", "b")
    assert not await store.delete("resp_1", "b")
    assert await kept(store, 2) == [1]


async def test_a_deleted_response_is_gone(store: ResponseStore) -> None:
    await store.put(stored(1))
    assert await store.delete("resp_1", "a")
    assert await kept(store, 2) == []
    assert not await store.delete("resp_1", "a")


async def test_the_oldest_are_forgotten_by_count(store: ResponseStore) -> None:
    for number in range(5):
        await store.put(stored(number))
    assert await kept(store, 5) == [2, 3, 4]
    assert await store.delete("resp_3", "a")
    await store.put(stored(5))
    assert await kept(store, 6) == [2, 4, 5], "a deleted response does not count"


async def test_the_oldest_are_forgotten_by_bytes(path: Path | None) -> None:
    size = len(msgspec.json.encode(stored(0, text="x" * 1000)))
    made = ResponseStore(path, 100, max_bytes=2 * size)
    for number in range(4):
        await made.put(stored(number, text="x" * 1000))
    assert await kept(made, 4) == [2, 3]
    assert await made.delete("resp_3", "a")
    await made.put(stored(5, text="x" * 1000))
    assert await kept(made, 6) == [2, 5], "what was deleted does not count"
    await made.put(stored(6, text="x" * 3000))
    assert await kept(made, 7) == [], "one that is larger than all may be is not stored"
    made.close()


async def test_a_chain_comes_oldest_first(store: ResponseStore) -> None:
    for number in range(3):
        await store.put(stored(number, number - 1 if number else None))
    assert [link.id for link in await store.chain("resp_2", "a")] == ["resp_0", "resp_1", "resp_2"]


async def test_broken_chain_names_the_missing_response(store: ResponseStore) -> None:
    for number in range(4):
        await store.put(stored(number, number - 1 if number else None))
    with pytest.raises(ResponseNotFoundError, match="'resp_0'") as caught:
        await store.chain("resp_3", "a", "previous_response_id")
    assert caught.value.param == "previous_response_id"


async def test_a_chain_is_bounded() -> None:
    store = ResponseStore(None, 3, max_chain=2)
    for number in range(3):
        await store.put(stored(number, number - 1 if number else None))
    assert len(await store.chain("resp_1", "a")) == 2
    with pytest.raises(InvalidParameterError, match="more than 2 responses"):
        await store.chain("resp_2", "a")
    store.close()


async def test_a_file_survives_its_server_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    first = ResponseStore(path, 3)
    await first.put(stored(1))
    first.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second = ResponseStore(path, 3)
    assert await second.get("resp_1", "a") == stored(1)
    second.close()


async def test_two_servers_share_a_file_and_its_limits(tmp_path: Path) -> None:
    first = ResponseStore(tmp_path / "r.db", 3)
    second = ResponseStore(tmp_path / "r.db", 3)
    for number in range(4):
        await (first if number % 2 else second).put(stored(number))
    assert await kept(first, 4) == [1, 2, 3]
    assert await second.delete("resp_2", "a")
    await first.put(stored(4))
    assert await kept(first, 5) == [1, 3, 4], "the other server's deletion counts"
    first.close()
    second.close()


async def test_another_programs_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE responses (x)")
    theirs.close()
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"theirs\.db: a database of another program or version"):
        ResponseStore(path, 3)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="cannot be stored there"):
        ResponseStore(tmp_path, 3)


async def test_response_that_cannot_be_stored_fails(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r.db", 3)
    await store.put(stored(1))
    with pytest.raises(RequestFailedError, match="could not be stored: UNIQUE"):
        await store.put(stored(1))
    await store.put(stored(2))
    assert await kept(store, 3) == [1, 2], "the file is not locked by what failed"
    store.close()
