"""Store of files and batches: keeps their metadata in a SQLite database and file contents in the same folder.

A folder is used by one server at a time. Tenants cannot see each other's files and batches.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
import tempfile
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from lockstep.errors import (
    BatchNotFoundError,
    ConfigError,
    InvalidParameterError,
    QueueFullError,
    StorageError,
    StoredFileNotFoundError,
)
from lockstep.owned_folders import OwnedFolder, claim_folder
from lockstep.server.batches.input_file import MAX_FILE_BYTES
from lockstep.server.batches.job import BatchJob
from lockstep.server.batches.journal import Journal, durable_file
from lockstep.server.batches.schema import ENDED, Batch, StoredFile, derived_id
from lockstep.server.database import BUSY_TIMEOUT_S, OWNER_ONLY, Database, Schema
from lockstep.system import SYSTEM, System

log = logging.getLogger(__name__)

T = TypeVar("T")

SCHEMA = Schema(
    application_id=0x4C53_4254,
    version=1,
    tables="""
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    purpose TEXT NOT NULL,
    size INTEGER NOT NULL,
    expires_at INTEGER,
    payload BLOB NOT NULL
);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    has_ended INTEGER NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX open_batches ON batches (has_ended);
""",
    kept="batches",
    is_exclusive=True,
    synchronous="FULL",
)
_TEMPORARY = "lockstep-owned-batches-"
"""Prefix of the names of temporary folders."""
_PROBE_BYTES = 64 << 10
"""Number of bytes that must be writable for the disk to count as recovered."""
_FOLDER_MODE = 0o700
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of a store."""

    max_file_bytes: int = MAX_FILE_BYTES
    """Maximum size of an uploaded file."""
    max_files: int = 1_000
    """Maximum number of uploaded files per tenant. Result files are limited separately to the same number."""
    max_bytes: int = 16 << 30
    """Maximum size of all files together, checked for uploads. Results are written even beyond it."""
    max_batches: int = 1_000
    """Maximum number of batches per tenant. Above it, the oldest ended batch is removed, but not its files."""
    busy_timeout_s: float = BUSY_TIMEOUT_S
    """Time limit in seconds to wait for another process that uses the folder."""


