"""A constraint says what is wrong with its shape before any model is asked."""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from typing import Any

import pytest

from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import MAX_CHOICES, MAX_SOURCE_BYTES, Constraint, ConstraintKind, closed, schema_text
from lockstep.executors.sampling_params import SamplingParams

GOOD = (
    Constraint.choice(["a", "b"]),
    Constraint.regex("[0-9]+"),
    Constraint.json_schema({"type": "object"}),
    Constraint.json_schema('{"type": "object"}'),
    Constraint.json_schema(True),
    Constraint.json_object(),
    Constraint.lark('start: "x"'),
)


@pytest.mark.parametrize("constraint", GOOD, ids=lambda constraint: constraint.kind)
def test_valid_constraint_is_accepted_and_hashable(constraint: Constraint) -> None:
    SamplingParams(constraint=constraint).validate(1000)
    assert {constraint: 1}[Constraint(constraint.kind, constraint.source)] == 1


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint.choice([]), "the choice has 0 texts; it must be a list of 1..1000 texts"),
        (Constraint.choice(["x"] * (MAX_CHOICES + 1)), "the choice has 1001 texts"),
        (Constraint.choice(["a", ""]), "text 1 of the choice is ''; it must be a string that is not empty"),
        (Constraint.choice(["a", 7]), "text 1 of the choice is 7"),  # type: ignore[list-item]  # what a client may send
        (Constraint.regex(""), "the regex constraint is empty"),
        (Constraint.regex(7), "the source of a regex constraint is of type int; it must be text"),  # type: ignore[arg-type]  # same
        (Constraint.regex("\ud800"), "not Unicode text"),
        (Constraint("regex", "a"), "kind is 'regex'; it must be one of choice, regex"),  # type: ignore[arg-type]  # same
        (Constraint.lark("x" * (MAX_SOURCE_BYTES + 1)), f"has 65537 bytes; it must have at most {MAX_SOURCE_BYTES}"),
        (Constraint.choice(["é" * 20_000, "x" * 30_000]), "has 70000 bytes"),
    ],
)
def test_invalid_constraint_is_rejected_by_name(constraint: Constraint, words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words.replace("(", r"\(")) as caught:
        SamplingParams(constraint=constraint).validate(1000)
    assert caught.value.param == "constraint"


def test_of_a_schema_that_is_too_long_nothing_is_kept() -> None:
    class Member:
        """What is seen to go."""

    members: list[object] = ["ab"] * MAX_SOURCE_BYTES + [Member()]
    gone = weakref.ref(members[-1])
    gc.disable()
    try:
        with contextlib.suppress(InvalidParameterError):
            Constraint.json_schema({"enum": members})
        del members
        assert gone() is None
    finally:
        gc.enable()


def test_a_schema_within_itself_is_refused() -> None:
    circle: dict[str, object] = {}
    circle["not"] = circle
    with pytest.raises(InvalidParameterError, match="the JSON schema"):
        Constraint.json_schema(circle)


def test_something_else_than_a_constraint_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"it must be a Constraint, e\.g\."):
        SamplingParams(constraint="[0-9]").validate(1000)  # type: ignore[arg-type]  # what a user may write


def test_schema_that_is_not_json_is_rejected() -> None:
    with pytest.raises(InvalidParameterError, match="the JSON schema is not JSON"):
        Constraint.json_schema({"enum": [{1, 2}]})
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InvalidParameterError, match="the JSON schema is not JSON"):
        Constraint.json_schema(deep)


def test_a_text_alone_is_a_choice_of_one() -> None:
    assert Constraint.choice("yes").source == ("yes",)
    assert Constraint.choice("yes").kind is ConstraintKind.CHOICE


def test_a_schema_is_written_no_further_than_it_may_be_long() -> None:
    """What is behind that could not be written at all, and nobody finds out."""
    with pytest.raises(InvalidParameterError, match=f"more than {MAX_SOURCE_BYTES} bytes") as caught:
        Constraint.json_schema({"enum": ["ab"] * MAX_SOURCE_BYTES, "default": object()})
    assert caught.value.param == "constraint"


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
def test_schemas_with_a_rule_for_undeclared_properties_or_joined_schemas_stay_unchanged(schema: object) -> None:
    assert closed(schema) == schema


def test_invalid_schema_text_is_passed_unchanged_to_the_compiler() -> None:
    deep = '{"items":' * 5_000 + "{}" + "}" * 5_000
    for text in ("{", "[1]", '"x"', "nonsense", deep):
        assert json.dumps(schema_text(Constraint.json_schema(text))) == json.dumps(text)
