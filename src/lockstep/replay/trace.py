"""Recordings on disk: reads the files of a run with their frames and entries, and checks and bounds them."""

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
"""Maximum decompressed bytes of one frame; the checkpoint of a large pool has megabytes."""
_PIECE_BYTES = 512
"""Compressed bytes per read. A malicious file of this size decompresses to at most 20 MB."""
_READ_BYTES = 1 << 16
_JSON_HEADER = re.compile(rb'\{"schema":(\d+),"lockstep":"([^"]*)"')
"""Header of plans and routes before schema 11, when these were lines of JSON."""
_NO_ENTRY = (IndexError, msgspec.MsgspecError, ConfigError)
"""Errors from reading a chunk that is cut or invalid."""
STEPS: EntryDecoder[Entry] = msgspec.msgpack.Decoder(list[Entry])
"""Decoder of a recording of a device's steps."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A recording of one or several runs: its files in order. Each iteration reads the files again."""

    files: tuple[Path, ...]
    engines: tuple[EngineEntry, ...]
    """Engines of the first file, ordered by number."""
    header: Header
    """Header of the first file; its machine is empty if unknown, as for simulated runs."""
    findings: tuple[Finding, ...] = ()
    """Findings about the files: missing, repeated, misplaced, cut."""
    has_beginning: bool = True
    """True if the first file is the first of its run."""
    num_runs: int = 1
    """Number of recorded runs in the directory."""

    def engine(self, number: int | None) -> EngineEntry:
        """Engine with a number; None: the only engine.

        Raises:
            TraceError: there is no such engine, or there are several; the message lists them.
        """
        names = ", ".join(f"{each.number} ({each.name})" for each in self.engines) or "none"
        if number is None and len(self.engines) > 1:
            raise TraceError(f"the recording has several engines: {names}; choose one with --engine NUMBER")
        found = [each for each in self.engines if number in (None, each.number)]
        if not found:
            raise TraceError(f"the recording has no engine {number or 0}; its engines are {names}")
        return found[0]

    def check_as_recorded(self, verb: str) -> None:
        """Raise an error if a file of the recording was changed, cut, removed or added.

        Raises:
            TraceError: the message names the file.
        """
        for each in self.findings:
            if each.kind.is_fault:
                raise TraceError(
                    f"{self.files[0].parent}: {each}; {verb} needs the files as they were recorded; restore them, or "
                    "name a single file"
                )

    def check_unbroken(self, verb: str) -> None:
        """Raise an error if the recording has faults or gaps, for callers that need every step.

        Raises:
            TraceError: a part is missing; the message names it.
        """
        self.check_as_recorded(verb)
        for each in self.findings:
            if each.kind is Kind.GAP:
                raise TraceError(f"{each}; {verb} needs every step; name a single file")

    def entries(self) -> Iterator[Entry | CutFile]:
        """All entries, file by file.

        Raises:
            TraceError: a file is damaged, of a newer version, or not a recording.
        """
        for path in self.files:
            yield from read_entries(path, STEPS)


def files_in(path: Path, suffix: str) -> tuple[Path, ...]:
    """Files with a suffix in a directory, ordered by name; for a single file, the file if it has the suffix."""
    if path.is_dir():
        return tuple(sorted(path.glob(f"*{suffix}")))
    return (path,) if path.suffix == suffix else ()


def read_parts(path: Path, suffix: str, decoder: EntryDecoder[EntryT]) -> tuple[tuple[Part, ...], tuple[Finding, ...]]:
    """Files of one kind of recording in recorded order, and findings about them.

    Args:
        path: a directory, or one file of any name.

    Raises:
        TraceError: a file is damaged, has another schema, or is not a recording of this kind; or nothing was recorded.
    """
    found = files_in(path, suffix) if path.is_dir() else (path,)
    parts, findings = arranged([part_of(each, decoder) for each in found], is_alone=not path.is_dir())
    if not parts:
        raise TraceError(f"{path}: it ends before the first entry")
    return parts, findings


