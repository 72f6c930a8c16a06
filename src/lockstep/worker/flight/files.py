"""Recording files: a thread compresses and writes chunks, lists files, starts new ones and deletes the oldest.

Recorders queue chunks and never wait. Chunks that cannot be written are lost, counted and reported once. Then the next
file begins with a checkpoint, so that it can be read without the lost part. The folder's manifest lists each file
(`lockstep.worker.flight.folder`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import zstandard

from lockstep.system import SYSTEM, System
from lockstep.worker.flight.entries import SUFFIX
from lockstep.worker.flight.folder import DIGEST_BYTES, FolderManifest, Listed, State, lock
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.flight.rotation import make_room

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 20
"""Size from which a frame is ended, in bytes. A reader holds one whole frame in memory."""
WARN_INTERVAL_S = 600.0
"""Minimum interval in seconds between log lines about lost chunks; metrics and health report them at once."""
CLOSE_LIMIT_S = 2.0
LEVEL = 3


@dataclass(frozen=True, slots=True)
class TraceReport:
    """State of a recording: bytes written, gaps, and the current fault."""

    num_bytes: int = 0
    """Number of bytes that were written to files."""
    num_gaps: int = 0
    """Number of times that chunks could not be written, after which the recording continues in a new file."""
    fault: str = ""
    """Reason why nothing is being recorded now; empty: recording works."""
    num_queued_bytes: int = 0
    """Number of bytes of chunks that wait for the disk."""


class _State(Enum):
    READY = auto()
    """A file has to be begun."""
    OPEN = auto()
    FULL = auto()
    """The file is full, and the next one has to be begun."""
    BROKEN = auto()
    """Nothing can be written until the next attempt."""


class _Item(NamedTuple):
    """Task of the writing thread."""

    number: int
    """Number of the file that begins with the chunk; 0: the chunk continues the file; -1: the thread ends."""
    chunk: bytes
    needs: tuple[str, ...] = ()
    """Names of the files without which this one cannot be served."""


class TraceFiles:
    """Writes chunks of entries. One thread calls `begin`, `put` and `close`; any thread may call the rest."""

    def __init__(self, options: TraceOptions, suffix: str = SUFFIX, system: System = SYSTEM) -> None:
        self._options = options
        self._folder = Path(options.directory)
        self._system, self._now_s = system, system.now_s
        self.manifest = FolderManifest(self._folder, system)
        self._suffix = suffix
        self._max_bytes = options.max_bytes
        self._max_file_bytes = options.max_bytes // options.num_files
        started = time.gmtime(system.unix_time_s())
        self.run = f"{time.strftime('%Y%m%d-%H%M%S', started)}-{os.getpid()}-{self.manifest.id[:4]}"
        """Name of this recording's files, unique among machines; later recordings have names that sort later."""
        self.num_files = 0
        """Number of files that were begun. All numbers up to it exist, except the oldest ones, which were deleted."""
        self.gap = ""
        """Reason why the latest chunks are in no file, so that the next file does not continue the previous one; empty:
        no chunks were lost."""
        self._chunks: SimpleQueue[_Item] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_queued = 0
        self._state = _State.READY
        self.is_steady = False
        """True if chunks go to a file that is not full, so that only `put` has to be called."""
        self._retry_s = 0.0
        self._num_bytes = 0
        self._num_gaps = 0
        self._fault = ""
        self._warn_s = 0.0
        """Time before which no further warning is logged."""
        self._file: FileIO | None = None
        self._frame: zstandard.ZstdCompressionObj | None = None
        self._frame_bytes = 0
        self._file_bytes = 0
        self._number = 0
        """Number of the open file."""
        self._digest = blake2b(digest_size=DIGEST_BYTES)
        self._needs: dict[str, None] = {}
        self._listed_s = 0.0
        """Time at which the open file was last listed."""
        self._list_s: float | None = None
        """Time at which the open file has to be listed again; None: it has not changed since."""
        self._thread = system.start_thread(self._run, "lockstep-trace")

    # -- the recording thread -----------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if chunks reach a file."""
        return self._state in (_State.OPEN, _State.FULL)

    def wants_file(self) -> bool:
        """True if a new file has to be begun now."""
        state = self._state
        if state is _State.OPEN:
            return False
        return state is not _State.BROKEN or (not self._num_queued and self._now_s() >= self._retry_s)

    def begin(self, chunk: bytes, needs: tuple[str, ...] = ()) -> None:
        """Begin a new file with its first chunk.

        Args:
            needs: names of files in the folder without which this one cannot be served.
        """
        with self._lock:
            self.num_files += 1
            self.gap = ""
            self._move_to(_State.OPEN)
        self._queue(_Item(self.num_files, chunk, needs))

    def put(self, chunk: bytes, needs: tuple[str, ...] = ()) -> None:
        """Continue the file."""
        self._queue(_Item(0, chunk, needs))

    def close(self) -> None:
        """Write the queued chunks, and end the thread; the wait is limited to `CLOSE_LIMIT_S`."""
        self._chunks.put(_Item(-1, b""))
        self._thread.join(CLOSE_LIMIT_S)

    def report(self) -> TraceReport:
        return TraceReport(self._num_bytes, self._num_gaps, self._fault, self._num_queued)

    def _move_to(self, state: _State) -> None:
        """Change the state; the caller holds the lock."""
        self._state, self.is_steady = state, state is _State.OPEN

    def _queue(self, item: _Item) -> None:
        size = len(item.chunk)
        with self._lock:
            if self._state is _State.BROKEN:
                return  # the file cannot be read beyond lost chunks
            fits = self._num_queued + size <= self._options.max_queued_bytes
            self._num_queued += size if fits else 0
        if fits:
            self._chunks.put(item)
        else:
            self._break("the disk does not keep up", item.number)

    # -- the writing thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        item = _Item(0, b"")
        while item.number >= 0:
            wait_s = None if self._list_s is None else max(0.0, self._list_s - self._now_s())
            try:
                item = self._chunks.get(timeout=wait_s)
            except Empty:
                item = _Item(0, b"")
            number = item.number
            try:
                self._take(item)
            except (OSError, zstandard.ZstdError) as error:
                self._abandon()
                self._break(_reason_of(error), 0 if os.path.exists(self._path(number)) else number)
            with self._lock:
                self._num_queued -= len(item.chunk)

    def _take(self, item: _Item) -> None:
        if item.number:
            self._finish()
        if item.number > 0 and not self._is_lost(item.number):
            self._next_file(item)
        if self._file is None:
            return
        self._needs.update(dict.fromkeys(item.needs))
        if item.chunk:
            self._write(item.chunk)
        if self._list_s is not None and self._now_s() >= self._list_s:
            self._list(State.OPEN)

    def _is_lost(self, number: int) -> bool:
        """True if the previous file lost chunks before this file's first chunk was queued, so that the chunk does not
        mention the gap."""
        with self._lock:
            if self.gap:
                self.num_files = number - 1
            return bool(self.gap)

    def _next_file(self, item: _Item) -> None:
        path = self._path(item.number)
        self._folder.mkdir(parents=True, exist_ok=True)
        max_bytes, has_texts = self._max_bytes - self._max_file_bytes, self._suffix == SUFFIX
        make_room(self.manifest, self._suffix, max_bytes, has_texts=has_texts, needs=item.needs)
        self.manifest.put(Listed(path.name, State.OPEN))
        self._file = self._system.open(path, "xb")
        lock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)  # `make_room` of any process skips a locked file
        self._file_bytes, self._number = 0, item.number
        self._digest, self._needs, self._list_s = blake2b(digest_size=DIGEST_BYTES), {}, 0.0

    def _path(self, number: int) -> Path:
        return self._folder / f"{self.run}-{number:06}{self._suffix}"

    def _list(self, state: State) -> None:
        """List the file in the manifest with its current size."""
        assert self._file is not None, "the file that is listed is open"
        digest = self._digest.hexdigest() if self._file_bytes else ""
        self._list_s = None
        self.manifest.put(Listed(self._path(self._number).name, state, self._file_bytes, digest, tuple(self._needs)))
        self._listed_s = self._now_s()

    def _write(self, chunk: bytes) -> None:
        """Write a chunk so that it remains readable if this process ends."""
        if self._frame is None:
            self._frame = zstandard.ZstdCompressor(LEVEL, write_checksum=True).compressobj()
            self._frame_bytes = 0
        self._frame_bytes += len(chunk)
        data = self._frame.compress(chunk)
        if self._frame_bytes >= MAX_FRAME_BYTES:
            data += self._frame.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH)
            self._frame = None
        else:
            data += self._frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        self._append(data)
        if self._file_bytes >= self._max_file_bytes:
            with self._lock:
                if self._state is _State.OPEN and self._number == self.num_files:
                    self._move_to(_State.FULL)

    def _append(self, data: bytes) -> None:
        assert self._file is not None, "a chunk belongs to a file"
        rest = memoryview(data)
        while rest:
            written = self._file.write(rest)
            self._digest.update(rest[:written])
            self._file_bytes += written
            rest = rest[written:]
        self._num_bytes += len(data)
        if self._list_s is None:
            self._list_s = self._listed_s + self._options.list_interval_s
        self._fault = ""

    def _finish(self) -> None:
        if self._frame is not None:
            self._append(self._frame.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
        self._abandon()

    def _abandon(self) -> None:
        """Close the file, and delete it if it is empty."""
        if self._file is None:
            return
        with suppress(OSError):  # the last listing remains
            self._list(State.CLOSED if self._file_bytes else State.DELETED)
        file, self._file, self._frame, self._list_s = self._file, None, None, None
        file.close()
        if not self._file_bytes:
            self._path(self._number).unlink(missing_ok=True)

    def _break(self, why: str, number: int) -> None:
        """Stop writing until the next attempt; if a file was to be begun, the next one gets its number."""
        with self._lock:
            self._move_to(_State.BROKEN)
            self._retry_s = self._now_s() + self._options.retry_s
            self._num_gaps += 1
            self.gap = why
            if number > 0:
                self.num_files = number - 1
        self._fault = why
        if self._now_s() >= self._warn_s:
            self._warn_s = self._now_s() + WARN_INTERVAL_S
            log.warning("the recording in %s has a gap: %s; requests are not affected", self._folder, why)


def _reason_of(error: OSError | zstandard.ZstdError) -> str:
    """Describe an error without the path, which the server's health endpoint must not expose."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
