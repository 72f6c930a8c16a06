"""Response store: keeps answered responses that later requests can continue, in a SQLite file or in memory.

It is limited in count and bytes; the oldest responses are removed first. Tenants cannot see each other's
responses.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import InvalidParameterError, RequestFailedError, ResponseNotFoundError, StorageError
from lockstep.server.database import IN_MEMORY, Database, Schema

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


class ResponseStore:
    """Stored responses of a server. Used from one event loop. Call `close` after the last use.

    Args:
        path: SQLite file, which several servers can share; None: in memory.
        max_responses: maximum number of responses. Beyond it, the oldest one is removed.
        max_bytes: maximum total size of the responses, as JSON. Beyond it, the oldest ones are removed.

    Raises:
        ConfigError: the file cannot be opened or created, or it is not a response database.
    """

    def __init__(
        self, path: Path | None, max_responses: int, max_bytes: int = MAX_STORED_BYTES, max_chain: int = MAX_CHAIN
    ) -> None:
        self._database = Database(path or IN_MEMORY, SCHEMA)
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_chain = max_chain
        self._totals: tuple[int, int, int] | None = None
        """Version of the data after the last insertion, with the count and bytes of all responses. Counting them takes
        160 us, and a single server does it once."""

    async def put(self, stored: StoredResponse) -> None:
        """Store a response. Raises RequestFailedError or StorageError if it cannot be stored."""
        payload = msgspec.json.encode(stored)
        try:
            await self._database.run(lambda: self._insert(stored, payload))
        except sqlite3.Error as error:
            raise RequestFailedError(f"{_UNSTORED}: {error}") from error
        except StorageError as error:
            raise type(error)(f"{_UNSTORED}: {error}") from error

    async def get(self, response_id: str, tenant: str, param: str = "response_id") -> StoredResponse:
        """Return a tenant's response.

        Args:
            param: the request parameter that contains the id.

        Raises:
            ResponseNotFoundError: the response does not exist or was removed.
        """
        rows = await self._database.rows(
            "SELECT payload FROM responses WHERE id = ? AND tenant = ?", response_id, tenant
        )
        if not rows:
            raise ResponseNotFoundError(f"Response with id '{response_id}' not found.", param=param)
        return msgspec.json.decode(rows[0][0], type=StoredResponse)

    async def chain(self, response_id: str, tenant: str, param: str = "response_id") -> tuple[StoredResponse, ...]:
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
            if len(newest_first) == self._max_chain:
                raise InvalidParameterError(
                    f"the conversation up to {response_id} has more than {self._max_chain} responses; send it as input",
                    param=param,
                )
            newest_first.append(await self.get(following, tenant, param))
            following = newest_first[-1].previous_id
        return tuple(reversed(newest_first))

    async def delete(self, response_id: str, tenant: str) -> bool:
        """Delete a response. Return whether it existed."""

        def delete() -> bool:
            self._totals = None
            query = "DELETE FROM responses WHERE id = ? AND tenant = ?"
            return self._database.connection.execute(query, (response_id, tenant)).rowcount > 0

        return await self._database.run(delete)

    def close(self) -> None:
        self._database.close()

    def _insert(self, stored: StoredResponse, payload: bytes) -> None:
        """Insert one response and remove the oldest ones beyond the limits, in one transaction."""
        known, self._totals = self._totals, None
        with self._database.transaction() as connection:
            version = connection.execute("PRAGMA data_version").fetchone()[0]  # other connections' changes change it
            if known is None or known[0] != version:
                totals = connection.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM responses").fetchone()
                known = (version, *totals)
            connection.execute(
                "INSERT INTO responses (id, tenant, size, payload) VALUES (?, ?, ?, ?)",
                (stored.id, stored.tenant, len(payload), payload),
            )
            count, num_bytes = known[1] + 1, known[2] + len(payload)
            oldest = connection.execute("SELECT seq, size FROM responses ORDER BY seq")
            while count > self._max_responses or num_bytes > self._max_bytes:
                last, size = oldest.fetchone()
                count, num_bytes = count - 1, num_bytes - size
                connection.execute("DELETE FROM responses WHERE seq = ?", (last,))
            oldest.close()
        self._totals = version, count, num_bytes
