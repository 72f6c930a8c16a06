"""Store of files and batches: a SQLite file with what is known of them, and their contents beside it in one folder.

One server at a time uses a folder. What one tenant stored does not exist for another.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from lockstep.owned_folders import claim_folder
from lockstep.server.batches.input_file import MAX_FILE_BYTES
from lockstep.server.batches.job import Job, write_results
from lockstep.server.batches.journal import Journal, sync_folder
from lockstep.server.batches.schema import ENDED, Batch, StoredFile, derived_id
from lockstep.server.database import OWNER_ONLY, Database, Schema
from lockstep.server.options import ServerOptions

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
"""Beginning of the names of temporary folders."""
_PROBE_BYTES = 64 << 10
"""Room that a folder needs to be taken for one that can be written again."""
_FOLDER_MODE = 0o700
_COPY_BYTES = 1 << 20
_ANY = ""
"""A purpose that every file has."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of a store."""

    max_file_bytes: int = MAX_FILE_BYTES
    """Of one uploaded file."""
    max_files: int = 1_000
    """Uploaded files of a tenant; so many more may be results."""
    max_bytes: int = 16 << 30
    """Of all files together; results are written beyond it."""
    max_batches: int = 1_000
    """Batches of a tenant; the oldest that has ended is forgotten, its files are not."""


