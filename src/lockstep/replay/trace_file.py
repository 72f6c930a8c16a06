"""A recording's file: its frames, decompressed one at a time and bounded whatever the file claims, and its entries,
checked: version, order, where it breaks off."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zstandard

from lockstep.core.policy import SchedulerConfig
from lockstep.errors import ConfigError, TraceError
from lockstep.replay.wholeness import Part
from lockstep.worker.flight.entries import Entry, EntryReader, Header
from lockstep.worker.flight.format import SCHEMA_VERSION

MAX_FRAME_BYTES = 256 << 20
"""Of one frame, decompressed: the checkpoint of a large pool has megabytes."""
_PIECE_BYTES = 512
"""Compressed bytes taken at a time; a hostile one becomes some 20 MB at most."""
_READ_BYTES = 1 << 16
_NO_ENTRY = (IndexError, ValueError, TypeError, msgspec.MsgspecError)
"""What reading raises where a frame ends within an entry, or has other bytes."""


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


@dataclass(frozen=True, slots=True)
class TracedEngine:
    """One engine of a recorded device."""

    number: int
    """Its number in the recording, from 0."""
    key: str
    """The replica that it is, as its worker calls it."""
    name: str
    """Of its model."""
    fingerprint: str
    """Of its artifact's content."""
    config: SchedulerConfig
    environment: Mapping[str, str]
    """What the bits of its answers depend on."""
    bytes_per_block: int


class Cut(NamedTuple):
    """A file that was not written to its end, as when its process was killed; what it holds was read."""

    path: Path
    offset: int
    """Bytes that there are."""


def engine_of(facts: Mapping[str, Any]) -> TracedEngine:
    """What an entry says of an engine.

    Raises:
        TraceError: it does not say it.
    """
    try:
        config = SchedulerConfig(**facts["config"])
        return TracedEngine(
            int(facts["number"]),
            facts["key"],
            facts["name"],
            facts["fingerprint"],
            config,
            facts["environment"],
            int(facts["geometry"]["bytes_per_block"]),
        )
    except (KeyError, TypeError, ConfigError) as error:
        raise TraceError(f"an engine of the recording cannot be made: {error!r}") from error


def read_entries(path: Path) -> Iterator[Entry | Cut]:
    """The entries of one file, and a `Cut` where it breaks off.

    Raises:
        TraceError: it is damaged, of a newer version, or no recording.
    """
    reader = EntryReader()
    frame: Frame | None = None
    is_first = True
    for frame in read_frames(path):
        try:
            for entry in reader.read(frame.data):
                if is_first:
                    _header_of(path, entry)
                    is_first = False
                yield entry
        except _NO_ENTRY as error:
            if frame.is_whole:
                where = f"{path}: byte {reader.offset} of the frame at byte {frame.offset}"
                raise TraceError(f"{where} is no entry of a recording: {error}") from error
    if frame is None or not frame.is_whole or not reader.has_ended:
        yield Cut(path, path.stat().st_size)


def part_of(path: Path) -> Part:
    """The file as a part of its recording: its header and its end are read, and what is between is not understood.

    Raises:
        TraceError: it is damaged, of a newer version, or no recording.
    """
    facts: dict[str, Any] = {}
    frame: Frame | None = None
    reader = EntryReader()
    for frame in read_frames(path):
        first = None if facts else _first(path, frame)
        if first is not None:
            facts = _header_of(path, first)
    if frame is not None:
        with suppress(*_NO_ENTRY):  # whoever reads it all tells where
            deque(reader.read(frame.data), maxlen=0)
    return Part(
        path,
        facts.get("run", ""),
        facts.get("file", 0),
        path.stat().st_size,
        str(facts.get("gap", "")),
        frame is not None and frame.is_whole and reader.has_ended,
        reader.goes_on,
        bool(facts.get("simulated")),
    )


def _first(path: Path, frame: Frame) -> Entry | None:
    """The first entry; None: the file ends before it does."""
    try:
        return next(EntryReader().read(frame.data))
    except (StopIteration, *_NO_ENTRY) as error:
        if frame.is_whole:
            raise TraceError(f"{path}: byte {frame.offset} is no entry of a recording: {error!r}") from None
        return None


def _header_of(path: Path, entry: Entry) -> dict[str, Any]:
    """What a file's first entry says."""
    facts = entry.facts if isinstance(entry, Header) else {}
    number = facts.get("file")
    if "schema" not in facts or not isinstance(facts.get("run"), str) or not isinstance(number, int) or number < 1:
        raise TraceError(f"{path}: it does not begin as a recording does")
    schema = facts["schema"]
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA_VERSION:
        version = facts.get("lockstep")
        raise TraceError(
            f"{path}: its schema is {schema}, and this version reads 1 to {SCHEMA_VERSION}; "
            f"it was recorded by lockstep {version}"
        )
    return facts
