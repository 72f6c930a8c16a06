"""What a call's outputs become: thoughts apart from text, usage, failures, and nothing that depends on the reader."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lockstep.cluster.base import Accepted
from lockstep.core.request import FinishReason
from lockstep.engine.outputs import Completion, RequestOutput, Timings, TokenOutput
from lockstep.server.answer_response import Answer
from lockstep.server.app import create_app
from lockstep.server.choices import Choice
from lockstep.server.errors import HttpError
from lockstep.server.responses.answer import ResponseEncoder, ResponseWriter
from lockstep.server.responses.schema import ResponseBody, response_base
from lockstep.server.responses.store import ResponseStore
from tests.cluster.support import one_model
from tests.server.making import context
from tests.server.responses.shapes import check_events, check_response

PIECES = (("hm", ""), (", so", ""), ("", "It"), ("", " is"), ("", " blue."))
"""Thoughts and text of each token."""


def outputs(reason: FinishReason = FinishReason.STOP) -> list[TokenOutput]:
    text = "".join(text for _, text in PIECES)
    completion = Completion(0, text, tuple(range(len(PIECES))), reason, None, None)
    request = RequestOutput(7, (1, 2, 3), (completion,), 2, 0, Timings(0.1, 0.2, 0.5))
    made = [TokenOutput(7, 0, (index,), text, reasoning=thoughts) for index, (thoughts, text) in enumerate(PIECES)]
    last = TokenOutput(7, 0, (), "", reason, request=request)
    return [*made, last]


def answer() -> Answer:
    return Answer([Accepted("m", (1, 2, 3))], [Choice(0)], encoder(), context())


def encoder() -> ResponseEncoder:
    numbers = itertools.count()
    base = response_base(ResponseBody(input="Hi"), "resp_1", "m", 1_800_000_000)
    return ResponseEncoder(ResponseWriter(base, lambda prefix: f"{prefix}_{next(numbers)}"))


def events_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(frame.split("\ndata: ")[1]) for frame in data.decode().strip().split("\n\n")]


def streamed(batches: Sequence[int], reason: FinishReason = FinishReason.STOP) -> list[dict[str, Any]]:
    """The events, read by a client that comes after so many outputs each time."""
    made, left = answer(), iter(outputs(reason))
    data = b""
    for size in batches:
        made.feed(0, list(itertools.islice(left, size)))
        data += made.take()
    made.feed(0, list(left))
    assert made.is_complete
    return events_of(data + made.take() + made.end())


@pytest.mark.parametrize("batches", [(), (1,), (1, 1, 1, 1, 1), (2, 2), (3,), (0, 0, 5)])
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_stream_and_a_whole_response_have_the_same_content(batches: Sequence[int], reason: FinishReason) -> None:
    final = check_events(streamed(batches, reason))
    whole = answer()
    whole.feed(0, outputs(reason))
    told = json.loads(whole.whole())
    assert {**final, "completed_at": None} == {**told, "completed_at": None}
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]
    assert [item["content"][0]["text"] for item in final["output"]] == ["hm, so", "It is blue."]
    assert final["status"] == ("completed" if reason is FinishReason.STOP else "incomplete")


def test_thoughts_are_counted() -> None:
    made = answer()
    made.feed(0, outputs())
    usage = check_response(json.loads(made.whole())).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 5, 8)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (2, 2)


def test_a_stream_begins_before_its_first_token() -> None:
    assert [event["type"] for event in events_of(answer().take())] == ["response.created", "response.in_progress"]


@pytest.mark.parametrize(
    ("status", "code"), [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (503, "server_error")]
)
def test_a_failed_response_has_the_error_and_an_incomplete_item(status: int, code: str) -> None:
    made = answer()
    made.feed(0, outputs()[:3])
    final = check_events(events_of(made.take() + made.failed(HttpError(status, "it broke"))))
    assert final["error"] == {"code": code, "message": "it broke"}
    assert [item["status"] for item in final["output"]] == ["completed", "incomplete"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_that_cannot_be_stored_has_failed(tmp_path: Path, is_stream: bool) -> None:
    store = ResponseStore(tmp_path / "r.db", 9)
    store._database.connection.execute("PRAGMA query_only = ON")  # as a disk that has become read-only
    cluster = one_model("stub://alpha", ("alpha",))
    await cluster.start()
    transport = httpx2.ASGITransport(create_app(cluster, response_store=store))
    try:
        async with httpx2.AsyncClient(transport=transport, base_url="http://server") as client:
            response = await client.post("/v1/responses", json={"input": "Hi", "stream": is_stream})
            unstored = await client.post("/v1/responses", json={"input": "Hi", "store": False})
    finally:
        await cluster.close()
        store.close()
    if is_stream:
        error = check_events(events_of(response.content))["error"]
    else:
        assert response.status_code == 503
        error = response.json()["error"]
    assert f"could not be stored: {tmp_path}: " in error["message"]
    assert "attempt to write a readonly database" in error["message"]
    assert unstored.status_code == 200