def open_trace(path: str | Path, noted: Sequence[Finding] = ()) -> Trace:
    """Open a recording in a directory or a single file, and read the engines of its first file.

    Args:
        noted: known findings about other files in the directory.

    Raises:
        TraceError: there is no recording, or it is of another version or damaged.
    """
    path = Path(path)
    if path.is_dir() and not files_in(path, SUFFIX):
        missing = "".join(f"; {each}" for each in folder_findings(path)[:1])
        raise TraceError(f"{path}: no recording found; recordings have files with the suffix {SUFFIX}{missing}")
    parts, findings = read_parts(path, SUFFIX, STEPS)
    simulated = [part.path.name for part in parts if part.is_simulated]
    simulated += [each.file for each in findings if each.kind is Kind.EMPTY]
    of_folder = folder_findings(path, (*findings, *noted), simulated)
    cut = [each.file for each in of_folder]
    findings = (*(each for each in findings if each.kind is not Kind.OPEN or each.file not in cut), *of_folder)
    entries = read_entries(parts[0].path, STEPS)
    header = next(entries)
    assert isinstance(header, Header), "a part that is not empty has a header"
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
    """A file that was not written to its end, for example because its process was killed; its contents were read."""

    path: Path
    offset: int
    """Size of the file in bytes."""


def read_entries(path: Path, decoder: EntryDecoder[EntryT]) -> Iterator[EntryT | CutFile]:
    """Entries of one file, followed by a `CutFile` if it is cut.

    Raises:
        TraceError: the file is damaged, has another schema, or is not a recording.
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
                raise TraceError(f"{where} is not an entry of a recording: {error}") from error
    if frame is None or not frame.is_whole or not isinstance(last, End):
        yield CutFile(path, path.stat().st_size)


def part_of(path: Path, decoder: EntryDecoder[EntryT]) -> Part:
    """Part of a recording: the header and the end of a file.

    Raises:
        TraceError: the file is damaged, has another schema, or is not a recording.
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
    """Raise an error if the first entry is not a header of the current schema."""
    if not isinstance(entry, Header) or entry.file < 1:
        raise TraceError(f"{path}: its first entry is not the header of a recording")
    if entry.schema != SCHEMA_VERSION:
        raise _other_schema(path, entry.schema, entry.lockstep)


def _other_schema(path: Path, schema: int, version: str) -> TraceError:
    return TraceError(
        f"{path}: its schema is {schema}, this version reads schema {SCHEMA_VERSION}; "
        f"read it with lockstep {version}, which recorded it"
    )


class Frame(NamedTuple):
    """One decompressed frame."""

    offset: int
    """Offset of the frame in its file."""
    data: bytes
    is_whole: bool
    """False: the file ends inside the frame; ``data`` is the readable part."""


def read_frames(path: Path, max_bytes: int = MAX_FRAME_BYTES) -> Iterator[Frame]:
    """Frames of a file, in order.

    Args:
        max_bytes: maximum size of a frame after decompression.

    Raises:
        TraceError: the file cannot be read, or a frame is damaged or too large.
    """
    offset = at = 0
    data = bytearray()
    frame = zstandard.ZstdDecompressor().decompressobj()
    for piece in _pieces(path):
        if at == 0 and not piece.startswith(zstandard.FRAME_HEADER[: len(piece)]):
            raise TraceError(f"{path}: not a recording; `lockstep serve --trace DIR` writes recordings")
        rest = piece
        while rest:
            try:
                data += frame.decompress(rest)
            except zstandard.ZstdError as error:
                raise TraceError(f"{path}: the frame at byte {offset} is damaged before byte {at}: {error}") from None
            if len(data) > max_bytes:
                raise TraceError(f"{path}: the frame at byte {offset} has more than {max_bytes} bytes")
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
        raise TraceError(f"{path}: cannot read the file: {error.strerror}") from error
