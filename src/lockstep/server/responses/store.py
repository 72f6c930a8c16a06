"""Stores of answered responses, which later requests may continue: a protocol, memory, and a SQLite file.

A store is bounded by count and by bytes, oldest first. What one tenant stored does not exist for another.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from lockstep.errors import InvalidParameterError, RequestFailedError, ResponseNotFoundError, StorageError
from lockstep.server.database import Database, Schema
from lockstep.server.options import ServerOptions

MAX_STORED_BYTES = 256 << 20
"""Of all stored responses together, as JSON."""
MAX_CHAIN = 256
"""Responses that one conversation may be made of; each of them is read to continue it."""

_UNSTORED = "the response was made, but it could not be stored"

JsonObject = Mapping[str, Any]


class StoredResponse(msgspec.Struct, frozen=True):
    """One answered request: the response, and the input of the client."""

    id: str
    tenant: str
    response: JsonObject
    """The response object."""
    input_items: tuple[JsonObject, ...]
    """This request's own, without those of the responses before it."""

    @property
    def previous_id(self) -> str | None:
        previous: str | None = self.response["previous_response_id"]
        return previous


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of a store; beyond them the oldest response is forgotten."""

    max_responses: int
    max_bytes: int = MAX_STORED_BYTES


class ResponseStore(Protocol):
    """Used from one event loop; closed when no one uses it any more."""

    async def put(self, stored: StoredResponse) -> None:
        """Keep a response; RequestFailedError when it cannot be kept."""
        ...

    async def get(self, response_id: str, tenant: str) -> StoredResponse | None:
        """A tenant's response; None when there is none of that id, or no longer."""
        ...

    async def delete(self, response_id: str, tenant: str) -> bool:
        """Forget it; whether it was there."""
        ...

    def close(self) -> None: ...


class MemoryStore:
    """Keeps responses as long as the process lives. Implements `ResponseStore`."""

    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self._kept: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._num_bytes = 0

    async def put(self, stored: StoredResponse) -> None:
        payload = encode(stored)
        self._kept[stored.id] = (stored.tenant, payload)
        self._num_bytes += len(payload)
        while len(self._kept) > self._limits.max_responses or self._num_bytes > self._limits.max_bytes:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._num_bytes -= len(oldest)

    async def get(self, response_id: str, tenant: str) -> StoredResponse | None:
        owner, payload = self._kept.get(response_id, ("", b""))
        return decode(payload) if payload and owner == tenant else None

    async def delete(self, response_id: str, tenant: str) -> bool:
        if response_id not in self._kept or self._kept[response_id][0] != tenant:
            return False
        self._num_bytes -= len(self._kept.pop(response_id)[1])
        return True

    def close(self) -> None:
        self._kept.clear()


def encode(stored: StoredResponse) -> bytes:
    """A response as it is kept: a value of its own, and exactly as many bytes as are counted."""
    return msgspec.json.encode(stored)


def decode(payload: bytes) -> StoredResponse:
    return msgspec.json.decode(payload, type=StoredResponse)


async def get_stored(store: ResponseStore, response_id: str, tenant: str, param: str | None) -> StoredResponse:
    """A tenant's response; ResponseNotFoundError, with the parameter that named it, when it is not there."""
    stored = await store.get(response_id, tenant)
    if stored is None:
        raise ResponseNotFoundError(f"Response with id '{response_id}' not found.", param=param)
    return stored


async def chain_to(
    store: ResponseStore, response_id: str, tenant: str, *, param: str = "previous_response_id"
) -> tuple[StoredResponse, ...]:
    """A response and all that it continued, oldest first.

    Args:
        param: the parameter that named it.

    Raises:
        ResponseNotFoundError: one of them is not kept, or no longer.
        InvalidParameterError: there are too many.
    """
    newest_first: list[StoredResponse] = []
    following: str | None = response_id
    while following is not None:
        if len(newest_first) == MAX_CHAIN:
            raise InvalidParameterError(
                f"the conversation that {response_id} ends has more than {MAX_CHAIN} responses; send it as input",
                param=param,
            )
        newest_first.append(await get_stored(store, following, tenant, param))
        following = newest_first[-1].previous_id
    return tuple(reversed(newest_first))


SCHEMA = Schema(
    application_id=0x4C53_5250,
    version=1,
    tables="""
CREATE TABLE responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    size INTEGER NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX responses_by_size ON responses (size);
""",
    kept="stored responses",
)


class SqliteStore:
    """Implements `ResponseStore`.

    Raises:
        ConfigError: the file cannot be opened or made, or it is not one of ours.
    """

    def __init__(self, path: Path, limits: StoreLimits) -> None:
        self._database = Database(path, SCHEMA)
        self._limits = limits

    async def put(self, stored: StoredResponse) -> None:
        payload = encode(stored)
        try:
            await self._database.run(lambda: self._insert(stored, payload))
        except sqlite3.Error as error:
            raise RequestFailedError(f"{_UNSTORED}: {error}") from error
        except StorageError as error:
            raise type(error)(f"{_UNSTORED}: {error}") from error

    async def get(self, response_id: str, tenant: str) -> StoredResponse | None:
        rows = await self._database.rows(
            "SELECT payload FROM responses WHERE id = ? AND tenant = ?", response_id, tenant
        )
        return decode(rows[0][0]) if rows else None

    async def delete(self, response_id: str, tenant: str) -> bool:
        query = "DELETE FROM responses WHERE id = ? AND tenant = ?"
        return await self._database.change(query, response_id, tenant) > 0

    def close(self) -> None:
        self._database.close()

    def _insert(self, stored: StoredResponse, payload: bytes) -> None:
        """Add one and forget the oldest, in one transaction."""
        limits = self._limits
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO responses (id, tenant, size, payload) VALUES (?, ?, ?, ?)",
                (stored.id, stored.tenant, len(payload), payload),
            )
            count, num_bytes = connection.execute("SELECT COUNT(*), SUM(size) FROM responses").fetchone()
            oldest = connection.execute("SELECT seq, size FROM responses ORDER BY seq")
            while count > limits.max_responses or num_bytes > limits.max_bytes:
                last, size = oldest.fetchone()
                count, num_bytes = count - 1, num_bytes - size
                connection.execute("DELETE FROM responses WHERE seq = ?", (last,))
            oldest.close()


def open_store(options: ServerOptions) -> ResponseStore:
    """The store of a server; the caller closes it.

    Raises:
        ConfigError: the file of ``responses_db`` cannot be used.
    """
    if options.responses_db is None:
        return memory_store(options)
    return SqliteStore(Path(options.responses_db), _limits(options))


def memory_store(options: ServerOptions) -> MemoryStore:
    """A store that is there at once."""
    return MemoryStore(_limits(options))


def _limits(options: ServerOptions) -> StoreLimits:
    return StoreLimits(options.max_stored_responses)
