"""What a server of ours answered, and what clients make of it, goes back in as it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel

from lockstep.cluster.base import Hop
from lockstep.server.chat import ChatBody, template_messages
from lockstep.server.choices import Choice
from lockstep.server.chunk_encoder import ChatEncoder
from lockstep.server.completions import CompletionBody
from lockstep.server.embeddings import EmbeddingBody
from lockstep.server.fields import Body
from lockstep.server.responses.answer import ResponseWriter
from lockstep.server.responses.schema import ResponseBody, response_base
from lockstep.server.responses.translation import items_of, messages_of
from lockstep.server.tokenize import DetokenizeRequest, TokenizeRequest
from tests.server.making import TOKENIZER, answer_of, metadata, outputs_of
from tests.server.tools.models import tool_use_of

DUMPS: Mapping[str, Callable[[Any], Any]] = {
    "as it came": lambda made: made.model_dump(exclude_unset=True),
    "with nulls": lambda made: made.model_dump(),
    "without nulls": lambda made: made.model_dump(exclude_none=True),
    "to_dict": lambda made: made.to_dict(),
}
USER: dict[str, Any] = {"role": "user", "content": "hello"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HOP = Hop("entry", "billing", "billing", "specialists.billing", 0.1, 3, 0, 1)


def encoder(**more: Any) -> ChatEncoder:
    return ChatEncoder(metadata(), TOKENIZER, 1, **more)


def answered(made: ChatEncoder, *pieces: str, thoughts: str = "") -> Any:
    """The official client's message of an answer that said these pieces."""
    tool_use = tool_use_of(TOKENIZER, [TOOL], "auto", True)
    answer = answer_of(made, num_choices=1)
    answer.choices = [Choice(0, parser=tool_use.parser(lambda: "call_1"))]
    answer.feed(0, outputs_of([pieces], thoughts))
    return ChatCompletion.model_validate_json(answer.whole()).choices[0].message


ANSWERS: Mapping[str, Callable[[], Any]] = {
    "text": lambda: answered(encoder(), "Hi"),
    "nothing": lambda: answered(encoder(), ""),
    "thoughts": lambda: answered(encoder(), "Hi", thoughts="hm"),
    "a call": lambda: answered(encoder(), CALL),
    "thoughts and a call": lambda: answered(encoder(), CALL, thoughts="hm"),
    "a route": lambda: answered(encoder(hops=[HOP]), "Hi"),
    "a deprecated call": lambda: answered(encoder(has_functions=True), CALL),
    "an echo": lambda: answered(encoder(echo="Oh. "), "Hi"),
}


@pytest.mark.parametrize("dump", DUMPS)
@pytest.mark.parametrize("kind", ANSWERS)
def test_a_message_of_ours_goes_back_as_it_is(kind: str, dump: str) -> None:
    message = ANSWERS[kind]()
    dumped = DUMPS[dump](message)
    body = ChatBody.model_validate({"messages": [USER, dumped, USER]})
    told = template_messages(body.messages)[1]
    assert told["role"] == "assistant"
    assert told.get("content", "") == (message.content or "")
    assert told.get("reasoning_content") == getattr(message, "reasoning_content", None)
    calls = [call["function"]["name"] for call in told.get("tool_calls", ())]
    assert calls == (["f"] if "call" in kind else [])


