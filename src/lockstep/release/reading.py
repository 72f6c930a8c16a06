"""Reader of input files: detects a file's format by its content and loads it as a table of observations with DuckDB.

JSON lines, CSV and Parquet are streamed and may have any size. A file that is one JSON document has a maximum size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import EvidenceError
from lockstep.release.content import MAX_LINE_BYTES, Content, Members, content_of
from lockstep.release.documents import DocumentError, first_bad_line, items_of, lines_of, one_line, write_lines
from lockstep.release.formats import FILE, FORMATS, OWN, Format
from lockstep.release.observation import FIELDS, NAMES, SIDES, Side
from lockstep.release.store import Store, quoted, sentence_of
from lockstep.spelling import did_you_mean, listed

_BYTE = re.compile(r'Malformed JSON in file ".*", at byte (\d+) in line \d+: ')
_CSV_LINE = re.compile(r"CSV Error on Line: (\d+)(?:; )?")
LARGE = {field.name for field in FIELDS if field.type.endswith("[]")} | {"text"}
OBSERVATION = "STRUCT(" + ", ".join(f'"{field.name}" {field.type}' for field in FIELDS) + ")"
SHARED: Mapping[str, str] = {field.name: field.type for field in FIELDS if field.name != "side"}
"""Fields that a pair may define once for both sides, with their types."""
MAX_NAMES = 1_000
"""Maximum number of member names that are checked in a file."""
PAIR: Mapping[str, str] = {**SHARED, "baseline": OBSERVATION, "candidate": OBSERVATION}


@dataclass(frozen=True, slots=True)
class Source:
    """Input file after it was read."""

    path: Path
    format: str
    side: Side | None
    """Side of the observations; None: the file holds both sides."""
    num_rows: int
    unread: tuple[str, ...] = ()
    """Names of record members that were ignored because no field of an observation uses them, sorted."""


@dataclass(frozen=True, slots=True)
class _Records:
    """Records that DuckDB can read with a table function."""

    content: Content
    columns: Mapping[str, str]
    """Types of the columns to read, by name."""
    path: Path
    """File that DuckDB reads: the input file, or a file of JSON lines that was written from it."""

    def table(self, columns: Mapping[str, str] | None = None) -> str:
        """SQL of the table.

        Args:
            columns: columns to read; None: `columns` of this object.
        """
        wanted = self.columns if columns is None else columns
        typed = "{" + ", ".join(f"{quoted(name)}: {quoted(kind)}" for name, kind in wanted.items()) + "}"
        path = quoted(str(self.path))
        if self.content.kind == "parquet":
            casts = "".join(f'"{name}"::{kind} AS "{name}", ' for name, kind in wanted.items())
            return f"(SELECT {casts}file_row_number FROM read_parquet({path}, file_row_number = true))"
        if self.content.kind == "csv":
            typed = "{" + ", ".join(f"{quoted(name)}: {quoted(kind)}" for name, kind in self._all(wanted)) + "}"
            return (
                f"read_csv({path}, columns = {typed}, auto_detect = false, header = true, delim = ',', quote = '\"',"
                f" escape = '\"', max_line_size = {MAX_LINE_BYTES})"
            )
        return (
            f"read_json({path}, columns = {typed}, format = 'newline_delimited', records = true,"
            f" maximum_object_size = {MAX_LINE_BYTES})"
        )

    def _all(self, wanted: Mapping[str, str]) -> Iterable[tuple[str, str]]:
        """All columns of a CSV file in file order, with their types; columns that are not requested are text."""
        return ((name, wanted.get(name, "VARCHAR")) for name in self.content.records[0])


def read(
    store: Store, path: Path, side: Side | None, given: Path | None = None
) -> tuple[Source, dict[str, Any] | None]:
    """Read a file and create a view of the store for its side, or for each side.

    Args:
        side: side of the file; None: the file holds both sides, as pairs, as two lists, or with a field ``side``.
        given: path of the original file, for messages and the source, if `path` is a copy.

    Returns:
        Description of the file, and the policy that it contains, if any.

    Raises:
        EvidenceError: the file cannot be read, is empty, or has an unsupported version.
    """
    sides = SIDES if side is None else (side,)
    copy, path = path, given or path
    store.paths |= dict.fromkeys(sides, path)
    content = content_of(copy, store.folder / f"input-{side or 'both'}", path)
    if content.kind == "parquet":
        content = replace(content, records=(_parquet_types(store, content),))
    is_table = content.is_table
    first = next((each for each in content.records if each.keys() - {"policy"}), {})
    unread: tuple[str, ...] = ()
    if not is_table and side is not None and first.keys() & {*SIDES, "pairs"}:
        raise EvidenceError(f"{path}: contains both sides; pass it as the only file")
    try:
        policy = None if is_table else _policy(content)
        if content.kind == "document" and any(_is_list(first.get(each)) for each in SIDES):
            name, unread = "gate", _read_lists(store, content, first)
        elif not is_table and not content.fault and first.keys() & {*SIDES, "pairs"}:
            name, unread = "mirror", _read_pairs(store, content, first)
        else:
            found = OWN if is_table else _format_of(content)
            name = found.name
            path_of_lines = _read_format(store, content, found, sides)
            if found is OWN:
                unread = _unread(content, first if is_table else _names_in(store, path_of_lines))
    except (DocumentError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EvidenceError(f"{path}: {error}") from None
    count = sum(store.number(f"SELECT count(*) FROM {each}") for each in sides)
    if not count:
        raise EvidenceError(f"{path}: contains no observations")
    return Source(path, name, side, count, unread), policy


def _policy(content: Content) -> dict[str, Any] | None:
    value = content.records[0].get("policy")
    if isinstance(value, msgspec.Raw):
        value = msgspec.json.decode(value)
    if value is not None and not isinstance(value, dict):
        raise EvidenceError(f"{content.given}: policy must be a JSON object")
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, msgspec.Raw) and bytes(memoryview(value)[:1]) == b"["


# -- layouts ----------------------------------------------------------------------------------------------------------


def _read_lists(store: Store, content: Content, document: Members) -> tuple[str, ...]:
    """Read a document with a list of observations for each side, and return `Source.unread`. A missing one is empty."""
    names: set[str] = set()
    for side in SIDES:
        items = items_of(document[side], side) if side in document else []
        path = store.folder / f"{side}.jsonl"
        write_lines(path, map(one_line, items))
        table = _keep(store, _Records(content, OWN.columns, path), side, OWN.fields)
        _view(store, side, table)
        names |= _names_in(store, path)
    return _unread(content, names)


def _read_pairs(store: Store, content: Content, first: Members) -> tuple[str, ...]:
    """Read pairs of observations, as one document or one pair per line, and return `Source.unread`. Members of a pair
    apply to both of its sides."""
    path = content.path
    if content.kind != "lines":
        value = content.path.read_bytes() if content.kind == "list" else first.get("pairs")
        items = [msgspec.Raw(content.path.read_bytes())] if value is None else items_of(value, "pairs")
        path = store.folder / "pairs.jsonl"
        write_lines(path, map(one_line, items))
    fields = {
        f"{side}_{name}": f'coalesce({side}."{name}", "{name}")::{kind}'
        for side in SIDES
        for name, kind in SHARED.items()
    }
    has = {f"has_{side}": f"{side} IS NOT NULL" for side in SIDES}
    table = _keep(store, _Records(content, PAIR, path), "pairs", fields | has)
    for side in SIDES:
        _view(store, side, table, {name: f'"{side}_{name}"' for name in SHARED}, f"has_{side}", pair="file_row_number")
    return _unread(content, _names_in(store, path, *SIDES) - set(SIDES))


def _read_format(store: Store, content: Content, found: Format, sides: tuple[Side, ...]) -> Path:
    """Read records of one format, for one side, or for both sides if each record has a field ``side``.

    Returns:
        File that DuckDB read.
    """
    is_shared = len(sides) > 1
    if is_shared and found is not OWN:
        raise EvidenceError(
            f"{content.given}: {found.tool}: this format has one side only; pass two files: baseline, then candidate"
        )
    name = "both" if is_shared else sides[0]
    records = _Records(content, found.columns, _lines(store, content, found, name))
    fields = found.fields
    if content.is_table:
        columns = {each: kind for each, kind in found.columns.items() if each in content.records[0]}
        records = _Records(content, columns, content.path)
        fields = {each: f'"{each}"' for each in columns}
    if content.kind == "parquet":
        _check_types(store, records)
        table = records.table()
    else:
        table = _keep(store, records, name, fields, found)
        fields = {each: f'"{each}"' for each in fields}
    _check_sides(store, content, table, fields, sides)
    for side in sides:
        _view(store, side, table, fields, f"side = '{side}'" if is_shared else "")
    return records.path


def _lines(store: Store, content: Content, found: Format, name: str) -> Path:
    """File of JSON lines with the records. The input file is returned if it already has this layout."""
    path = store.folder / f"{name}.jsonl"
    if found.layout == "log":
        with content.path.open("rb") as file:
            write_lines(path, (line.rstrip(b"\r\n") for line in file if line.startswith(b"{")))
    elif content.kind == "list":
        write_lines(path, map(one_line, items_of(content.path.read_bytes(), "the file")))
    elif content.kind == "document":
        write_lines(path, lines_of(content.records[0], found))
    else:
        return content.path
    return path


# -- formats -----------------------------------------------------------------------------------------------------------


def _format_of(content: Content) -> Format:
    """Format of a file, identified by the members of its first record that matches a format.

    Raises:
        EvidenceError: the format is unknown, or its version lacks a required member.
    """
    for record in content.records:
        for each in FORMATS:
            if not all(name in record for name in each.markers) or (content.fault and each.layout != "log"):
                continue
            if each.layout in ("arrays", "benchmarks") and content.kind != "document":
                raise EvidenceError(f"{content.given}: contains several runs of {each.tool}; pass a file with one run")
            missing = next((name for name in each.required if not _has(_first_record(record, each), name)), None)
            if missing is not None:
                advice = f"; {each.hint}" if each.hint else "; this version of the format is not supported"
                raise EvidenceError(f"{content.given}: looks like {each.tool}, but has no {missing}{advice}")
            return each
    if content.fault:
        raise EvidenceError(f"{content.given}: {content.fault}")
    members = content.records[0]
    if not members.keys() & set(NAMES):
        near = (did_you_mean(name, NAMES) for name in list(members)[:8])
        question = next((f"; {text}" for text in near if text), "")
        raise EvidenceError(
            f"{content.given}: unknown format; the first record has {listed(list(members)) or 'no members'}{question}"
        )
    return OWN


def _parquet_types(store: Store, content: Content) -> dict[str, str]:
    """Types of the columns of a Parquet file, by name.

    Raises:
        EvidenceError: the file is damaged, or no column is a field of an observation.
    """
    query = f"DESCRIBE SELECT * FROM read_parquet({quoted(str(content.path))})"
    if message := store.fault(query):
        message = message.replace(str(content.path), str(content.given))
        raise EvidenceError(f"{content.given}: incomplete or damaged: {message}")
    types = {name: kind for name, kind, *_ in store.rows(query)}
    if not types.keys() & set(NAMES):
        found = f"none of its columns ({listed(list(types))}) is a field of an observation"
        raise EvidenceError(f"{content.given}: {found}; the fields are {listed(NAMES)}")
    return types


def _first_record(record: Members, found: Format) -> Any:
    """First record that is checked for a format's required members."""
    if found.layout != "benchmarks":
        return record
    return next((msgspec.json.decode(line) for line in lines_of(record, found)), None)


