"""Constrained answers hold calls that are read, obey their schemas, and are as many as may be, in every format."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.output_rules import ReasoningSplitter
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import Constraint
from lockstep.executors.grammar import AnyGrammar
from lockstep.executors.grammar_compiler import GrammarCompiler
from lockstep.server.tools.call_formats import CallFormat, CallKind
from lockstep.server.tools.grammar import MAX_FORCED_CALLS
from lockstep.server.tools.tool_use import ToolUse
from tests.engine import text_models
from tests.executors.grammars import ids_of
from tests.server.tools.models import (
    KWARGS,
    STRICT_TOOLS,
    TEMPLATES,
    TOOLS,
    Parsed,
    function,
    parsed,
    tokenizer_of,
    tool_use_of,
)

NAMED: Mapping[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
LIKE_OTHERS = ("granite 3", "phi-4-mini", "functools", "smollm3", "smollm3 code", "gemma 4")
"""Families whose calls, spelled letter by letter, are those of another but for their markers."""
MODELS = [(family, True) for family in TEMPLATES] + [(each, False) for each in TEMPLATES if each not in LIKE_OTHERS]


@cache
def compiler_of(family: str, has_markers: bool) -> GrammarCompiler:
    tokenizer = tokenizer_of(family, has_markers)
    return GrammarCompiler(tokenizer.vocabulary, tokenizer.vocab_size, tokenizer.end_token_ids)


class Writer:
    """A model that writes what it is told as far as the grammar lets it, and then whatever the grammar lets it."""

    def __init__(self, family: str, has_markers: bool, constraint: Constraint | None) -> None:
        assert constraint is not None
        self.tokenizer = tokenizer_of(family, has_markers)
        self.grammar: AnyGrammar
        (self.grammar,) = compiler_of(family, has_markers).build(constraint)
        self.tokens: list[int] = []

    def accept(self, token: int, room: int = 0) -> None:
        self.tokens += [token, *self.grammar.accept(token, room)]

    def say(self, *pieces: str) -> None:
        for piece in filter(None, pieces):
            marker = self.tokenizer.marker_id(piece)
            for token in self.tokenizer.encode_plain([piece])[0] if marker is None else [marker]:
                assert token in ids_of(self.grammar.allowed()), (piece, self.text)
                self.accept(token)

    def may_say(self, piece: str) -> bool:
        marker = self.tokenizer.marker_id(piece)
        first = self.tokenizer.encode_plain([piece])[0][0] if marker is None else marker
        return not self.grammar.is_complete and first in ids_of(self.grammar.allowed())

    def go_on(self, seed: int, most: int = 3_000) -> bool:
        """Whether it came to an end."""
        rng = random.Random(seed)
        while not self.grammar.is_complete and len(self.tokens) < most:
            token = rng.choice(ids_of(self.grammar.allowed()))
            if token in self.tokenizer.end_token_ids:
                return True
            self.accept(token, 15)
        return self.grammar.is_complete

    @property
    def text(self) -> str:
        table = self.tokenizer.token_bytes
        assert table is not None
        return b"".join(map(table.of, self.tokens)).decode("utf-8", "replace")


def parse(tool_use: ToolUse, text: str) -> Parsed:
    return parsed(tool_use.parser(lambda: "call_x"), text)


def check(parser: Parsed, tools: Sequence[Mapping[str, Any]]) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in tools}
    for call in parser.calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def begin(tokenizer: Tokenizer, writer: Writer) -> str:
    """Have no thoughts, or come to their end where the prompt has opened them; returns what of the text they are."""
    reasoning = tokenizer.reasoning_after(tokenizer.encode_chat([{"role": "user", "content": "Hello"}]))
    if reasoning is not None and reasoning.is_open:
        writer.say("I must ", "call.", "</think>")
        return writer.text
    if reasoning is not None and not writer.grammar.is_complete:
        writer.say("<tool_call>")
    return ""


@pytest.mark.parametrize(("family", "has_markers"), MODELS)
@pytest.mark.parametrize("choice", ["required", "single", "named"])
def test_a_forced_answer_is_calls_and_nothing_else(family: str, has_markers: bool, choice: str) -> None:
    tokenizer = tokenizer_of(family, has_markers)
    chosen = NAMED if choice == "named" else "required"
    tool_use = tool_use_of(tokenizer, TOOLS, chosen, choice == "required", KWARGS.get(family))
    numbers, names = set(), set()
    for seed in range(10):
        writer = Writer(family, has_markers, tool_use.constraint)
        thoughts = begin(tokenizer, writer)
        assert writer.go_on(seed), (seed, writer.text)
        parser = parse(tool_use, writer.text[len(thoughts) :])
        assert parser.content == "", (seed, writer.text)
        check(parser, TOOLS)
        numbers.add(len(parser.calls))
        names |= {call.name for call in parser.calls}
    assert min(numbers) == 1
    if choice != "required":
        assert numbers == {1}
    assert names == {"get_weather"} if choice == "named" else len(names) > 1


def ping(form: CallFormat) -> list[str]:
    """The pieces of a call without arguments."""
    if form.kind is CallKind.NAMED:
        return ["ping", form.arguments_marker, "{", "}"]
    if form.kind is CallKind.TAGGED:
        return ["<function=ping>\n", "</function>"]
    if form.syntax is None:
        return [f'{{"name": "ping", "{form.key}": ', "{", "}", "}"]
    return [f"{form.syntax.prefix}ping{form.syntax.open}", form.syntax.close]


@pytest.mark.parametrize(("family", "has_markers"), MODELS)
def test_number_of_calls_is_limited_by_parallel_tool_calls(family: str, has_markers: bool) -> None:
    tokenizer = tokenizer_of(family, has_markers)
    for parallel in (True, False):
        tool_use = tool_use_of(tokenizer, TOOLS, "required", parallel, KWARGS.get(family))
        form = tool_use.call_format
        writer = Writer(family, has_markers, tool_use.constraint)
        thoughts = begin(tokenizer, writer)
        call = [form.layout, *ping(form), form.layout]
        again = [form.close, form.layout, form.begin] if form.each else [form.separator]
        if not writer.text.endswith(form.begin) and not form.bare:
            writer.say(form.begin)
        if form.open:
            writer.say(form.open)
        for number in range(MAX_FORCED_CALLS if parallel else 1):
            writer.say(*(again if number else []), *(call if form.each else call[number > 0 : -1]))
        writer.say("" if form.each else form.layout, form.close, form.end)
        assert writer.grammar.is_complete, writer.text
        assert len(parse(tool_use, writer.text[len(thoughts) :]).calls) == (MAX_FORCED_CALLS if parallel else 1)


@pytest.mark.parametrize(("family", "has_markers"), MODELS)
def test_strict_function_constrains_calls_but_not_text(family: str, has_markers: bool) -> None:
    tokenizer = tokenizer_of(family, has_markers)
    tool_use = tool_use_of(tokenizer, STRICT_TOOLS, "auto", True, KWARGS.get(family))
    for seed in range(8):
        writer = Writer(family, has_markers, tool_use.constraint)
        thoughts = "" if family == "qwen3" else begin(tokenizer, writer)
        writer.say("Let me see. ")
        assert set(tokenizer.end_token_ids) & set(ids_of(writer.grammar.allowed())), "it may have said all"
        writer.say(tool_use.call_format.begin)
        assert writer.go_on(seed), writer.text
        parser = parse(tool_use, writer.text[len(thoughts) :])
        assert parser.content == "Let me see."
        assert parser.calls
        check(parser, STRICT_TOOLS)


def test_an_answer_of_a_llama_may_begin_with_a_call_and_its_text_with_no_brace() -> None:
    tool_use = tool_use_of(tokenizer_of("llama3"), STRICT_TOOLS, "auto", True)
    for seed in range(5):
        writer = Writer("llama3", True, tool_use.constraint)
        writer.say("{")
        assert writer.go_on(seed)
        parser = parse(tool_use, writer.text)
        assert parser.calls
        check(parser, STRICT_TOOLS)


def test_a_single_call_of_a_free_model_has_any_arguments() -> None:
    tool_use = tool_use_of(tokenizer_of("qwen3"), TOOLS, "auto", False)
    writer = Writer("qwen3", True, tool_use.constraint)
    writer.say("<tool_call>", "\n", '{"name": "ping", "arguments": ', '{"new', '": ')
    writer.say('"x"', "}", "}", "\n", "</tool_call>")
    assert writer.grammar.is_complete
    assert [call.arguments for call in parse(tool_use, writer.text).calls] == ['{"new": "x"}']


@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "thoughts opened", "qwen3.5"])
def test_a_model_that_thinks_may_think_before_a_forced_call(family: str, has_markers: bool) -> None:
    tokenizer = tokenizer_of(family, has_markers)
    tool_use = tool_use_of(tokenizer, TOOLS, "required", True)
    reasoning = tokenizer.reasoning_after(tokenizer.encode_chat([{"role": "user", "content": "Hello"}]))
    assert reasoning is not None
    for seed in range(6):
        writer = Writer(family, has_markers, tool_use.constraint)
        if not reasoning.is_open:
            writer.say("<think>")
        assert not writer.may_say("<tool_call>") or not has_markers, "thoughts come to their end first"
        writer.say("Hm. It is cold.", "</think>", "\n\n", "<tool_call>")
        assert writer.go_on(seed)
        splitter = ReasoningSplitter(reasoning)
        thoughts, content = splitter.append(writer.text)
        assert (thoughts, splitter.flush()) == ("Hm. It is cold.", ("", ""))
        parser = parse(tool_use, content)
        assert parser.content == ""
        check(parser, TOOLS)
        assert parser.calls
    if not reasoning.is_open:
        Writer(family, has_markers, tool_use.constraint).say("<tool_call>")


def test_open_thoughts_are_detected_with_the_template_variables_of_the_request() -> None:
    template = "{{ messages[0].content }}{{ tools }}{% if deep %}<think>{% endif %}{{ '</think>' if false }}"
    tokenizer = Tokenizer(text_models.parts(text_models.byte_level(), template))
    open_, closed = (tool_use_of(tokenizer, TOOLS, "required", True, {"deep": deep}) for deep in (True, False))
    assert open_.constraint != closed.constraint


TICKET: Mapping[str, Any] = {"type": "object", "properties": {"urgent": {"type": "boolean"}}, "required": ["urgent"]}


@pytest.mark.parametrize(("family", "has_markers"), MODELS)
def test_an_answer_that_must_be_json_is_that_or_calls(family: str, has_markers: bool) -> None:
    tokenizer = tokenizer_of(family, has_markers)
    tool_use = tool_use_of(tokenizer, TOOLS, "auto", True, KWARGS.get(family), Constraint.json_schema(TICKET))
    for seed, (first, is_call) in enumerate([('{"urgent":', False), (tool_use.call_format.begin, True)]):
        writer = Writer(family, has_markers, tool_use.constraint)
        if family in ("thoughts opened", "qwen3.5"):
            writer.say("I must ", "call.", "</think>")
        thoughts = writer.text
        assert not writer.may_say("Hello")
        writer.say(first)
        assert writer.go_on(seed), writer.text
        parser = parse(tool_use, writer.text[len(thoughts) :])
        assert bool(parser.calls) == is_call
        if is_call:
            assert parser.content == ""
        else:
            assert set(json.loads(parser.content)) == {"urgent"}


ORDER: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "note": {"type": "string", "maxLength": 5},
        "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$", "maxLength": 6},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "level": {"enum": ["low", "high", 3, None]},
        "choice": {"anyOf": [{"const": "x"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
        "item": {"$ref": "#/$defs/item"},
        "other": {"allOf": [{"$ref": "#/$defs/item"}]},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 2},
        "gift": {"type": ["boolean", "null"]},
        "tree": {"$ref": "#/$defs/tree"},
    },
    "required": ["code", "item", "gift", "rows"],
    "additionalProperties": False,
    "$defs": {
        "item": {
            "type": "object",
            "properties": {"sku": {"type": "integer", "minimum": 1, "maximum": 9}, "name": {"enum": ["ä b", "c"]}},
            "required": ["sku"],
            "additionalProperties": False,
        },
        "tree": {
            "type": "object",
            "properties": {"leaves": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}},
            "additionalProperties": False,
        },
    },
}
MARKUP = ("olmo 3", "lfm2", "qwen3 coder", "function gemma")


@pytest.mark.parametrize("has_markers", [True, False])
@pytest.mark.parametrize("family", MARKUP)
def test_a_forced_call_that_is_not_json_obeys_its_schema(family: str, has_markers: bool) -> None:
    tools = [function("order", ORDER)]
    tool_use = tool_use_of(tokenizer_of(family, has_markers), tools, "required", False)
    keys: set[str] = set()
    for seed in range(8):
        writer = Writer(family, has_markers, tool_use.constraint)
        assert writer.go_on(seed), (seed, writer.text)
        parser = parse(tool_use, writer.text)
        assert (parser.content, len(parser.calls)) == ("", 1), (seed, writer.text)
        check(parser, tools)
        keys |= json.loads(parser.calls[0].arguments).keys()
    assert keys > {*ORDER["required"]}, "others come at times"


@pytest.mark.parametrize("family", MARKUP)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"properties": {"a": True, "b": {}}, "required": ["a", "c"]},
        {"properties": {"o": {"type": "object", "additionalProperties": {"type": "boolean"}}}, "required": ["o"]},
        {"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": {"const": [1, "b", {"c": None}]}}}}},
    ],
)
def test_open_schemas_constrain_declared_parts_only(family: str, schema: Mapping[str, Any]) -> None:
    tools = [function("f", schema)]
    tool_use = tool_use_of(tokenizer_of(family), tools, "required", False)
    for seed in range(3):
        writer = Writer(family, True, tool_use.constraint)
        if writer.go_on(seed, 800):
            parser = parse(tool_use, writer.text)
            assert (parser.content, len(parser.calls)) == ("", 1), (seed, writer.text)
            check(parser, tools)


@pytest.mark.parametrize("family", MARKUP)
def test_a_required_argument_that_the_format_cannot_write_is_refused_by_name(family: str) -> None:
    schema = {"properties": {"a>(b": {"type": "integer"}, "c": {"type": "integer"}}}
    optional = tool_use_of(tokenizer_of(family), [function("f", schema)], "required", False)
    writer = Writer(family, True, optional.constraint)
    assert writer.go_on(1)
    assert "a>(b" not in writer.text
    with pytest.raises(InvalidParameterError, match="'a>\\(b'") as caught:
        tool_use_of(tokenizer_of(family), [function("f", {**schema, "required": ["a>(b"]})], "required", False)
    assert caught.value.param == "tools"


JUNK = st.recursive(
    st.sampled_from((None, True, 0, -1, 2.5, "", "string", "#/$defs/a", "#/$defs/b", "#", "^a$", "a/b")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                (
                    "type", "properties", "required", "items", "enum", "const", "anyOf", "allOf", "$ref", "minItems",
                    "maxItems", "maxLength", "pattern", "additionalProperties", "a", "b",
                )
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3 coder", "function gemma"])
@settings(max_examples=40, deadline=None)
@given(a=JUNK, b=JUNK)
def test_a_schema_that_makes_no_sense_is_refused_or_forced_and_never_an_error_of_the_server(
    family: str, a: object, b: object
) -> None:
    schema = {"properties": {"a": a, "b": {"$ref": "#/$defs/b"}}, "required": ["a"], "$defs": {"a": a, "b": b}}
    try:
        tool_use = tool_use_of(tokenizer_of(family), [function("f", schema)], "required", False)
        Writer(family, True, tool_use.constraint)
    except InvalidParameterError:
        pass
    parser = tool_use_of(tokenizer_of(family), [function("f", schema)], "auto", True).parser(lambda: "id")
    parsed(parser, "<tool_call><function=f><parameter=a>1</parameter><parameter=b>x</parameter></function></tool_call>")
