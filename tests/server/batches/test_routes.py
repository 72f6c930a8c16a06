"""The Batch API as the official client uses it, against a server as a user starts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.batches.inputs import CHAT, created, ended, jsonl, line, results, uploaded
from tests.server.process import IN_THREAD, ServerProcess, serve
from tests.server.support import error_of
from tests.waiting import HANG_S, until

SLOW = "stub://alpha?step_ms=20"
"""Steps that last, so that a batch is still running when something happens to it."""
LONG: Any = {"model": "pocket", "max_tokens": 16, "ignore_eos": True}


def client_of(server: ServerProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, max_retries=0, timeout=HANG_S)


@pytest.fixture(scope="module")
def slow() -> Iterator[ServerProcess]:
    limits = ("--max-batch-requests", "2", "--served-model-name", "pocket")
    with serve(SLOW, *IN_THREAD, *limits) as server:
        yield server


def test_a_batch_is_answered_in_order_as_the_same_requests_are(client: openai.OpenAI) -> None:
    lines = [line(index) for index in range(12)]
    lines[3]["body"]["temperature"] = -1
    lines[7]["body"]["max_tokens"] = 10**6
    file_id = uploaded(client, jsonl(lines))
    batch = client.batches.create(
        input_file_id=file_id, endpoint=CHAT, completion_window="24h", metadata={"night": "one"}
    )
    assert (batch.object, batch.metadata, batch.input_file_id) == ("batch", {"night": "one"}, file_id)
    batch = ended(client, batch)
    assert (batch.status, batch.errors, batch.model) == ("completed", None, "pocket")
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (12, 10, 2)
    assert batch.in_progress_at
    assert batch.finalizing_at
    assert batch.completed_at
    assert batch.expires_at

    answered = results(client, batch.output_file_id)
    assert [each["custom_id"] for each in answered] == [f"request-{i}" for i in range(12) if i not in (3, 7)]
    alone = client.chat.completions.create(**lines[5]["body"]).choices[0]
    [same] = [each for each in answered if each["custom_id"] == "request-5"]
    assert set(same) == {"id", "custom_id", "response", "error"}
    assert same["error"] is None
    assert same["response"]["status_code"] == 200
    assert same["response"]["request_id"] == f"{batch.id}-6"
    assert same["response"]["body"]["choices"][0]["message"]["content"] == alone.message.content

    failed = results(client, batch.error_file_id)
    assert [each["custom_id"] for each in failed] == ["request-3", "request-7"]
    with pytest.raises(openai.BadRequestError) as told:
        client.chat.completions.create(**lines[3]["body"])
    assert failed[0]["response"]["status_code"] == 400
    assert failed[0]["response"]["body"] == told.value.response.json()
    assert len({each["id"] for each in (*answered, *failed)}) == 12


@pytest.mark.parametrize(
    ("endpoint", "asked", "member"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 3}, "choices"),
        ("/v1/embeddings", {"input": "Hello"}, "data"),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 3}, "output"),
    ],
)
def test_other_endpoints_answer_in_their_shapes(
    client: openai.OpenAI, endpoint: str, asked: dict[str, Any], member: str
) -> None:
    wanted = {"custom_id": "one", "method": "POST", "url": endpoint, "body": {"model": "pocket", **asked}}
    batch = ended(client, created(client, jsonl([wanted]), endpoint=endpoint))
    [answered] = results(client, batch.output_file_id)
    assert answered["response"]["body"][member], answered


def test_every_fault_of_an_input_file_is_reported_with_its_line(client: openai.OpenAI) -> None:
    wrong = [line(0), {**line(1), "method": "PUT"}, line(0), line(3, url="/v1/completions"), line(4, model="nobody")]
    batch = ended(client, created(client, jsonl(wrong) + b"{broken\n"))
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.errors is not None
    told = [(fault.line, fault.code, fault.param) for fault in batch.errors.data or ()]
    assert told == [
        (2, "invalid_method", "method"),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_url", "url"),
        (5, "model_not_found", "body.model"),
        (6, "invalid_json_line", None),
    ]
    assert batch.output_file_id is None


def test_files_are_listed_page_by_page_read_and_deleted(client: openai.OpenAI) -> None:
    contents = [jsonl([line(index)]) for index in range(3)]
    ids = [uploaded(client, content) for content in contents]
    file = client.files.retrieve(ids[0])
    assert (file.filename, file.purpose, file.bytes, file.object) == (
        "requests.jsonl",
        "batch",
        len(contents[0]),
        "file",
    )
    assert client.files.content(ids[1]).read() == contents[1]
    listed = [each.id for each in client.files.list(limit=2, purpose="batch")]
    assert listed[:3] == ids[::-1]
    assert len(listed) == len(set(listed)) > 2
    assert [each.id for each in client.files.list(after=ids[0], order="asc").data] == ids[1:]
    for file_id in ids:
        assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(ids[0])


def test_batches_are_listed_latest_first(client: openai.OpenAI) -> None:
    made = [created(client, jsonl([line(index)])) for index in range(3)]
    for batch in made:
        assert ended(client, batch).status == "completed"
    page = client.batches.list(limit=2)
    assert [each.id for each in page.data] == [made[2].id, made[1].id]
    assert page.has_more
    assert made[0].id in [each.id for each in page.get_next_page().data]


@pytest.mark.parametrize(
    ("files", "data", "param"),
    [
        ({"file": ("a.jsonl", b"{}")}, {"purpose": "fine-tune"}, "purpose"),
        ({"file": ("a.jsonl", b"{}")}, {}, "purpose"),
        ({"other": ("a.jsonl", b"{}")}, {"purpose": "batch"}, "other"),
        ({}, {"purpose": "batch", "file": "text"}, None),
        ({"file": ("a/b.jsonl", b"{}")}, {"purpose": "batch"}, "file"),
        ({"file": ("a.jsonl", b"{}")}, {"purpose": "batch", "expires_after[seconds]": "9"}, "expires_after"),
    ],
)
def test_invalid_upload_is_rejected_by_parameter(
    served: ServerProcess, files: dict[str, Any], data: dict[str, str], param: str | None
) -> None:
    with served.client() as http:
        answered = http.post("/v1/files", files=files or None, data=data)
    assert answered.status_code == 400
    assert error_of(answered)["param"] == param


@pytest.mark.parametrize(
    ("changed", "status", "param"),
    [
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"endpoint": "/v1/images"}, 400, "endpoint"),
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"metadata": {"a": 1}}, 400, "metadata.a"),
        ({"window": "24h"}, 400, "window"),
    ],
)
def test_invalid_batch_is_rejected_by_parameter(
    served: ServerProcess, client: openai.OpenAI, changed: dict[str, Any], status: int, param: str
) -> None:
    body = {"input_file_id": uploaded(client, b"{}"), "endpoint": CHAT, "completion_window": "24h"}
    with served.client() as http:
        answered = http.post("/v1/batches", json={**body, **changed})
    assert (answered.status_code, error_of(answered)["param"]) == (status, param)


def test_unknown_files_and_batches_are_not_found(client: openai.OpenAI) -> None:
    for look in (client.files.retrieve, client.files.delete, client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError, match="No "):
            look("file-none")


def test_a_cancelled_batch_has_the_answers_that_came_before(slow: ServerProcess) -> None:
    with client_of(slow) as client:
        batch = created(client, jsonl([line(index, **LONG) for index in range(40)]))
        until(lambda: _completed(client, batch.id) > 0)
        with pytest.raises(openai.BadRequestError, match="is the input of"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = ended(client, batch)
        assert batch.status == "cancelled"
        assert batch.cancelling_at
        assert batch.cancelled_at
        answered = results(client, batch.output_file_id)
        assert 0 < len(answered) == _completed(client, batch.id) < 40
        assert batch.error_file_id is None
        assert client.batches.cancel(batch.id).status == "cancelled"
        assert client.files.delete(batch.input_file_id).deleted


def test_requests_not_answered_in_time_are_reported_as_expired(slow: ServerProcess) -> None:
    with client_of(slow) as client:
        batch = ended(client, created(client, jsonl([line(index, **LONG) for index in range(60)]), window="2s"))
        assert batch.status == "expired"
        assert batch.expired_at
        answered, late = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert [each["custom_id"] for each in (*answered, *late)] == [f"request-{index}" for index in range(60)]
        assert {each["error"]["code"] for each in late} == {"batch_expired"}
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (60, len(answered), len(late))


def test_a_clients_request_goes_before_those_of_a_batch(slow: ServerProcess) -> None:
    """They are aborted for it, and each of them is answered once all the same."""
    with client_of(slow) as client:
        batch = created(client, jsonl([line(index, **LONG) for index in range(12)]))
        until(lambda: _metric(slow, "batch_requests_running") > 0)
        before = _metric(slow, "batch_requests_set_back_total")
        client.chat.completions.create(**line(0)["body"])
        assert _metric(slow, "batch_requests_set_back_total") > before
        batch = ended(client, batch)
        assert [each["custom_id"] for each in results(client, batch.output_file_id)] == [
            f"request-{index}" for index in range(12)
        ]


def test_tenants_do_not_see_each_others_files_and_batches() -> None:
    keys = ("--api-key", "one", "--api-key", "two")
    with serve("stub://alpha", *IN_THREAD, *keys, "--served-model-name", "pocket") as server:
        first, second = client_of(server, "one"), client_of(server, "two")
        with first, second:
            batch = ended(first, created(first, jsonl([line(0)])))
            assert batch.output_file_id is not None
            assert not second.files.list().data
            assert not second.batches.list().data
            for look in (second.files.retrieve, second.files.content, second.files.delete):
                with pytest.raises(openai.NotFoundError):
                    look(batch.output_file_id)
            for reach in (second.batches.retrieve, second.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    reach(batch.id)
            with pytest.raises(openai.NotFoundError):
                second.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
            with client_of(server, "three") as stranger, pytest.raises(openai.AuthenticationError):
                stranger.files.list()
            assert "tenant=key-1" in server.stderr.split(f"id={batch.id}-1 ")[1].splitlines()[0]


def _completed(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def _metric(server: ServerProcess, name: str) -> float:
    with server.client() as http:
        lines = http.get("/metrics").text.splitlines()
    return sum(float(each.rpartition(" ")[2]) for each in lines if each.startswith(f"lockstep:{name}"))
