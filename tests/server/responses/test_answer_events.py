"""The events of a response: OpenAI's shapes and order, whatever is written."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.server.responses.answer import ResponseWriter
from tests.server.responses.shapes import check_events, check_response

BASE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1_800_000_000,
    "model": "pocket",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "metadata": {},
}
USAGE = {
    "input_tokens": 3,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 5,
}


def writer() -> ResponseWriter:
    numbers = itertools.count()
    made = ResponseWriter(BASE, lambda prefix: f"{prefix}_{next(numbers)}")
    made.begin()
    return made


def completed(made: ResponseWriter) -> Mapping[str, Any]:
    response = made.complete(1_800_000_001, usage=USAGE)
    made.end(response)
    return response


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_text_has_openais_sequence() -> None:
    made = writer()
    made.write_text("Hel")
    made.write_text("lo")
    response = completed(made)
    events = made.take_events()
    assert types(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert check_events(events) == response
    assert check_response(response).output_text == "Hello"
    assert (events[0]["response"]["status"], response["status"]) == ("in_progress", "completed")


def test_thoughts_text_and_calls_are_items_of_their_own() -> None:
    made = writer()
    made.write_thoughts("hm")
    made.write_text("Let me see.")
    for number in range(2):
        made.write_call({"type": "function_call", "call_id": f"call_{number}", "name": "look", "arguments": '{"x": 1}'})
    response = completed(made)
    assert check_events(made.take_events()) == response
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["id"] for item in response["output"]] == ["rs_0", "msg_1", "fc_2", "fc_3"]


def test_an_empty_answer_is_an_empty_message() -> None:
    made = writer()
    response = completed(made)
    assert check_events(made.take_events()) == response
    assert response["output"][0]["content"][0]["text"] == ""


def test_a_cut_answer_reports_max_output_tokens() -> None:
    made = writer()
    made.write_thoughts("hm")
    made.write_text("It is")
    response = made.cut(usage=USAGE)
    made.end(response)
    assert check_events(made.take_events()) == response
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_calls_of_an_answer_that_was_cut_are_whole() -> None:
    made = writer()
    made.write_text("It is")
    made.end_text(is_cut=True)
    made.write_call({"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"})
    response = made.cut(usage=USAGE)
    made.end(response)
    assert check_events(made.take_events()) == response
    assert [item["status"] for item in response["output"]] == ["incomplete", "completed"]


def test_failed_response_keeps_its_output_so_far() -> None:
    made = writer()
    made.write_text("It is")
    response = made.fail("server_error", "the worker ended")
    made.end(response)
    assert check_events(made.take_events()) == response
    assert response["error"] == {"code": "server_error", "message": "the worker ended"}
    assert response["output"][0]["content"][0]["text"] == "It is"


def test_a_response_ends_once() -> None:
    made = writer()
    completed(made)
    with pytest.raises(AssertionError, match="ends once"):
        made.end(made.fail("server_error", "late"))


def test_completed_response_can_still_fail() -> None:
    made = writer()
    made.write_text("It is")
    made.complete(1_800_000_001, usage=USAGE)
    response = made.fail("server_error", "the disk is full")
    made.end(response)
    assert check_events(made.take_events())["status"] == "failed"


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("thoughts"), st.text(max_size=5)),
        st.tuples(st.just("text"), st.text(max_size=5)),
        st.tuples(st.just("call"), st.text(max_size=5)),
    ),
    max_size=12,
)


@given(STEPS, st.sampled_from(["complete", "cut", "fail"]))
def test_event_stream_is_well_formed_for_any_output(steps: list[tuple[str, str]], end: str) -> None:
    made = writer()
    events = []
    for number, (kind, text) in enumerate(steps):
        if kind == "thoughts":
            made.write_thoughts(text)
        elif kind == "text":
            made.write_text(text)
        else:
            made.write_call({"type": "function_call", "call_id": f"call_{number}", "name": "look", "arguments": text})
        events += made.take_events()
    if end == "complete":
        response = completed(made)
    else:
        response = made.cut(usage=USAGE) if end == "cut" else made.fail("server_error", "x")
        made.end(response)
    events += made.take_events()
    assert check_events(events) == response
