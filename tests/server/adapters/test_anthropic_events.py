"""Messages in the making: Anthropic's events in their order, however the answer is read, and what they say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.base import Accepted
from lockstep.core.request import FinishReason
from lockstep.engine.outputs import Completion, RequestOutput, Timings, TokenOutput
from lockstep.server.adapters.anthropic import MessagesEncoder, signature_of
from lockstep.server.adapters.anthropic_body import MessagesBody, messages_of, warnings_of
from lockstep.server.answer_response import Answer
from lockstep.server.choices import Choice
from lockstep.server.errors import HttpError
from tests.server.adapters.clients import check_events, events_of
from tests.server.making import TOKENIZER, context
from tests.server.tools.models import tool_use_of

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
Pieces = Sequence[tuple[str, str]]
"""Thoughts and text of each token."""
THOUGHTFUL: Pieces = (("hm", ""), (", so", ""), ("", "It"), ("", " is"), ("", " blue."))


def outputs(pieces: Pieces, reason: FinishReason, stop: int | str | None = None) -> list[TokenOutput]:
    text = "".join(text for _, text in pieces)
    ids = tuple(range(len(pieces)))
    completion = Completion(0, text, ids, reason, stop, None)
    request = RequestOutput(7, (1, 2, 3), (completion,), 2, 0, Timings(0.1, 0.2, 0.5))
    made = [TokenOutput(7, 0, (index,), text, reasoning=thoughts) for index, (thoughts, text) in enumerate(pieces)]
    return [*made, TokenOutput(7, 0, (), "", reason, stop, request=request)]


def answer(*, max_tokens: int = 5, hides_thoughts: bool = False) -> Answer:
    numbers = itertools.count()
    use = tool_use_of(TOKENIZER, [TOOL], "auto", True)
    choice = Choice(0, parser=use.parser(lambda: f"toolu_{next(numbers)}"), num_prompt_tokens=3)
    encoder = MessagesEncoder("m", max_tokens, "req-1", hides_thoughts=hides_thoughts)
    return Answer([Accepted("m", (1, 2, 3))], [choice], encoder, context())


def streamed(told: Sequence[TokenOutput], batches: Sequence[int], **more: Any) -> dict[str, Any]:
    """The message of a stream, read by a client that comes after so many outputs each time."""
    made, left = answer(**more), iter(told)
    data = made.take()
    for size in batches:
        made.feed(0, list(itertools.islice(left, size)))
        data += made.take()
    made.feed(0, list(left))
    return check_events(events_of(data + made.take() + made.end()))


def whole(told: Sequence[TokenOutput], **more: Any) -> dict[str, Any]:
    made = answer(**more)
    made.feed(0, told)
    message: dict[str, Any] = json.loads(made.whole())
    return message


def without_id(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("id", "lockstep")}


_TEXTS = st.sampled_from(["It", " is", "\n", "<tool", CALL, CALL[:30], "", "</tool_call>"])


@given(
    st.lists(st.tuples(st.sampled_from(["", "hm", " so"]), st.just("")), max_size=3),
    st.lists(st.tuples(st.just(""), _TEXTS), max_size=6),
    st.lists(st.integers(0, 3), max_size=6),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    st.booleans(),
)
def test_a_stream_is_well_formed_and_equals_the_whole_message(
    thoughts: Pieces, texts: Pieces, batches: Sequence[int], reason: FinishReason, hides: bool
) -> None:
    told = outputs([*thoughts, *texts], reason)
    assert without_id(streamed(told, batches, hides_thoughts=hides)) == without_id(whole(told, hides_thoughts=hides))


@given(st.integers(0, 5))
def test_a_stream_that_fails_ends_with_its_error(num_fed: int) -> None:
    made = answer()
    made.feed(0, outputs(THOUGHTFUL, FinishReason.STOP)[:num_fed])
    *told, last = events_of(made.take() + made.failed(HttpError(529, "it broke")))
    assert told[0]["type"] == "message_start"
    error = {"type": "overloaded_error", "message": "it broke"}
    assert last == {"type": "error", "error": error, "request_id": "req-1"}


def test_thoughts_are_blocks_of_their_own_and_counted() -> None:
    message = whole(outputs(THOUGHTFUL, FinishReason.STOP))
    thoughts, text = message["content"]
    assert thoughts == {"type": "thinking", "thinking": "hm, so", "signature": signature_of("hm, so")}
    assert text == {"type": "text", "text": "It is blue."}
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] == 2
    [hidden, _] = whole(outputs(THOUGHTFUL, FinishReason.STOP), hides_thoughts=True)["content"]
    assert (hidden["thinking"], hidden["signature"]) == ("", thoughts["signature"])


@pytest.mark.parametrize(
    ("pieces", "reason", "stop", "max_tokens", "told"),
    [
        (THOUGHTFUL, FinishReason.STOP, 9, 99, ("end_turn", None)),
        (THOUGHTFUL, FinishReason.STOP, "END", 99, ("stop_sequence", "END")),
        (THOUGHTFUL, FinishReason.LENGTH, None, 5, ("max_tokens", None)),
        (THOUGHTFUL, FinishReason.LENGTH, None, 99, ("model_context_window_exceeded", None)),
        ([("", CALL)], FinishReason.STOP, None, 99, ("tool_use", None)),
    ],
)
def test_a_message_reports_its_stop_reason(
    pieces: Pieces, reason: FinishReason, stop: int | str | None, max_tokens: int, told: tuple[str, str | None]
) -> None:
    message = whole(outputs(pieces, reason, stop), max_tokens=max_tokens)
    assert (message["stop_reason"], message["stop_sequence"]) == told


def test_a_prompt_from_the_cache_is_counted_apart() -> None:
    usage = whole(outputs(THOUGHTFUL, FinishReason.STOP))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (1, 2, 5)


def test_a_message_of_ours_goes_back_as_it_is() -> None:
    content = whole(outputs([("hm", ""), ("", "Let me see. "), ("", CALL)], FinishReason.STOP))["content"]
    use = content[-1]
    results = [
        {"type": "tool_result", "tool_use_id": use["id"], "content": "2", "is_error": True},
        {"type": "text", "text": "Go on."},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "one"}, "title": "A"},
    ]
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": content}]
    body = MessagesBody.model_validate({"max_tokens": 1, "messages": [*turns, {"role": "user", "content": results}]})
    _, said, result, more = messages_of(body)
    assert (said["content"], said["reasoning_content"]) == ("Let me see.", "hm")
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    told = [{"type": "text", "text": "Error:"}, {"type": "text", "text": "2"}]
    assert result == {"role": "tool", "tool_call_id": use["id"], "name": "f", "content": told}
    assert [part["text"] for part in more["content"]] == ["Go on.", "A\none"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"tools": [{"name": "f", "input_schema": {}, "input_examples": [{"a": 1}]}]}, "tools.input_examples"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "messages"),
    ],
)
def test_requested_features_without_effect_give_a_warning(fields: dict[str, Any], param: str | None) -> None:
    hello = {"role": "user", "content": "Hi"}
    body = MessagesBody.model_validate({"max_tokens": 1, "messages": [hello], **fields})
    assert [warning.partition(":")[0] for warning in warnings_of(body)] == ([] if param is None else [param])
