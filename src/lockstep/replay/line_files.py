"""Files of lines: what the recorders of the cluster write, zstd frames of JSON lines below a header, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from lockstep.cluster.plan_recorder import PlanHeader
from lockstep.cluster.route_recorder import RouteHeader
from lockstep.errors import TraceError
from lockstep.replay.trace import read_frames
from lockstep.replay.wholeness import Part

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
    """The whole lines of a file; None: it is cut here."""
    number = 0
    for frame in read_frames(path):
        *lines, rest = frame.data.split(b"\n")
        for data in lines:
            number += 1
            yield Line(path, number, data)
        if rest or not frame.is_whole:
            yield None


def header_of(line: Line, kind: type[Header], newest: int, what: str) -> Header:
    """The header of a file, which is its first line.

    Args:
        newest: version of its form that is read here; older ones are too.
        what: what it is a recording of.

    Raises:
        TraceError: it is none, or of a newer version.
    """
    header = line.decoded(msgspec.json.Decoder(kind).decode, f"header of {what}")
    if header.schema > newest:
        raise TraceError(
            f"{line.path}: recorded by lockstep {header.lockstep} in version {header.schema} of the format; "
            f"this one reads up to {newest}"
        )
    return header


def part_of(path: Path, kind: type[Header], newest: int, what: str) -> Part:
    """The file as a part of its recording. Nothing says that it was closed: it is whole where a line ends it.

    Raises:
        TraceError: it is damaged, of a newer version, or no such recording.
    """
    header: Header | None = None
    is_cut = False
    for line in lines_of(path):
        if line is not None and header is None:
            header = header_of(line, kind, newest, what)
        is_cut = line is None
    num_bytes = path.stat().st_size
    if header is None:
        return Part(path, "", 0, num_bytes)
    return Part(path, header.run, header.file, num_bytes, header.gap, not is_cut)