class BatchStore:
    """Stores files and batches. Used from one event loop. Call `close` after the last use.

    Args:
        folder: folder of the store; None: a temporary folder that is removed when the store is closed.

    Raises:
        ConfigError: the folder cannot be created or used, or another server uses it.
    """

    def __init__(self, folder: Path | None, limits: StoreLimits | None = None, system: System = SYSTEM) -> None:
        self.system = system
        self.limits = limits or StoreLimits()
        self.fault: StorageError | None = None
        """The last write error of the disk; None once a write succeeds again."""
        self._temporary: OwnedFolder | None = None
        self._folder = (folder or Path(tempfile.gettempdir())).expanduser().absolute()
        try:
            if folder is None:
                self._temporary = claim_folder(self._folder, _TEMPORARY)
                self._folder = self._temporary.path
            for each in (self._folder, self._folder / "files", self._folder / "journals"):
                each.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self._folder}: batches cannot be stored there: {error}") from error
        self.database = Database(self._folder / "batches.db", SCHEMA, system, self.limits.busy_timeout_s)
        self._sweep()

    def close(self) -> None:
        self.database.close()
        if self._temporary is not None:
            self._temporary.remove()

    async def run(self, work: Callable[[], T]) -> T:
        """Run work with files and the database on the database's thread.

        Raises:
            StorageError: a write failed; `fault` is then set to the error.
        """
        try:
            return await self.database.run(work)
        except StorageError as error:
            if self.fault is None:
                log.warning("%s; batches are paused until then, other requests are not affected", error)
            self.fault = error
            raise

    async def probe(self) -> None:
        """Test whether the disk can be written again, and clear `fault` if it can."""

        def write() -> None:
            path = self.path_of("probe")
            try:
                with durable_file(path, OWNER_ONLY, self.system) as file:
                    file.write(bytes(_PROBE_BYTES))
            finally:
                path.unlink(missing_ok=True)

        with suppress(StorageError):
            await self.run(write)
            self.fault = None
            log.info("%s: batches can be stored there again; resuming batches", self._folder)

    def _sweep(self) -> None:
        """Remove incomplete files of a server that was killed."""
        connection = self.database.connection
        kept = {row[0] for row in connection.execute("SELECT id FROM files")}
        open_ids = {row[0] for row in connection.execute("SELECT id FROM batches WHERE has_ended = 0")}
        for folder, known in (("files", kept), ("journals", open_ids)):
            for path in (self._folder / folder).iterdir():
                if path.name not in known:
                    path.unlink(missing_ok=True)

    # -- files ----------------------------------------------------------------------------------------------------

    def path_of(self, file_id: str) -> Path:
        return self._folder / "files" / file_id

    async def put_file(self, tenant: str, file: StoredFile, content: IO[bytes]) -> None:
        """Store an uploaded file.

        Raises:
            InvalidParameterError: a limit of the store is reached.
            StorageError: a write failed.
        """

        def put() -> None:
            query = "SELECT COUNT(*) FROM files WHERE tenant = ? AND purpose = ?"
            count = self.database.connection.execute(query, (tenant, file.purpose)).fetchone()[0]
            num_bytes = self.database.connection.execute("SELECT COALESCE(SUM(size), 0) FROM files").fetchone()[0]
            limits = self.limits
            if count >= limits.max_files:
                raise InvalidParameterError(f"{count} files are stored, which is the limit; delete one", param="file")
            if num_bytes + file.bytes > limits.max_bytes:
                raise InvalidParameterError(
                    f"{num_bytes} bytes of files are stored, and the limit is {limits.max_bytes}; delete some files",
                    param="file",
                )
            with durable_file(self.path_of(file.id), OWNER_ONLY, self.system) as target:
                shutil.copyfileobj(content, target, _COPY_BYTES)
            with self.database.transaction() as connection:
                _insert_file(connection, tenant, file)

        await self.run(put)

    async def file(self, file_id: str, tenant: str, now_s: float, *, param: str = "file_id") -> StoredFile:
        """Return a tenant's file. Raises StoredFileNotFoundError with ``param`` if there is none."""
        await self._forget_expired(now_s)
        rows = await self.database.rows("SELECT payload FROM files WHERE id = ? AND tenant = ?", file_id, tenant)
        if not rows:
            raise StoredFileNotFoundError(f"No such file: {file_id!r}.", param=param)
        return msgspec.json.decode(rows[0][0], type=StoredFile)

    async def files(
        self, tenant: str, now_s: float, *, after: str | None, limit: int, is_descending: bool, purpose: str | None
    ) -> list[StoredFile]:
        """Return a page of files, ordered by creation."""
        await self._forget_expired(now_s)
        rows = await self._page("files", tenant, after, limit, is_descending=is_descending, purpose=purpose)
        return [msgspec.json.decode(payload, type=StoredFile) for payload in rows]

    async def delete_file(self, file_id: str, tenant: str, now_s: float) -> None:
        """Delete a file.

        Raises:
            StoredFileNotFoundError: no file has this id.
            InvalidParameterError: a batch that has not ended uses it.
        """
        await self.file(file_id, tenant, now_s)
        query = "SELECT id FROM batches WHERE input_file_id = ? AND has_ended = 0"
        if rows := await self.database.rows(query, file_id):
            raise InvalidParameterError(
                f"{file_id} is the input of {rows[0][0]}; cancel that batch or wait for its end", param="file_id"
            )
        await self.run(lambda: self._forget([file_id]))

    async def _forget_expired(self, now_s: float) -> None:
        query = (
            "SELECT id FROM files WHERE expires_at <= ? AND id NOT IN "
            "(SELECT input_file_id FROM batches WHERE has_ended = 0)"
        )
        if rows := await self.database.rows(query, int(now_s)):
            with suppress(StorageError):  # the next attempt removes them
                await self.run(lambda: self._forget([row[0] for row in rows]))

    def _forget(self, file_ids: list[str]) -> None:
        with self.database.transaction() as connection:
            connection.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in file_ids])
        for file_id in file_ids:
            self.path_of(file_id).unlink(missing_ok=True)

    async def _page(
        self, table: str, tenant: str, after: str | None, limit: int, *, is_descending: bool, purpose: str | None = None
    ) -> list[bytes]:
        query, values = f"SELECT payload FROM {table} WHERE tenant = ?", [tenant]
        if purpose:
            query, values = f"{query} AND purpose = ?", [*values, purpose]
        bounds: list[Any] = []
        if after is not None:
            found = await self.database.rows(f"SELECT seq FROM {table} WHERE id = ? AND tenant = ?", after, tenant)
            if not found:
                raise InvalidParameterError(f"after is {after!r}, which is not an id in the {table}", param="after")
            query += f" AND seq {'<' if is_descending else '>'} ?"
            bounds = [found[0][0]]
        query += f" ORDER BY seq {'DESC' if is_descending else 'ASC'} LIMIT ?"
        return [row[0] for row in await self.database.rows(query, *values, *bounds, limit)]

    # -- batches --------------------------------------------------------------------------------------------------

    async def put_batch(self, tenant: str, batch: Batch) -> None:
        """Store a new batch. If there are too many, remove the oldest one that has ended.

        Raises:
            QueueFullError: there are too many batches and none has ended.
            StorageError: a write failed.
        """

        def put() -> None:
            with self.database.transaction() as connection:
                counted = "SELECT COUNT(*), MIN(CASE WHEN has_ended THEN seq END) FROM batches WHERE tenant = ?"
                count, oldest = connection.execute(counted, (tenant,)).fetchone()
                if count >= self.limits.max_batches:
                    if oldest is None:
                        raise QueueFullError(f"{count} batches have not ended, which is the limit; try again later")
                    connection.execute("DELETE FROM batches WHERE seq = ?", (oldest,))
                connection.execute(
                    "INSERT INTO batches (id, tenant, input_file_id, has_ended, payload) VALUES (?, ?, ?, 0, ?)",
                    (batch.id, tenant, batch.input_file_id, msgspec.json.encode(batch)),
                )

        await self.run(put)

    async def batch(self, batch_id: str, tenant: str) -> Batch:
        """Return a tenant's batch as last saved. Raises BatchNotFoundError if there is none."""
        rows = await self.database.rows("SELECT payload FROM batches WHERE id = ? AND tenant = ?", batch_id, tenant)
        if not rows:
            raise BatchNotFoundError(f"No batch found with id {batch_id!r}.", param="batch_id")
        return msgspec.json.decode(rows[0][0], type=Batch)

    async def batches(self, tenant: str, *, after: str | None, limit: int) -> list[Batch]:
        """Return a page of batches, latest first."""
        rows = await self._page("batches", tenant, after, limit, is_descending=True)
        return [msgspec.json.decode(payload, type=Batch) for payload in rows]

    async def open_batches(self) -> list[tuple[str, Batch]]:
        """Return every batch that has not ended with its tenant, oldest first."""
        rows = await self.database.rows("SELECT tenant, payload FROM batches WHERE has_ended = 0 ORDER BY seq")
        return [(tenant, msgspec.json.decode(payload, type=Batch)) for tenant, payload in rows]

    async def save(self, batch: Batch) -> None:
        """Save the state of a batch. Raises StorageError if the write failed."""
        await self.run(lambda: _update(self.database.connection, batch))

    def open_job(self, tenant: str, batch: Batch, offsets: array[int]) -> BatchJob:
        """Open the job of a batch, which continues an interrupted one. Runs on the database's thread."""
        journal = Journal(self._folder / "journals" / batch.id, batch.id, len(offsets), self.system)
        return BatchJob(batch.id, tenant, self.path_of(batch.input_file_id), offsets, journal)

    def finish(self, job: BatchJob, batch: Batch, now_s: float, unanswered: tuple[str, str] | None) -> Batch:
        """Write a job's result files, and save the files and the final batch in one transaction.

        Runs on the database's thread. If it is interrupted and repeated, it writes the same files.

        Args:
            batch: the batch in its final state.
            unanswered: as in `BatchJob.write_results`.
        """
        ids = {kind: derived_id("file-", batch.id, kind) for kind in ("output", "error")}
        paths = {kind: self.path_of(file_id) for kind, file_id in ids.items()}
        with (
            durable_file(paths["output"], OWNER_ONLY, self.system) as output,
            durable_file(paths["error"], OWNER_ONLY, self.system) as errors,
        ):
            job.write_results(output, errors, unanswered)
        made: dict[str, StoredFile] = {}
        for kind, file_id in ids.items():
            size = paths[kind].stat().st_size
            if size == 0:
                paths[kind].unlink()
                continue
            expires_at = None if batch.output_expiry_s is None else int(now_s) + batch.output_expiry_s
            name = f"{batch.id}_{kind}.jsonl"
            made[kind] = StoredFile(file_id, size, int(now_s), name, "batch_output", expires_at)
        of_kind = {kind: file.id for kind, file in made.items()}
        ended = msgspec.structs.replace(batch, output_file_id=of_kind.get("output"), error_file_id=of_kind.get("error"))
        with self.database.transaction() as connection:
            for file in made.values():
                _insert_file(connection, job.tenant, file)
            _update(connection, ended)
        job.close()
        with suppress(OSError):  # the next server start removes it
            job.journal.path.unlink(missing_ok=True)
        return ended


def _insert_file(connection: sqlite3.Connection, tenant: str, file: StoredFile) -> None:
    connection.execute(
        "INSERT INTO files (id, tenant, purpose, size, expires_at, payload) VALUES (?, ?, ?, ?, ?, ?)",
        (file.id, tenant, file.purpose, file.bytes, file.expires_at, msgspec.json.encode(file)),
    )


def _update(connection: sqlite3.Connection, batch: Batch) -> None:
    values = (batch.status in ENDED, msgspec.json.encode(batch), batch.id)
    connection.execute("UPDATE batches SET has_ended = ?, payload = ? WHERE id = ?", values)
