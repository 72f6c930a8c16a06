"""Rules of the runner: who is aborted for a client, when a request is tried again, and what an upload may be."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from lockstep.errors import ConfigError
from lockstep.server.app import create_app
from lockstep.server.batches.answering import MAX_LOST_TRIES, MAX_TRIES, MAX_WAIT_S, InProcessServer, answer, wait_s
from lockstep.server.batches.input_file import BatchRequest
from lockstep.server.batches.job import BatchJob, Reply
from lockstep.server.batches.journal import Journal
from lockstep.server.batches.runner import MAX_ABORTS, MAX_BESIDE, RunningRequest, has_expired, to_abort
from lockstep.server.batches.schema import Batch
from lockstep.server.batches.store import BatchStore, StoreLimits
from tests.cluster.support import one_model
from tests.server.batches.inputs import CHAT, jsonl, line
from tests.server.batches.running import running as running_batches
from tests.server.support import error_of
from tests.waiting import eventually

REQUEST = BatchRequest("one", CHAT, b"{}", None)


def running(*num_aborts: int) -> list[RunningRequest]:
    nobody = cast(Any, None)
    return [RunningRequest(nobody, nobody, index, count) for index, count in enumerate(num_aborts)]


def test_all_are_aborted_but_one_that_was_often_enough() -> None:
    each = running(0, MAX_ABORTS, 1, MAX_ABORTS, MAX_ABORTS + 1)
    assert [one.index for one in to_abort(each)] == [0, 2, 3, 4]
    assert MAX_BESIDE == 1
    assert to_abort(running(MAX_ABORTS)) == []


async def test_a_request_that_was_aborted_often_enough_is_answered_beside_clients(tmp_path: Path) -> None:
    """A client is there whenever a request of the batch begins, and the last one stays; so none can starve."""
    async with running_batches(tmp_path, "stub://alpha?step_ms=5", max_batch_requests=1) as each:
        batch_id = await each.begun(1, max_tokens=16, ignore_eos=True)
        for num_aborted in range(1, MAX_ABORTS + 1):
            await eventually(lambda: each.runner.num_running == 1)
            each.serving.traffic.enter()
            await eventually(lambda: each.runner.num_running == 0)
            assert each.runner.counts.num_aborted == num_aborted
            each.serving.traffic.leave()
        await eventually(lambda: each.runner.num_running == 1)
        each.serving.traffic.enter()
        found = await each.ended(batch_id)
        assert (found["status"], found["request_counts"]["completed"]) == ("completed", 1)
        assert each.runner.counts.num_aborted == MAX_ABORTS
        each.serving.traffic.leave()


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling", "completed"])
def test_a_batch_expires_at_its_second_and_not_before_unless_all_is_answered(status: Any) -> None:
    batch = Batch("batch_1", CHAT, "file-0", "10s", 90, 100, status=status)
    is_open = status in ("validating", "in_progress")
    assert [has_expired(batch, now_s) for now_s in (99.999, 100.0, 100.001)] == [False, is_open, is_open]


def test_waits_between_tries_grow_to_a_bound_and_heed_the_server() -> None:
    waits = [wait_s(attempt, 0.0, 1.0) for attempt in range(MAX_TRIES)]
    assert waits == sorted(waits)
    assert waits[-1] == MAX_WAIT_S
    assert wait_s(0, 7.0, 0.0) == 7.0
    assert wait_s(3, 0.0, 0.0) == wait_s(3, 0.0, 1.0) / 2


class Replies(InProcessServer):
    """A server that gives replies in turn, the last one for ever."""

    def __init__(self, *replies: Reply) -> None:
        super().__init__(cast(Any, None))
        self._replies = replies
        self.num_asked = 0

    async def send(self, request: BatchRequest, tenant: str, request_id: str) -> Reply:
        self.num_asked += 1
        return self._replies[min(self.num_asked, len(self._replies)) - 1]


@pytest.fixture
def job(tmp_path: Path) -> BatchJob:
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([line(0)]))
    return BatchJob("batch_1", "", source, array("Q", [0]), Journal(tmp_path / "j", "d", 1))


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.server.batches.answering.wait_s", lambda *_: 0.0)


async def test_a_request_is_tried_again_until_it_is_answered(job: BatchJob) -> None:
    busy, done = Reply(503, "r", b"{}", 0.0), Reply(200, "r", b"{}")
    server = Replies(busy, busy, done)
    assert await answer(server, job, 0, REQUEST) == done
    assert server.num_asked == 3
    job.close()


async def test_attempts_are_limited_and_end_earlier_if_the_worker_ended(job: BatchJob) -> None:
    busy = Replies(Reply(429, "r", b"no JSON", 0.0))
    assert (await answer(busy, job, 0, REQUEST)).status == 429
    lost = Replies(Reply(503, "r", b'{"error": {"code": "worker_lost"}}', 0.0))
    assert (await answer(lost, job, 0, REQUEST)).status == 503
    assert (busy.num_asked, lost.num_asked) == (MAX_TRIES, MAX_LOST_TRIES)
    job.close()


async def test_an_answer_that_is_complete_is_not_lost_by_an_abort_that_comes_too_late() -> None:
    """The application still has something to do when its answer was sent."""
    is_sent = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        if scope["path"] == CHAT:
            await send({"type": "http.response.body", "body": b"2"})
        is_sent.set()
        await asyncio.get_running_loop().create_future()

    for url, is_complete in ((CHAT, True), ("/v1/completions", False)):
        task = asyncio.create_task(InProcessServer(app).send(BatchRequest("one", url, b"{}", None), "", "r"))
        await is_sent.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() is not is_complete
        if is_complete:
            assert task.result() == Reply(200, "r", b"12")
        is_sent.clear()


def test_an_input_file_changed_after_its_check_is_rejected(job: BatchJob, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"{}\n")
    with pytest.raises(ConfigError, match="request 1 of batch_1 has changed since it was checked"):
        job.request(0)
    job.close()


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[httpx2.AsyncClient]:
    """A server whose files are at most 1,000 bytes."""
    store = BatchStore(tmp_path, StoreLimits(max_file_bytes=1_000))
    app = create_app(one_model("stub://alpha"), batch_store=store)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as client:
        yield client
    store.close()


@pytest.mark.parametrize("size", [1_001, 100_000])
async def test_a_file_larger_than_one_may_be_is_refused(small: httpx2.AsyncClient, size: int) -> None:
    """Also where the whole form is longer than it may be, so that its end is never read."""
    answered = await small.post("/v1/files", files={"file": ("a", b"x" * size)}, data={"purpose": "batch"})
    assert (answered.status_code, error_of(answered)["param"]) == (413, "file")
    kept = await small.get("/v1/files")
    assert kept.json() == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_body_that_is_not_a_form_is_rejected(small: httpx2.AsyncClient) -> None:
    for body, kind in (
        (b"{}", "application/json"),
        (b"x", "multipart/form-data"),
        (b"x", "multipart/form-data; boundary=a"),
    ):
        answered = await small.post("/v1/files", content=body, headers={"Content-Type": kind})
        assert answered.status_code == 400, answered.text
        error_of(answered)


async def test_an_application_without_a_batch_store_is_unavailable() -> None:
    app = create_app(one_model("stub://alpha"))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://test") as client:
        answered = await client.get("/v1/batches")
        assert answered.status_code == 503
        assert "use `lockstep serve`" in error_of(answered)["message"]
