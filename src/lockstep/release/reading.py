"""Input files to tables of observations: the content of a file shows its format, and DuckDB reads it.

Lines, CSV and Parquet are streamed and may have any size; a file that is one JSON document has a maximum size.
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

_PLACE = re.compile(r'Malformed JSON in file ".*", at byte (\d+) in line \d+: ')
_CSV_LINE = re.compile(r"CSV Error on Line: (\d+)(?:; )?")
LARGE = {field.name for field in FIELDS if field.type.endswith("[]")} | {"text"}
OBSERVATION = "STRUCT(" + ", ".join(f'"{field.name}" {field.type}' for field in FIELDS) + ")"
SHARED: Mapping[str, str] = {field.name: field.type for field in FIELDS if field.name != "side"}
"""Fields of a pair that hold for both of its sides."""
MAX_NAMES = 1_000
"""Names of members that are looked at in a file."""
PAIR: Mapping[str, str] = {**SHARED, "baseline": OBSERVATION, "candidate": OBSERVATION}


@dataclass(frozen=True, slots=True)
class Source:
    """One file as it was read."""

    path: Path
    format: str
    side: Side | None
    """None: it holds both."""
    num_rows: int
    unread: tuple[str, ...] = ()
    """Members of its records that no field of an observation is made of, sorted."""


@dataclass(frozen=True, slots=True)
class _Records:
    """Records that DuckDB can read: a table function, and the columns that are wanted of it."""

    content: Content
    columns: Mapping[str, str]
    path: Path
    """Of its lines, or of the file itself."""

    def table(self, columns: Mapping[str, str] | None = None) -> str:
        """SQL of the table; with some of its columns only."""
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
        """The columns of a CSV in its order, those that are not wanted as text."""
        return ((name, wanted.get(name, "VARCHAR")) for name in self.content.records[0])


def read(
    store: Store, path: Path, side: Side | None, given: Path | None = None
) -> tuple[Source, dict[str, Any] | None]:
    """Read a file as the view of its side, or of both.

    Args:
        side: the side of the file; None: the file itself has both, as pairs, as two lists, or by a field.
        given: the file's name in messages and in the source, if it is a copy of another.

    Returns:
        What it was, and the policy that it holds, if any.

    Raises:
        EvidenceError: it cannot be read, is empty, or of an unknown version.
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
        raise EvidenceError(f"{path}: holds both sides; give it alone")
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
        raise EvidenceError(f"{path}: no observation in it")
    return Source(path, name, side, count, unread), policy


def _policy(content: Content) -> dict[str, Any] | None:
    value = content.records[0].get("policy")
    if isinstance(value, msgspec.Raw):
        value = msgspec.json.decode(value)
    if value is not None and not isinstance(value, dict):
        raise EvidenceError(f"{content.given}: its policy is no object of fields")
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, msgspec.Raw) and bytes(memoryview(value)[:1]) == b"["


# -- layouts ----------------------------------------------------------------------------------------------------------


