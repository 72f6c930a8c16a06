"""A schema's objects are closed where that takes nothing from anybody who said something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.executors.constraint import Constraint
from lockstep.executors.grammar_source import closed, schema_text

A: dict[str, Any] = {"properties": {"a": {"type": "string"}}}
SHUT: dict[str, Any] = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, SHUT),
        ({"items": A}, {"items": SHUT}),
        ({"prefixItems": [A, True]}, {"prefixItems": [SHUT, True]}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        (
            {"properties": {"properties": A, "b": {"$ref": "#/$defs/B"}}, "$defs": {"B": A}},
            {
                "properties": {"properties": SHUT, "b": {"$ref": "#/$defs/B"}},
                "$defs": {"B": SHUT},
                "additionalProperties": False,
            },
        ),
    ],
)
def test_an_object_that_declares_its_properties_has_no_others(schema: object, expected: object) -> None:
    assert closed(schema) == expected
    assert closed(closed(schema)) == expected


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "patternProperties": {"^x": True}},
        {**A, "minProperties": 2},
        {"allOf": [A, {"properties": {"b": True}}]},
        {**A, "$ref": "#/$defs/B", "$defs": {"B": {"properties": {"b": True}}}},
        {**A, "anyOf": [{"properties": {"b": True}}, True]},
        {"not": A},
        {"if": A, "then": A},
        {"enum": [{"properties": {"a": 1}}], "default": {"properties": {"a": 1}}},
    ],
)
def test_what_is_said_of_others_holds(schema: object) -> None:
    assert closed(schema) == schema


def test_what_is_no_schema_is_left_to_who_compiles_it() -> None:
    deep = '{"items":' * 5_000 + "{}" + "}" * 5_000
    for text in ("{", "[1]", '"x"', "nonsense", deep):
        assert json.dumps(schema_text(Constraint.json_schema(text))) == json.dumps(text)
