"""From a constraint to the source that llguidance compiles."""

from __future__ import annotations

import json

from lockstep.executors.constraint import Constraint, ConstraintKind

COMPACT: dict[str, bool] = {"whitespace_flexible": False}
"""Documents on one line: a small model loses itself in white space, and what is fixed between values can be forced."""


def grammar_source(constraint: Constraint) -> str:
    """The source in one of llguidance's own languages; whether it can be compiled is not known yet.

    Raises:
        ValueError: the schema is not JSON.
    """
    from llguidance import LLMatcher

    kind, source = constraint.kind, constraint.source
    if kind is ConstraintKind.CHOICE:
        return f"start: {' | '.join(map(_literal, source))}"
    assert isinstance(source, str), "validation lets only a choice have several texts"
    if kind is ConstraintKind.REGEX:
        return LLMatcher.grammar_from_regex(source)
    if kind is ConstraintKind.LARK:
        return LLMatcher.grammar_from_lark(source)
    schema = '{"type":"object"}' if kind is ConstraintKind.JSON_OBJECT else source
    if schema.strip() == "false":  # options need an object
        return LLMatcher.grammar_from_json_schema(schema)
    schema = "{}" if schema.strip() == "true" else schema
    return LLMatcher.grammar_from_json_schema(schema, defaults=COMPACT)  # type: ignore[arg-type]  # total=False


def _literal(text: str) -> str:
    """A Lark string; DEL, alone of the control characters, is not escaped by JSON and not taken by the lexer."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
