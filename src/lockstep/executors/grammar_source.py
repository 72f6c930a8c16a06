"""From a constraint to the source that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Iterator

from lockstep.executors.constraint import Constraint, ConstraintKind

COMPACT: dict[str, bool] = {"whitespace_flexible": False}
"""Documents on one line: a small model loses itself in white space, and what is fixed between values can be forced."""
_JOINING = frozenset(["allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"])
"""Keywords by which one object obeys several schemas."""
_CHOOSING = frozenset(["anyOf", "oneOf", "$ref"])
"""Also these, beside `properties`."""
_OPENING = frozenset(["additionalProperties", "patternProperties", "propertyNames", "minProperties"])
"""Keywords that say something of properties which are not declared."""
_MAPS, _LISTS, _ONES = ("properties", "$defs", "definitions"), ("anyOf", "oneOf", "prefixItems"), ("items",)
"""Where schemas stand in a schema: by name, in a list, alone."""


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
    schema = schema_text(constraint)
    if schema.strip() == "false":  # options need an object
        return LLMatcher.grammar_from_json_schema(schema)
    schema = "{}" if schema.strip() == "true" else schema
    return LLMatcher.grammar_from_json_schema(schema, defaults=COMPACT)  # type: ignore[arg-type]  # total=False


def schema_text(constraint: Constraint) -> str:
    """The schema of a JSON constraint, its objects closed."""
    source = constraint.source
    if constraint.kind is ConstraintKind.JSON_OBJECT:
        return '{"type":"object"}'
    assert isinstance(source, str), "validation lets only a choice have several texts"
    try:
        return json.dumps(closed(json.loads(source)), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):  # whoever compiles it says what is wrong
        return source


def closed(schema: object) -> object:
    """A schema whose documents this one accepts as well: an object that declares its properties has no others.

    Left open, they are what a model never comes to an end with. So vLLM's and llama.cpp's grammars do, and OpenAI's
    strict schemas must say it, which clients take out again for other servers. A schema that says anything of
    undeclared properties keeps its word, and one that joins schemas to one object stays as it is.
    """
    return _closed(schema) if not _joins(schema) else schema


def _joins(schema: object) -> bool:
    """Whether an object may have to obey several schemas at once."""
    if not isinstance(schema, dict):
        return False
    keys = schema.keys()
    if not keys.isdisjoint(_JOINING) or ("properties" in keys and not keys.isdisjoint(_CHOOSING)):
        return True
    return any(_joins(part) for part in _parts(schema))


def _parts(schema: dict[str, object]) -> Iterator[object]:
    for key in _MAPS:
        if isinstance(named := schema.get(key), dict):
            yield from named.values()
    for key in _LISTS:
        if isinstance(several := schema.get(key), list):
            yield from several
    for key in _ONES:
        yield schema.get(key)


def _closed(schema: object) -> object:
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for key in _MAPS:
        if isinstance(named := copy.get(key), dict):
            copy[key] = {name: _closed(part) for name, part in named.items()}
    for key in _LISTS:
        if isinstance(several := copy.get(key), list):
            copy[key] = [_closed(part) for part in several]
    for key in _ONES:
        if key in copy:
            copy[key] = _closed(copy[key])
    if "properties" in copy and _OPENING.isdisjoint(copy):
        copy["additionalProperties"] = False
    return copy


def _literal(text: str) -> str:
    """A Lark string; DEL, alone of the control characters, is not escaped by JSON and not taken by the lexer."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
