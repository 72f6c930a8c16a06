"""Choices and the answers made of them, without a server: whatever is shown in pieces is what is shown whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.base import Accepted
from lockstep.core.request import FinishReason
from lockstep.engine.outputs import TokenOutput
from lockstep.errors import RequestFailedError
from lockstep.executors.logits import TokenLogprobs
from lockstep.executors.sampling_params import SamplingParams
from lockstep.executors.stub import END_ID
from lockstep.server.answer_response import Answer
from lockstep.server.choices import Choice, open_choices
from lockstep.server.errors import HttpError
from lockstep.server.logprobs import Tracer
from tests.server.frames import events_of, texts_of
from tests.server.making import TOKENIZER, answer_of, chat_encoder, completion_encoder, context, outputs_of
from tests.server.tools.models import TOOLS, tokenizer_of, tool_use_of

PIECES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=12)


@given(first=PIECES, second=PIECES, cuts=st.lists(st.booleans(), min_size=40, max_size=40), is_chat=st.booleans())
def test_stream_cut_anywhere_equals_the_whole_answer(
    first: list[str], second: list[str], cuts: list[bool], is_chat: bool
) -> None:
    make = chat_encoder if is_chat else completion_encoder
    outputs = outputs_of([first, second])
    whole = answer_of(make())
    whole.feed(0, outputs)
    streamed = answer_of(make())
    data = b""
    for output, cut in zip(outputs, cuts, strict=False):
        streamed.feed(0, [output])
        if cut:
            data += streamed.take()
    streamed.feed(0, outputs[len(cuts) :])
    data += streamed.take() + streamed.end()
    assert streamed.is_complete
    events = events_of(data)
    choices = json.loads(whole.whole())["choices"]
    said = [choice["message"]["content"] if is_chat else choice["text"] for choice in choices]
    assert said == ["".join(first), "".join(second)]
    assert texts_of(events) == dict(enumerate(said))
    endings = [choice for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in endings) == [0, 1]
    assert all(not (choice.get("text") or choice.get("delta")) for choice in endings), "an ending has no content"
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1


def test_the_first_delta_of_a_choice_has_the_role_and_no_other_has() -> None:
    answer = answer_of(chat_encoder())
    data = b""
    for output in outputs_of([["a", "b"], ["c"]]):
        answer.feed(0, [output])
        data += answer.take()
    deltas: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for event in events_of(data + answer.end()):
        for choice in event["choices"]:
            deltas[choice["index"]].append(choice["delta"])
    for told in deltas.values():
        assert told[0] == {"role": "assistant", "content": ""}
        assert all("role" not in delta for delta in told[1:])


def test_usage_comes_in_a_chunk_of_its_own_and_is_null_before() -> None:
    answer = answer_of(chat_encoder(include_usage=True))
    answer.feed(0, outputs_of([["a", "b"], ["c"]]))
    *events, last = events_of(answer.take() + answer.end())
    assert all(event["usage"] is None and "lockstep" not in event for event in events)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 3
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert last["lockstep"]["preemptions"] == 1


def test_without_usage_the_last_ending_carries_the_extension() -> None:
    answer = answer_of(chat_encoder())
    answer.feed(0, outputs_of([["a"], ["c"]]))
    *events, last = events_of(answer.take() + answer.end())
    assert not any("lockstep" in event or "usage" in event for event in (*events, last) if event is not last)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["lockstep"] == {
        "request_id": "r",
        "queue_ms": 1.0,
        "ttft_ms": 2.0,
        "tokens_per_second": 4.0,
        "preemptions": 1,
        "session_id": None,
    }


def test_thoughts_have_both_names_and_are_counted() -> None:
    answer = answer_of(chat_encoder(include_usage=True))
    answer.feed(0, outputs_of([["a"], ["c"]], thoughts="hm"))
    whole = json.loads(answer.whole())
    assert [choice["message"]["reasoning_content"] for choice in whole["choices"]] == ["hm", "hm"]
    assert [choice["message"]["reasoning"] for choice in whole["choices"]] == ["hm", "hm"]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    streamed = answer_of(chat_encoder())
    streamed.feed(0, outputs_of([["a"], ["c"]], thoughts="hm"))
    deltas = [choice["delta"] for event in events_of(streamed.take() + streamed.end()) for choice in event["choices"]]
    assert deltas.count({"reasoning_content": "hm", "reasoning": "hm"}) == 2
    assert deltas.index({"reasoning_content": "hm", "reasoning": "hm"}) < deltas.index({"content": "a"})


def test_tool_calls_are_separated_from_content_and_set_the_finish_reason() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    tool_use = tool_use_of(TOKENIZER, tools, "auto", True)
    said = 'Well. <tool_call>\n{"name": "f", "arguments": {"x": [1, 2]}}\n</tool_call>'

    def fed() -> Answer:
        choice = Choice(0, parser=tool_use.parser(lambda: "call_1"), end_ids=frozenset([END_ID]))
        return Answer([Accepted("m", (1,))], [choice], chat_encoder(), context())

    whole, streamed, data = fed(), fed(), b""
    whole.feed(0, outputs_of([list(said)]))
    for output in outputs_of([list(said)]):
        streamed.feed(0, [output])
        data += streamed.take()
    [choice] = json.loads(whole.whole())["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"] == {"name": "f", "arguments": '{"x": [1, 2]}'}
    assert (choice["message"]["content"], call["id"]) == ("Well.", "call_1")
    events = events_of(data + streamed.end())
    parts = [part for event in events for part in event["choices"][0]["delta"].get("tool_calls", ())]
    assert parts[0]["id"] == "call_1"
    assert parts[0]["function"]["name"] == "f"
    assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    assert texts_of(events)[0] == "Well."
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_pending_bytes_are_counted_until_taken() -> None:
    answer = answer_of(chat_encoder())
    answer.feed(0, [TokenOutput(1, 0, (65,), "x" * 10), TokenOutput(1, 1, (65,), "y" * 5)])
    assert answer.num_pending_bytes == 15
    answer.take()
    assert answer.num_pending_bytes == 0
    assert answer.take() == b""


def test_an_ending_that_is_none_of_openais_is_a_failure() -> None:
    with pytest.raises(RequestFailedError, match="abort"):
        Choice(0).feed(TokenOutput(1, 0, (), "", FinishReason.ABORT))


def test_a_failure_is_an_error_frame_and_the_end() -> None:
    [event] = events_of(answer_of(chat_encoder()).failed(HttpError(500, "boom")))
    assert event == {"error": {"message": "boom", "type": "server_error", "param": None, "code": None}}


def traced(text: str, shown: str, stop_reason: int | str | None, step: int = 1) -> list[str]:
    """The tokens that are told of an answer which was generated as one text and shown as another."""
    choice = Choice(0, tracer=Tracer(TOKENIZER, None, verbatim=False), end_ids=frozenset([END_ID]))
    told: list[str] = []
    ids = [*text.encode(), *([END_ID] if stop_reason == END_ID else [])]
    for place, token in enumerate(ids):
        is_last = place == len(ids) - 1
        piece = shown[place * step : (place + 1) * step] if not is_last else shown[place * step :]
        finish = FinishReason.STOP if is_last else None
        logprobs = (TokenLogprobs(-0.5, ((token, -0.5),)),)
        choice.feed(TokenOutput(1, 0, (token,), piece, finish, stop_reason if is_last else None, logprobs))
        told += [entry.chosen.token for entry in choice.entries]
        choice.shown()
    return told


def test_the_end_token_has_no_logprobs_entry() -> None:
    assert traced("abc", "abc", END_ID) == ["a", "b", "c"]


def test_tokens_after_a_stop_string_have_no_logprobs_entry() -> None:
    assert traced("ab.STOP", "ab.", "STOP") == ["a", "b", "."]


def test_token_ids_go_with_the_text() -> None:
    choice = Choice(0, returns_ids=True)
    choice.feed(TokenOutput(1, 0, (65, 66), "AB"))
    assert choice.token_ids == [65, 66]
    assert not choice.is_plain


def test_chunk_has_at_most_one_piece_of_a_call() -> None:
    """Clients read the first of a chunk's calls and no other."""
    tool_use = tool_use_of(TOKENIZER, [{"type": "function", "function": {"name": "f"}}], "auto", True)
    calls = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>' * 2
    ids = iter(("call_1", "call_2"))
    answer = answer_of(chat_encoder(), num_choices=1)
    answer.choices = [Choice(0, parser=tool_use.parser(lambda: next(ids)))]
    answer.feed(0, outputs_of([list(calls)]))
    frames = [json.loads(frame.removeprefix("data: ")) for frame in answer.take().decode().strip().split("\n\n")]
    deltas = [frame["choices"][0]["delta"].get("tool_calls", []) for frame in frames]
    told = [[(call["index"], call["id"], call["function"]["arguments"]) for call in delta] for delta in deltas if delta]
    assert told == [[(0, "call_1", '{"a": 1}')], [(1, "call_2", '{"a": 1}')]]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "ping"}}])
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("has_call", [True, False])
def test_the_reason_is_tool_calls_unless_the_function_was_named(
    choice: Any, reason: FinishReason, has_call: bool
) -> None:
    tool_use = tool_use_of(tokenizer_of("qwen3"), TOOLS, choice, True)
    [made] = open_choices(SamplingParams(), TOKENIZER, Accepted("m", (1,)), tool_use=tool_use)
    text = '<tool_call>{"name": "ping", "arguments": {}}</tool_call>' if has_call else "Hello"
    made.feed(TokenOutput(1, 0, (65,), text, reason))
    is_free = isinstance(choice, str)
    assert made.finish_reason == (
        "tool_calls" if has_call and is_free and reason is FinishReason.STOP else reason.value
    )
