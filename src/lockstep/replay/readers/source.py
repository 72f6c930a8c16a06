"""Input files as bytes and as numbered lines: plain or zstd, of any size, in bounded memory."""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import zstandard

from lockstep.errors import TraceError

MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line. Lines of traces have some kilobytes; the longest are recordings of every token's time."""
MAX_WINDOW_BYTES = 128 << 20
"""Maximum memory of decompression; only files of ``zstd --ultra`` or ``zstd --long`` need more."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_GZIP_MAGIC = b"\x1f\x8b"
_FEED_BYTES = 1 << 10
"""Bytes per call of the decompressor. Four bytes can encode a block of 128 KiB, so the output is at most 32 MiB."""


@contextmanager
def open_source(path: Path) -> Iterator[BinaryIO]:
    """Open a file as bytes, decompressed if it is zstd.

    Raises:
        TraceError: the path is not a file, or cannot be read; while reading: the compressed data is cut or damaged.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise TraceError(f"{path} is not a regular file; a pipe cannot be used, because it is read more than once")
        file = path.open("rb")
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot read {path} ({getattr(error, 'strerror', None) or error})") from None
    with file:
        magic = file.read(len(_ZSTD_MAGIC))
        file.seek(0)
        if magic.startswith(_GZIP_MAGIC):
            raise TraceError(f"{path.name} is gzip data; decompress it, or compress it with zstd")
        if magic == _ZSTD_MAGIC:
            yield cast(BinaryIO, io.BufferedReader(_Decompressed(file, path.name)))
        else:
            yield file


def numbered_lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, without their line ends, each with its number from 1.

    Raises:
        TraceError: a line is too long or not UTF-8.
    """
    for number in count(1):
        line = stream.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{name}:{number}: not a trace: a line is longer than {MAX_LINE_BYTES >> 20} MiB")
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise TraceError(f"{name}:{number}: not UTF-8 ({error.reason} at byte {error.start})") from None
        text = (text.removeprefix("\ufeff") if number == 1 else text).strip()
        if text:
            yield number, text


class _Decompressed(io.RawIOBase):
    """Content of consecutive zstd frames; a cut last frame is an error."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._name = name
        self._chunks = self._frames(file)
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._ready = memoryview(chunk)
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _frames(self, file: BinaryIO) -> Iterator[bytes]:
        try:
            yield from unpacked(file)
        except zstandard.ZstdError as error:
            raise TraceError(f"{self._name} is damaged zstd data ({error})") from None
        except EOFError:
            raise TraceError(f"{self._name} ends in the middle of its zstd data, so it was cut") from None


def unpacked(file: IO[bytes]) -> Iterator[bytes]:
    """Content of consecutive zstd frames, in parts.

    Raises:
        zstandard.ZstdError: the data is damaged.
        EOFError: the last frame is cut.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    frame = None
    while data := file.read(_FEED_BYTES):
        while data:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the last frame is cut")