def _read_lists(store: Store, content: Content, document: Members) -> tuple[str, ...]:
    """A document with a list of observations for each side; one that is absent is empty."""
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
    """Pairs of observations, a document of them or one a line; what stands beside both sides holds for both."""
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
    """Read records of one format, of one side, or of both if each record has its side; returns their file."""
    is_shared = len(sides) > 1
    if is_shared and found is not OWN:
        raise EvidenceError(
            f"{content.given}: {found.tool}: it holds one side only; give two files, the baseline's and the candidate's"
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
    """The file that holds the records, a line each."""
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
    """The format whose members a record has, the first record that is of any.

    Raises:
        EvidenceError: of none, or of a version that lacks what is needed.
    """
    for record in content.records:
        for each in FORMATS:
            if not all(name in record for name in each.tells) or (content.fault and each.layout != "log"):
                continue
            if each.layout in ("arrays", "benchmarks") and content.kind != "document":
                raise EvidenceError(f"{content.given}: several runs of {each.tool}; give a file of one")
            missing = next((name for name in each.needs if not _has(_first_record(record, each), name)), None)
            if missing is not None:
                advice = f"; {each.hint}" if each.hint else "; its version is not known here"
                raise EvidenceError(f"{content.given}: looks like {each.tool}, but has no {missing}{advice}")
            return each
    if content.fault:
        raise EvidenceError(f"{content.given}: {content.fault}")
    members = content.records[0]
    if not members.keys() & set(NAMES):
        near = (did_you_mean(name, NAMES) for name in list(members)[:8])
        question = next((f"; {text}" for text in near if text), "")
        raise EvidenceError(
            f"{content.given}: of no known format; its first record has {listed(list(members)) or 'nothing'}{question}"
        )
    return OWN


def _parquet_types(store: Store, content: Content) -> dict[str, str]:
    """Types of the columns by their names.

    Raises:
        EvidenceError: the file is damaged, or no column is a field of an observation.
    """
    query = f"DESCRIBE SELECT * FROM read_parquet({quoted(str(content.path))})"
    if told := store.fault(query):
        told = told.replace(str(content.path), str(content.given))
        raise EvidenceError(f"{content.given}: not whole, or damaged: {told}")
    types = {name: kind for name, kind, *_ in store.rows(query)}
    if not types.keys() & set(NAMES):
        found = f"none of its columns ({listed(list(types))}) is a field of an observation"
        raise EvidenceError(f"{content.given}: {found}; those are {listed(NAMES)}")
    return types


def _first_record(record: Members, found: Format) -> Any:
    """The first record to which a format's ``needs`` apply."""
    if found.layout != "benchmarks":
        return record
    return next((msgspec.json.decode(line) for line in lines_of(record, found)), None)


def _has(record: Any, name: str) -> bool:
    """True if a record has a member, looked for in the first entry of lists."""
    if isinstance(record, msgspec.Raw):
        record = msgspec.json.decode(record)
    first, _, rest = name.partition(".")
    if isinstance(record, list):
        record = record[0] if record else None
    if not isinstance(record, Mapping) or first not in record:
        return False
    return not rest or _has(record[first], rest)


def _names_in(store: Store, lines: Path, *members: str) -> set[str]:
    """Names of the members of all records of a file of lines, and of what these members of a record hold."""
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
    """Names that are no fields.

    Raises:
        EvidenceError: one is nearly a field's name.
    """
    names = sorted(set(found) - {*NAMES, "policy"})
    for name in names:
        question = did_you_mean(name, NAMES)
        if question and len(name) > 2:
            raise EvidenceError(f"{content.given}: an observation has the field {name!r}, which is unknown; {question}")
    return tuple(names)


# -- tables and views -------------------------------------------------------------------------------------------------


def _keep(store: Store, records: _Records, name: str, fields: Mapping[str, str], found: Format = OWN) -> str:
    """Write the fields of records into a file that can be read again and again, column by column; SQL of its table."""
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
    """Fields that no record has: what is made of them need not be computed."""
    return {
        name
        for name in LARGE & fields.keys()
        if not store.rows(f"SELECT 1 FROM {table} WHERE ({fields[name]}) IS NOT NULL LIMIT 1")
    }


def _check_sides(
    store: Store, content: Content, table: str, fields: Mapping[str, str], sides: tuple[Side, ...]
) -> None:
    """Refuse observations that are of no side, or of the other one."""
    if "side" not in fields:
        if len(sides) > 1:
            right = "give two files, the baseline's and the candidate's, or a field side"
            raise EvidenceError(f"{content.given}: its observations have no side; {right}")
        return
    known = ", ".join(f"'{side}'" for side in sides)
    wrong = "side IS NULL OR" if len(sides) > 1 else "side IS NOT NULL AND"
    [found] = store.rows(f"SELECT count(*), min(side) FROM {table} WHERE {wrong} side NOT IN ({known})")
    if found[0]:
        told = f"{found[0]:,} observations" + (f" say of their side {found[1]!r}" if found[1] else " have no side")
        advice = "" if found[1] else "; or give two files, one of each"
        right = " or ".join(sides) + advice if len(sides) > 1 else f"it is given as the {sides[0]}'s file"
        raise EvidenceError(f"{content.given}{_place_of_side(content, sides)}: {told}; {right}")


def _place_of_side(content: Content, sides: tuple[Side, ...]) -> str:
    """``:LINE`` of the first line without a right side; empty: the file has no line for each observation."""
    if content.kind != "lines" or content.fault:
        return ""
    right = sides if len(sides) > 1 else (*sides, None)
    with content.path.open("rb") as file:
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        wrong = (number for number, line in lines if msgspec.json.decode(line).get("side") not in right)
        return f":{next(wrong)}"


def _check_types(store: Store, records: _Records) -> None:
    """Refuse columns of a table that are of another kind than their fields: texts in place of numbers."""
    types = records.content.records[0]
    for name, kind in records.columns.items():
        is_text = types[name].startswith("VARCHAR") and kind != "VARCHAR"
        if is_text or store.fault(f"SELECT CAST(CAST(NULL AS {types[name]}) AS {kind})"):
            raise EvidenceError(f"{records.content.given}: {name} is {types[name]}; it has to be {_words(kind)}")


# -- faults -----------------------------------------------------------------------------------------------------------


def _located(store: Store, records: _Records, fields: Mapping[str, str], found: Format, error: EvidenceError) -> str:
    """The message on records that cannot be read: ``FILE:LINE: message`` where they are lines of the given file."""
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
        told = _fault(store, records, fields, _rows(records, found), cause)
        in_csv = _CSV_LINE.search(told)
        place = f":{in_csv[1]}" if in_csv else ""
        return f"{content.given}{place}: {_CSV_LINE.sub('', told)}"
    told = _fault(store, part, fields, _rows(part, found), last)
    if found.layout == "log":
        number = _line_of_record(content.path, number)
    elif records.path != content.path:
        return f"{content.given}: record {number}: {told}"
    return f"{content.given}:{number}: {told}"


def _line_of_record(path: Path, record: int) -> int:
    """Number of the line of a log that holds its n-th record."""
    with path.open("rb") as file:
        numbers = (number for number, line in enumerate(file, 1) if line.startswith(b"{"))
        return next(islice(numbers, record - 1, None))


def _fault(store: Store, records: _Records, fields: Mapping[str, str], rows: str, error: BaseException) -> str:
    """DuckDB's message, with the name of the member or the field that it is about."""
    told = sentence_of(error, {records.path: records.content.given, records.content.path: records.content.given})
    if "Malformed" in told:
        return "not JSON, or not whole: " + _PLACE.sub(r"at byte \1: ", told)
    if "maximum_object_size" in told:
        return f"a line of more than {MAX_LINE_BYTES >> 20} MiB, which is too long for an observation"
    anything = next(iter(records.columns))
    if store.fault(f'SELECT count("{anything}") FROM {records.table({anything: "VARCHAR"})}'):
        return _value(told)  # of no field: a record is none
    reads = (
        (f"{label} has to be {_words(kind)}", f'SELECT count("{name}") FROM {records.table({name: read_as})}')
        for name, label, read_as, kind in _parts(records.columns)
    )
    makes = ((f"{name} cannot be made of it", f"SELECT count({text}) FROM {rows}") for name, text in fields.items())
    found = ((words, store.fault(query)) for words, query in (*reads, *makes))
    return next((f"{words}: {_value(fault)}" for words, fault in found if fault), told)


def _parts(columns: Mapping[str, str]) -> Iterable[tuple[str, str, str, str]]:
    """Columns, a part for each field of one of observations: name, words, type to read it as, type of the part."""
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
    """DuckDB's message, from the value on."""
    return re.sub(r'^.*? in file ".*", in line \d+: ', "", message)
