"""SQLite files of the server: opened or made, known as ours by their header, and used on one thread of their own."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import ConfigError

BUSY_TIMEOUT_S = 5.0
"""How long to wait for another process that is writing to the file."""
OWNER_ONLY = 0o600
"""The files hold what people said."""

T = TypeVar("T")
Value = str | bytes | int | float | None


@dataclass(frozen=True, slots=True)
class Schema:
    """Tables of a kind of file, and the two numbers in its header that tell it from others."""

    application_id: int
    version: int
    tables: str
    kept: str
    """Plural noun of what it holds, for messages."""
    is_exclusive: bool = False
    """Whether one process at a time may use it."""


class Database:
    """One file; `run` does work with its connection on its thread, one after another.

    Raises:
        ConfigError: the file cannot be opened or made, or it is not one of this schema.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        try:
            self.connection = _connect(path, schema)
        except (OSError, sqlite3.Error) as error:
            why = "another server uses it" if schema.is_exclusive and "locked" in str(error) else str(error)
            raise ConfigError(f"{path}: {schema.kept} cannot be kept there: {why}") from error
        self._thread = ThreadPoolExecutor(1, f"lockstep-{schema.kept.replace(' ', '-')}")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def rows(self, query: str, *values: Value) -> list[tuple[Any, ...]]:
        """All rows that a query finds."""
        return await self.run(lambda: self.connection.execute(query, values).fetchall())

    async def change(self, statement: str, *values: Value) -> int:
        """Execute a statement by itself; returns how many rows it changed."""
        return await self.run(lambda: self.connection.execute(statement, values).rowcount)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All that is done in the block, or nothing of it. On the database's thread."""
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._thread.shutdown()
        self.connection.close()


def _connect(path: Path, schema: Schema) -> sqlite3.Connection:
    """A connection to a file of ours, for one thread at a time."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, OWNER_ONLY))
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        if schema.is_exclusive:  # from the first access on, until the connection is closed or the process ends
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")
        is_new = connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone()[0] == 0
        expected = (schema.application_id, schema.version)
        if is_new:
            header = f"PRAGMA application_id = {expected[0]}; PRAGMA user_version = {expected[1]};"
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {schema.tables} {header} COMMIT;")
        found = tuple(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if found != expected:
            raise ConfigError(
                f"{path}: a database of another program or version (application_id {found[0]}, user_version "
                f"{found[1]}); it must be a file that this version made ({expected[0]}, {expected[1]}), or none"
            )
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection
