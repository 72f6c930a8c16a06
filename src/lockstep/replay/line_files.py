"""Files of lines: what the recorders of the cluster write, zstd frames of JSON lines below a header and under marks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from lockstep.cluster.marked_lines import MARK_BEGINNING, Mark, Marker
from lockstep.cluster.plan_recorder import PlanHeader
from lockstep.cluster.route_recorder import RouteHeader
from lockstep.errors import TraceError
from lockstep.replay.trace import read_frames
from lockstep.replay.trace_integrity import Part

Value = TypeVar("Value")
Header = TypeVar("Header", PlanHeader, RouteHeader)


class Line(NamedTuple):
    """One line of a file."""

    path: Path
    number: int
    """From 1, as ``zstd -dc FILE | sed -n NUMBERp`` counts."""
    data: bytes

    def decoded(self, decode: Callable[[bytes], Value], what: str) -> Value:
        """The line's value; TraceError: it is none of what is recorded there."""
        try:
            return decode(self.data)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{self.path}: line {self.number} is no {what} of ours: {error}") from None


def lines_of(path: Path) -> Iterator[Line | None]:
    """The lines of a file that a mark covers, the header before its mark is read; None: it is cut here.

    Raises:
        TraceError: a line is not as it was recorded.
    """
    marker, number, lines, rest = Marker(), 0, list[Line](), b""
    decode: Callable[[bytes], Mark] = msgspec.json.Decoder(Mark).decode
    is_whole = True
    for frame in read_frames(path):
        *whole, rest = frame.data.split(b"\n")
        is_whole = frame.is_whole
        for data in whole:
            number += 1
            line = Line(path, number, data)
            if not data.startswith(MARK_BEGINNING):
                lines.append(line)
                if number == 1:
                    yield line  # the number of its schema comes first: other schemas may have other marks
                continue
            if line.decoded(decode, "mark").digest != marker.follow(b"".join([each.data + b"\n" for each in lines])):
                raise TraceError(f"{path}: lines {number - len(lines)} to {number} are not as they were recorded")
            yield from (each for each in lines if each.number > 1)
            lines.clear()
        if is_whole and rest:
            raise TraceError(f"{path}: line {number + 1} is not as it was recorded: it does not end")
    if is_whole and lines:
        raise TraceError(f"{path}: lines {lines[0].number} to {number} are not as they were recorded: no mark follows")
    if lines or rest or not is_whole:
        yield None


def header_of(line: Line, kind: type[Header], schema: int, what: str) -> Header:
    """The header of a file, which is its first line.

    Args:
        schema: version of its form that is read here.
        what: what it is a recording of.

    Raises:
        TraceError: it is none, or of another version.
    """
    header = line.decoded(msgspec.json.Decoder(kind).decode, f"header of {what}")
    if header.schema != schema:
        raise TraceError(
            f"{line.path}: its schema is {header.schema}, and this version reads {schema}; "
            f"it was recorded by lockstep {header.lockstep}"
        )
    return header


def part_of(path: Path, kind: type[Header], schema: int, what: str) -> Part:
    """The file as a part of its recording. It has no mark of its end, so it counts as whole if its last line is.

    Raises:
        TraceError: it is damaged, of another version, or no such recording.
    """
    header: Header | None = None
    is_cut = False
    for line in lines_of(path):
        if line is not None and header is None:
            header = header_of(line, kind, schema, what)
        is_cut = line is None
    num_bytes = path.stat().st_size
    if header is None:
        return Part(path, "", 0, num_bytes)
    return Part(path, header.run, header.file, num_bytes, header.gap, not is_cut)
