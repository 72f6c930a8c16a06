"""Recordings on disk: the files of a run, their frames and entries, checked and bounded whatever they claim."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import zstandard

from lockstep.errors import ConfigError, TraceError
from lockstep.replay.folder_integrity import folder_findings
from lockstep.replay.trace_integrity import Finding, Kind, Part, arranged
from lockstep.worker.flight.chunks import ChangedChunkError, ChunkReader, EntryDecoder, EntryT
from lockstep.worker.flight.entries import SCHEMA_VERSION, SUFFIX, End, EngineEntry, Entry, Header

MAX_FRAME_BYTES = 256 << 20
"""Of one frame, decompressed: the checkpoint of a large pool has megabytes."""
_PIECE_BYTES = 512
"""Compressed bytes taken at a time; a hostile one becomes some 20 MB at most."""
_READ_BYTES = 1 << 16
_JSON_HEADER = re.compile(rb'\{"schema":(\d+),"lockstep":"([^"]*)"')
"""Header of plans and routes before schema 11, which were lines of JSON."""
_NO_ENTRY = (IndexError, msgspec.MsgspecError, ConfigError)
"""What reading raises where a frame ends within a chunk, or has other bytes."""
STEPS: EntryDecoder[Entry] = msgspec.msgpack.Decoder(list[Entry])
"""Decoder of the recording of a device's steps."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A recording, or several: files in order. Nothing is held but this; every reading starts anew."""

    files: tuple[Path, ...]
    engines: tuple[EngineEntry, ...]
    """Of the first file, in order of their numbers."""
    header: Header
    """Of the first file; its machine is empty where it does not say, as of simulated runs."""
    findings: tuple[Finding, ...] = ()
    """What is to be reported of the files: missing, repeated, out of place, cut."""
    has_beginning: bool = True
    """Whether the first file is the first of its run."""
    num_runs: int = 1
    """That were recorded in the directory."""

    def engine(self, number: int | None) -> EngineEntry:
        """The engine of a number; None: the only one.

        Raises:
            TraceError: there is none, or there are several; the message lists them.
        """
        names = ", ".join(f"{each.number} ({each.name})" for each in self.engines) or "none"
        if number is None and len(self.engines) > 1:
            raise TraceError(f"the recording has several engines: {names}; choose one by its number, with --engine")
        found = [each for each in self.engines if number in (None, each.number)]
        if not found:
            raise TraceError(f"the recording has no engine {number or 0}; it has {names}")
        return found[0]

    def check_as_recorded(self, verb: str) -> None:
        """Refuse a recording of which a file was changed, cut, removed or added.

        Raises:
            TraceError: one was; the message names it.
        """
        for each in self.findings:
            if each.kind.is_fault:
                raise TraceError(
                    f"{self.files[0].parent}: {each}; {verb} needs the files as they were recorded: restore them, or "
                    "name one file by itself"
                )

    def check_unbroken(self, verb: str) -> None:
        """Refuse a recording with faults or gaps, for callers that follow it from step to step.

        Raises:
            TraceError: something is not there; the message states what.
        """
        self.check_as_recorded(verb)
        for each in self.findings:
            if each.kind is Kind.GAP:
                raise TraceError(f"{each}; {verb} follows every step and cannot pass over that: name a file by itself")

    def entries(self) -> Iterator[Entry | CutFile]:
        """Everything, file by file.

        Raises:
            TraceError: a file is damaged, of a newer version, or no recording.
        """
        for path in self.files:
            yield from read_entries(path, STEPS)


def files_in(path: Path, suffix: str) -> tuple[Path, ...]:
    """The files of a suffix in a directory, by name; of a single file, itself where it has the suffix."""
    if path.is_dir():
        return tuple(sorted(path.glob(f"*{suffix}")))
    return (path,) if path.suffix == suffix else ()


def read_parts(path: Path, suffix: str, decoder: EntryDecoder[EntryT]) -> tuple[tuple[Part, ...], tuple[Finding, ...]]:
    """The files of one kind of recording, in recorded order, and the findings about them.

    Args:
        path: a directory, or one file whatever it is called.

    Raises:
        TraceError: a file is damaged, of another schema, or no recording of this kind; or nothing was recorded.
    """
    found = files_in(path, suffix) if path.is_dir() else (path,)
    parts, findings = arranged([part_of(each, decoder) for each in found], is_alone=not path.is_dir())
    if not parts:
        raise TraceError(f"{path}: it breaks off before anything was recorded")
    return parts, findings


