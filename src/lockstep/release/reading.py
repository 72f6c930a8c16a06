"""Input files to tables of observations: what a file is, is told from its content; DuckDB reads, and nothing is guessed.

Lines, CSV and Parquet are streamed and may be of any size; a file that is one JSON document is bounded. Extensions of
DuckDB are never fetched, and pickles are never opened.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import msgspec
import zstandard

from lockstep.errors import EvidenceError
from lockstep.release.formats import FILE, FORMATS, OWN, Format
from lockstep.release.observation import FIELDS, NAMES
from lockstep.spelling import did_you_mean, listed

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Side = Literal["baseline", "candidate"]
SIDES: tuple[Side, Side] = ("baseline", "candidate")
MAX_LINE_BYTES = 16 << 20
MAX_DOCUMENT_BYTES = 512 << 20
"""Of a file that is one JSON document, decompressed."""
MEMORY_LIMIT = "800MB"
"""Of DuckDB; what needs more goes to its temporary folder."""
_PARQUET, _GZIP, _ZSTD, _ZIP = b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
_OBSERVATION = "STRUCT(" + ", ".join(f'"{field.name}" {field.type}' for field in FIELDS) + ")"


@dataclass(frozen=True, slots=True)
class Source:
    """One file as it was read."""

    path: Path
    format: str
    side: Side | None
    """None: it holds both."""
    num_rows: int
    unread: tuple[str, ...] = ()
    """Members of its first record that no field of an observation is made of."""
    weak_join: bool = False


@dataclass(frozen=True, slots=True)
class _Content:
    """What a file turned out to be."""

    path: Path
    """A plain name for it."""
    given: Path
    kind: Literal["json", "csv", "parquet"]
    compression: Literal["none", "gzip", "zstd"]
    first: Mapping[str, Any]
    """Its first record, or its columns' names."""
    is_document: bool
    """Whether the first record is all there is."""
    size: int


@dataclass(frozen=True, slots=True)
class Store:
    """A DuckDB, and the folder in which it keeps what is too large for memory.

    Once both sides are read, it has the views ``baseline`` and ``candidate``: the fields of observations, and ``row``.
    """

    connection: DuckDBPyConnection
    folder: Path

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return self.connection.execute(query).fetchall()

    def number(self, query: str) -> int:
        """The whole number that a query gives."""
        return int(self.rows(query)[0][0])


@contextmanager
def open_store() -> Iterator[Store]:
    """An empty store; what it keeps on disk goes with it."""
    import duckdb

    with tempfile.TemporaryDirectory(prefix="lockstep-gate-") as folder:
        connection = duckdb.connect(
            config={
                "autoinstall_known_extensions": "false",
                "autoload_known_extensions": "false",
                "memory_limit": MEMORY_LIMIT,
                "temp_directory": folder,
                "preserve_insertion_order": "false",
                "threads": str(os.cpu_count() or 1),
            }
        )
        try:
            connection.execute("SET TimeZone = 'UTC'")
            yield Store(connection, Path(folder))
        finally:
            connection.close()


def read(store: Store, path: Path, side: Side | None) -> tuple[Source, dict[str, Any] | None]:
    """Read a file as the view of its side, or of both.

    Args:
        side: whose file it is; None: it says itself, by pairs, by two lists, or in each observation.

    Returns:
        What it was, and the policy that it holds, if any.

    Raises:
        EvidenceError: it cannot be read, is empty, or of an unknown version.
    """
    import duckdb

    content = _content_of(path, store.folder / f"input-{side or 'both'}")
    try:
        return _read(store, content, side)
    except duckdb.Error as error:
        message = str(error).replace(str(content.path), path.name).splitlines()[0]
        raise EvidenceError(f"{path}: {message}") from None


