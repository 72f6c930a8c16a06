"""Batches over restarts: each request is answered once, in order, however the server ended."""

from __future__ import annotations

import json
import signal
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import openai
import pytest

from lockstep.errors import ConfigError, InvalidParameterError, QueueFullError, StoredFileNotFoundError
from lockstep.server.batches.schema import Batch, StoredFile
from lockstep.server.batches.store import BatchStore, StoreLimits
from tests.server.batches.inputs import CHAT, created, ended, jsonl, line, results
from tests.server.process import IN_THREAD, ServerProcess
from tests.waiting import HANG_S, until

NAMED = ("--served-model-name", "pocket", "--max-batch-requests", "4")
LONG: Any = {"max_tokens": 12, "ignore_eos": True}


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=HANG_S)


def completed(client: openai.OpenAI, batch: Batch | openai.types.Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    return counts.completed


def break_off(folder: Path, number: signal.Signals, source: str, num_requests: int, at: int) -> openai.types.Batch:
    """End a server by a signal when it has answered so many requests of a batch, and not all."""
    with ServerProcess(source, *IN_THREAD, *NAMED, "--batch-dir", str(folder)) as server:
        server.wait_ready()
        with client_of(server) as client:
            batch = created(client, jsonl([line(index, **LONG) for index in range(num_requests)]))
            until(lambda: completed(client, batch) >= at)
            server.signal(number)
        code = server.wait()
        assert code == (0 if number == signal.SIGTERM else -number)
    return batch


def check_whole(folder: Path, batch: openai.types.Batch, source: str, num_requests: int) -> None:
    """Serve the folder again: the batch comes to its end, and each of its requests has one answer, in order."""
    with ServerProcess(source, *IN_THREAD, *NAMED, "--batch-dir", str(folder)) as server:
        server.wait_ready()
        with client_of(server) as client:
            whole = ended(client, batch)
            assert whole.status == "completed"
            answered = results(client, whole.output_file_id)
            assert [each["custom_id"] for each in answered] == [f"request-{index}" for index in range(num_requests)]
            assert whole.error_file_id is None
            answered_again = server.stderr.count("endpoint=/v1/chat/completions status=200")
    assert 0 < answered_again < num_requests, "answers from before the restart were made again"
    assert not list((folder / "journals").iterdir())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_batch_goes_on_where_the_server_ended(tmp_path: Path, number: signal.Signals) -> None:
    batch = break_off(tmp_path, number, "stub://alpha?step_ms=20", 40, 4)
    [journal] = (tmp_path / "journals").iterdir()
    if number == signal.SIGKILL:
        with journal.open("ab") as file:
            file.write(b'39 1 {"id": "half of a li')
    check_whole(tmp_path, batch, "stub://alpha", 40)


@pytest.mark.slow
def test_a_batch_of_a_thousand_survives_several_kills(tmp_path: Path) -> None:
    with ServerProcess("pocket://", *NAMED, "--batch-dir", str(tmp_path)) as server:
        server.wait_ready()
        with client_of(server) as client:
            batch = created(client, jsonl([line(index, **LONG) for index in range(1_000)]))
            until(lambda: completed(client, batch) >= 200)
            server.signal(signal.SIGKILL)
        server.wait()
    for at in (450, 700):
        with ServerProcess("pocket://", *NAMED, "--batch-dir", str(tmp_path)) as server:
            server.wait_ready()
            with client_of(server) as client:
                until(lambda at=at: completed(client, batch) >= at)  # type: ignore[misc]  # a default binds it
                assert client.batches.retrieve(batch.id).status == "in_progress"
                server.signal(signal.SIGKILL)
            server.wait()
    check_whole(tmp_path, batch, "pocket://", 1_000)


def test_a_batch_that_comes_while_the_model_loads_is_answered(tmp_path: Path) -> None:
    with ServerProcess("stub://alpha?load_ms=1500", *IN_THREAD, *NAMED) as server:
        server.wait_listening()
        with client_of(server) as client:
            batch = created(client, jsonl([line(0), line(1)]))
            assert ended(client, batch).status == "completed"


def stored(number: int, size: int = 2) -> StoredFile:
    return StoredFile(f"file-{number}", size, number, f"{number}.jsonl", "batch")


def batch_of(number: int, file_id: str = "file-0") -> Batch:
    return Batch(f"batch_{number}", CHAT, file_id, "24h", number, number + 86_400)


async def put(store: BatchStore, folder: Path, file: StoredFile, tenant: str = "a") -> None:
    source = folder / "source"
    source.write_bytes(b"{}" * (file.bytes // 2))
    with source.open("rb") as content:
        await store.put_file(tenant, file, content)


async def test_as_many_files_are_kept_as_may_be(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "kept", StoreLimits(max_files=2, max_bytes=100))
    for number in range(2):
        await put(store, tmp_path, stored(number))
    with pytest.raises(InvalidParameterError, match="2 files are stored"):
        await put(store, tmp_path, stored(2))
    with pytest.raises(InvalidParameterError, match="4 bytes of files are stored, and the limit is 100"):
        await put(store, tmp_path, stored(2, 98), "b")
    await store.delete_file("file-0", "a", 0)
    await put(store, tmp_path, stored(2))
    store.close()


async def test_the_oldest_batch_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, StoreLimits(max_batches=2))
    for number in range(2):
        await store.put_batch("a", batch_of(number))
    with pytest.raises(QueueFullError, match="2 batches have not ended"):
        await store.put_batch("a", batch_of(2))
    await store.save(batch_of(1).in_state("failed", 9))
    await store.put_batch("a", batch_of(2))
    kept = await store.batches("a", after=None, limit=9)
    assert [batch.id for batch in kept] == ["batch_2", "batch_0"]
    store.close()


async def test_files_that_expired_are_gone_but_for_those_that_a_batch_reads(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "kept")
    for number in range(2):
        file = stored(number)
        await put(store, tmp_path, StoredFile(file.id, 2, number, file.filename, "batch", 100))
    await store.put_batch("a", batch_of(0, "file-1"))
    found = await store.files("a", 200, after=None, limit=9, is_descending=False, purpose=None)
    assert [each.id for each in found] == ["file-1"]
    assert [path.name for path in (tmp_path / "kept" / "files").iterdir()] == ["file-1"]
    store.close()


async def test_a_file_is_there_until_the_second_in_which_it_expires(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "kept")
    file = stored(0)
    await put(store, tmp_path, StoredFile(file.id, 2, 0, file.filename, "batch", 100))
    assert (await store.file(file.id, "a", 99.9)).id == file.id
    with pytest.raises(StoredFileNotFoundError):
        await store.file(file.id, "a", 100.0)
    store.close()


async def test_incomplete_files_of_a_killed_server_are_removed(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "kept")
    await put(store, tmp_path, stored(0))
    store.close()
    for name in ("files/file-9", "files/file-8.part", "journals/batch_9"):
        (tmp_path / "kept" / name).write_bytes(b"x")
    BatchStore(tmp_path / "kept").close()
    names = [path.name for folder in ("files", "journals") for path in (tmp_path / "kept" / folder).iterdir()]
    assert names == ["file-0"]


def test_one_server_at_a_time_uses_a_folder(tmp_path: Path) -> None:
    first = BatchStore(tmp_path)
    with pytest.raises(ConfigError, match="batches cannot be stored there: another server uses it"):
        BatchStore(tmp_path, StoreLimits(busy_timeout_s=0.05))
    first.close()
    BatchStore(tmp_path).close()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "batches.db") as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    with pytest.raises(ConfigError, match="a database of another program"):
        BatchStore(tmp_path)
    file = tmp_path / "file"
    file.write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="batches cannot be stored there"):
        BatchStore(file)


def test_a_temporary_folder_of_a_server_that_was_killed_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ServerProcess("stub://alpha", *IN_THREAD, environment={"TMPDIR": str(tmp_path)}) as server:
        server.wait_ready()
        [left] = tmp_path.glob("lockstep-owned-batches-*")
        alive = BatchStore(None)
        assert left.is_dir(), "its server runs"
        server.signal(signal.SIGKILL)
        server.wait()
    following = BatchStore(None)
    assert not left.exists()
    assert len([*tmp_path.glob("lockstep-owned-batches-*")]) == 2
    alive.close()
    following.close()


def test_a_temporary_folder_goes_with_its_store() -> None:
    store = BatchStore(None)
    path = store.path_of("x").parent
    assert path.is_dir()
    store.close()
    assert not path.exists()