def _has(record: Any, name: str) -> bool:
    """True if a record has a member. Of a list, only the first entry is checked.

    Args:
        name: path of the member, with dots between the levels.
    """
    if isinstance(record, msgspec.Raw):
        record = msgspec.json.decode(record)
    first, _, rest = name.partition(".")
    if isinstance(record, list):
        record = record[0] if record else None
    if not isinstance(record, Mapping) or first not in record:
        return False
    return not rest or _has(record[first], rest)


def _names_in(store: Store, lines: Path, *members: str) -> set[str]:
    """Member names of all records of a file of JSON lines, including the member names of the given `members`."""
    objects = f"read_json_objects({quoted(str(lines))}, format = 'newline_delimited',"
    names = " UNION ALL ".join(
        f"SELECT unnest(json_keys(json, '{path}')) AS name FROM records"
        for path in ("$", *(f"$.{member}" for member in members))
    )
    return {
        name
        for (name,) in store.rows(
            f"WITH records AS (FROM {objects} maximum_object_size = {MAX_LINE_BYTES}))"
            f" SELECT DISTINCT name FROM ({names}) ORDER BY name LIMIT {MAX_NAMES}"
        )
    }


def _unread(content: Content, found: Iterable[str]) -> tuple[str, ...]:
    """Names that are not fields of an observation, sorted.

    Raises:
        EvidenceError: a name looks like a misspelled field.
    """
    names = sorted(set(found) - {*NAMES, "policy"})
    for name in names:
        question = did_you_mean(name, NAMES)
        if question and len(name) > 2:
            raise EvidenceError(f"{content.given}: unknown field {name!r} of an observation; {question}")
    return tuple(names)