def _read(store: Store, content: _Content, side: Side | None) -> tuple[Source, dict[str, Any] | None]:
    members = content.first
    policy: dict[str, Any] | None = None
    unread: tuple[str, ...] = ()
    weak_join = False
    if content.is_document and {"baseline", "candidate"} <= members.keys() and isinstance(members["baseline"], list):
        name, policy = "gate", members.get("policy")
        unread = _unknown(content, *(row for each in SIDES for row in members[each][:1]))
        for each in SIDES:
            rows = f"(SELECT unnest({each}) AS o FROM {_records(content, {each: _OBSERVATION + '[]'}, False)})"
            _keep(store, each, rows, {field.name: f'o."{field.name}"' for field in FIELDS})
    elif {"baseline", "candidate"} <= members.keys() or "pairs" in members:
        name, policy = "mirror", members.get("policy")
        unread = _read_pairs(store, content)
    else:
        found = _format_of(content)
        if found is OWN:
            unread = _unknown(content, members)
        name, weak_join = found.name, found.weak_join
        for each in SIDES if side is None else (side,):
            _read_format(store, content, found, each, is_shared=side is None)
    counts = {each: store.number(f"SELECT count(*) FROM {each}") for each in (SIDES if side is None else (side,))}
    if not sum(counts.values()):
        why = "" if side is not None or name != OWN.name else ": none says in its field side whose it is"
        raise EvidenceError(f"{content.given}: no observation in it{why}")
    return Source(content.given, name, side, sum(counts.values()), unread, weak_join), policy


def _read_pairs(store: Store, content: _Content) -> tuple[str, ...]:
    """Pairs of observations, a document of them or one a line; what stands beside both sides holds for both."""
    shared = {field.name: field.type for field in FIELDS if field.name != "side"}
    pair = {**shared, "baseline": _OBSERVATION, "candidate": _OBSERVATION}
    if "pairs" in content.first:
        first = content.first["pairs"][0] if content.first["pairs"] else {}
        struct = "STRUCT(" + ", ".join(f'"{name}" {kind}' for name, kind in pair.items()) + ")[]"
        rows = f"(SELECT unnest(pairs, recursive := false) AS p FROM {_records(content, {'pairs': struct}, False)})"
        inside = "p."
    else:
        first, inside = content.first, ""
        rows = _records(content, pair, not content.is_document)
    for each in SIDES:
        fields = {name: f'coalesce({inside}{each}."{name}", {inside}"{name}")' for name in shared}
        _keep(store, each, rows, fields, where=f"{inside}{each} IS NOT NULL")
    known = set(first) - {"baseline", "candidate"}
    return _unknown(content, dict.fromkeys(known), first.get("baseline") or {}, first.get("candidate") or {})


def _read_format(store: Store, content: _Content, found: Format, side: Side, is_shared: bool) -> None:
    """Keep one side of a file whose records are of one format."""
    if found is OWN and content.kind != "json":
        columns = {name: kind for name, kind in found.columns.items() if name in content.first}
        fields: Mapping[str, str] = {name: f'"{name}"' for name in columns}
        records = _table(content, columns)
    else:
        fields = found.fields
        records = _records(content, found.columns, found.layout == "lines")
    conditions = [found.where] if found.where else []
    if is_shared:
        if "side" not in fields:
            raise EvidenceError(
                f"{content.given}: {found.tool}: it holds one side only; give two files, the baseline's and the candidate's"
            )
        conditions.append(f"side = '{side}'")
    table = records if found.table == FILE else found.table.replace(FILE, records)
    _keep(store, side, table, fields, " AND ".join(conditions), is_kept=content.kind == "parquet")


