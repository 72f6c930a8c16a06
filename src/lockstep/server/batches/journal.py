"""Journals of answers: one durable line for each request that was answered, in the order in which they were.

A line counts once it is on the disk. A process that is killed leaves at most half a line at the end, which the next one
removes; so each request has one answer, however often the work was broken off.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.server.database import OWNER_ONLY

_MAGIC = b"lockstep-batch 1 "
_NONE = 2**64 - 1


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
        header = _MAGIC + digest.encode() + b"\n"
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, OWNER_ONLY), "r+b")
        try:
            self._read(header)
        except BaseException:
            self._file.close()
            raise

    def _read(self, header: bytes) -> None:
        """Take over what is there, and cut what was not written to its end."""
        first = self._file.readline()
        if not first.endswith(b"\n"):
            if not header.startswith(first):
                raise ConfigError(f"{self.path}: this is no journal of a batch; move it away")
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(header)
            self._sync()
            return
        if first != header:
            raise ConfigError(
                f"{self.path}: this is no journal of this input; move it away, or give the input that it is of"
            )
        place = len(first)
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(place)
                break
            self._take(line, place)
            place += len(line)
        self._file.seek(place)

    def _take(self, line: bytes, place: int) -> None:
        index, _, rest = line.partition(b" ")
        known = index.isdigit() and int(index) < len(self._places) and rest[:2] in (b"0 ", b"1 ")
        if not known or self._places[int(index)] != _NONE:
            raise ConfigError(f"{self.path}: byte {place} begins no answer of this batch; the file was changed")
        self._count(int(index), place, is_success=rest[:1] == b"1")

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
        """
        assert not self.has(index), "a request is answered once"
        place = self._file.tell()
        try:
            self._file.write(b"%d %d %b\n" % (index, is_success, line))
            self._sync()
        except OSError:
            self._file.truncate(place)
            self._file.seek(place)
            raise
        self._count(index, place, is_success=is_success)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def lines(self) -> Iterator[tuple[int, bool, bytes]]:
        """Answers in the order of the requests: number, success, and the line with its newline."""
        end = self._file.tell()
        try:
            for index, place in enumerate(self._places):
                if place != _NONE:
                    self._file.seek(place)
                    _, is_success, line = self._file.readline().split(b" ", 2)
                    yield index, is_success == b"1", line
        finally:
            self._file.seek(end)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
