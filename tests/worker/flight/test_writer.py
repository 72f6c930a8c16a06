"""Files of every kind of recording have a header, the state that they begin with, and an end."""

from __future__ import annotations

from pathlib import Path

from lockstep.worker.flight.entries import SUFFIX, End, Header, Idle, Turn
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.flight.writer import RecordingWriter
from tests.replay.recordings import entries_in, files_of

TURN = Turn(0, 1, 2, True)


def written(folder: Path) -> RecordingWriter:
    return RecordingWriter(TraceOptions(str(folder)), SUFFIX, "a key")


def test_each_file_has_a_header_its_state_and_an_end(tmp_path: Path) -> None:
    writer = written(tmp_path)
    for gap in ("", "too large"):
        writer.end(goes_on=True)
        writer.begin(lambda: writer.chunk.put(Idle()), gap=gap)
        writer.chunk.put(TURN)
        writer.flush()
    writer.close()
    first, second = map(entries_in, files_of(tmp_path))
    assert first[1:] == [Idle(), TURN, End((), goes_on=True)]
    assert second[1:] == [Idle(), TURN, End((), goes_on=False)]
    headers = [entries[0] for entries in (first, second)]
    assert [(each.file, each.gap, each.key_name) for each in headers if isinstance(each, Header)] == [
        (1, "", "a key"),
        (2, "too large", "a key"),
    ]


def test_a_writer_without_a_file_writes_nothing_and_ends(tmp_path: Path) -> None:
    writer = written(tmp_path)
    writer.chunk.put(TURN)
    writer.close()
    assert files_of(tmp_path) == []
