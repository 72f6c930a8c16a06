"""Stored responses in a SQLite file: they survive the server. One thread of its own talks to the database."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from lockstep.errors import ConfigError, RequestFailedError
from lockstep.server.responses.store import StoredResponse, StoreLimits, decode, encode

SCHEMA_VERSION = 1
"""Kept in `user_version`; a file of another version is refused."""
APPLICATION_ID = 0x4C53_5250
"""Says that a SQLite file is ours."""
BUSY_TIMEOUT_S = 5.0
"""How long to wait for another process that is writing to the file."""
_OWNER_ONLY = 0o600
"""The file holds what people said."""

_SCHEMA = f"""
BEGIN;
CREATE TABLE responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    size INTEGER NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX responses_by_size ON responses (size);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""

_T = TypeVar("_T")


class SqliteStore:
    """Implements `ResponseStore`.

    Raises:
        ConfigError: the file cannot be opened or made, or it is not one of ours.
    """

    def __init__(self, path: Path, limits: StoreLimits) -> None:
        try:
            self._connection = _connect(path)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path}: stored responses cannot be kept there: {error}") from error
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, "lockstep-responses")

    async def put(self, stored: StoredResponse) -> None:
        payload = encode(stored)
        try:
            await self._run(lambda: self._insert(stored, payload))
        except sqlite3.Error as error:
            raise RequestFailedError(f"the response was made, but it could not be stored: {error}") from error

    async def get(self, response_id: str, tenant: str) -> StoredResponse | None:
        query = "SELECT payload FROM responses WHERE id = ? AND tenant = ?"
        row = await self._run(lambda: self._connection.execute(query, (response_id, tenant)).fetchone())
        return None if row is None else decode(row[0])

    async def delete(self, response_id: str, tenant: str) -> bool:
        query = "DELETE FROM responses WHERE id = ? AND tenant = ?"
        return await self._run(lambda: self._connection.execute(query, (response_id, tenant)).rowcount) > 0

    def close(self) -> None:
        self._thread.shutdown()
        self._connection.close()

    def _insert(self, stored: StoredResponse, payload: bytes) -> None:
        """Add one and forget the oldest, in one transaction."""
        connection, limits = self._connection, self._limits
        connection.execute("BEGIN IMMEDIATE")
        try:
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
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _connect(path: Path) -> sqlite3.Connection:
    """A connection to a file of ours, for one thread at a time."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, _OWNER_ONLY))
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        is_new = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0] == 0
        if is_new:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_SCHEMA)
        found = tuple(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if found != (APPLICATION_ID, SCHEMA_VERSION):
            raise ConfigError(
                f"{path}: a database of another program or version (application_id {found[0]}, user_version "
                f"{found[1]}); it must be a file that this version made ({APPLICATION_ID}, {SCHEMA_VERSION}), or none"
            )
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection
