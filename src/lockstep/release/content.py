"""Content of an input file: detects JSON lines, a JSON document, CSV or Parquet by its bytes, never by its name.

Compressed files are decompressed and checked to their end. Pickles are never loaded.
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
"""Members of a JSON object by name. The values of a document are `msgspec.Raw`."""

MAX_LINE_BYTES = 16 << 20
MAX_LOOKED_AT = 1000
"""Maximum number of lines, of `MAX_LINE_BYTES` together, that are searched for the first record, since logs may begin
with other lines."""
MAX_SHOWN_BYTES = 60
"""Maximum number of bytes of an unknown first line in an error message."""
_CHUNK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_PARQUET, _GZIP, _ZSTD, _ZIP = b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))


@dataclass(frozen=True, slots=True)
class ContentLimits:
    """Limits of input files."""

    max_document_bytes: int = 256 << 20
    """Maximum size of a file that is one JSON document, after decompression."""
    max_unpacked_bytes: int = 64 << 30
    """Maximum size of a compressed file after decompression."""
    max_packing: int = 200
    """Maximum compression ratio of a file that is larger than `max_document_bytes` after decompression. Real records do
    not compress better."""

    def max_plain_bytes(self, num_packed_bytes: int) -> int:
        """Maximum size after decompression of a file of this size."""
        return min(self.max_unpacked_bytes, max(self.max_document_bytes, self.max_packing * num_packed_bytes))


@dataclass(frozen=True, slots=True)
class Content:
    """Kind and first records of an input file."""

    given: Path
    """Path of the file in messages."""
    path: Path
    """Path without characters that DuckDB reads as a pattern: a link to the file, or its decompressed copy."""
    kind: Literal["lines", "document", "list", "csv", "parquet"]
    records: tuple[Members, ...]
    """First records of JSON lines, first record of a list, members of a document, or columns of a CSV file."""
    fault: str = ""
    """Reason why the first line is not a record, in which case the file may be a log; empty: it is a record."""

    @property
    def is_table(self) -> bool:
        """True if the columns have names, once for all records."""
        return self.kind in ("csv", "parquet")


def content_of(path: Path, plain: Path, given: Path | None = None, limits: ContentLimits | None = None) -> Content:
    """Detect the content of a file.

    Args:
        plain: unused path, for a link to the file or its decompressed copy.
        given: path of the original file, for messages, if `path` is a copy.

    Raises:
        EvidenceError: the file cannot be read, is incomplete, or has an unsupported kind.
    """
    limits = limits or ContentLimits()
    source, path = path, given or path
    magic = _magic(source, path)
    if magic.startswith((_GZIP, _ZSTD, _BOM)):
        _unpack(source, plain, path, limits.max_plain_bytes(source.stat().st_size))
        magic = _magic(plain, path)
    else:
        plain.symlink_to(source.absolute())
    if magic.startswith(_PICKLES):
        raise EvidenceError(f"{path}: pickles are not supported, since loading one can run code; export JSON lines")
    if magic.startswith(_ZIP):
        raise EvidenceError(f"{path}: zip archives are not supported; unpack it, or compress the file with gz or zst")
    if magic.startswith(_PARQUET):
        return Content(path, plain, "parquet", ())
    try:
        with plain.open("rb") as file:
            return _content_of_text(file, path, plain, limits.max_document_bytes)
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror}") from None


def _magic(path: Path, given: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise EvidenceError(
                f"{given}: not a regular file (pipe, device or folder); write its content to a file; it is read twice"
            )
        with path.open("rb") as file:
            magic = file.read(8)
    except OSError as error:
        raise EvidenceError(f"{given}: cannot be read: {error.strerror}") from None
    if not magic:
        raise EvidenceError(f"{given}: the file is empty")
    return magic


def _unpack(source: Path, plain: Path, path: Path, most: int) -> None:
    num_bytes = 0
    try:
        with source.open("rb") as packed, plain.open("wb") as target:
            for chunk in _content_bytes(packed, _magic(source, path)):
                num_bytes += len(chunk)
                if num_bytes > most:
                    raise EvidenceError(f"{path}: more than {most >> 20:,} MiB when decompressed; decompress it first")
                target.write(chunk)
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise EvidenceError(f"{path}: incomplete or damaged: {error}") from None
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be decompressed: {error.strerror}") from None


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


def _content_of_text(file: IO[bytes], path: Path, plain: Path, max_bytes: int) -> Content:
    lines = _first_lines(file)
    if not lines:
        raise EvidenceError(f"{path}: the file contains only whitespace")
    first, *others = lines
    begins_as_json = first.lstrip()[:1] in (b"{", b"[")
    fault = "the first line is not JSON"
    if begins_as_json:
        if others and isinstance(_decoded(first), dict):
            return Content(path, plain, "lines", _objects(lines))
        file.seek(0)
        found, fault = _document(file.read(max_bytes + 1), max_bytes)
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
    """First lines that are not blank. Long lines are truncated to `MAX_LINE_BYTES`."""
    found: list[bytes] = []
    num_bytes = 0
    while len(found) < MAX_LOOKED_AT and num_bytes < MAX_LINE_BYTES and (line := file.readline(MAX_LINE_BYTES)):
        num_bytes += len(line)
        found += [line] if line.strip() else []
    return found


def _objects(lines: Iterable[bytes]) -> tuple[dict[str, Any], ...]:
    return tuple(found for found in map(_decoded, lines) if isinstance(found, dict))


def _decoded(text: bytes) -> Any:
    """Value of a JSON text; None if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _document(text: bytes, max_bytes: int) -> tuple[dict[str, msgspec.Raw] | list[msgspec.Raw] | None, str]:
    """Members of a document, or a list of objects, or else the fault."""
    if len(text) > max_bytes:
        return None, (
            f"JSON document of more than {max_bytes >> 20} MiB; write one observation per line (JSONL), or "
            "Parquet, which have no size limit"
        )
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw] | list[msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None, _fault_of(text)
    if isinstance(found, dict) or (found and isinstance(_decoded(found[0]), dict)):
        return found, ""
    return None, _NO_OBJECTS


_NO_OBJECTS = "JSON, but neither an object nor a list of objects"


def _fault_of(text: bytes) -> str:
    """Fault of a text that is not an object or a list of objects in JSON."""
    try:
        value = json.loads(text, parse_constant=_Constant)
    except RecursionError:
        return "JSON that is nested too deeply"
    except ValueError as error:
        return f"invalid or truncated JSON: {error}"
    if found := _first_constant(value):
        return f"{found}, which is not a JSON number; omit the field"
    return _NO_OBJECTS


class _Constant(str):
    """NaN or an infinity, which Python writes although JSON does not have them."""

    __slots__ = ()


def _first_constant(value: Any) -> str:
    """Path and value of the first constant, as text; empty if there is none."""
    if isinstance(value, Mapping):
        children: Iterable[tuple[str, Any]] = value.items()
    elif isinstance(value, list):
        children = ((str(place), each) for place, each in enumerate(value))
    else:
        children = ()
    for name, each in children:
        if isinstance(each, _Constant):
            return f"{name} is {each}"
        if found := _first_constant(each):
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
        found = f"; it begins with {begins!r}, which is not a CSV header with fields of an observation"
        detail = found if begins.isprintable() else ""
        raise EvidenceError(f"{path}: not JSON, CSV or Parquet, plain or compressed with gz or zst{detail}")
    return dict.fromkeys(names, "VARCHAR")
