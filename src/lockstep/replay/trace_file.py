"""The frames of a recording's file: decompressed one at a time, checked, and bounded whatever the file claims."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zstandard

from lockstep.errors import TraceError

MAX_FRAME_BYTES = 256 << 20
"""Of one frame, decompressed: the checkpoint of a large pool has megabytes."""
_PIECE_BYTES = 512
"""Compressed bytes taken at a time; a hostile one becomes some 20 MB at most."""
_READ_BYTES = 1 << 16


class Frame(NamedTuple):
    """What one frame holds."""

    offset: int
    """Of the frame in its file."""
    data: bytes
    is_whole: bool
    """False: the file ends within it; ``data`` is what can be read."""


def read_frames(path: Path) -> Iterator[Frame]:
    """The frames of a file, in order.

    Raises:
        TraceError: it cannot be read, a frame is damaged, or holds more than any recorder writes.
    """
    offset = at = 0
    data = bytearray()
    frame = zstandard.ZstdDecompressor().decompressobj()
    for piece in _pieces(path):
        if at == 0 and not piece.startswith(zstandard.FRAME_HEADER[: len(piece)]):
            raise TraceError(f"{path}: it is no recording; `lockstep serve --trace DIR` makes them")
        rest = piece
        while rest:
            try:
                data += frame.decompress(rest)
            except zstandard.ZstdError as error:
                raise TraceError(f"{path}: the frame at byte {offset} is damaged before byte {at}: {error}") from None
            if len(data) > MAX_FRAME_BYTES:
                raise TraceError(f"{path}: the frame at byte {offset} holds more than {MAX_FRAME_BYTES} bytes")
            taken = len(rest) - len(frame.unused_data)
            at += taken
            rest = frame.unused_data
            if frame.eof:
                yield Frame(offset, bytes(data), True)
                offset = at
                data.clear()
                frame = zstandard.ZstdDecompressor().decompressobj()
    if at > offset:
        yield Frame(offset, bytes(data), False)


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while read := file.read(_READ_BYTES):
                for start in range(0, len(read), _PIECE_BYTES):
                    yield read[start : start + _PIECE_BYTES]
    except OSError as error:
        raise TraceError(f"{path}: it cannot be read: {error.strerror}") from error
