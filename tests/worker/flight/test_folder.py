"""The manifest of a recording's folder: chained, shared by processes, bounded, and readable after a kill."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.errors import TraceError
from lockstep.worker.flight.content import read_text, write_text
from lockstep.worker.flight.entries import SUFFIX
from lockstep.worker.flight.files import TraceFiles
from lockstep.worker.flight.folder import (
    FolderManifest,
    Listed,
    State,
    chained,
    digest_of,
    manifest_files,
    read_manifest,
)
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import TokenizerPayload
from tests.waiting import HANG_S, until

CHUNK_BYTES = 3_000
NUM_FILES = TraceOptions("").num_files


def manifest_of(folder: Path) -> Path:
    [path] = manifest_files(folder)
    return path


def states(folder: Path) -> dict[str, str]:
    return {name: each.state.value for name, each in read_manifest(manifest_of(folder)).files.items()}


def chunk(seed: int, num_bytes: int = CHUNK_BYTES) -> bytes:
    """Bytes that do not compress, so that files of as many chunks have one size."""
    return random.Random(seed).randbytes(num_bytes)


def begin_files(folder: Path, max_bytes: int, count: int, run: str = "") -> None:
    """Record so many files of one chunk each."""
    recorder = TraceFiles(TraceOptions(str(folder), max_bytes))
    recorder.run = run or recorder.run
    write_files(recorder, range(count))
    recorder.close()


def write_files(recorder: TraceFiles, numbers: range, needs: tuple[str, ...] = ()) -> None:
    for number in numbers:
        recorder.begin(chunk(number), needs)
        until(lambda: not recorder.report().num_queued_bytes)


def text(name: str) -> TokenizerPayload:
    return TokenizerPayload("{}", name, None, None, ())


def test_each_file_is_listed_with_its_size_and_digest(tmp_path: Path) -> None:
    begin_files(tmp_path, 1 << 20, 2)
    for path in tmp_path.glob(f"*{SUFFIX}"):
        data = path.read_bytes()
        expected = Listed(path.name, State.CLOSED, len(data), digest_of(data))
        assert read_manifest(manifest_of(tmp_path)).files[path.name] == expected


def test_a_growing_file_is_listed_though_nothing_more_is_written(tmp_path: Path) -> None:
    recorder = TraceFiles(TraceOptions(str(tmp_path), list_interval_s=0.02))
    recorder.begin(chunk(0))
    recorder.put(chunk(1))

    def is_listed() -> bool:
        for path in tmp_path.glob(f"*{SUFFIX}"):
            listed = read_manifest(manifest_of(tmp_path)).files[path.name]
            return listed.state is State.OPEN and listed.num_bytes == path.stat().st_size > CHUNK_BYTES * 2
        return False

    until(is_listed)
    recorder.close()


def test_every_byte_of_a_manifest_is_under_its_chain(tmp_path: Path) -> None:
    begin_files(tmp_path, 1 << 20, 1)
    path = manifest_of(tmp_path)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(TraceError, match="line"):
            read_manifest(path)


def test_lines_that_were_left_out_or_exchanged_are_refused(tmp_path: Path) -> None:
    begin_files(tmp_path, 1 << 20, 2)
    path = manifest_of(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    for at in range(len(lines) - 1):
        for changed in ([*lines[:at], *lines[at + 1 :]], [*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]]):
            path.write_bytes(b"".join(changed))
            with pytest.raises(TraceError, match=f"line {at + 1} differs from what was written"):
                read_manifest(path)


def test_a_torn_last_line_does_not_count_and_is_written_over(tmp_path: Path) -> None:
    manifest = FolderManifest(tmp_path)
    manifest.put(Listed("a", State.OPEN))
    whole = manifest.path.read_bytes()
    manifest.put(Listed("b", State.OPEN))
    for size in range(len(whole), len(manifest.path.read_bytes())):
        os.truncate(manifest.path, size)
        assert [*read_manifest(manifest.path).files] == ["a"]
        manifest.put(Listed("b", State.OPEN))
        assert [*read_manifest(manifest.path).files] == ["a", "b"]


def test_a_manifest_of_another_schema_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.lsmanifest"
    header = b'{"schema":99,"lockstep":"0.9.0"}'
    path.write_bytes(b"%s %s\n" % (chained(b"", header).hex().encode(), header))
    with pytest.raises(TraceError, match="its schema is 99, this version reads schema 1"):
        read_manifest(path)


def test_long_manifest_is_compacted_without_deleted_files(tmp_path: Path) -> None:
    manifest = FolderManifest(tmp_path, max_bytes=2_000)
    for number in range(200):
        name = f"{number:03}"
        manifest.put(Listed(name, State.OPEN))
        manifest.put(Listed(name, State.CLOSED, 7, "0" * 32))
        if number > 2:
            manifest.put(Listed(f"{number - 3:03}", State.DELETED, 7, "0" * 32))
    assert manifest.path.stat().st_size < 5_000
    read = read_manifest(manifest.path)
    assert [each.file for each in read.live] == ["197", "198", "199"]
    assert read.header.num_left_out + read.num_lines > 590
    assert len(read.header.chain) == 32


APPENDS = """
import sys
from pathlib import Path
from lockstep.worker.flight import folder
manifest = folder.FolderManifest(Path(sys.argv[1]), max_bytes=3_000)
for number in range(150):
    manifest.put(folder.Listed(f"{sys.argv[2]}-{number % 10}", folder.State.CLOSED, number, "0" * 32))