# -- tables and views -------------------------------------------------------------------------------------------------


def _keep(store: Store, records: _Records, name: str, fields: Mapping[str, str], found: Format = OWN) -> str:
    """Write the fields of records to a column-oriented file for later queries, and return the SQL of its table."""
    try:
        return store.save(_query(records, fields, found), name)
    except EvidenceError as error:
        raise EvidenceError(_located(store, records, fields, found, error)) from None


def _query(records: _Records, fields: Mapping[str, str], found: Format) -> str:
    types = {field.name: f"::{field.type}" for field in FIELDS}
    listed_ = ", ".join(f'({text}){types.get(field, "")} AS "{field}"' for field, text in fields.items())
    condition = f" WHERE {found.where}" if found.where else ""
    return f"SELECT {listed_} FROM {_rows(records, found)}{condition}"


def _rows(records: _Records, found: Format) -> str:
    return records.table() if found.table == FILE else found.table.replace(FILE, records.table())


def _view(
    store: Store, side: Side, table: str, fields: Mapping[str, str] = OWN.fields, where: str = "", *, pair: str = "NULL"
) -> None:
    absent = _absent(store, table, fields)
    known = {name: text for name, text in fields.items() if name not in absent}
    listed_ = ", ".join(f'({known.get(field.name, "NULL")})::{field.type} AS "{field.name}"' for field in FIELDS)
    condition = f" WHERE {where}" if where else ""
    numbers = f"file_row_number AS row, ({pair})::BIGINT AS pair"
    store.run(f"CREATE VIEW {side} AS SELECT {listed_}, {numbers} FROM {table}{condition}")


