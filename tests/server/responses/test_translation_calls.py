"""Functions that a model calls in a response, and conversations that go on with what they answered."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.process import ServerProcess
from tests.server.responses.shapes import check_events, check_response
from tests.server.responses.test_routes import HELLO, frames

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 99}, "year": {"enum": [2025, 2026]}},
    "required": ["number", "year"],
    "additionalProperties": False,
}
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Looks up an invoice.",
    "parameters": PARAMETERS,
    "strict": True,
}
WAIT = {"type": "function", "name": "wait", "parameters": {"type": "object", "properties": {}}}
ASKED: dict[str, Any] = {
    "model": "pocket",
    "temperature": 0.0,
    "max_output_tokens": 200,
    "input": HELLO,
    "tools": [LOOK, WAIT],
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_a_call_that_is_demanded_comes(served: ServerProcess, client: openai.OpenAI, choice: Any) -> None:
    asked = {**ASKED, "tool_choice": choice, "parallel_tool_calls": False}
    made = client.responses.create(**asked)
    check_response(made.to_dict())
    assert made.status == "completed"
    [call] = made.output
    assert call.type == "function_call"
    if call.name == "look":
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    final = check_events(frames(served.base_url, asked))
    assert [(item["type"], item["name"], item["arguments"]) for item in final["output"]] == [
        ("function_call", call.name, call.arguments)
    ]
    assert (made.tool_choice if isinstance(made.tool_choice, str) else made.tool_choice.to_dict()) == choice
    assert final["tools"] == [LOOK, {**WAIT, "strict": False}]


def test_conversation_continues_with_the_result_of_a_function(client: openai.OpenAI) -> None:
    """By id, and as a whole: the same bytes."""
    first = client.responses.create(**ASKED, tool_choice="required", parallel_tool_calls=False)
    [call] = first.output
    assert call.type == "function_call"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It was paid twice."}
    more = {
        "model": "pocket",
        "temperature": 0.0,
        "max_output_tokens": 16,
        "tools": [LOOK, WAIT],
        "tool_choice": "none",
    }
    by_id: Any = client.responses.create(input=[output], previous_response_id=first.id, **more)  # type: ignore[call-overload]  # plain dicts
    said = [{"role": "user", "content": HELLO}, call.to_dict(), output]
    whole: Any = client.responses.create(input=said, store=False, **more)  # type: ignore[call-overload]  # plain dicts
    assert (by_id.output_text, by_id.usage.input_tokens) == (whole.output_text, whole.usage.input_tokens)
    items = client.responses.input_items.list(by_id.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]


def test_an_output_needs_its_call(client: openai.OpenAI) -> None:
    output: Any = {"type": "function_call_output", "call_id": "call_9", "output": "x"}
    with pytest.raises(openai.BadRequestError, match=r"No tool call found .* call_9"):
        client.responses.create(input=[output], model="pocket")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name"),
        ({"tools": [{**LOOK, "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_uncallable_functions_are_rejected_by_name(client: openai.OpenAI, wrong: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**ASKED, **wrong})
    assert caught.value.param == param
