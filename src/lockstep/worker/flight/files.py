"""The files of a recording: a thread that compresses, writes, starts the next one and deletes the oldest.

Whoever records hands chunks over and never waits. What cannot be written is lost, counted and said once; then the
next file begins, and with a checkpoint nothing before it is missed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

import zstandard

from lockstep.worker.flight.entries import SUFFIX
from lockstep.worker.flight.options import TraceOptions

log = logging.getLogger(__name__)

NUM_FILES = 8
"""A recording is kept in about so many files, of which the oldest is deleted for the newest."""
MAX_FRAME_BYTES = 1 << 20
"""Bytes that a frame holds before the next chunk begins another: a reader holds one frame."""
MAX_QUEUED_BYTES = 16 << 20
"""Chunks that wait for the disk; more are lost."""
RETRY_S = 5.0
"""After a failure, until the next file is tried."""
WARN_INTERVAL_S = 600.0
"""A disk that stays full is told so often; metrics and health tell it at once."""
CLOSE_LIMIT_S = 2.0
LEVEL = 3


@dataclass(frozen=True, slots=True)
class TraceReport:
    """State of a recording: bytes written, gaps, and the fault that keeps it from going on."""

    num_bytes: int = 0
    """Written to files."""
    num_gaps: int = 0
    """How often something could not be written, and the recording began anew."""
    fault: str = ""
    """Why nothing is being recorded now; empty: it is."""


class _State(Enum):
    READY = auto()
    """A file is to be begun."""
    OPEN = auto()
    FULL = auto()
    """The next file is to be begun."""
    BROKEN = auto()
    """Nothing can be written, until it is tried again."""


class TraceFiles:
    """Writes chunks of entries. `begin`, `put` and `close` are for one thread, the rest for any."""

    def __init__(self, options: TraceOptions, suffix: str = SUFFIX) -> None:
        self._folder = Path(options.directory)
        self._suffix = suffix
        self._max_bytes = options.max_bytes
        self._max_file_bytes = options.max_bytes // NUM_FILES
        self.run = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
        """Names this recording's files; later ones sort behind."""
        self.num_files = 0
        """That were begun: who has the files has each number up to the last, but for the oldest that were deleted."""
        self.gap = ""
        """Why what was handed over last is in no file, so that the next one does not go on where that before it ends;
        empty: it does."""
        self._chunks: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_queued = 0
        self._state = _State.READY
        self.is_steady = False
        """Whether chunks go to a file that is not full: nothing is to be done but `put`."""
        self._retry_s = 0.0
        self._num_bytes = 0
        self._num_gaps = 0
        self._fault = ""
        self._warn_s = 0.0
        """When it may be said again."""
        self._file: BinaryIO | None = None
        self._frame: zstandard.ZstdCompressionObj | None = None
        self._frame_bytes = 0
        self._file_bytes = 0
        self._number = 0
        """Of the open file."""
        self._thread = threading.Thread(target=self._run, name="lockstep-trace", daemon=True)
        self._thread.start()

    # -- who records --------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True if chunks reach a file."""
        return self._state in (_State.OPEN, _State.FULL)

    def wants_file(self) -> bool:
        """True if a new file is to be begun now."""
        state = self._state
        if state is _State.OPEN:
            return False
        return state is not _State.BROKEN or (not self._num_queued and time.monotonic() >= self._retry_s)

    def begin(self, chunk: bytes) -> None:
        """Begin a new file with its first chunk."""
        with self._lock:
            self.num_files += 1
            self.gap = ""
            self._move_to(_State.OPEN)
        self._queue(self.num_files, chunk)

    def put(self, chunk: bytes) -> None:
        """Continue the file."""
        self._queue(0, chunk)

    def close(self) -> None:
        """Write what is queued, within a bounded time."""
        self._chunks.put((-1, b""))
        self._thread.join(CLOSE_LIMIT_S)

    def report(self) -> TraceReport:
        return TraceReport(self._num_bytes, self._num_gaps, self._fault)

    def _move_to(self, state: _State) -> None:
        """With the lock held."""
        self._state, self.is_steady = state, state is _State.OPEN

    def _queue(self, number: int, chunk: bytes) -> None:
        with self._lock:
            if self._state is _State.BROKEN:
                return  # behind what was lost nothing of the file can be understood
            fits = self._num_queued + len(chunk) <= MAX_QUEUED_BYTES
            self._num_queued += len(chunk) if fits else 0
        if fits:
            self._chunks.put((number, chunk))
        else:
            self._break("the disk does not keep up", number)

    # -- the writing thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            number, chunk = self._chunks.get()
            try:
                if number:
                    self._finish()
                if number > 0 and not self._is_lost(number):
                    self._next_file(number)
                if self._file is not None:
                    self._write(chunk)
            except (OSError, zstandard.ZstdError) as error:
                self._abandon()
                self._break(_said(error), 0 if os.path.exists(self._path(number)) else number)
            if number < 0:
                return
            with self._lock:
                self._num_queued -= len(chunk)

    def _is_lost(self, number: int) -> bool:
        """True if the file before broke off when this one's first chunk, which does not say so, was handed over."""
        with self._lock:
            if self.gap:
                self.num_files = number - 1
            return bool(self.gap)

    def _next_file(self, number: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._make_room()
        self._file = self._path(number).open("xb", buffering=0)
        self._file_bytes, self._number = 0, number

    def _path(self, number: int) -> Path:
        return self._folder / f"{self.run}-{number:06}{self._suffix}"

    def _make_room(self) -> None:
        """Delete the oldest files until one more fits."""
        kept = [(path, path.stat().st_size) for path in sorted(self._folder.glob(f"*{self._suffix}"))]
        total = sum(size for _, size in kept)
        for path, size in kept:
            if total + self._max_file_bytes <= self._max_bytes:
                return
            path.unlink()
            total -= size

    def _write(self, chunk: bytes) -> None:
        """Write a chunk so that it can be read from now on, whatever happens to this process."""
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
            rest = rest[written:]
        self._file_bytes += len(data)
        self._num_bytes += len(data)
        self._fault = ""

    def _finish(self) -> None:
        if self._frame is not None:
            self._append(self._frame.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
        self._abandon()

    def _abandon(self) -> None:
        """Leave the file as it is, unless it says nothing."""
        file, self._file, self._frame = self._file, None, None
        if file is not None:
            file.close()
            if not self._file_bytes:
                Path(file.name).unlink(missing_ok=True)

    def _break(self, why: str, number: int) -> None:
        """Nothing is written until it is tried again; if a file was to be begun, the next one gets its number."""
        with self._lock:
            self._move_to(_State.BROKEN)
            self._retry_s = time.monotonic() + RETRY_S
            self._num_gaps += 1
            self.gap = why
            if number > 0:
                self.num_files = number - 1
        self._fault = why
        if time.monotonic() >= self._warn_s:
            self._warn_s = time.monotonic() + WARN_INTERVAL_S
            log.warning("the recording in %s has a gap: %s; requests are served all the same", self._folder, why)


def _said(error: OSError | zstandard.ZstdError) -> str:
    """Without the path, which whoever may ask for the server's health need not know."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
