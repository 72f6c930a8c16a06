"""Schemas of functions as far as a grammar enforces them: what is left out is named, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.errors import InvalidParameterError
from lockstep.executors.grammar_compiler import schema_fault
from lockstep.server.tools.definitions import checked_tools
from lockstep.server.tools.enforcement import ANNOTATIONS, UNENFORCED, enforceable, enforced_tools
from tests.server.tools.models import function, functions_of

SOME: dict[str, Any] = {"type": "string"}
PARTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "propertyNames": SOME}, "propertyNames"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": SOME}, "not"),
    ({"type": "array", "contains": SOME}, "contains"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "string", "format": "binary"}, "format"),
    ({"type": "string", "pattern": "^(?!x).*$"}, "pattern"),
    ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
    ({"type": "object", "patternProperties": {"^(?=x)": SOME}}, 'patternProperties["^(?=x)"]'),
    ({"oneOf": [SOME, {"type": "string", "maxLength": 2}]}, "oneOf"),
]


@pytest.mark.parametrize(("part", "named"), PARTS, ids=[named for _, named in PARTS])
def test_part_that_no_grammar_enforces_is_left_out_by_name(part: dict[str, Any], named: str) -> None:
    schema = {"type": "object", "properties": {"a": part, "b": {"type": "integer"}}, "required": ["a", "b"]}
    kept, left_out = enforceable(schema)
    assert left_out == (f".properties.a{'' if named.startswith('[') else '.'}{named}",)
    assert kept["properties"]["b"] == {"type": "integer"}
    assert kept["required"] == ["a", "b"]
    assert not schema_fault(kept)


def test_conditions_are_left_out_and_the_properties_beside_them_are_kept() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "if": {"properties": {"a": {"const": 1}}},
        "then": {"required": ["b"]},
    }
    kept, left_out = enforceable(schema)
    assert left_out == (".if", ".then")
    assert kept == {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_enforceable_schema_loses_only_descriptions() -> None:
    inner = {"type": "string", "enum": ["a"], "description": "one", "title": "t", "default": "a"}
    schema = {"type": "object", "properties": {"description": inner}, "$defs": {"title": {"type": "string"}}}
    kept, left_out = enforceable(schema)
    assert left_out == ()
    assert kept["properties"] == {"description": {"type": "string", "enum": ["a"]}}
    assert kept["$defs"] == {"title": {"type": "string"}}
    assert inner["title"] == "t", "the request's own schema is as it was"


@pytest.mark.parametrize("part", [{"type": "any"}, {"$ref": "#/$defs/gone"}, {"type": "file"}])
def test_property_that_is_no_schema_is_any_value(part: dict[str, Any]) -> None:
    kept, left_out = enforceable({"type": "object", "properties": {"a": part, "b": SOME}})
    assert left_out == (".properties.a",)
    assert kept["properties"] == {"a": {}, "b": SOME}


def test_schema_that_is_wrong_as_a_whole_is_any_object() -> None:
    assert enforceable({"type": "object", "required": "a"}) == ({}, ("",))


def test_one_function_without_a_grammar_leaves_the_others_enforced() -> None:
    good = function("good", {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]})
    bad = function("bad", {"type": "object", "properties": {"a": {"not": {}}}})
    tools, warnings = enforced_tools(checked_tools(functions_of([good, bad])))
    assert tools[0].parameters == good["function"]["parameters"]
    assert warnings == ("tools[1].function.parameters: not enforced in calls of bad: properties.a.not",)


def test_strict_function_is_refused_at_its_part() -> None:
    bad = function("bad", {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, strict=True)
    with pytest.raises(InvalidParameterError) as refused:
        enforced_tools(checked_tools(functions_of([bad])))
    assert refused.value.param == "tools[0].function.parameters.properties.a.uniqueItems"
    assert "'bad'" in str(refused.value)


def test_table_of_unenforced_keywords_is_that_of_the_grammar_engine() -> None:
    """A newer engine may implement one of them; it is then enforced."""
    values: dict[str, Any] = {"uniqueItems": True, "unevaluatedItems": True, "unevaluatedProperties": True}
    for keyword in sorted(UNENFORCED - {"$recursiveAnchor"}):
        assert schema_fault({"type": ["object", "array"], keyword: values.get(keyword, {})}), keyword
    for keyword in sorted(ANNOTATIONS - {"$schema"}):
        assert not schema_fault({"type": "object", keyword: "x"}), keyword