def open_trace(path: str | Path, noted: Sequence[Finding] = ()) -> Trace:
    """Find the files of a recording, in a directory or a single file, and read the engines of the first file.

    Args:
        noted: known findings about other files in the directory.

    Raises:
        TraceError: there is no recording, it is of another version, or it is damaged.
    """
    path = Path(path)
    if path.is_dir() and not files_in(path, SUFFIX):
        missing = "".join(f"; {each}" for each in folder_findings(path)[:1])
        raise TraceError(f"{path}: no recording is there; its files end with {SUFFIX}{missing}")
    parts, findings = read_parts(path, SUFFIX, STEPS)
    simulated = [part.path.name for part in parts if part.is_simulated]
    simulated += [each.file for each in findings if each.kind is Kind.EMPTY]
    of_folder = folder_findings(path, (*findings, *noted), simulated)
    cut = [each.file for each in of_folder]
    findings = (*(each for each in findings if each.kind is not Kind.OPEN or each.file not in cut), *of_folder)
    entries = read_entries(parts[0].path, STEPS)
    header = next(entries)
    assert isinstance(header, Header), "a part that is not empty has one"
    engines = {entry.number: entry for entry in entries if isinstance(entry, EngineEntry)}
    return Trace(
        tuple(part.path for part in parts),
        tuple(engines[number] for number in sorted(engines)),
        header,
        findings,
        parts[0].number == 1,
        len({part.run for part in parts}),
    )


class CutFile(NamedTuple):
    """A file that was not written to its end, as when its process was killed; what it holds was read."""

    path: Path
    offset: int
    """Bytes that there are."""


def read_entries(path: Path, decoder: EntryDecoder[EntryT]) -> Iterator[EntryT | CutFile]:
    """The entries of one file, and a `CutFile` where it breaks off.

    Raises:
        TraceError: it is damaged, of another schema, or no recording.
    """
    reader = ChunkReader(decoder)
    frame: Frame | None = None
    last: EntryT | None = None
    for frame in read_frames(path):
        if last is None and (header := _JSON_HEADER.match(frame.data)):
            raise _other_schema(path, int(header[1]), header[2].decode())
        try:
            for entry in reader.read(frame.data):
                if last is None:
                    _check_header(path, entry)
                last = entry
                yield entry
        except (ChangedChunkError, *_NO_ENTRY) as error:
            where = f"{path}: the chunk at byte {reader.offset} of the frame at byte {frame.offset}"
            if isinstance(error, ChangedChunkError):
                raise TraceError(f"{where} {error}") from error
            if frame.is_whole:
                raise TraceError(f"{where} is no entry of a recording: {error}") from error
    if frame is None or not frame.is_whole or not isinstance(last, End):
        yield CutFile(path, path.stat().st_size)


def part_of(path: Path, decoder: EntryDecoder[EntryT]) -> Part:
    """The file as a part of its recording, by its header and its end.

    Raises:
        TraceError: it is damaged, of another schema, or no recording.
    """
    header: Header | None = None
    last: EntryT | CutFile | None = None
    for last in read_entries(path, decoder):
        if isinstance(last, Header):
            header = last
    num_bytes = path.stat().st_size
    if header is None:
        return Part(path, "", 0, num_bytes, is_whole=False)
    is_whole, goes_on = isinstance(last, End), isinstance(last, End) and last.goes_on
    return Part(path, header.run, header.file, num_bytes, header.gap, is_whole, goes_on, header.is_simulated)


def _check_header(path: Path, entry: object) -> None:
    """Refuse a file whose first entry is no header of our schema."""
    if not isinstance(entry, Header) or entry.file < 1:
        raise TraceError(f"{path}: it does not begin as a recording does")
    if entry.schema != SCHEMA_VERSION:
        raise _other_schema(path, entry.schema, entry.lockstep)


def _other_schema(path: Path, schema: int, version: str) -> TraceError:
    return TraceError(
        f"{path}: its schema is {schema}, and this version reads {SCHEMA_VERSION}; "
        f"it was recorded by lockstep {version}"
    )


class Frame(NamedTuple):
    """One frame, decompressed."""

    offset: int
    """Of the frame in its file."""
    data: bytes
    is_whole: bool
    """False: the file ends within it; ``data`` is what can be read."""


def read_frames(path: Path, max_bytes: int = MAX_FRAME_BYTES) -> Iterator[Frame]:
    """The frames of a file, in order.

    Args:
        max_bytes: maximum size of a frame after decompression.

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
            if len(data) > max_bytes:
                raise TraceError(f"{path}: the frame at byte {offset} holds more than {max_bytes} bytes")
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
