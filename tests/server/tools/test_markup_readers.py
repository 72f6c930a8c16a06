"""Calls that a format's writer writes are read as they were, wherever the text is cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.server.tools.argument_schemas import type_of
from lockstep.server.tools.call_formats import (
    FUNCTION_GEMMA,
    GEMMA4,
    GRANITE3,
    LFM2,
    OLMO3,
    PHI4_MINI,
    QWEN3_CODER,
    SMOLLM3_CODE,
    CallFormat,
)
from lockstep.server.tools.markup_readers import typed
from lockstep.server.tools.parser import ToolParser
from lockstep.server.tools.template_tools import calls_text

KEYS = st.sampled_from(("city", "days", "from", "max-results", "$id", "größe"))
TEXTS = st.text(st.sampled_from("ab '\"\\\n\t<>/=()[]{},:é😀"), max_size=8) | st.sampled_from(
    ("it's", "a', b", "</para", "<esc", "\\n", "null", "1")
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.dictionaries(KEYS, VALUES, max_size=3), min_size=1, max_size=3)
FORMATS = (OLMO3, LFM2, SMOLLM3_CODE, QWEN3_CODER, FUNCTION_GEMMA, GEMMA4, GRANITE3, PHI4_MINI)


def schema_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {"type": type_of(value)} for key, value in arguments.items()}}


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda form: form.name)
@settings(max_examples=30)
@given(calls=CALLS, cuts=st.lists(st.integers(0, 300), max_size=6))
def test_written_calls_are_read_as_they_were(
    call_format: CallFormat, calls: list[dict[str, Any]], cuts: list[int]
) -> None:
    names = [f"f{number}" for number in range(len(calls))]
    schemas = {name: schema_of(call) for name, call in zip(names, calls, strict=True)}
    text = calls_text(call_format, list(zip(names, calls, strict=True)))
    parser = ToolParser(call_format, names, lambda: "id", schemas)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    deltas = [delta for begin, end in pairwise(borders) for delta in parser.append(text[begin:end])] + parser.flush()
    assert all(hasattr(delta, "arguments") for delta in deltas), text
    assert [(call.name, json.loads(call.arguments)) for call in parser.calls] == list(zip(names, calls, strict=True))


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("12", {"integer"}, 12),
        ("012", {"integer"}, 12),
        ("1.5", {"number"}, 1.5),
        ("3", {"number"}, 3),
        ("True", {"boolean"}, True),
        ("false", {"boolean"}, False),
        ("None", {"string", "null"}, None),
        ("null", {"null", "integer"}, None),
        ("Noon", {"string", "null"}, "Noon"),
        ("12", {"string", "null"}, "12"),
        ("12", {"string", "integer"}, 12),
        ('["a", 1]', {"array"}, ["a", 1]),
        ("{'a': [True]}", {"object"}, {"a": [True]}),
        ("not json", {"object"}, "not json"),
        ("", {"integer"}, ""),
        ("1, 2", {"integer"}, "1, 2"),
        ("1], [2", {"array"}, "1], [2"),
        ("1e999", {"number"}, "1e999"),
        ("9" * 5000, {"string"}, "9" * 5000),
        ("[" * 5000, {"array"}, "[" * 5000),
    ],
)
def test_a_value_between_tags_has_a_type_that_its_schema_allows(text: str, types: set[str], value: object) -> None:
    if text == "1e999":
        assert typed(text, frozenset(types)) == text, "JSON has numbers of any size"
    else:
        assert json.loads(typed(text, frozenset(types))) == value


def test_a_type_is_found_through_references_and_choices() -> None:
    schema = {
        "properties": {
            "n": {"$ref": "#/$defs/count"},
            "o": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "e": {"enum": [1, 2]},
            "loop": {"$ref": "#/properties/loop"},
            "any": True,
        },
        "$defs": {"count": {"type": "integer"}},
    }
    body = "".join(f"<parameter={key}>\n1\n</parameter>\n" for key in ("n", "o", "e", "loop", "any"))
    parser = ToolParser(QWEN3_CODER, ("f",), lambda: "id", {"f": schema})
    parser.append(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>")
    assert [json.loads(call.arguments) for call in parser.calls] == [{"n": 1, "o": 1, "e": 1, "loop": "1", "any": "1"}]
