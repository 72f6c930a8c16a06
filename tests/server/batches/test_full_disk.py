"""Batches on a disk that is full: they wait, the reason is shown, nothing is lost or made twice, and they go on."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from lockstep.server.batches import Journal, runner
from lockstep.server.database import refusal_of
from tests.disks import Refusing, fill, mounted
from tests.server.batches.inputs import created, ended, jsonl, line, results, uploaded
from tests.server.batches.running import Running, running
from tests.server.process import IN_THREAD, ServerProcess
from tests.server.support import error_of
from tests.waiting import HANG_S, eventually, until

LONG: Any = {"max_tokens": 16, "ignore_eos": True}
NUM = 12
NAMED = (*IN_THREAD, "--served-model-name", "pocket", "--max-batch-requests", "2")


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=HANG_S)


def started(client: openai.OpenAI) -> openai.types.Batch:
    """A batch, once some of its requests are answered."""
    batch = created(client, jsonl([line(index, **LONG) for index in range(40)]))

    def is_begun() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed > 2

    until(is_begun)
    return batch


def health(server: ServerProcess) -> tuple[int, str, str]:
    with server.client() as http:
        answer = http.get("/health")
    return answer.status_code, answer.json()["status"], " ".join(answer.json()["warnings"])


def check_whole(client: openai.OpenAI, server: ServerProcess, batch: openai.types.Batch, num: int = 40) -> None:
    whole = ended(client, batch)
    assert (whole.status, whole.errors, whole.error_file_id) == ("completed", None, None)
    answered = results(client, whole.output_file_id)
    assert [each["custom_id"] for each in answered] == [f"request-{index}" for index in range(num)]
    answered_lines = [line for line in server.stderr.splitlines() if " status=200 " in line]  # an aborted one has 499
    for index in range(num):
        num_answers = sum(f"id={batch.id}-{index + 1} method=POST" in line for line in answered_lines)
        assert num_answers <= 1, "a request was answered twice"


def test_a_batch_on_a_full_disk_waits_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk", "1m") as disk,
        ServerProcess("stub://alpha?step_ms=5", *NAMED, "--batch-dir", str(disk / "b")) as server,
    ):
        server.wait_ready()
        with client_of(server) as client:
            batch = started(client)
            filler = fill(disk)
            until(lambda: health(server)[1] == "degraded")
            status, _, warning = health(server)
            assert status == 200
            assert f"{disk}/b: batches cannot be stored there now: No space left on device; free space" in warning
            shown = client.batches.retrieve(batch.id)
            assert shown.status == "in_progress"
            assert shown.errors is not None
            assert [each.code for each in shown.errors.data or ()] == ["storage_full"]
            with pytest.raises(openai.APIStatusError) as refused:
                uploaded(client, jsonl([line(index) for index in range(200)]))
            error: Any = refused.value.body
            assert (refused.value.status_code, error["code"], error["type"]) == (507, "storage_full", "server_error")
            assert str(disk / "b") in error["message"]
            assert client.chat.completions.create(**line(0)["body"]).choices
            filler.unlink()
            check_whole(client, server, batch)
            until(lambda: health(server)[1:] == ("ready", ""))
            assert server.stop() == 0
        assert server.stderr.count(" WARNING ") == 1, server.stderr
        assert "Traceback" not in server.stderr


def test_a_batch_is_cancelled_and_files_are_deleted_on_a_full_disk(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk", "1m") as disk,
        ServerProcess("stub://alpha?step_ms=5", *NAMED, "--batch-dir", str(disk / "b")) as server,
    ):
        server.wait_ready()
        with client_of(server) as client:
            spare = uploaded(client, jsonl([line(index) for index in range(1_000)]))
            batch = started(client)
            fill(disk)
            until(lambda: health(server)[1] == "degraded")
            cancelled = client.batches.cancel(batch.id)
            assert cancelled.status in ("cancelling", "cancelled")
            assert cancelled.cancelling_at
            assert client.files.delete(spare).deleted, "this gives the room for the end of the batch"
            found = ended(client, batch)
            answered = results(client, found.output_file_id)
            counts = found.request_counts
            assert counts is not None
            assert (found.status, len(answered)) == ("cancelled", counts.completed)
            assert 2 < len(answered) < 40
            assert server.stop() == 0


def test_a_server_that_ends_on_a_full_disk_goes_on_with_its_batches_later(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "1m") as disk:
        arguments = ("stub://alpha?step_ms=5", *NAMED, "--batch-dir", str(disk / "b"))
        with ServerProcess(*arguments) as server, contextmanager(_ready)(server) as client:
            batch = started(client)
            filler = fill(disk)
            until(lambda: health(server)[1] == "degraded")
            assert server.stop() == 0
            assert "Traceback" not in server.stderr
        filler.unlink()
        with ServerProcess(*arguments) as server, contextmanager(_ready)(server) as client:
            check_whole(client, server, batch)


def _ready(server: ServerProcess) -> Iterator[openai.OpenAI]:
    server.wait_ready()
    with client_of(server) as client:
        yield client


# -- by every user ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(runner, "MAX_REFUSED_S", 0.05)


async def check(each: Running, batch_id: str) -> None:
    """Assert that a batch is complete, and that each of its requests was answered once."""
    found = await each.ended(batch_id)
    assert (found["status"], found["errors"]) == ("completed", None)
    answered = await each.results(found["output_file_id"])
    assert [one["custom_id"] for one in answered] == [f"request-{index}" for index in range(NUM)]
    assert sorted(each.answered) == sorted(f"{batch_id}-{index + 1}" for index in range(NUM))


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_answers_that_the_disk_refuses_are_kept_until_it_takes_them(
    tmp_path: Path, number: int, call: str
) -> None:
    disk = Refusing(tmp_path / "journals", number, call)
    async with running(tmp_path, "stub://alpha?step_ms=2", disk, max_batch_requests=3) as each:
        batch_id = await each.begun(NUM, **LONG)
        await eventually(lambda: len(each.answered) >= 2)
        disk.is_refusing, num_before = True, len(each.answered)
        await eventually(lambda: disk.num_refused >= 9 and not each.runner.num_running)
        assert len(each.answered) <= num_before + 3, "nothing begins while its answer could not be kept"
        code = "storage_unavailable" if number == errno.EIO else "storage_full"
        assert [one["code"] for one in (await each.batch(batch_id))["errors"]["data"]] == [code]
        assert str(tmp_path) in (await each.client.get("/v1/cluster")).json()["warnings"][0]
        assert "lockstep:batch_storage_fault 1.0" in (await each.client.get("/metrics")).text
        disk.is_refusing = False
        await check(each, batch_id)
        assert (await each.client.get("/health")).json()["status"] == "ready"
        assert "lockstep:batch_storage_fault 0.0" in (await each.client.get("/metrics")).text


@pytest.mark.parametrize("folder", ["journals", "files"])
async def test_a_batch_waits_where_it_cannot_begin_and_where_it_cannot_end(tmp_path: Path, folder: str) -> None:
    """The journal's header is written at its beginning, the files of results at its end."""
    disk = Refusing(tmp_path / folder)
    async with running(tmp_path, system=disk) as each:
        uploaded = (await each.upload(NUM)).json()["id"]
        disk.is_refusing = True
        batch_id = (await each.create(uploaded)).json()["id"]
        await eventually(lambda: disk.num_refused >= 3)
        found = await each.batch(batch_id)
        assert found["status"] == ("validating" if folder == "journals" else "finalizing")
        assert [one["code"] for one in found["errors"]["data"]] == ["storage_full"]
        disk.is_refusing = False
        await check(each, batch_id)


