"""Journals of batch results: store one durable line per finished request, in the order of completion.

A line counts once it is on disk. A process that is killed leaves at most one incomplete line at the end, which the next
process removes. So each request has exactly one result, however often the batch was interrupted.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.server.database import OWNER_ONLY

_MAGIC = b"lockstep-batch 1 "
_NONE = 2**64 - 1
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

    def __init__(self, path: Path, digest: str, num_requests: int) -> None:
        self.path = path
        self.num_completed = 0
        self.num_failed = 0
        self._places = array("Q", [_NONE]) * num_requests
        """Offset of each request's result line."""
        self._end = 0
        """Offset of the next line. Data beyond it is ignored."""
        self._is_torn = False
        """True if the file may have part of a failed write beyond the end."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
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
                self._is_torn = True
                self._write(header)
                sync_folder(self.path.parent)
                return
            if first != header:
                raise ConfigError(
                    f"{self.path}: this journal belongs to another input; move it away, or use its own input"
                )
            self._end = len(first)
            for line in file:
                if not line.endswith(b"\n"):
                    self._is_torn = True
                    break
                self._take(line)
                self._end += len(line)

    def _take(self, line: bytes) -> None:
        index, _, rest = line.partition(b" ")
        known = index.isdigit() and int(index) < len(self._places) and rest[:2] in (b"0 ", b"1 ")
        if not known or self._places[int(index)] != _NONE:
            raise ConfigError(f"{self.path}: no result of this batch starts at byte {self._end}; the file was changed")
        self._count(int(index), self._end, is_success=rest[:1] == b"1")

    def _count(self, index: int, place: int, *, is_success: bool) -> None:
        self._places[index] = place
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
        return self._places[index] != _NONE

    def unanswered(self) -> Iterator[int]:
        """Indexes of requests without a result, in order."""
        return (index for index, place in enumerate(self._places) if place == _NONE)

    def append(self, index: int, line: bytes, *, is_success: bool) -> None:
        """Append a result. It is on disk when this method returns.

        Args:
            line: JSON without a line break.

        Raises:
            OSError: the result cannot be written. The journal is unchanged, and the call can be repeated.
        """
        assert not self.has(index), "a request has one result"
        place = self._end
        self._write(b"%d %d %b\n" % (index, is_success, line))
        self._count(index, place, is_success=is_success)

    def _write(self, data: bytes) -> None:
        """Write all of the data durably at the end, or nothing."""
        if self._is_torn:
            os.ftruncate(self._descriptor, self._end)
        self._is_torn = True
        try:
            num_written = 0
            while num_written < len(data):
                num_written += os.pwrite(self._descriptor, data[num_written:], self._end + num_written)
            os.fsync(self._descriptor)
        except OSError:
            with suppress(OSError):  # if it fails, the next write retries it
                os.ftruncate(self._descriptor, self._end)
            raise
        self._is_torn = False
        self._end += len(data)

    def lines(self) -> Iterator[tuple[int, bool, bytes]]:
        """Yield results in the order of the requests: index, success, and the line with its line break."""
        with self.path.open("rb") as file:
            for index, place in enumerate(self._places):
                if place != _NONE:
                    file.seek(place)
                    _, is_success, line = file.readline().split(b" ", 2)
                    yield index, is_success == b"1", line

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names of new and renamed files are durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