class BatchStore:
    """Used from one event loop; closed when no one uses it any more.

    Args:
        folder: where it is; None: a temporary one, which goes when the store is closed.

    Raises:
        ConfigError: the folder cannot be made or used, or another server uses it.
    """

    def __init__(self, folder: Path | None, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self.fault: StorageError | None = None
        """The last refusal of the disk, until it takes something again."""
        try:
            self._temporary = None if folder else claim_folder(Path(tempfile.gettempdir()), _TEMPORARY)
        except OSError as error:
            raise ConfigError(f"{tempfile.gettempdir()}: batches cannot be kept there: {error}") from error
        self._folder = self._temporary.path if self._temporary else Path(folder or "").expanduser().absolute()
        try:
            for each in (self._folder, self._folder / "files", self._folder / "journals"):
                each.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self._folder}: batches cannot be kept there: {error}") from error
        self.database = Database(self._folder / "batches.db", SCHEMA)
        self._sweep()

    def close(self) -> None:
        self.database.close()
        if self._temporary is not None:
            self._temporary.remove()

    async def run(self, work: Callable[[], T]) -> T:
        """Do work with files and the database on the database's thread.

        Raises:
            StorageError: the disk refuses it; `fault` has the error from then on.
        """
        try:
            return await self.database.run(work)
        except StorageError as error:
            if self.fault is None:
                log.warning("%s; batches wait until then, and other requests are answered all the same", error)
            self.fault = error
            raise

    async def probe(self) -> None:
        """Find out whether the disk takes something again; then there is no `fault` any more."""

        def write() -> None:
            path = self._folder / "files" / "probe.part"
            try:
                with path.open("wb") as file:
                    file.write(bytes(_PROBE_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                path.unlink(missing_ok=True)

        with suppress(StorageError):
            await self.run(write)
            self.fault = None
            log.info("%s: batches can be kept there again; they go on", self._folder)

    def _sweep(self) -> None:
        """Remove what a server that was killed left half done."""
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
        """Keep an uploaded file.

        Raises:
            InvalidParameterError: as much is kept as may be.
            StorageError: the disk refuses it.
        """

        def put() -> None:
            query = "SELECT COUNT(*) FROM files WHERE tenant = ? AND purpose = ?"
            count = self.database.connection.execute(query, (tenant, file.purpose)).fetchone()[0]
            num_bytes = self.database.connection.execute("SELECT COALESCE(SUM(size), 0) FROM files").fetchone()[0]
            limits = self.limits
            if count >= limits.max_files:
                raise InvalidParameterError(f"{count} files are kept, as many as may be; delete one", param="file")
            if num_bytes + file.bytes > limits.max_bytes:
                raise InvalidParameterError(
                    f"{num_bytes} bytes of files are kept, and at most {limits.max_bytes} may be; delete some",
                    param="file",
                )
            with self._written(file.id) as target:
                shutil.copyfileobj(content, target, _COPY_BYTES)
            with self.database.transaction() as connection:
                _insert_file(connection, tenant, file)

        await self.run(put)

    @contextmanager
    def _written(self, file_id: str) -> Iterator[IO[bytes]]:
        """A new file that has its name as soon as it is whole and on the disk."""
        path = self.path_of(file_id)
        part = path.with_name(f"{file_id}.part")
        try:
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWNER_ONLY), "wb") as target:
                yield target
                target.flush()
                os.fsync(target.fileno())
            part.replace(path)
            sync_folder(path.parent)
        finally:
            part.unlink(missing_ok=True)

    async def file(self, file_id: str, tenant: str, now_s: float, *, param: str = "file_id") -> StoredFile:
        """A tenant's file; StoredFileNotFoundError, with the parameter that named it, when there is none."""
        await self._forget_expired(now_s)
        rows = await self.database.rows("SELECT payload FROM files WHERE id = ? AND tenant = ?", file_id, tenant)
        if not rows:
            raise StoredFileNotFoundError(f"No such file: {file_id!r}.", param=param)
        return msgspec.json.decode(rows[0][0], type=StoredFile)

    async def files(
        self, tenant: str, now_s: float, *, after: str | None, limit: int, is_descending: bool, purpose: str | None
    ) -> list[StoredFile]:
        """A page of files, by when they came."""
        await self._forget_expired(now_s)
        rows = await self._page("files", tenant, after, limit, is_descending=is_descending, purpose=purpose or _ANY)
        return [msgspec.json.decode(payload, type=StoredFile) for payload in rows]

    async def delete_file(self, file_id: str, tenant: str, now_s: float) -> None:
        """Forget a file.

        Raises:
            StoredFileNotFoundError: there is none of that id.
            InvalidParameterError: a batch that has not ended reads it.
        """
        await self.file(file_id, tenant, now_s)
        query = "SELECT id FROM batches WHERE input_file_id = ? AND has_ended = 0"
        if rows := await self.database.rows(query, file_id):
            raise InvalidParameterError(
                f"{file_id} is being read by {rows[0][0]}; cancel that first, or wait for its end", param="file_id"
            )
        await self.run(lambda: self._forget([file_id]))

    async def _forget_expired(self, now_s: float) -> None:
        query = (
            "SELECT id FROM files WHERE expires_at <= ? AND id NOT IN "
            "(SELECT input_file_id FROM batches WHERE has_ended = 0)"
        )
        if rows := await self.database.rows(query, int(now_s)):
            with suppress(StorageError):  # they go when the disk takes it
                await self.run(lambda: self._forget([row[0] for row in rows]))

    def _forget(self, file_ids: list[str]) -> None:
        with self.database.transaction() as connection:
            connection.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in file_ids])
        for file_id in file_ids:
            self.path_of(file_id).unlink(missing_ok=True)

    async def _page(
        self, table: str, tenant: str, after: str | None, limit: int, *, is_descending: bool, purpose: str = _ANY
    ) -> list[bytes]:
        query, values = f"SELECT payload FROM {table} WHERE tenant = ?", [tenant]
        if purpose:
            query, values = f"{query} AND purpose = ?", [*values, purpose]
        bounds: list[Any] = []
        if after is not None:
            found = await self.database.rows(f"SELECT seq FROM {table} WHERE id = ? AND tenant = ?", after, tenant)
            if not found:
                raise InvalidParameterError(f"after is {after!r}, which is none of the {table}", param="after")
            query += f" AND seq {'<' if is_descending else '>'} ?"
            bounds = [found[0][0]]
        query += f" ORDER BY seq {'DESC' if is_descending else 'ASC'} LIMIT ?"
        return [row[0] for row in await self.database.rows(query, *values, *bounds, limit)]

    # -- batches --------------------------------------------------------------------------------------------------

    async def put_batch(self, tenant: str, batch: Batch) -> None:
        """Keep a new batch, and forget the oldest one that has ended where there are too many.

        Raises:
            QueueFullError: none of them has.
            StorageError: the disk refuses it.
        """

        def put() -> None:
            with self.database.transaction() as connection:
                counted = "SELECT COUNT(*), MIN(CASE WHEN has_ended THEN seq END) FROM batches WHERE tenant = ?"
                count, oldest = connection.execute(counted, (tenant,)).fetchone()
                if count >= self.limits.max_batches:
                    if oldest is None:
                        raise QueueFullError(f"{count} batches have not ended, as many as may be; try again later")
                    connection.execute("DELETE FROM batches WHERE seq = ?", (oldest,))
                connection.execute(
                    "INSERT INTO batches (id, tenant, input_file_id, has_ended, payload) VALUES (?, ?, ?, 0, ?)",
                    (batch.id, tenant, batch.input_file_id, msgspec.json.encode(batch)),
                )

        await self.run(put)

    async def batch(self, batch_id: str, tenant: str) -> Batch:
        """A tenant's batch as it was saved last; BatchNotFoundError when there is none."""
        rows = await self.database.rows("SELECT payload FROM batches WHERE id = ? AND tenant = ?", batch_id, tenant)
        if not rows:
            raise BatchNotFoundError(f"No batch found with id {batch_id!r}.", param="batch_id")
        return msgspec.json.decode(rows[0][0], type=Batch)

    async def batches(self, tenant: str, *, after: str | None, limit: int) -> list[Batch]:
        """A page of batches, latest first."""
        rows = await self._page("batches", tenant, after, limit, is_descending=True)
        return [msgspec.json.decode(payload, type=Batch) for payload in rows]

    async def open_batches(self) -> list[tuple[str, Batch]]:
        """Every batch that has not ended, oldest first, with its tenant."""
        rows = await self.database.rows("SELECT tenant, payload FROM batches WHERE has_ended = 0 ORDER BY seq")
        return [(tenant, msgspec.json.decode(payload, type=Batch)) for tenant, payload in rows]

    async def save(self, batch: Batch) -> None:
        """Keep how far a batch has come; StorageError: the disk refuses it."""
        await self.run(lambda: _update(self.database.connection, batch))

    def open_job(self, tenant: str, batch: Batch, offsets: array[int]) -> Job:
        """Work on a batch; begins where an earlier one was broken off. On the database's thread."""
        journal = Journal(self._folder / "journals" / batch.id, batch.id, len(offsets))
        return Job(batch.id, tenant, self.path_of(batch.input_file_id), offsets, journal)

    def finish(self, job: Job, batch: Batch, now_s: float, of_others: tuple[str, str] | None) -> Batch:
        """Make files of a job's results, and keep them and the batch's end in one transaction. On the database's
        thread. Broken off in the middle and done again, it makes the same files.

        Args:
            batch: in its last state.
            of_others: as in `Job.results`.
        """
        kinds = {"output": derived_id("file-", batch.id, "output"), "error": derived_id("file-", batch.id, "error")}
        with self._written(kinds["output"]) as output, self._written(kinds["error"]) as errors:
            write_results(job, output, errors, of_others)
        made: dict[str, StoredFile] = {}
        for kind, file_id in kinds.items():
            size = self.path_of(file_id).stat().st_size
            if size == 0:
                self.path_of(file_id).unlink()
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
        with suppress(OSError):  # the next start removes it
            job.journal.path.unlink(missing_ok=True)
        return ended


def open_batch_store(options: ServerOptions) -> BatchStore:
    """The store of a server; the caller closes it.

    Raises:
        ConfigError: the folder of ``batch_dir`` cannot be used.
    """
    return BatchStore(None if options.batch_dir is None else Path(options.batch_dir))


def _insert_file(connection: sqlite3.Connection, tenant: str, file: StoredFile) -> None:
    connection.execute(
        "INSERT INTO files (id, tenant, purpose, size, expires_at, payload) VALUES (?, ?, ?, ?, ?, ?)",
        (file.id, tenant, file.purpose, file.bytes, file.expires_at, msgspec.json.encode(file)),
    )


def _update(connection: sqlite3.Connection, batch: Batch) -> None:
    values = (batch.status in ENDED, msgspec.json.encode(batch), batch.id)
    connection.execute("UPDATE batches SET has_ended = ?, payload = ? WHERE id = ?", values)
