"""Grammars of answers with tool calls: built as text, in llguidance's dialect of Lark.

Source of the dialect: llguidance's docs/syntax.md. A marker that is a single token is referenced by its id, because
literal text never matches such a token. For a model with reasoning, the grammar allows free text up to the end tag
first. This keeps reasoning possible although the constraint applies from the first token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.engine.output_rules import Reasoning
from lockstep.executors.constraint import COMPACT, Constraint, schema_text
from lockstep.server.tools.argument_grammar import (
    LAYOUT,
    ArgumentGrammar,
    MarkerId,
    lark_literal,
    lark_marker,
    lark_pattern,
)
from lockstep.server.tools.call_formats import CallFormat, CallKind
from lockstep.server.tools.definitions import CallableTool

MAX_FORCED_CALLS = 16
"""Maximum number of calls in a constrained answer. It limits a model that does not stop."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The form of the answers that a grammar allows."""

    call_format: CallFormat
    tools: Sequence[CallableTool]
    """Functions that can be called."""
    at_most: int
    """Maximum number of calls."""
    allows_text: bool
    """Whether the answer can have text before a call, or no call at all."""
    json_constraint: Constraint | None
    """Constraint of an answer without calls, if it must be JSON. Text before calls is then not allowed."""
    reasoning: Reasoning | None
    """Reasoning that can come first. It must come first if the prompt has opened it."""


def answer_grammar(shape: AnswerShape, marker_id: MarkerId) -> str:
    """Return the complete grammar. Its first rule is ``start``."""
    rules: list[str] = []
    answer = _answer(shape, marker_id, rules)
    thoughts = _thoughts(shape.reasoning, marker_id, rules)
    rules.append(_calls(shape, marker_id, rules))
    rules += _one_call(shape, marker_id)
    return "\n".join([f"start: {thoughts} answer", f"answer: {answer}", *rules])


def _answer(shape: AnswerShape, marker_id: MarkerId, rules: list[str]) -> str:
    form = shape.call_format
    if not shape.allows_text:
        return "calls" if form.bare else f"{lark_marker(form.begin, marker_id)} calls"
    # A call always has its marker here, also in a bare format: a JSON answer and a bare call both start with a brace.
    if shape.json_constraint is not None:
        rules.append(f"json_answer: %json {_compact_schema(shape.json_constraint)}")
        return f"json_answer | {lark_marker(form.begin, marker_id)} calls"
    begins = r"\s*[^\s{](?s:.*)" if form.bare else "(?s:.*)"
    rules.append(f"TEXT: /{begins}/ & ~/(?s:.*){lark_pattern(form.begin)}(?s:.*)/")
    options = ["TEXT"]
    if marker_id(form.begin) is None:
        rules.append(f"head[lazy]: /(?s:.*){lark_pattern(form.begin)}/")
        options.append("head calls")
    else:
        options += [f"TEXT {lark_marker(form.begin, marker_id)} calls", f"{lark_marker(form.begin, marker_id)} calls"]
    if form.bare:
        options.append("calls")
    return " | ".join(options)


def _calls(shape: AnswerShape, marker_id: MarkerId, rules: list[str]) -> str:
    """Rule for all calls after the first marker."""
    form, more = shape.call_format, shape.at_most - 1
    gap = lark_literal(form.layout)
    close = f"{gap} {lark_marker(form.close, marker_id)} {lark_marker(form.end, marker_id)}"
    if form.each:
        first = f"{gap} call {close}"
        again = f"{gap} {lark_marker(form.begin, marker_id)} {first}"
    else:
        first, again = f"{gap} call", f"{lark_literal(form.separator)} call"
        if form.open:
            rules.append(f"OPEN: / ?{lark_pattern(form.open)}/")
            first = f"OPEN {first}"
    repeated = f" ({again}){{0,{more}}}" if more else ""
    return f"calls: {first}{repeated}{'' if form.each else close}"


def _one_call(shape: AnswerShape, marker_id: MarkerId) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(shape.tools)))]
    write = _json_call if shape.call_format.kind in (CallKind.JSON, CallKind.NAMED) else _markup_call
    for index, tool in enumerate(shape.tools):
        rules += write(shape, marker_id, index, tool)
    return rules


def _json_call(shape: AnswerShape, marker_id: MarkerId, index: int, tool: CallableTool) -> list[str]:
    form = shape.call_format
    head, end = f'{{"name": "{tool.name}", "{form.key}": ', "}"
    if form.kind is CallKind.NAMED:
        head, end = tool.name, ""
    marker = lark_marker(form.arguments_marker, marker_id)
    schema = json.dumps({**tool.arguments_schema, "x-guidance": LAYOUT}, ensure_ascii=False)
    return [
        f"call_{index}: {lark_literal(head)} {marker} arguments_{index} {lark_literal(end)}",
        f"arguments_{index}: %json {schema}",
    ]


def _markup_call(shape: AnswerShape, marker_id: MarkerId, index: int, tool: CallableTool) -> list[str]:
    arguments = ArgumentGrammar(shape.call_format, marker_id, f"call_{index}", tool.arguments_schema)
    return [f"call_{index}: {arguments.call(tool.name)}", *arguments.rules]


def _compact_schema(json_constraint: Constraint) -> str:
    schema = json.loads(schema_text(json_constraint))
    return json.dumps({"x-guidance": COMPACT, **schema} if isinstance(schema, dict) else schema, ensure_ascii=False)


def _thoughts(reasoning: Reasoning | None, marker_id: MarkerId, rules: list[str]) -> str:
    if reasoning is None:
        return ""
    tags = reasoning.tags
    if marker_id(tags.end) is None:
        rules.append(f"thought[lazy]: /(?s:.*){lark_pattern(tags.end)}/")
    else:
        rules.append(f"THOUGHT: /(?s:.*)/ & ~/(?s:.*){lark_pattern(tags.end)}(?s:.*)/")
        rules.append(f"thought: THOUGHT? {lark_marker(tags.end, marker_id)}")
    rules.append("GAP: /[ \\n]{1,3}/")
    if reasoning.is_open:
        return "thought GAP?"
    return f"({lark_marker(tags.begin, marker_id)} thought GAP?)?"