def _keep(
    store: Store, side: Side, rows: str, fields: Mapping[str, str], where: str = "", *, is_kept: bool = False
) -> None:
    """Make the view of a side.

    Args:
        is_kept: whether the rows come from a file that can be read again and again, column by column.
    """
    listed_ = ", ".join(f'({fields.get(field.name, "NULL")})::{field.type} AS "{field.name}"' for field in FIELDS)
    condition = f" WHERE {where}" if where else ""
    if is_kept:
        query = f"SELECT {listed_}, file_row_number AS row FROM {rows}{condition}"
    else:
        place = _quoted(str(store.folder / f"{side}.parquet"))
        store.connection.execute(f"COPY (SELECT {listed_} FROM {rows}{condition}) TO {place} (FORMAT parquet)")
        query = f"SELECT *, file_row_number AS row FROM read_parquet({place}, file_row_number = true)"
    store.connection.execute(f"CREATE VIEW {side} AS {query}")


def _records(content: _Content, columns: Mapping[str, str], is_lines: bool) -> str:
    """A table function over the JSON records of a file."""
    listed_ = ", ".join(f"{_quoted(name)}: {_quoted(kind)}" for name, kind in columns.items())
    layout = "newline_delimited" if is_lines and not content.is_document else "auto"
    most = MAX_LINE_BYTES if layout == "newline_delimited" else max(MAX_LINE_BYTES, content.size + 1)
    return (
        f"read_json({_quoted(str(content.path))}, columns = {{{listed_}}}, format = '{layout}', records = true,"
        f" maximum_object_size = {most}, compression = '{content.compression}')"
    )


def _table(content: _Content, columns: Mapping[str, str]) -> str:
    path = _quoted(str(content.path))
    if content.kind == "parquet":
        casts = ", ".join(f'"{name}"::{kind} AS "{name}"' for name, kind in columns.items())
        return f"(SELECT {casts}, file_row_number FROM read_parquet({path}, file_row_number = true))"
    types = ", ".join(f"{_quoted(name)}: {_quoted(kind)}" for name, kind in columns.items())
    return f"read_csv({path}, header = true, types = {{{types}}}, compression = '{content.compression}')"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


# -- what a file is ---------------------------------------------------------------------------------------------------


