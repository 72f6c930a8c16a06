"""Journals of answers: one durable line for each request that was answered, in the order in which they were.

A line counts once it is on the disk. A process that is killed leaves at most half a line at the end, which the next one
removes; so each request has one answer, however often the work was broken off.
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
"""Errors of filesystems that keep names by themselves."""


class Journal:
    """Answers of one batch. Used by one thread at a time.

    Args:
        digest: of the input, so that answers are never taken for those of other requests.
        num_requests: of the input.

    Raises:
        ConfigError: the file is no journal, or that of another input.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path, digest: str, num_requests: int) -> None:
        self.path = path
        self.num_completed = 0
        self.num_failed = 0
        self._places = array("Q", [_NONE]) * num_requests
        """By request, where the line of its answer begins."""
        self._end = 0
        """Where the next line begins; what is beyond it does not count."""
        self._is_torn = False
        """Whether part of a line that could not be written may be beyond the end."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY)
        try:
            self._read(_MAGIC + digest.encode() + b"\n")
        except BaseException:
            self.close()
            raise

    def _read(self, header: bytes) -> None:
        """Take over what is there, and cut what was not written to its end."""
        with self.path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                if not header.startswith(first):
                    raise ConfigError(f"{self.path}: this is no journal of a batch; move it away")
                self._is_torn = True
                self._write(header)
                sync_folder(self.path.parent)
                return
            if first != header:
                raise ConfigError(
                    f"{self.path}: this is no journal of this input; move it away, or give the input that it is of"
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
            raise ConfigError(f"{self.path}: byte {self._end} begins no answer of this batch; the file was changed")
        self._count(int(index), self._end, is_success=rest[:1] == b"1")

    def _count(self, index: int, place: int, *, is_success: bool) -> None:
        self._places[index] = place
        self.num_completed += is_success
        self.num_failed += not is_success

    @property
    def num_requests(self) -> int:
        return len(self._places)

    @property
    def is_whole(self) -> bool:
        """True if every request has its answer."""
        return self.num_completed + self.num_failed == len(self._places)

    def has(self, index: int) -> bool:
        return self._places[index] != _NONE

    def unanswered(self) -> Iterator[int]:
        """Requests without an answer, in order."""
        return (index for index, place in enumerate(self._places) if place == _NONE)

    def append(self, index: int, line: bytes, *, is_success: bool) -> None:
        """Keep an answer; when this returns, it survives whatever happens.

        Args:
            line: JSON without its newline.

        Raises:
            OSError: it cannot be written. The journal is as it was, and the answer may be appended again.
        """
        assert not self.has(index), "a request is answered once"
        place = self._end
        self._write(b"%d %d %b\n" % (index, is_success, line))
        self._count(index, place, is_success=is_success)

    def _write(self, data: bytes) -> None:
        """Write at the end, durably, all of it or nothing."""
        if self._is_torn:
            os.ftruncate(self._descriptor, self._end)
        self._is_torn = True
        try:
            num_written = 0
            while num_written < len(data):
                num_written += os.pwrite(self._descriptor, data[num_written:], self._end + num_written)
            os.fsync(self._descriptor)
        except OSError:
            with suppress(OSError):  # where it fails, the next write tries it again
                os.ftruncate(self._descriptor, self._end)
            raise
        self._is_torn = False
        self._end += len(data)

    def lines(self) -> Iterator[tuple[int, bool, bytes]]:
        """Answers in the order of the requests: number, success, and the line with its newline."""
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
    """Make names in a folder durable: those of new files, and those that files were given."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)
