"""Content of an input file, detected from its bytes and never from its name: lines, a document, CSV or Parquet.

Compressed files are unpacked and checked to their end. Pickles are never opened.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import zstandard

from lockstep.errors import EvidenceError
from lockstep.release.observation import NAMES
from lockstep.replay.readers.source import unpacked

Members = Mapping[str, Any]
"""Of a JSON object; those of a document are `msgspec.Raw`."""

MAX_LINE_BYTES = 16 << 20
MAX_DOCUMENT_BYTES = 256 << 20
"""Of a file that is one JSON document, unpacked."""
MAX_UNPACKED_BYTES = 64 << 30
"""Of a compressed file."""
MAX_PACKING = 200
"""Times that a file may be larger when it is unpacked, if it is larger than a document: records are not so alike."""
MAX_LOOKED_AT = 1000
"""Lines in which the first record is looked for, of `MAX_LINE_BYTES` together: logs begin with other lines."""
MAX_SHOWN_BYTES = 60
"""Of a first line that nothing can be made of."""
_CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_PARQUET, _GZIP, _ZSTD, _ZIP = b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))


@dataclass(frozen=True, slots=True)
class Content:
    """Kind, packing and first bytes of a file, as found in it."""

    given: Path
    """Its name in messages."""
    path: Path
    """A name without anything that DuckDB takes for a pattern; what was compressed is unpacked there."""
    kind: Literal["lines", "document", "list", "csv", "parquet"]
    records: tuple[Members, ...]
    """The first records of lines, the first one of a list, the members of a document, or the columns of a CSV."""
    fault: str = ""
    """Why its first line is no record: it may be a log."""

    @property
    def is_table(self) -> bool:
        """True if the columns have names, once for all records."""
        return self.kind in ("csv", "parquet")


def content_of(path: Path, plain: Path, given: Path | None = None) -> Content:
    """Look into a file.

    Args:
        plain: a name that is free, for the file or for what is unpacked of it.
        given: the file's name in messages, if it is a copy of another.

    Raises:
        EvidenceError: it cannot be read, is not whole, or nothing that the gate reads.
    """
    source, path = path, given or path
    magic = _magic(source, path)
    if magic.startswith((_GZIP, _ZSTD, _BOM)):
        _unpack(source, plain, magic, path)
        magic = _magic(plain, path)
    else:
        plain.symlink_to(source.absolute())
    if magic.startswith(_PICKLES):
        raise EvidenceError(f"{path}: a pickle, which can run code when it is opened and never is; export JSON lines")
    if magic.startswith(_ZIP):
        raise EvidenceError(f"{path}: a zip archive; unpack it, gz and zst are read as they are")
    if magic.startswith(_PARQUET):
        return Content(path, plain, "parquet", ())
    try:
        with plain.open("rb") as file:
            return _content_of_text(file, path, plain)
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror}") from None


def _magic(path: Path, given: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise EvidenceError(
                f"{given}: a pipe, device or folder; write what it holds to a file, which is read twice"
            )
        with path.open("rb") as file:
            magic = file.read(8)
    except OSError as error:
        raise EvidenceError(f"{given}: cannot be read: {error.strerror}") from None
    if not magic:
        raise EvidenceError(f"{given}: the file is empty")
    return magic


def _unpack(source: Path, plain: Path, magic: bytes, path: Path) -> None:
    num_bytes = 0
    try:
        most = min(MAX_UNPACKED_BYTES, max(MAX_DOCUMENT_BYTES, MAX_PACKING * source.stat().st_size))
        with source.open("rb") as packed, plain.open("wb") as target:
            for chunk in _content_bytes(packed, magic):
                num_bytes += len(chunk)
                if num_bytes > most:
                    raise EvidenceError(f"{path}: more than {most >> 20:,} MiB when it is unpacked; unpack it yourself")
                target.write(chunk)
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise EvidenceError(f"{path}: not whole, or damaged: {error}") from None
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be unpacked: {error.strerror}") from None


def _content_bytes(source: IO[bytes], magic: bytes) -> Iterator[bytes]:
    if magic.startswith(_GZIP):
        with gzip.GzipFile(fileobj=source) as file:
            yield from iter(lambda: file.read(_CHUNK_BYTES), b"")
    elif magic.startswith(_ZSTD):
        yield from unpacked(source)
    else:
        source.seek(len(_BOM))
        yield from iter(lambda: source.read(_CHUNK_BYTES), b"")


# -- text -------------------------------------------------------------------------------------------------------------


def _content_of_text(file: IO[bytes], path: Path, plain: Path) -> Content:
    lines = _first_lines(file)
    if not lines:
        raise EvidenceError(f"{path}: nothing but blanks")
    first, *others = lines
    begins_as_json = first.lstrip()[:1] in (b"{", b"[")
    fault = "its first line is no JSON"
    if begins_as_json:
        if others and isinstance(_decoded(first), dict):
            return Content(path, plain, "lines", _objects(lines))
        file.seek(0)
        found, fault = _document(file.read(MAX_DOCUMENT_BYTES + 1))
        if isinstance(found, dict):
            return Content(path, plain, "document", (found,))
        if found:
            return Content(path, plain, "list", (msgspec.json.decode(found[0]),))
    records = _objects(line for line in others if line.startswith(b"{"))
    if records:
        return Content(path, plain, "lines", records, fault)
    if begins_as_json:
        raise EvidenceError(f"{path}: {fault}")
    return Content(path, plain, "csv", (_csv_columns(first, path),))


def _first_lines(file: IO[bytes]) -> list[bytes]:
    """Lines that are not blank; of one that is too long its beginning."""
    found: list[bytes] = []
    num_bytes = 0
    while len(found) < MAX_LOOKED_AT and num_bytes < MAX_LINE_BYTES and (line := file.readline(MAX_LINE_BYTES)):
        num_bytes += len(line)
        found += [line] if line.strip() else []
    return found


def _objects(lines: Iterable[bytes]) -> tuple[dict[str, Any], ...]:
    return tuple(found for found in map(_decoded, lines) if isinstance(found, dict))


def _decoded(text: bytes) -> Any:
    """The JSON value; None where it is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _document(text: bytes) -> tuple[dict[str, msgspec.Raw] | list[msgspec.Raw] | None, str]:
    """The members of a document, or a list of objects; or else what is wrong."""
    if len(text) > MAX_DOCUMENT_BYTES:
        return None, (
            f"one JSON document of more than {MAX_DOCUMENT_BYTES >> 20} MiB; write an observation a line (JSONL), or "
            "Parquet, which have no limit"
        )
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw] | list[msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None, _fault_of(text)
    if isinstance(found, dict) or (found and isinstance(_decoded(found[0]), dict)):
        return found, ""
    return None, _NO_OBJECTS


_NO_OBJECTS = "JSON, but neither an object nor a list of them"


def _fault_of(text: bytes) -> str:
    """The fault of a text that is no JSON."""
    try:
        value = json.loads(text, parse_constant=_Constant)
    except RecursionError:
        return "JSON that is nested too deeply"
    except ValueError as error:
        return f"not JSON, or not whole: {error}"
    if place := _place_of_constant(value):
        return f"{place}, which is no number of JSON; leave the field out"
    return _NO_OBJECTS


class _Constant(str):
    """NaN or an infinity, as Python's JSON writes them and JSON does not know them."""

    __slots__ = ()


def _place_of_constant(value: Any) -> str:
    """Names of the members that lead to the first constant, and what it is; empty: there is none."""
    if isinstance(value, Mapping):
        children: Iterable[tuple[str, Any]] = value.items()
    elif isinstance(value, list):
        children = ((str(place), each) for place, each in enumerate(value))
    else:
        children = ()
    for name, each in children:
        if isinstance(each, _Constant):
            return f"{name} is {each}"
        if found := _place_of_constant(each):
            return f"{name}.{found}"
    return ""


# -- tables -----------------------------------------------------------------------------------------------------------


def _csv_columns(line: bytes, path: Path) -> dict[str, str]:
    try:
        names = next(csv.reader([line.decode("utf-8").rstrip("\r\n")], strict=True))
    except (UnicodeDecodeError, csv.Error, StopIteration):
        names = []
    if not set(names) & set(NAMES):
        begins = line[:MAX_SHOWN_BYTES].decode("ascii", "replace").strip()
        found = f", and begins with {begins!r}, which as a CSV's head names no field of an observation"
        told = found if begins.isprintable() else ""
        raise EvidenceError(f"{path}: neither JSON, CSV nor Parquet, nor gz or zst of one of them{told}")
    return dict.fromkeys(names, "VARCHAR")