def _absent(store: Store, table: str, fields: Mapping[str, str]) -> set[str]:
    """Large fields that no record has, so that nothing is computed from them."""
    return {
        name
        for name in LARGE & fields.keys()
        if not store.rows(f"SELECT 1 FROM {table} WHERE ({fields[name]}) IS NOT NULL LIMIT 1")
    }


def _check_sides(
    store: Store, content: Content, table: str, fields: Mapping[str, str], sides: tuple[Side, ...]
) -> None:
    """Reject observations that have no side or the wrong one."""
    if "side" not in fields:
        if len(sides) > 1:
            advice = "pass two files (baseline, then candidate), or add a field side"
            raise EvidenceError(f"{content.given}: the observations have no side; {advice}")
        return
    known = ", ".join(f"'{side}'" for side in sides)
    wrong = "side IS NULL OR" if len(sides) > 1 else "side IS NOT NULL AND"
    [found] = store.rows(f"SELECT count(*), min(side) FROM {table} WHERE {wrong} side NOT IN ({known})")
    if found[0]:
        message = f"{found[0]:,} observations have " + (f"the side {found[1]!r}" if found[1] else "no side")
        advice = "" if found[1] else ", or pass two files, one for each side"
        if len(sides) > 1:
            expected = f"the side must be {' or '.join(sides)}{advice}"
        else:
            expected = f"the file was passed as the {sides[0]}"
        raise EvidenceError(f"{content.given}{_line_of_wrong_side(content, sides)}: {message}; {expected}")


def _line_of_wrong_side(content: Content, sides: tuple[Side, ...]) -> str:
    """``:LINE`` of the first line without a valid side; empty if the file does not have one observation per line."""
    if content.kind != "lines" or content.fault:
        return ""
    right = sides if len(sides) > 1 else (*sides, None)
    with content.path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        wrong = (number for number, line in lines if msgspec.json.decode(line).get("side") not in right)
        return f":{next(wrong)}"


