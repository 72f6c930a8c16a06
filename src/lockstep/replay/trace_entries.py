"""A recording's file as its entries, checked: version, order, where it breaks off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep.core.policy import SchedulerConfig
from lockstep.errors import ConfigError, TraceError
from lockstep.replay.trace_file import Frame, read_frames
from lockstep.worker.flight.entries import Entry, EntryReader, Header
from lockstep.worker.flight.format import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class TracedEngine:
    """One engine of a recorded device."""

    number: int
    """Its number in the recording, from 0."""
    key: str
    """The replica that it is, as its worker calls it."""
    name: str
    """Of its model."""
    fingerprint: str
    """Of its artifact's content."""
    config: SchedulerConfig
    environment: Mapping[str, str]
    """What the bits of its answers depend on."""
    bytes_per_block: int


class Cut(NamedTuple):
    """A file that was not written to its end, as when its process was killed; what it holds was read."""

    path: Path
    offset: int
    """Of the frame within which it ends; its size, if it ends after one."""


def engine_of(facts: Mapping[str, Any]) -> TracedEngine:
    """What an entry says of an engine.

    Raises:
        TraceError: it does not say it.
    """
    try:
        config = SchedulerConfig(**facts["config"])
        return TracedEngine(
            int(facts["number"]),
            facts["key"],
            facts["name"],
            facts["fingerprint"],
            config,
            facts["environment"],
            int(facts["geometry"]["bytes_per_block"]),
        )
    except (KeyError, TypeError, ConfigError) as error:
        raise TraceError(f"an engine of the recording cannot be made: {error!r}") from error


def read_entries(path: Path) -> Iterator[Entry | Cut]:
    """The entries of one file, and a `Cut` where it breaks off.

    Raises:
        TraceError: it is damaged, of a newer version, or no recording.
    """
    reader = EntryReader()
    frame: Frame | None = None
    is_first = True
    for frame in read_frames(path):
        try:
            for entry in reader.read(frame.data):
                if is_first:
                    _check_header(path, entry)
                    is_first = False
                yield entry
        except (IndexError, ValueError, TypeError, msgspec.MsgspecError) as error:
            if frame.is_whole:
                where = f"{path}: byte {reader.offset} of the frame at byte {frame.offset}"
                raise TraceError(f"{where} is no entry of a recording: {error}") from error
    if frame is None or not frame.is_whole:
        yield Cut(path, 0 if frame is None else frame.offset)
    elif not reader.has_ended:
        yield Cut(path, path.stat().st_size)


def _check_header(path: Path, entry: Entry) -> None:
    if not isinstance(entry, Header) or not {"schema", "run", "file"} <= entry.facts.keys():
        raise TraceError(f"{path}: it does not begin as a recording does")
    schema = entry.facts["schema"]
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA_VERSION:
        version = entry.facts.get("lockstep")
        raise TraceError(
            f"{path}: its schema is {schema}, and this version reads 1 to {SCHEMA_VERSION}; "
            f"it was recorded by lockstep {version}"
        )