"""


def test_processes_that_append_at_once_keep_one_chain(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", APPENDS, str(tmp_path), name] for name in "abc"]
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait(HANG_S) == 0
    read = read_manifest(manifest_of(tmp_path))
    assert sorted(read.files) == [f"{name}-{number}" for name in "abc" for number in range(10)]
    assert all(each.num_bytes >= 140 for each in read.files.values())
    assert read.header.num_left_out > 0
    assert not list(tmp_path.glob("*.part"))


def test_exactly_as_many_files_are_kept_as_fit_the_bound(tmp_path: Path) -> None:
    """A bound of eight such files: seven and the newest; with a byte less for each, one fewer."""
    begin_files(tmp_path / "one", 1 << 20, 1)
    [one] = (tmp_path / "one").glob(f"*{SUFFIX}")
    size = one.stat().st_size
    for max_bytes, kept in ((NUM_FILES * size, NUM_FILES), (NUM_FILES * (size - 1), NUM_FILES - 1)):
        folder = tmp_path / str(max_bytes)
        begin_files(folder, max_bytes, 3 * NUM_FILES)
        names = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
        assert [int(Path(name).stem[-6:]) for name in names] == [*range(3 * NUM_FILES - kept + 1, 3 * NUM_FILES + 1)]
        assert [each.file for each in read_manifest(manifest_of(folder)).live] == names
        assert [*states(folder).values()].count("deleted") == 3 * NUM_FILES - kept


def test_a_file_that_another_recorder_writes_is_not_deleted(tmp_path: Path) -> None:
    other = TraceFiles(TraceOptions(str(tmp_path), 1 << 20))
    other.run = "20200101-000000-1-0000"
    write_files(other, range(1))
    begin_files(tmp_path, 4 * CHUNK_BYTES, 9)
    assert len(list(tmp_path.glob(f"{other.run}*"))) == 1
    other.close()
    begin_files(tmp_path, 4 * CHUNK_BYTES, 9, run="20990101-000000-1-0000")
    assert not list(tmp_path.glob(f"{other.run}*"))
    assert states(tmp_path)[f"{other.run}-000001{SUFFIX}"] == "deleted"


def test_a_text_is_deleted_with_the_last_file_that_needs_it(tmp_path: Path) -> None:
    """A text that one file needs, a text that no file needs, and a text that was kept just now."""
    recorder = TraceFiles(TraceOptions(str(tmp_path), NUM_FILES * (CHUNK_BYTES + 200)))
    write_files(recorder, range(1))
    names = [write_text(recorder.manifest, text(name)) for name in ("needed", "unneeded")]
    write_files(recorder, range(7))
    write_files(recorder, range(1), (f"{names[0]}.lstext",))
    write_files(recorder, range(4))
    late = write_text(recorder.manifest, text("late"))
    assert {path.stem for path in tmp_path.glob("*.lstext")} == {names[0], late}
    write_files(recorder, range(12), (f"{late}.lstext",))
    recorder.close()
    assert {path.stem for path in tmp_path.glob("*.lstext")} == {late}
    assert read_text(tmp_path, late) == text("late")
    assert [states(tmp_path)[f"{name}.lstext"] for name in (*names, late)] == ["deleted", "deleted", "closed"]


def test_texts_count_within_the_bound(tmp_path: Path) -> None:
    max_bytes = NUM_FILES * (CHUNK_BYTES + 200)
    recorder = TraceFiles(TraceOptions(str(tmp_path), max_bytes))
    large = write_text(recorder.manifest, text(random.Random(1).randbytes(2 * CHUNK_BYTES).hex()))
    write_files(recorder, range(12), (f"{large}.lstext",))
    recorder.close()
    held = [path.stat().st_size for path in tmp_path.iterdir() if path.suffix in (SUFFIX, ".lstext")]
    assert sum(held) <= max_bytes
    assert 2 < len(held) < NUM_FILES


def test_a_manifest_of_another_machine_is_removed_when_nothing_of_it_is_left(tmp_path: Path) -> None:
    begin_files(tmp_path, 4 * CHUNK_BYTES, 2)
    own = manifest_of(tmp_path)
    own.rename(tmp_path / "0000000000000000.lsmanifest")
    begin_files(tmp_path, 4 * CHUNK_BYTES, 9, run="20990101-000000-1-0000")
    assert manifest_files(tmp_path) == [own]


def test_a_manifest_is_text_that_anybody_can_read(tmp_path: Path) -> None:
    begin_files(tmp_path, 1 << 20, 1)
    header, *lines = [json.loads(line.split(" ", 1)[1]) for line in manifest_of(tmp_path).read_text().splitlines()]
    assert header["schema"] == 1
    assert [line["state"] for line in lines] == ["open", "open", "closed"]
