"""What a request says of functions is checked, and errors name the place."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import InvalidParameterError
from lockstep.server.tools.definitions import (
    MAX_SCHEMA_DEPTH,
    MAX_TOOLS,
    NO_PARAMETERS,
    CheckedChoice,
    ChoiceMode,
    checked_choice,
    checked_tools,
)
from tests.server.tools.models import PING, TOOLS, WEATHER, WEATHER_SCHEMA, chat_body, function, functions_of

NAMED = {"type": "function", "function": {"name": "ping"}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"inner": schema}}
    return schema


def test_functions_are_taken_as_they_are() -> None:
    weather, time, ping = checked_tools(functions_of(TOOLS))
    assert (weather.name, weather.description, weather.strict) == ("get_weather", "The weather of a city.", False)
    assert weather.shown == WEATHER
    assert time.parameters == {"properties": {"zone": {"const": "UTC"}}, "required": ["zone"]}
    assert ping.parameters == NO_PARAMETERS
    assert checked_tools([]) == ()


def test_a_forced_call_has_declared_parameters_only() -> None:
    def schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
        return checked_tools(functions_of([function("f", parameters)]))[0].arguments_schema

    assert schema(WEATHER_SCHEMA) == {**WEATHER_SCHEMA, "additionalProperties": False}
    assert schema(None) == NO_PARAMETERS
    assert schema({}) == {"type": "object"}
    for open_schema in (
        {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}},
        {"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]},
    ):
        assert schema(open_schema) == open_schema


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("ping", "tools"),
        ({}, "tools"),
        ([PING] * (MAX_TOOLS + 1), "tools"),
        ([PING, 5], "tools[1]"),
        ([{"type": "retrieval"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([PING, WEATHER, function("get weather")], "tools[2].function.name"),
        ([function("")], "tools[0].function.name"),
        ([function("x" * 65)], "tools[0].function.name"),
        ([function("wetter_für")], "tools[0].function.name"),
        ([PING, PING], "tools[1].function.name"),
        ([function("f", description=3)], "tools[0].function.description"),
        ([function("f", strict="yes")], "tools[0].function.strict"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        ([function("f", {"type": "string"})], "tools[0].function.parameters.type"),
        ([function("f", {"properties": []})], "tools[0].function.parameters.properties"),
        ([function("f", {"default": float("nan")})], "tools[0].function.parameters"),
        ([function("f", {"default": {1, 2}})], "tools[0].function.parameters"),
        ([function("f", nested(MAX_SCHEMA_DEPTH))], "tools[0].function.parameters"),
    ],
)
def test_invalid_tools_are_rejected_by_name(tools: object, param: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        checked_tools(functions_of(tools))
    assert caught.value.param == param
    assert str(caught.value).startswith(param), "a message begins with the place"


def test_repeated_name_is_reported_with_its_first_use() -> None:
    with pytest.raises(InvalidParameterError, match=r"tools\[2\]\.function\.name is 'ping', also used by tools\[0\]"):
        checked_tools(functions_of([PING, WEATHER, PING]))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, CheckedChoice(ChoiceMode.AUTO)),
        ("none", CheckedChoice(ChoiceMode.NONE)),
        ("auto", CheckedChoice(ChoiceMode.AUTO)),
        ("required", CheckedChoice(ChoiceMode.REQUIRED)),
        ({"type": "function", "function": {"name": "ping"}}, CheckedChoice(ChoiceMode.NAMED, ("ping",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED, NAMED]}},
            CheckedChoice(ChoiceMode.AUTO, ("ping",)),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
            CheckedChoice(ChoiceMode.REQUIRED, ("ping",)),
        ),
    ],
)
def test_every_choice_is_known(choice: object, expected: CheckedChoice) -> None:
    assert checked_choice(chat_body(TOOLS, choice).tool_choice, checked_tools(functions_of(TOOLS))) == expected


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_without_functions_there_is_nothing_to_choose(choice: object) -> None:
    assert checked_choice(chat_body([], choice).tool_choice, ()) == CheckedChoice(ChoiceMode.NONE)


@pytest.mark.parametrize(
    ("choice", "names", "param"),
    [
        ("any", True, "tool_choice"),
        (5, True, "tool_choice"),
        ({"type": "function"}, True, "tool_choice.function"),
        ({"type": "allowed_tools", "function": {"name": "ping"}}, True, "tool_choice.allowed_tools"),
        ({"type": "function", "function": {"name": "pong"}}, True, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "ping"}}, False, "tool_choice.function.name"),
        ("required", False, "tool_choice"),
    ],
)
def test_a_wrong_choice_is_named(choice: object, names: bool, param: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        checked_choice(chat_body([], choice).tool_choice, checked_tools(functions_of(TOOLS)) if names else ())
    assert caught.value.param == param
