"""Grammars of constrained answers with calls, in llguidance's dialect of Lark, made of texts alone.

Source of the dialect: llguidance's docs/syntax.md. A marker that is one token of the model is named by its id, since
text never becomes such a token there. Thoughts come first where the model has them, as free text up to their end tag;
they stay possible that way although a constraint holds from the first token on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.engine.output_rules import Reasoning
from lockstep.executors.constraint import COMPACT, Constraint, schema_text
from lockstep.server.tools.call_reader import CallFormat
from lockstep.server.tools.definitions import CallableTool

MAX_FORCED_CALLS = 16
"""Calls in one constrained answer: a model that cannot stop is stopped."""
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python writes JSON, and so as templates show it to models."""

MarkerId = Callable[[str], int | None]
"""The token that is exactly this text and no text to grammars, or None."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """Shape of the answers that a grammar allows."""

    call_format: CallFormat
    tools: Sequence[CallableTool]
    """Those that may be called."""
    at_most: int
    """Calls."""
    may_talk: bool
    """Whether there may be text before a call, or no call at all."""
    json_constraint: Constraint | None
    """What an answer without calls must be, where it is to be JSON; there is no text before calls then."""
    reasoning: Reasoning | None
    """Thoughts that may come first; must, where the prompt has opened them."""


def answer_grammar(shape: AnswerShape, marker_id: MarkerId) -> str:
    """The whole grammar; its rule ``start`` begins."""
    rules: list[str] = []
    answer = _answer(shape, marker_id, rules)
    thoughts = _thoughts(shape.reasoning, marker_id, rules)
    rules.append(_calls(shape, marker_id, rules))
    rules += _one_call(shape, marker_id)
    return "\n".join([f"start: {thoughts} answer", f"answer: {answer}", *rules])


def _answer(shape: AnswerShape, marker_id: MarkerId, rules: list[str]) -> str:
    form = shape.call_format
    if not shape.may_talk:
        return "calls" if form.bare else f"{_marker(form.begin, marker_id)} calls"
    if (
        shape.json_constraint is not None
    ):  # a call has its marker also where it could do without: both begin with a brace
        rules.append(f"told: %json {_compact_schema(shape.json_constraint)}")
        return f"told | {_marker(form.begin, marker_id)} calls"
    begins = r"\s*[^\s{](?s:.*)" if form.bare else "(?s:.*)"
    rules.append(f"TEXT: /{begins}/ & ~/(?s:.*){_pattern(form.begin)}(?s:.*)/")
    options = ["TEXT"]
    if marker_id(form.begin) is None:
        rules.append(f"head[lazy]: /(?s:.*){_pattern(form.begin)}/")
        options.append("head calls")
    else:
        options += [f"TEXT {_marker(form.begin, marker_id)} calls", f"{_marker(form.begin, marker_id)} calls"]
    if form.bare:
        options.append("calls")
    return " | ".join(options)


def _calls(shape: AnswerShape, marker_id: MarkerId, rules: list[str]) -> str:
    """All calls after the first marker."""
    form, more = shape.call_format, shape.at_most - 1
    gap = _literal(form.layout)
    if form.each:
        one = f"{gap} call {gap} {_marker(form.close, marker_id)}"
        again = f"{gap} {_marker(form.begin, marker_id)} {one}"
        first = one
    else:
        first, again = "call", f"{_literal(form.between + ' ')} call"
        if form.open:
            rules.append(f"OPEN: / ?{_pattern(form.open)}/")
            first = f"OPEN {first}"
    repeated = f" ({again}){{0,{more}}}" if more else ""
    end = "" if form.each else f" {_literal(form.close)}"
    return f"calls: {first}{repeated}{end}"


def _one_call(shape: AnswerShape, marker_id: MarkerId) -> list[str]:
    form = shape.call_format
    marker = _marker(form.arguments_marker, marker_id)
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(shape.tools)))]
    for index, tool in enumerate(shape.tools):
        head, end = f'{{"name": "{tool.name}", "{form.key}": ', "}"
        if form.arguments_marker:
            head, end = tool.name, ""
        rules.append(f"call_{index}: {_literal(head)} {marker} arguments_{index} {_literal(end)}")
        schema = {**tool.arguments_schema, "x-guidance": _LAYOUT}
        rules.append(f"arguments_{index}: %json {json.dumps(schema, ensure_ascii=False)}")
    return rules


def _compact_schema(json_constraint: Constraint) -> str:
    schema = json.loads(schema_text(json_constraint))
    return json.dumps({"x-guidance": COMPACT, **schema} if isinstance(schema, dict) else schema, ensure_ascii=False)


def _thoughts(reasoning: Reasoning | None, marker_id: MarkerId, rules: list[str]) -> str:
    if reasoning is None:
        return ""
    tags = reasoning.tags
    if marker_id(tags.end) is None:
        rules.append(f"thought[lazy]: /(?s:.*){_pattern(tags.end)}/")
    else:
        rules.append(f"THOUGHT: /(?s:.*)/ & ~/(?s:.*){_pattern(tags.end)}(?s:.*)/")
        rules.append(f"thought: THOUGHT? {_marker(tags.end, marker_id)}")
    rules.append("GAP: /[ \\n]{1,3}/")
    if reasoning.is_open:
        return "thought GAP?"
    return f"({_marker(tags.begin, marker_id)} thought GAP?)?"


def _marker(text: str, marker_id: MarkerId) -> str:
    token = marker_id(text) if text else None
    return _literal(text) if token is None else f"<[{token}]>"


def _literal(text: str) -> str:
    """A Lark string; nothing where there is no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
