"""What a power failure leaves: everything that was acknowledged, since it was synced before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.server.batches import Journal
from lockstep.server.batches.store import BatchStore
from tests.disks import Synced
from tests.server.batches.inputs import jsonl, line
from tests.server.batches.running import running
from tests.waiting import eventually

LONG: Any = {"max_tokens": 16, "ignore_eos": True}


def test_every_answer_that_was_appended_survives_a_power_failure(
    tmp_path: Path,
) -> None:
    disk = Synced()
    folder = tmp_path / "journals"
    folder.mkdir()
    journal = Journal(folder / "j", "digest", 5, disk)
    for num_kept, index in enumerate((3, 0, 4, 1)):
        journal.append(index, b'{"answer":%d}' % index, is_success=True)
        left = disk.left_of(folder, tmp_path / f"left-{num_kept}")
        again = Journal(left / "j", "digest", 5)
        assert again.num_completed == num_kept + 1
        assert again.has(index)
        again.close()
    journal.close()


async def test_an_uploaded_file_survives_a_power_failure(tmp_path: Path) -> None:
    disk = Synced()
    async with running(tmp_path / "kept", system=disk) as each:
        file = (await each.upload(3)).json()
        left = disk.left_of(tmp_path / "kept" / "files", tmp_path / "left")
        assert (left / file["id"]).read_bytes() == jsonl([line(index) for index in range(3)])


async def test_results_are_on_the_disk_before_the_database_names_them_and_the_journal_goes_last(
    tmp_path: Path,
) -> None:
    """Whatever a power failure cuts off, the answers are in the journal or in a file that the batch names."""
    events: list[str] = []
    disk = Synced(events)
    kept = tmp_path / "kept"
    async with running(kept, system=disk) as each:
        batch_id = (await each.ended(await each.begun(3)))["id"]
        uploaded = (await each.batch(batch_id))["input_file_id"]
        events.clear()

        def traced(statement: str) -> None:
            if statement == "COMMIT":
                events.append(f"COMMIT with {len([*(kept / 'journals').iterdir()])} journals")

        each.store.database.connection.set_trace_callback(traced)
        second = (await each.create(uploaded)).json()["id"]
        found = await each.ended(second)
        each.store.database.connection.set_trace_callback(None)
        left = disk.left_of(kept / "files", tmp_path / "left")
        assert (left / found["output_file_id"]).read_bytes().count(b"\n") == 3
        assert events[-2:] == ["fsync files", "COMMIT with 1 journals"], events
        await eventually(lambda: not [*(kept / "journals").iterdir()])


def test_committed_transactions_survive_a_power_failure(tmp_path: Path) -> None:
    """With FULL, SQLite syncs its log with each transaction; it does that in C, where no test of ours can look."""
    store = BatchStore(tmp_path)
    assert store.database.connection.execute("PRAGMA synchronous").fetchone() == (2,)
    store.close()