async def test_a_state_that_cannot_be_saved_is_saved_later(tmp_path: Path) -> None:
    async with running(tmp_path, "stub://alpha?step_ms=2") as each:
        connection = each.store.database.connection
        batch_id = await each.begun(NUM, **LONG)
        await eventually(lambda: len(each.answered) >= 1)
        connection.execute("PRAGMA query_only = 1")
        await eventually(lambda: len(each.answered) == NUM and each.store.fault is not None)
        found = await each.batch(batch_id)
        assert (found["status"], found["errors"]["data"][0]["code"]) == ("finalizing", "storage_unavailable")
        refused = await each.create((await each.client.get("/v1/files")).json()["data"][0]["id"])
        assert (refused.status_code, error_of(refused)["code"]) == (503, "storage_unavailable")
        connection.execute("PRAGMA query_only = 0")
        await check(each, batch_id)


async def test_a_batch_of_which_the_failure_cannot_be_saved_fails_later(tmp_path: Path) -> None:
    async with running(tmp_path) as each:
        connection = each.store.database.connection
        batch_id = await each.begun(3, model="nobody")
        [name] = [each.store.path_of((await each.batch(batch_id))["input_file_id"])]
        assert (await each.ended(batch_id))["status"] == "failed"
        second = (await each.create(name.name)).json()["id"]
        connection.execute("PRAGMA query_only = 1")
        await eventually(lambda: each.store.fault is not None)
        assert each.runner.num_of()["validating"] + each.runner.num_of().get("failed", 0) == 1
        connection.execute("PRAGMA query_only = 0")
        found = await each.ended(second)
        assert {one["code"] for one in found["errors"]["data"]} == {"model_not_found"}
        await eventually(lambda: not sum(each.runner.num_of().values()))
        saved = await each.store.batch(second, "")
        assert saved.status == "failed"


