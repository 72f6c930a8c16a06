"""Journals of batch results: store one durable line per finished request, in the order of completion.

A line counts once it is on disk. A process that is killed leaves at most one incomplete line at the end, which the next
process removes. So each request has exactly one result, however often the batch was interrupted.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import IO

from lockstep.errors import ConfigError
from lockstep.server.database import OWNER_ONLY
from lockstep.system import SYSTEM, System, write_all

_MAGIC = b"lockstep-batch 1 "
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
"""Errors of filesystems that do not support syncing a folder and do not need it."""


class Journal:
    """Results of one batch. Used by one thread at a time.

    Args:
        digest: digest of the input, so that results are never used for other requests.
        num_requests: number of requests in the input.

    Raises:
        ConfigError: the file is not a journal, or it belongs to another input.
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, digest: str, num_requests: int, system: System = SYSTEM) -> None:
        self.path = path
        self._system = system
        self.num_completed = 0
        self.num_failed = 0
        self._places = array("Q", [0]) * num_requests
        """Offset of each request's result line; 0: it has no result."""
        self._end = 0
        """Offset of the next line. Data beyond it is part of a failed write, and is ignored."""
        self._file = system.open(path, "a+b", OWNER_ONLY)
        try:
            self._read(_MAGIC + digest.encode() + b"\n")
        except BaseException:
            self.close()
            raise

    def _read(self, header: bytes) -> None:
        """Read the existing lines, and drop an incomplete last line."""
        with self.path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                if not header.startswith(first):
                    raise ConfigError(f"{self.path}: this file is not a batch journal; move it away")
                self._write(header)
                self._end = len(header)
                sync_folder(self.path.parent, self._system)
                return
            if first != header:
                raise ConfigError(
                    f"{self.path}: this journal belongs to another input; move it away, or use its own input"
                )
            self._end = len(first)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._take(line)

    def _take(self, line: bytes) -> None:
        index, _, rest = line.partition(b" ")
        known = index.isdigit() and int(index) < len(self._places) and rest[:2] in (b"0 ", b"1 ")
        if not known or self.has(int(index)):
            raise ConfigError(f"{self.path}: no result of this batch starts at byte {self._end}; the file was changed")
        self._count(int(index), len(line), is_success=rest[:1] == b"1")

    def _count(self, index: int, num_bytes: int, *, is_success: bool) -> None:
        self._places[index] = self._end
        self._end += num_bytes
        self.num_completed += is_success
        self.num_failed += not is_success

    @property
    def num_requests(self) -> int:
        return len(self._places)

    @property
    def is_complete(self) -> bool:
        """True if every request has a result."""
        return self.num_completed + self.num_failed == len(self._places)

    def has(self, index: int) -> bool:
        return self._places[index] > 0

    def unanswered(self) -> Iterator[int]:
        """Indexes of requests without a result, in order."""
        return (index for index, place in enumerate(self._places) if not place)

    def append(self, index: int, line: bytes, *, is_success: bool) -> None:
        """Append a result. It is on disk when this method returns.

        Args:
            line: JSON without a line break.

        Raises:
            OSError: the result cannot be written. The journal is unchanged, and the call can be repeated.
        """
        assert not self.has(index), "a request has one result"
        data = b"%d %d %b\n" % (index, is_success, line)
        self._write(data)
        self._count(index, len(data), is_success=is_success)

    def _write(self, data: bytes) -> None:
        """Write all of the data durably at the end, or nothing."""
        descriptor = self._file.fileno()
        os.ftruncate(descriptor, self._end)
        try:
            write_all(self._file, data)  # appends
            self._system.sync(descriptor)
        except OSError:
            with suppress(OSError):  # if it fails, the next write retries it
                os.ftruncate(descriptor, self._end)
            raise

    def lines(self) -> Iterator[tuple[bool, bytes] | None]:
        """Yield for each request, in order, its success and its line with the line break; None: it has no result."""
        with self.path.open("rb") as file:
            for place in self._places:
                if not place:
                    yield None
                    continue
                file.seek(place)
                _, is_success, line = file.readline().split(b" ", 2)
                yield is_success == b"1", line

    def close(self) -> None:
        self._file.close()


@contextmanager
def durable_file(path: Path, permissions: int, system: System = SYSTEM) -> Iterator[IO[bytes]]:
    """A new file that gets its name once it is complete and on disk. If the block fails, nothing is left of it."""
    whole = path.with_name(f"{path.name}.whole")
    try:
        with BufferedWriter(system.open(whole, "wb", permissions)) as file:
            yield file
            file.flush()
            system.sync(file.fileno())
        system.replace(whole, path)
        sync_folder(path.parent, system)
    finally:
        whole.unlink(missing_ok=True)


def sync_folder(folder: Path, system: System) -> None:
    """Sync a folder, so that the names of new and renamed files are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        system.sync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
