"""Session records: a store opens with any files in their folder, and reads the valid ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.engine.kv_files import BlockFiles
from lockstep.engine.kv_records import SessionRecord, SessionRecords

ENVIRONMENT = b"e" * 16


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[BlockFiles]:
    files = BlockFiles(tmp_path, 1 << 20)
    yield files
    files.close()


def written(tier: BlockFiles, count: int) -> SessionRecords:
    records = SessionRecords(tier)
    for number in range(count):
        for name in records.put(SessionRecord("m", f"s{number}", ENVIRONMENT, (bytes([number]) * 16,), 0.0)):
            records.write(name)
    return records


def names(records: SessionRecords) -> list[str]:
    return [record.session_id for record in records.of(ENVIRONMENT)]


def test_records_survive_a_restart(tier: BlockFiles) -> None:
    written(tier, 3)
    assert sorted(names(SessionRecords(tier))) == ["s0", "s1", "s2"]


def test_other_files_in_the_folder_are_removed_or_ignored(tier: BlockFiles) -> None:
    written(tier, 1)
    folder = tier.folder / "sessions"
    [record] = folder.iterdir()
    (folder / "half.part").write_bytes(record.read_bytes())
    (folder / ("0" * 32)).write_bytes(record.read_bytes())
    (folder / "noise").write_bytes(b"\xff")
    (folder / "a folder").mkdir()
    assert names(SessionRecords(tier)) == ["s0"]
    assert {path.name for path in folder.iterdir()} == {record.name, "a folder"}


def test_a_store_works_without_records_if_their_folder_cannot_be_created(
    tier: BlockFiles, caplog: pytest.LogCaptureFixture
) -> None:
    (tier.folder / "sessions").write_bytes(b"somebody's file")
    records = SessionRecords(tier)
    assert names(records) == []
    assert "cannot be read" in caplog.text
    for name in records.put(SessionRecord("m", "s", ENVIRONMENT, (), 0.0)):
        records.write(name)
    assert names(records) == ["s"]


def test_the_number_of_records_read_is_limited(tier: BlockFiles) -> None:
    written(tier, 5)
    records = SessionRecords(tier, max_records=2)
    assert len(names(records)) == len(list((tier.folder / "sessions").iterdir())) == 2
    assert tier.num_bytes == (5 + 2) * 4096, "what is removed was not counted"
