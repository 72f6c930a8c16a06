"""Invalid, damaged or incomplete recordings are refused with one sentence and a location."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from msgspec.structs import replace

from lockstep.cli.main import invoke
from lockstep.core.request import Request as CoreRequest
from lockstep.errors import TraceError
from lockstep.replay.live import workload_of
from lockstep.replay.trace import STEPS, CutFile, open_trace, read_entries, read_frames
from lockstep.replay.verify import verify
from lockstep.worker.flight.chunks import ChunkWriter
from lockstep.worker.flight.entries import SCHEMA_VERSION, Added, CacheReset, Entry, Turn, ids_of, runs_of
from tests.replay.recordings import files_of, record, rewrite, rewrite_entries


def chunk(entry: Any) -> bytes:
    writer = ChunkWriter()
    writer.put(entry)
    return writer.take()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    [path] = files_of(record(tmp_path_factory.mktemp("recorded"), 12))
    return path.read_bytes()


@pytest.fixture
def path(whole: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "one.lstrace"
    path.write_bytes(whole)
    return path


def faulty(path: Path) -> str:
    with pytest.raises(TraceError) as raised:
        verify(open_trace(path))
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_a_newer_version_is_refused(path: Path) -> None:
    def newer(entries: list[Entry]) -> None:
        entries[0] = replace(entries[0], schema=SCHEMA_VERSION + 1)

    rewrite_entries(path, newer)
    assert f"its schema is {SCHEMA_VERSION + 1}, this version reads schema {SCHEMA_VERSION}" in faulty(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x28\xb5\x2f\xfd", b"x" * 100])
def test_a_file_that_is_not_a_recording_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert faulty(path)


def test_invalid_bytes_in_a_frame_are_refused(path: Path) -> None:
    path.write_bytes(zstandard.compress(b"[1, 2, 3]"))
    assert "not an entry of a recording" in faulty(path)


def test_a_directory_without_recordings_is_rejected_with_the_expected_extension(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"\.lstrace"):
        open_trace(tmp_path)
    assert invoke(["replay", "--verify", str(tmp_path)]) == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "cannot read the file" in faulty(tmp_path / "none.lstrace")


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_a_cut_file_is_read_up_to_its_end(path: Path, whole: bytes, share: float) -> None:
    path.write_bytes(whole[: int(share * len(whole))])
    entries = list(read_entries(path, STEPS))
    assert isinstance(entries[-1], CutFile)
    found = verify(open_trace(path)) if len(entries) > 1 else None
    assert found is None or found.is_identical


def test_a_damaged_frame_is_reported_with_its_offset(path: Path, whole: bytes) -> None:
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0x10
    path.write_bytes(damaged)
    message = faulty(path)
    assert "the frame at byte 0 is damaged" in message


def test_a_file_that_is_not_zstd_is_rejected(path: Path) -> None:
    path.write_text('{"requests": []}')
    assert "not a recording" in faulty(path)


def test_an_oversized_frame_is_refused_in_bounded_memory(path: Path) -> None:
    path.write_bytes(zstandard.compress(bytes(64 << 20)))
    with pytest.raises(TraceError, match=f"{path.name}: the frame at byte 0 has more than 1048576 bytes"):
        list(read_frames(path, max_bytes=1 << 20))


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff",
        chunk(Turn(9, 1, 0, True)),
        chunk(CacheReset(9, 0)),
        chunk([8, 0, 0, 0, "no reason", False]),
        chunk([6, 0, 0, 0, {"num_prompt_tokens": 1}, 0, [1, 1 << 40]]),
        chunk([9, 0, 0, [0, -1]]),
        chunk([2, 0, "a", "a", "", "none", {}, 0]),
        chunk([2, 0, "a", "a", "", {"block_size": 0, "num_blocks": 1, "max_model_len": 2}, {}, 0]),
        b"\x01\0\0\0\x80",
    ],
)
def test_impossible_entries_are_refused(path: Path, damage: bytes) -> None:
    rewrite(path, lambda held: held.extend(damage))
    with pytest.raises(TraceError):
        verify(open_trace(path))


def test_a_sequence_of_an_unknown_engine_is_refused_by_every_reader(path: Path) -> None:
    added = Added.of(9, 0, 0, CoreRequest(1, 1), 0, ())

    def append(entries: list[Entry]) -> None:
        entries.insert(-1, added)

    rewrite_entries(path, append)
    for read in (verify, workload_of):
        with pytest.raises(TraceError, match="an entry names engine 9, which its file does not define"):
            read(open_trace(path))


def test_an_unknown_engine_is_rejected_with_the_recorded_ones(path: Path) -> None:
    """Engines are numbered in the order of their first use, which depends on the speed of the recorded worker."""
    with pytest.raises(TraceError, match="no engine 7; its engines are ") as raised:
        workload_of(open_trace(path), 7)
    numbered = re.findall(r"(\d+) \((\w+)\)", str(raised.value))
    assert [number for number, _ in numbered] == ["0", "1"]
    assert {name for _, name in numbered} == {"alpha", "beta"}


def test_execution_needs_content(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["replay", "--execute", str(path), "--model", "stub://alpha"]) == 2
    assert "record with --trace-content" in capsys.readouterr().err
    assert invoke(["replay", "--execute", str(path)]) == 2
    assert "--model SOURCE" in capsys.readouterr().err
    assert invoke(["replay", "--execute", str(path), "--verify", str(path)]) == 2
    assert invoke(["replay", "--verify", str(path), "--model", "stub://alpha"]) == 2


def test_ids_are_encoded_as_runs() -> None:
    assert runs_of([5, 6, 7, 2, 3]) == (5, 3, 2, 2)
    assert ids_of((5, 3, 2, 2)) == (5, 6, 7, 2, 3)
    assert runs_of([]) == ids_of(()) == ()


def test_the_encoding_of_a_chunk() -> None:
    entries = bytes([0xDD, 0, 0, 0, 1, 0x95, 13, 0, 0xCD, 1, 44, 7, 0xC3])
    digest = bytes.fromhex("196549f79dc19a296bf1c49ecdda03d5")
    assert chunk(Turn(0, 300, 7, True)) == bytes([13, 0, 0, 0]) + entries + digest


def test_a_recording_is_read_entry_by_entry(path: Path) -> None:
    entries = read_entries(path, STEPS)
    first = next(entries)
    assert msgspec.msgpack.encode(first)
    assert any(isinstance(entry, Turn) for entry in entries)
