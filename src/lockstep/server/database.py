"""SQLite databases of the server: open or create one in a file or in memory, and run queries on one thread.

Disk errors, in particular a full disk, become a `StorageError` that names the folder.
"""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from lockstep.errors import ConfigError, StorageError, StorageFullError
from lockstep.system import SYSTEM, System

BUSY_TIMEOUT_S = 5.0
"""Time limit, in seconds, to wait for another process that writes to the file."""
IN_MEMORY = Path(":memory:")
"""Path of a database that is kept in memory until it is closed."""
OWNER_ONLY = 0o600
"""File mode. The files contain texts of users."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BROKEN = frozenset({errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENODEV, errno.ESTALE})
_BROKEN_DATABASE = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN})

T = TypeVar("T")
Value = str | bytes | int | float | None


@dataclass(frozen=True, slots=True)
class Schema:
    """Tables of a kind of database, with the two header numbers that identify it."""

    application_id: int
    version: int
    tables: str
    kept: str
    """Plural noun for the content, used in messages."""
    is_exclusive: bool = False
    """Whether only one process at a time can use the file."""
    synchronous: Literal["NORMAL", "FULL"] = "NORMAL"
    """FULL: commits survive a power failure. NORMAL: the latest commits may be lost, but the file stays consistent."""


class Database:
    """One database. `run` executes work with its connection on its thread, one item at a time.

    Work of a database in memory waits for no disk, so it is executed directly, without a thread.

    Raises:
        ConfigError: the file cannot be opened or created, or it has another schema.
    """

    def __init__(
        self, path: Path, schema: Schema, system: System = SYSTEM, busy_timeout_s: float = BUSY_TIMEOUT_S
    ) -> None:
        try:
            self.connection = _connect(path, schema, system, busy_timeout_s)
        except (OSError, sqlite3.Error) as error:
            why = "another server uses it" if schema.is_exclusive and "locked" in str(error) else str(error)
            raise ConfigError(f"{path}: {schema.kept} cannot be stored there: {why}") from error
        weakref.finalize(self, self.connection.close)  # an application that is never closed has one in memory
        self._folder, self._kept = path.absolute().parent, schema.kept
        thread_name = f"lockstep-{schema.kept.replace(' ', '-')}"
        self._thread = None if path == IN_MEMORY else system.pool(1, thread_name)

    async def run(self, work: Callable[[], T]) -> T:
        """Run work on the database's thread. It may also access other files in the folder.

        Raises:
            StorageError: the disk is full or failing.
        """
        try:
            if self._thread is None:
                return work()
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except (OSError, sqlite3.OperationalError) as error:
            refusal = refusal_of(error, self._folder, self._kept)
            if refusal is None:
                raise
            raise refusal from error

    async def rows(self, query: str, *values: Value) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        return await self.run(lambda: self.connection.execute(query, values).fetchall())

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Transaction that commits at the end of the block and is rolled back on an error. On the database's thread."""
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
        if self._thread is not None:
            self._thread.shutdown()
        self.connection.close()


def refusal_of(error: OSError | sqlite3.OperationalError, folder: Path, kept: str) -> StorageError | None:
    """Convert the error of a full or failing disk to a StorageError; None for any other error.

    Args:
        kept: plural noun for the content of the folder.
    """
    if isinstance(error, sqlite3.OperationalError):
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the higher bits are subtypes
        is_full, is_broken, why = code == sqlite3.SQLITE_FULL, code in _BROKEN_DATABASE, str(error)
    else:
        is_full, is_broken, why = error.errno in _FULL, error.errno in _BROKEN, error.strerror or str(error)
    text = f"{folder}: {kept} cannot be stored there now: {why}"
    if is_full:
        return StorageFullError(f"{text}; free space on that disk")
    return StorageError(f"{text}; repair the disk, or make the folder writable") if is_broken else None


def _connect(path: Path, schema: Schema, system: System, busy_timeout_s: float) -> sqlite3.Connection:
    """Open or create a database. The connection is for one thread at a time."""
    if path != IN_MEMORY:
        system.open(path, "ab", OWNER_ONLY).close()
    connection = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
    try:
        if schema.is_exclusive:  # lock the file until the connection is closed
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
                f"{found[1]}); it must be created by this version ({expected[0]}, {expected[1]}), or not exist"
            )
        connection.execute(f"PRAGMA synchronous = {schema.synchronous}")
        # The write-ahead log is emptied after each change but keeps its size, so the next change needs no space. Small
        # changes, such as removing a file, therefore work on a full disk.
        connection.execute("PRAGMA wal_autocheckpoint = 1")
    except BaseException:
        connection.close()
        raise
    return connection
