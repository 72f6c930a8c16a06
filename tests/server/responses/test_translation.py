"""Items become the messages that chat requests would have, whether they were sent or stored."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter

from lockstep.engine.chat_template import MAX_MESSAGES, checked_messages
from lockstep.errors import InvalidParameterError
from lockstep.server.responses.schema import Input
from lockstep.server.responses.translation import items_of, messages_of

CALL = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"x": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "blue"}


def items(said: object) -> Sequence[Mapping[str, Any]]:
    numbers = itertools.count()
    parsed = TypeAdapter[Any](Input).validate_python(said)
    return items_of(parsed, lambda prefix: f"{prefix}_{next(numbers)}")


def messages(said: object, instructions: str | None = None) -> list[dict[str, object]]:
    return checked_messages(messages_of(instructions, items(said)), supports_developer=True)


def test_text_becomes_a_user_message() -> None:
    assert messages("Hi") == [{"role": "user", "content": "Hi"}]
    assert items("Hi")[0] == {
        "id": "msg_0",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "Hi"}],
    }


def test_instructions_come_first() -> None:
    assert messages("Hi", "Be brief.")[0] == {"role": "system", "content": "Be brief."}


def test_parts_are_joined_as_in_chat() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert messages([{"role": "user", "content": parts}]) == checked_messages(chat, supports_developer=True)


def test_one_turn_of_the_assistant_is_one_message() -> None:
    said = [
        {"role": "user", "content": "What colour?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        CALL,
        {**CALL, "call_id": "call_2"},
        OUTPUT,
        {**OUTPUT, "call_id": "call_2", "output": [{"type": "input_text", "text": "red"}]},
        {"role": "assistant", "content": "Blue."},
    ]
    function = {"name": "look", "arguments": {"x": 1}}
    assert messages(said) == [
        {"role": "user", "content": "What colour?"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "I look.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": function},
                {"id": "call_2", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "blue"},
        {"role": "tool", "tool_call_id": "call_2", "name": "look", "content": "red"},
        {"role": "assistant", "content": "Blue."},
    ]


def test_two_turns_of_the_assistant_stay_two() -> None:
    said = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, CALL, {**CALL, "id": "x"}]
    assert [message["content"] for message in messages(said)] == ["a", "b"]
    after_a_call = [CALL, {"role": "assistant", "content": "b"}]
    assert len(messages(after_a_call)) == 2


def test_items_that_are_listed_may_be_sent_again() -> None:
    said = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "Hello"},
        CALL,
        OUTPUT,
    ]
    assert items(list(items(said))) == items(said)


@pytest.mark.parametrize("arguments", ["{", "[1]", "1", '"x"', '{"a":' * 9_000])
def test_arguments_that_are_no_object_are_named(arguments: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"input\[1\]\.arguments is not a JSON object") as caught:
        items([{"role": "user", "content": "Hi"}, {**CALL, "arguments": arguments}])
    assert caught.value.param == "input[1].arguments"


def test_an_output_without_its_call_is_named() -> None:
    with pytest.raises(InvalidParameterError, match=r"No tool call found .* call_1"):
        messages([OUTPUT])


def test_a_conversation_is_bounded() -> None:
    item = items("Hi")[0]
    assert len(messages_of(None, [item] * MAX_MESSAGES)) == MAX_MESSAGES
    with pytest.raises(InvalidParameterError, match=f"has {MAX_MESSAGES + 1} messages"):
        messages_of("Be brief.", [item] * MAX_MESSAGES)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([{"type": "web_search_call"}], "one of message, reasoning, function_call, function_call_output"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input_text"),
        ([{"role": "tool", "content": "x"}], "'user'"),
        ([], "at least 1 item"),
        (7, "string"),
    ],
)
def test_unsupported_items_are_rejected(said: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        items(said)