def _content_of(path: Path, plain: Path) -> _Content:
    """Look at the first bytes and the first record."""
    try:
        with open(path, "rb") as file:
            magic = file.read(8)
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror}") from None
    if not magic:
        raise EvidenceError(f"{path}: the file is empty")
    if magic[:1] == b"\x80" and magic[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise EvidenceError(f"{path}: a pickle, which can run code when it is opened and never is; export JSON lines")
    if magic.startswith(_ZIP):
        raise EvidenceError(f"{path}: a zip archive; unpack it, gz and zst are read as they are")
    compression: Literal["none", "gzip", "zstd"] = (
        "gzip" if magic.startswith(_GZIP) else "zstd" if magic.startswith(_ZSTD) else "none"
    )
    # Whatever the file is called: DuckDB takes * ? [ in a name for a pattern.
    plain.symlink_to(path.absolute())
    if magic.startswith(_PARQUET):
        return _Content(plain, path, "parquet", "none", dict.fromkeys(_parquet_columns(plain, path)), False, 0)
    try:
        with _opened(path, compression) as file:
            return _content_of_text(file, path, plain, compression)
    except (EOFError, gzip.BadGzipFile, zstandard.ZstdError, OSError) as error:
        raise EvidenceError(f"{path}: not whole: {error}") from None


def _content_of_text(
    file: IO[bytes], path: Path, plain: Path, compression: Literal["none", "gzip", "zstd"]
) -> _Content:
    line = b""
    while not line.strip():
        line = file.readline(MAX_LINE_BYTES)
        if not line:
            raise EvidenceError(f"{path}: nothing but blanks")
    line = line.removeprefix(b"\xef\xbb\xbf")
    start = line.lstrip()[:1]
    if start not in (b"{", b"["):
        names = _csv_names(line, path)
        return _Content(plain, path, "csv", compression, dict.fromkeys(names), False, 0)
    if start == b"{":
        record = _decoded(line)
        if isinstance(record, dict):
            is_alone = not any(chunk.strip() for chunk in iter(lambda: file.read(1 << 16), b""))
            return _Content(plain, path, "json", compression, record, is_alone, len(line))
    whole = line + file.read(MAX_DOCUMENT_BYTES - len(line) + 1)
    if len(whole) > MAX_DOCUMENT_BYTES:
        raise EvidenceError(
            f"{path}: one JSON document of more than {MAX_DOCUMENT_BYTES >> 20} MiB; "
            "write an observation a line (JSONL), or Parquet, which have no limit"
        )
    record = _decoded(whole)
    if isinstance(record, list) and record and isinstance(record[0], dict):
        return _Content(plain, path, "json", compression, record[0], False, len(whole))
    if isinstance(record, dict):
        return _Content(plain, path, "json", compression, record, True, len(whole))
    if record is None:
        try:
            json.loads(whole)
        except ValueError as error:
            raise EvidenceError(f"{path}: not JSON: {error}") from None
    raise EvidenceError(f"{path}: JSON, but neither an object nor a list of them")


def _decoded(text: bytes) -> Any:
    """The JSON value; None where it is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _opened(path: Path, compression: str) -> IO[bytes]:
    if compression == "gzip":
        return gzip.open(path, "rb")
    file = open(path, "rb")  # noqa: SIM115 - closed by who has the result
    if compression == "none":
        return file
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, closefd=True))


def _parquet_columns(plain: Path, path: Path) -> Sequence[str]:
    import duckdb

    try:
        described = duckdb.execute(f"DESCRIBE SELECT * FROM read_parquet({_quoted(str(plain))})").fetchall()
    except duckdb.Error as error:
        raise EvidenceError(f"{path}: {str(error).splitlines()[0].replace(str(plain), path.name)}") from None
    return [name for name, *_ in described]


def _csv_names(line: bytes, path: Path) -> Sequence[str]:
    try:
        names = next(csv.reader([line.decode("utf-8").rstrip("\r\n")], strict=True))
    except (UnicodeDecodeError, csv.Error, StopIteration):
        raise EvidenceError(f"{path}: neither JSON, CSV nor Parquet, also not gz or zst of one of them") from None
    if not set(names) & set(NAMES):
        raise EvidenceError(
            f"{path}: taken for CSV, and none of its columns ({listed(names)}) is a field of an observation; "
            f"those are {listed(NAMES)}"
        )
    return names


def _format_of(content: _Content) -> Format:
    """The format whose members a record has.

    Raises:
        EvidenceError: of none, or of a version that lacks what is needed.
    """
    members = content.first
    for each in FORMATS:
        if content.kind != "json" or not all(_has(members, name) for name in each.tells):
            continue
        for name in each.needs:
            if not _has(members, name):
                advice = f"; {each.hint}" if each.hint else ""
                raise EvidenceError(f"{content.given}: looks like {each.tool}, but has no {name}{advice}")
        return each
    if not set(members) & set(NAMES):
        near = [did_you_mean(name, NAMES) for name in list(members)[:8]]
        question = next((text for text in near if text), "")
        raise EvidenceError(
            f"{content.given}: of no known format; its first record has {listed(list(members)) or 'nothing'}"
            f"{'; ' + question if question else ''}"
        )
    return OWN


def _has(record: Any, name: str) -> bool:
    first, _, rest = name.partition(".")
    if isinstance(record, list):
        record = record[0] if record else None
    if not isinstance(record, Mapping) or first not in record:
        return False
    return not rest or _has(record[first], rest)


def _unknown(content: _Content, *records: Mapping[str, Any]) -> tuple[str, ...]:
    """Names that are no fields.

    Raises:
        EvidenceError: one is nearly a field's name.
    """
    names = [name for record in records for name in record if name not in NAMES]
    for name in names:
        question = did_you_mean(name, NAMES)
        if question and len(name) > 2:
            raise EvidenceError(f"{content.given}: an observation has the field {name!r}, which is unknown; {question}")
    return tuple(sorted(set(names)))
