"""Conversion of JSON documents to JSON lines: writes one record per line, which DuckDB reads in bounded memory.

Records are copied without being parsed; only the enclosing lists and objects are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from lockstep.release.formats import Format

Raw = msgspec.Raw
OUTCOMES = ("successful", "errored", "incomplete")
"""Names of the lists of requests in a benchmark of guidellm."""
_CHUNK_BYTES = 1 << 20


class DocumentError(Exception):
    """Records cannot be extracted from a document."""


def write_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Write one record per line.

    Returns:
        Number of records.
    """
    with path.open("wb") as file:
        return sum(bool(file.write(line + b"\n")) for line in lines)


def first_bad_line(path: Path, part: Path, is_bad: Callable[[], bool]) -> int | None:
    """Number, from 1, of the first line of a file that fails a check, found by bisection.

    In total, about as many bytes are checked as the file has.

    Args:
        part: file to which the lines of each check are written. At the end it contains the line that was found.
        is_bad: function that checks `part`.

    Returns:
        Line number; None if no single line fails.
    """
    begin, end = 0, path.stat().st_size
    with path.open("rb") as file:
        while (middle := _line_between(file, begin, end)) > begin:
            _copy(file, begin, middle, part)
            if is_bad():
                end = middle
            else:
                begin = middle
        _copy(file, begin, end, part)
        if not is_bad():
            return None
        file.seek(0)
        return 1 + sum(file.read(min(_CHUNK_BYTES, begin - at)).count(b"\n") for at in range(0, begin, _CHUNK_BYTES))


def _line_between(file: IO[bytes], begin: int, end: int) -> int:
    """Offset of a line start near the middle of a part of a file; `begin` if the part is one line."""
    file.seek((begin + end) // 2)
    file.readline()
    if file.tell() < end:
        return file.tell()
    place = begin
    file.seek(begin)
    while (following := place + len(file.readline())) < end:
        place = following
    return place


def _copy(file: IO[bytes], begin: int, end: int, part: Path) -> None:
    file.seek(begin)
    with part.open("wb") as target:
        for at in range(begin, end, _CHUNK_BYTES):
            target.write(file.read(min(_CHUNK_BYTES, end - at)))


def items_of(value: Raw | bytes, name: str) -> list[Raw]:
    """Entries of a list.

    Raises:
        DocumentError: the value is not a list.
    """
    try:
        return msgspec.json.decode(value, type=list[Raw])
    except msgspec.MsgspecError:
        raise DocumentError(f"{name} is not a list") from None


def one_line(value: Raw | bytes) -> bytes:
    """JSON value without line breaks. They can only occur between tokens, so they are replaced by spaces."""
    return bytes(value).replace(b"\r", b" ").replace(b"\n", b" ")


def lines_of(document: Mapping[str, Raw], found: Format) -> Iterator[bytes]:
    """Records of a document in this format.

    Raises:
        DocumentError: its arrays are missing or have different lengths.
    """
    if found.layout == "arrays":
        return _lines_of_arrays(document, found)
    if found.layout == "benchmarks":
        return _lines_of_benchmarks(document)
    return iter((one_line(msgspec.json.encode(document)),))


def _lines_of_arrays(document: Mapping[str, Raw], found: Format) -> Iterator[bytes]:
    arrays = {column: items_of(document[name], name) for column, name in found.arrays.items() if name in document}
    lengths = {found.arrays[column]: len(array) for column, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        found_lengths = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DocumentError(f"the arrays differ in length: {found_lengths}")
    shared = {name: document[name] for name in found.columns if name in document and name not in arrays}
    head = b"".join(b'"%s":%s,' % (name.encode(), one_line(value)) for name, value in shared.items())
    for place, values in enumerate(zip(*arrays.values(), strict=True)):
        row = b"".join(
            b',"%s":%s' % (name.encode(), one_line(value)) for name, value in zip(arrays, values, strict=True)
        )
        yield b'{%s"place":%d%s}' % (head, place, row)


def _lines_of_benchmarks(document: Mapping[str, Raw]) -> Iterator[bytes]:
    for run, benchmark in enumerate(items_of(document["benchmarks"], "benchmarks")):
        requests = _member(benchmark, "requests", f"benchmarks[{run}]")
        for outcome in OUTCOMES:
            name = f"benchmarks[{run}].requests.{outcome}"
            found = _member(requests, outcome, f"benchmarks[{run}].requests")
            if bytes(found) == b"null":
                continue
            for request in items_of(found, name):
                yield b'{"run":%d,"outcome":"%s","request":%s}' % (run, outcome.encode(), one_line(request))


def _member(value: Raw, name: str, of: str) -> Raw:
    try:
        return msgspec.json.decode(value, type=dict[str, Raw])[name]
    except (msgspec.MsgspecError, KeyError):
        raise DocumentError(f"looks like guidellm's benchmarks.json, but {of} has no {name}") from None
