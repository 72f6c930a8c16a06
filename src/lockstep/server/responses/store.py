"""Response stores: keep answered responses that later requests can continue, in memory or in a SQLite file.

A store is limited in count and bytes; the oldest responses are removed first. Tenants cannot see each other's
responses.
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
"""Maximum total size of all stored responses, as JSON."""
MAX_CHAIN = 256
"""Maximum number of responses in one conversation. Continuing a conversation reads all of them."""

_UNSTORED = "the response was generated but could not be stored"

JsonObject = Mapping[str, Any]


class StoredResponse(msgspec.Struct, frozen=True):
    """One stored response with the client's input."""

    id: str
    tenant: str
    response: JsonObject
    """The response object."""
    input_items: tuple[JsonObject, ...]
    """Input items of this request only, without those of earlier responses."""

    @property
    def previous_id(self) -> str | None:
        previous: str | None = self.response["previous_response_id"]
        return previous


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of a store. Beyond them, the oldest response is removed."""

    max_responses: int
    max_bytes: int = MAX_STORED_BYTES


class ResponseStore(Protocol):
    """Used from one event loop. Call `close` after the last use."""

    async def put(self, stored: StoredResponse) -> None:
        """Store a response. Raises RequestFailedError if it cannot be stored."""
        ...

    async def get(self, response_id: str, tenant: str) -> StoredResponse | None:
        """Return a tenant's response; None if it does not exist or was removed."""
        ...

    async def delete(self, response_id: str, tenant: str) -> bool:
        """Delete a response. Return whether it existed."""
        ...

    def close(self) -> None: ...


class MemoryStore:
    """Keeps responses in memory. Implements `ResponseStore`."""

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
    """Serialize a response: an independent copy, whose length counts towards the store's limit."""
    return msgspec.json.encode(stored)


def decode(payload: bytes) -> StoredResponse:
    return msgspec.json.decode(payload, type=StoredResponse)


async def get_stored(store: ResponseStore, response_id: str, tenant: str, param: str | None) -> StoredResponse:
    """Return a tenant's response. Raises ResponseNotFoundError with ``param`` if there is none."""
    stored = await store.get(response_id, tenant)
    if stored is None:
        raise ResponseNotFoundError(f"Response with id '{response_id}' not found.", param=param)
    return stored


async def chain_to(
    store: ResponseStore, response_id: str, tenant: str, *, param: str = "previous_response_id"
) -> tuple[StoredResponse, ...]:
    """Return a response and all responses that it continues, oldest first.

    Args:
        param: the request parameter that contains the id.

    Raises:
        ResponseNotFoundError: a response does not exist or was removed.
        InvalidParameterError: the conversation has more than `MAX_CHAIN` responses.
    """
    newest_first: list[StoredResponse] = []
    following: str | None = response_id
    while following is not None:
        if len(newest_first) == MAX_CHAIN:
            raise InvalidParameterError(
                f"the conversation up to {response_id} has more than {MAX_CHAIN} responses; send it as input",
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
    """Keeps responses in a SQLite file. Implements `ResponseStore`.

    Raises:
        ConfigError: the file cannot be opened or created, or it is not a response database.
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
        """Insert one response and remove the oldest ones beyond the limits, in one transaction."""
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
    """Open the response store of a server. The caller closes it.

    Raises:
        ConfigError: the file ``responses_db`` cannot be used.
    """
    if options.responses_db is None:
        return memory_store(options)
    return SqliteStore(Path(options.responses_db), _limits(options))


def memory_store(options: ServerOptions) -> MemoryStore:
    """Create a store in memory."""
    return MemoryStore(_limits(options))


def _limits(options: ServerOptions) -> StoreLimits:
    return StoreLimits(options.max_stored_responses)