async def test_a_cancellation_is_obeyed_while_the_disk_refuses_everything(tmp_path: Path) -> None:
    disk = Refusing(tmp_path)
    async with running(tmp_path, "stub://alpha?step_ms=2", disk) as each:
        batch_id = await each.begun(40, **LONG)
        await eventually(lambda: len(each.answered) >= 2)
        disk.is_refusing = True
        each.store.database.connection.execute("PRAGMA query_only = 1")
        await eventually(lambda: each.store.fault is not None)
        answer = await each.client.post(f"/v1/batches/{batch_id}/cancel")
        assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")
        disk.is_refusing = False
        each.store.database.connection.execute("PRAGMA query_only = 0")
        found = await each.ended(batch_id)
        assert found["status"] == "cancelled"
        assert len(await each.results(found["output_file_id"])) == len(set(each.answered)) < 40


@pytest.mark.parametrize("is_idle", [True, False])
async def test_an_upload_that_the_disk_refuses_leaves_nothing(tmp_path: Path, is_idle: bool) -> None:
    """Health is degraded until the disk takes something again, also where no batch waits."""
    disk = Refusing(tmp_path / "files")
    async with running(tmp_path, system=disk) as each:
        if not is_idle:
            await each.ended(await each.begun(2))
        before = sorted((tmp_path / "files").iterdir())
        disk.is_refusing = True
        refused = await each.upload(2)
        assert (refused.status_code, error_of(refused)["code"]) == (507, "storage_full")
        assert refused.headers["x-should-retry"] == "false"
        await eventually(lambda: disk.num_refused >= 2)
        assert (await each.client.get("/health")).json()["status"] == "degraded"
        disk.is_refusing = False

        async def is_ready() -> bool:
            return bool((await each.client.get("/health")).json()["status"] == "ready")

        await eventually(is_ready)
        assert sorted((tmp_path / "files").iterdir()) == before


async def test_a_database_without_room_refuses_with_507(tmp_path: Path) -> None:
    """SQLite's own limit of pages stands for the disk's."""
    async with running(tmp_path) as each:
        connection = each.store.database.connection
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
        statuses = [(await each.upload(1)).status_code for _ in range(40)]
        assert {*statuses} == {200, 507}
        assert statuses == sorted(statuses)
        connection.execute("PRAGMA max_page_count = 1000000")
        assert (await each.upload(1)).status_code == 200


async def test_a_full_temporary_folder_is_named_in_the_upload_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path / "b") as each:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
        (tmp_path / "t").mkdir()
        with _files_of(1 << 20):
            content = {"file": ("a.jsonl", b"x" * (3 << 20))}
            refused = await each.client.post("/v1/files", files=content, data={"purpose": "batch"})
        assert (refused.status_code, error_of(refused)["code"]) == (507, "storage_full")
        assert str(tmp_path / "t") in error_of(refused)["message"]
        assert each.store.fault is None, "the folder of batches has room"


@contextmanager
def _files_of(max_bytes: int) -> Iterator[None]:
    """A limit of this process on the size of files, which stands for a full disk: a write ends in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_an_answer_that_was_half_written_can_be_appended_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "d", 3)
    journal.append(0, b"{}", is_success=True)
    with _files_of((tmp_path / "j").stat().st_size + 10):
        for _ in range(2):
            with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
                journal.append(1, b'"' + b"x" * 100 + b'"', is_success=True)
        assert not journal.has(1)
        journal.append(2, b"1", is_success=True)
    journal.append(1, b"2", is_success=False)
    journal.close()
    again = Journal(tmp_path / "j", "d", 3)
    assert list(again.lines()) == [(True, b"{}\n"), (False, b"2\n"), (True, b"1\n")]
    again.close()


def test_a_journal_whose_half_line_could_not_be_cut_cuts_it_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j", "d", 2)

    def refuse(*_: object) -> None:
        patched.setattr(os, "ftruncate", refuse)
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="broken"):
                journal.append(0, b'"' + b"x" * 100 + b'"', is_success=True)
    assert (tmp_path / "j").stat().st_size > 100
    journal.append(1, b"1", is_success=True)
    journal.close()
    again = Journal(tmp_path / "j", "d", 2)
    assert list(again.lines()) == [None, (True, b"1\n")]
    again.close()


def test_errors_that_are_not_the_disks_are_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError) as wrong:
        sqlite3.connect(":memory:").execute("SELEC 1")
    for error in (wrong.value, FileNotFoundError(errno.ENOENT, "gone"), OSError("without a number")):
        assert refusal_of(error, tmp_path, "batches") is None
