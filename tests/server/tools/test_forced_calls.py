"""The embedded model, wild: what a request promises of calls holds, whatever the model would rather say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest

from lockstep import LLM, EngineOptions, FinishReason, LoadOptions, SamplingParams
from lockstep.artifacts.generation_config import MAX_TEMPERATURE
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import InvalidParameterError
from lockstep.server.tools.parser import CallDelta, ContentDelta
from lockstep.server.tools.tool_use import ToolUse
from tests.server.tools.models import PING, STRICT_TOOLS, TOOLS, Parsed, function, parsed, tool_use_of

MAX_TOKENS = 700
"""Four times what a call can have, were each of its bytes a token; whether another follows is a toss of a coin."""
EVENLY = MAX_TEMPERATURE
"""So hot that every token which the grammar allows is about as likely as any other, whatever the weights are."""
REFUND = function(
    "refund",
    {
        "type": "object",
        "properties": {
            "order": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            "reason": {"$ref": "#/$defs/reason"},
            "items": {"type": "array", "items": {"$ref": "#/$defs/item"}, "minItems": 1, "maxItems": 2},
        },
        "required": ["order", "reason", "items"],
        "additionalProperties": False,
        "$defs": {
            "reason": {"enum": ["broken", "late", "schade, größer"]},
            "item": {
                "type": "object",
                "properties": {"sku": {"type": "integer", "minimum": 1, "maximum": 999}, "gift": {"type": "boolean"}},
                "required": ["sku"],
                "additionalProperties": False,
            },
        },
    },
)
NAMED: Mapping[str, Any] = {"type": "function", "function": {"name": "refund"}}
ALL = (STRICT_TOOLS[0], *TOOLS[1:], REFUND)
"""None of them may grow beyond its schema, so that every call has an end."""
QUESTIONS = ("I was charged twice.", "How is the weather in Rome?", "My order never came!")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    options = LoadOptions(
        EngineOptions(num_blocks=2_000, max_num_seqs=64),
        cache_dir=tmp_path_factory.mktemp("cache"),
    )
    with LLM("pocket://", options) as model:
        yield model


def answers(
    llm: LLM, tool_use: ToolUse, count: int, max_tokens: int = MAX_TOKENS, temperature: float = EVENLY
) -> Iterator[tuple[Parsed, str]]:
    """Readings of `count` answers, each with its seed, and why they ended."""
    conversations = [tool_use.messages([{"role": "user", "content": question}]) for question in QUESTIONS]
    each = -(-count // len(QUESTIONS))
    params = SamplingParams(
        temperature=temperature, seed=1, n=each, max_tokens=max_tokens, constraint=tool_use.constraint
    )
    for output in llm.chat(conversations, params, template_kwargs=tool_use.template_kwargs):
        for completion in output.completions:
            ids = itertools.count()
            parser = tool_use.parser(lambda ids=ids: f"call_{next(ids):024x}")  # type: ignore[misc]  # bound per answer
            yield parsed(parser, completion.text), completion.finish_reason.value


def check(parser: Parsed) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in ALL}
    for call in parser.calls:
        jsonschema.Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [("required", True), ("required", False), (NAMED, True)],
    ids=["required", "single", "named"],
)
def test_a_forced_call_is_read_and_obeys_its_schema(llm: LLM, choice: Any, parallel: bool) -> None:
    tool_use = tool_use_of(llm.model.tokenizer, ALL, choice, parallel)
    read = list(answers(llm, tool_use, 45))
    for parser, reason in read:
        assert (parser.content, reason) == ("", FinishReason.STOP.value)
        assert len(parser.calls) == 1 or (parallel and choice == "required" and parser.calls)
        check(parser)
    arguments = {call.arguments for parser, _ in read for call in parser.calls}
    assert len(arguments) > 10, "the calls differ"
    if choice == "required":
        assert len({call.name for parser, _ in read for call in parser.calls}) == len(ALL)


def test_strict_functions_are_called_right_or_not_at_all(llm: LLM) -> None:
    tool_use = tool_use_of(llm.model.tokenizer, STRICT_TOOLS, "auto", True)
    assert tool_use.constraint is not None
    for parser, _ in answers(llm, tool_use, 30, 60, temperature=1.0):
        check(parser)
        assert parser.calls or "<tool_call>" not in parser.content


def test_a_stream_brings_the_same_calls(llm: LLM) -> None:
    """Piece by piece as the engine publishes them, against the whole text."""
    tool_use = tool_use_of(llm.model.tokenizer, ALL, "required", True)
    for seed in range(10):
        params = SamplingParams(temperature=EVENLY, seed=seed, max_tokens=MAX_TOKENS, constraint=tool_use.constraint)
        messages = tool_use.messages([{"role": "user", "content": QUESTIONS[0]}])
        request = GenerationRequest(Conversation(messages, tool_use.template_kwargs), params)
        outputs: list[TokenOutput] = []
        llm.engine.submit(request, outputs.append)
        llm.engine.run_until_idle()
        streamed, whole = tool_use.parser(lambda: "id"), tool_use.parser(lambda: "id")
        deltas = [delta for output in outputs for delta in streamed.append(output.text)] + streamed.flush()
        whole.append("".join(output.text for output in outputs))
        whole.flush()
        assert streamed.calls == whole.calls
        assert not any(isinstance(delta, ContentDelta) for delta in deltas)
        fragments = [delta.arguments for delta in deltas if isinstance(delta, CallDelta)]
        assert len(fragments) >= len(streamed.calls)
        assert "".join(fragments) == "".join(call.arguments for call in streamed.calls)


def test_functions_that_take_nothing_are_called_with_nothing(llm: LLM) -> None:
    tool_use = tool_use_of(llm.model.tokenizer, [PING], "required", False)
    assert {call.arguments for parser, _ in answers(llm, tool_use, 9) for call in parser.calls} == {"{}"}


def test_forced_call_leaves_the_unenforceable_part_of_its_schema_unenforced(llm: LLM) -> None:
    schema: dict[str, Any] = {
        "properties": {"x": {"type": "string", "pattern": "(?=a)b", "maxLength": 3}, "y": {"enum": [1, 2]}},
        "required": ["x", "y"],
    }
    tool_use = tool_use_of(llm.model.tokenizer, [function("look", schema)], "required", False)
    assert tool_use.warnings == ("tools[0].function.parameters: not enforced in calls of look: properties.x.pattern",)
    plain = {"type": "object", **schema, "properties": {**schema["properties"], "x": {"type": "string"}}}
    for parser, _ in answers(llm, tool_use, 9):
        for call in parser.calls:
            jsonschema.validate(json.loads(call.arguments), plain)


def test_strict_function_is_refused_at_the_part_that_cannot_be_enforced(llm: LLM) -> None:
    never = function("never", {"properties": {"x": {"type": "string", "pattern": "(?=a)b"}}}, strict=True)
    with pytest.raises(InvalidParameterError, match="'never' is strict") as caught:
        tool_use_of(llm.model.tokenizer, [PING, never], "auto", True)
    assert caught.value.param == "tools[1].function.parameters.properties.x.pattern"
    assert "%json" not in str(caught.value)