def written(thoughts: str, text: str, call: bool) -> Response:
    """The official client's response of what a writer was told."""
    numbers = iter(range(9))
    base = response_base(ResponseBody(input="Hi"), "resp_1", "m", 1)
    writer = ResponseWriter(base, lambda prefix: f"{prefix}_{next(numbers)}")
    writer.begin()
    if thoughts:
        writer.write_thoughts(thoughts)
    if text:
        writer.write_text(text, [{"token": text, "logprob": -0.5, "bytes": [72], "top_logprobs": []}])
    writer.end_text(is_cut=False)
    if call:
        writer.write_call({"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'})
    return Response.model_validate_json(json.dumps(writer.complete(2)))


@pytest.mark.parametrize("dump", DUMPS)
@pytest.mark.parametrize("thoughts", ["", "hm"])
@pytest.mark.parametrize(("text", "call"), [("Hi", False), ("", False), ("", True), ("Hi", True)])
def test_items_of_ours_go_back_as_they_are(dump: str, thoughts: str, text: str, call: bool) -> None:
    items = [DUMPS[dump](item) for item in written(thoughts, text, call).output]
    result = [{"type": "function_call_output", "call_id": "call_1", "output": "2"}] if call else []
    body = ResponseBody.model_validate({"input": [USER, *items, *result]})
    said = items_of(body.input, lambda prefix: f"{prefix}_new")
    assert [item["id"] for item in said[1 : 1 + len(items)]] == [item["id"] for item in items]
    told = messages_of(None, said)[1]
    assert told.get("content", "") == text
    assert told.get("reasoning_content", "") == thoughts
    assert len(told.get("tool_calls", ())) == call


@pytest.mark.parametrize(
    "message",
    [
        # LiteLLM 1.106.2, `message.model_dump()` of an answer and of a call
        {"content": "Hi", "role": "assistant", "tool_calls": None, "function_call": None,
         "provider_specific_fields": {"refusal": None}},
        {"content": None, "role": "assistant", "function_call": None, "provider_specific_fields": {"refusal": None},
         "tool_calls": [{"function": {"arguments": "{}", "name": "f"}, "id": "call_1", "type": "function"}]},
        # the official client, `client.chat.completions.stream` with tools
        {"content": None, "refusal": None, "role": "assistant", "parsed": None,
         "tool_calls": [{"id": "c", "type": "function", "index": 0,
                         "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}]},
        # OpenAI's own
        {"role": "assistant", "content": None, "refusal": "I cannot.", "annotations": [{"type": "url_citation"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot."}], "audio": None},
        {"role": "assistant", "content": [], "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
    ],
)  # fmt: skip
def test_messages_of_others_come_in(message: dict[str, Any]) -> None:
    [told] = template_messages(ChatBody.model_validate({"messages": [message]}).messages)
    assert "parsed" not in str(told)
    if message.get("refusal"):
        assert told["content"] == "I cannot."


def test_calls_in_their_deprecated_form_are_calls() -> None:
    call = {"name": "f", "arguments": "{}"}
    messages = [
        USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "1"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "2"},
    ]
    told = template_messages(ChatBody.model_validate({"messages": messages}).messages)
    ids = [told[1]["tool_calls"][0]["id"], told[3]["tool_calls"][0]["id"]]
    assert [told[2]["tool_call_id"], told[4]["tool_call_id"]] == ids
    assert ids[0] != ids[1]
    assert [message["role"] for message in told] == ["user", "assistant", "tool", "assistant", "tool"]


BODIES: Mapping[type[BaseModel], dict[str, Any]] = {
    ChatBody: {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "y", "tool_call_id": "c"},
        ],
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "structured_outputs": {"regex": "a"},
        "tools": [TOOL],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
    },
    CompletionBody: {"prompt": "x", "stream_options": {}},
    EmbeddingBody: {"input": ["x"]},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
    ResponseBody: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}], "summary": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low"},
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": {"type": "function", "name": "f"},
        "stream_options": {},
    },
}
FREE = ("schema", "parameters")
"""Members whose own members are the caller's."""


def objects_of(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a body whose members we name."""
    if isinstance(value, dict):
        yield value
        for name, member in value.items():
            if name not in FREE:
                yield from objects_of(member)
    elif isinstance(value, list):
        for member in value:
            yield from objects_of(member)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@given(where=st.randoms(use_true_random=False))
def test_an_unknown_member_that_is_null_is_no_error_anywhere(body: type[BaseModel], where: Any) -> None:
    def copy() -> Any:
        return json.loads(json.dumps(BODIES[body]))

    def read(asked: Any) -> Any:
        return body.model_validate(asked).model_dump(exclude_none=True, warnings=False)

    nulled, wrong = copy(), copy()
    at = where.randrange(len(list(objects_of(nulled))))
    list(objects_of(nulled))[at]["made_up"] = None
    assert read(nulled) == read(copy())
    list(objects_of(wrong))[at]["made_up"] = 0
    with pytest.raises(ValueError, match="made_up"):
        read(wrong)


def test_a_member_that_may_be_left_out_may_be_null() -> None:
    def bodies(base: type[Body]) -> Iterator[type[Body]]:
        for body in base.__subclasses__():
            yield body
            yield from bodies(body)

    for body in bodies(Body):
        told = body.model_json_schema()["properties"] if body.model_fields else {}
        for name, field in body.model_fields.items():
            if not field.is_required() and field.annotation is not Any:
                assert "null" in json.dumps(told[field.alias or name]), f"{body.__name__}.{name}"