def _check_types(store: Store, records: _Records) -> None:
    """Reject columns of a table whose type does not match their field, such as text instead of numbers."""
    types = records.content.records[0]
    for name, kind in records.columns.items():
        is_text = types[name].startswith("VARCHAR") and kind != "VARCHAR"
        if is_text or store.fault(f"SELECT CAST(CAST(NULL AS {types[name]}) AS {kind})"):
            raise EvidenceError(f"{records.content.given}: {name} is {types[name]}; it must be {_words(kind)}")


# -- faults -----------------------------------------------------------------------------------------------------------


def _located(store: Store, records: _Records, fields: Mapping[str, str], found: Format, error: EvidenceError) -> str:
    """Error message for records that cannot be read, as ``FILE:LINE: message`` if they are lines of the input file."""
    cause = error.__cause__ or error
    part = replace(records, path=store.folder / "part.jsonl")
    query, last = _query(part, fields, found), cause

    def is_bad() -> bool:
        nonlocal last
        try:
            store.save(query, "part")
        except EvidenceError as caught:
            last = caught.__cause__ or caught
            return True
        return False

    content = records.content
    number = None if content.kind == "csv" else first_bad_line(records.path, part.path, is_bad)
    if number is None:
        message = _fault(store, records, fields, _rows(records, found), cause)
        in_csv = _CSV_LINE.search(message)
        line = f":{in_csv[1]}" if in_csv else ""
        return f"{content.given}{line}: {_CSV_LINE.sub('', message)}"
    message = _fault(store, part, fields, _rows(part, found), last)
    if found.layout == "log":
        number = _line_of_record(content.path, number)
    elif records.path != content.path:
        return f"{content.given}: record {number}: {message}"
    return f"{content.given}:{number}: {message}"


def _line_of_record(path: Path, record: int) -> int:
    """Line number of the n-th record of a log."""
    with path.open("rb") as file:
        numbers = (number for number, line in enumerate(file, 1) if line.startswith(b"{"))
        return next(islice(numbers, record - 1, None))


def _fault(store: Store, records: _Records, fields: Mapping[str, str], rows: str, error: BaseException) -> str:
    """DuckDB's message, preceded by the name of the member or field that causes it."""
    message = sentence_of(error, {records.path: records.content.given, records.content.path: records.content.given})
    if "Malformed" in message:
        return "invalid or truncated JSON: " + _BYTE.sub(r"at byte \1: ", message)
    if "maximum_object_size" in message:
        return f"the line is longer than {MAX_LINE_BYTES >> 20} MiB, the maximum size of an observation"
    anything = next(iter(records.columns))
    if store.fault(f'SELECT count("{anything}") FROM {records.table({anything: "VARCHAR"})}'):
        return _value(message)  # no field is at fault: the line is not a record
    reads = (
        (f"{label} must be {_words(kind)}", f'SELECT count("{name}") FROM {records.table({name: read_as})}')
        for name, label, read_as, kind in _parts(records.columns)
    )
    makes = (
        (f"{name} cannot be computed from this record", f"SELECT count({text}) FROM {rows}")
        for name, text in fields.items()
    )
    found = ((words, store.fault(query)) for words, query in (*reads, *makes))
    return next((f"{words}: {_value(fault)}" for words, fault in found if fault), message)


def _parts(columns: Mapping[str, str]) -> Iterable[tuple[str, str, str, str]]:
    """Parts of columns that can be checked one by one. A column of observations has one part per field.

    Returns:
        For each part: the column, its name for messages, the type to read the column as, and the type of the part.
    """
    for name, kind in columns.items():
        if kind == OBSERVATION:
            for field in FIELDS:
                yield name, f"the {name}'s {field.name}", f'STRUCT("{field.name}" {field.type})', field.type
        else:
            yield name, name, kind, kind


def _words(kind: str) -> str:
    if kind.startswith("STRUCT"):
        return "a list of objects" if kind.endswith("[]") else "an object"
    word = {"DOUBLE": "number", "BIGINT": "whole number", "BOOLEAN": "truth value"}.get(kind.rstrip("[]"), "text")
    return f"a list of {word}s" if kind.endswith("[]") else f"a {word}"


def _value(message: str) -> str:
    """DuckDB's message without the file and line at its beginning."""
    return re.sub(r'^.*? in file ".*", in line \d+: ', "", message)
