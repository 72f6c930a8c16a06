"""Fifty common JSON schemas, each bounded, so that every valid document ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "minLength": 1, "maxLength": 12}
LINE: Schema = {"type": "string", "maxLength": 40}
BOOL: Schema = {"type": "boolean"}


def closed(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: Any) -> Schema:
    """Object schema with these properties and no others."""
    properties = {**required, **(optional or {})}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def whole(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def array(items: Schema, low: int, high: int) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def text(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def formatted(name: str, max_length: int = 40) -> Schema:
    """Bounded text, because the grammar of a time allows fractions of any length."""
    return {"type": "string", "format": name, "maxLength": max_length}


def one_of_kinds(*kinds: Schema) -> Schema:
    return {"anyOf": list(kinds)}


def kind(name: str, **required: Schema) -> Schema:
    return closed({"kind": {"const": name}, **required})


CLOCK = text("^([01][0-9]|2[0-3]):[0-5][0-9]$")
POINT = closed({"x": whole(-100, 100), "y": whole(-100, 100)})
ADDRESS = closed({"street": LINE, "zip": text("^[0-9]{5}$")}, {"city": WORD, "country": {"enum": ["DE", "FR", "US"]}})
TREE_LEAVES: Schema = {
    "$ref": "#/$defs/top",
    "$defs": {
        "leaf": closed({"value": whole(0, 9)}),
        "middle": closed({"children": array({"$ref": "#/$defs/leaf"}, 1, 2)}),
        "top": closed({"name": WORD, "children": array({"$ref": "#/$defs/middle"}, 0, 2)}),
    },
}

SCHEMAS: Mapping[str, Schema] = {
    # scalars and enumerations
    "boolean": BOOL,
    "null": {"type": "null"},
    "enumerated words": {"enum": ["billing", "technical", "legal", "none"]},
    "enumerated values of several types": {"enum": [1, "one", None, True, [1, 2], {"a": 1}]},
    "constant object": {"const": {"status": "ok", "codes": [200, 204]}},
    "digit": whole(0, 9),
    "integer across zero": whole(-273, 1_000_000),
    "integer above an exclusive bound": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 20},
    "number in a range": {"type": "number", "minimum": 0, "maximum": 1},
    "nullable word": {"type": ["string", "null"], "maxLength": 10},
    "bounded string": {"type": "string", "minLength": 5, "maxLength": 30},
    "plate number": text("^[A-Z]{1,3}-[A-Z]{1,2} [0-9]{1,4}$"),
    "hexadecimal colour": text("^#[0-9a-f]{6}$"),
    "version": text(r"^(0|[1-9][0-9]{0,2})\.(0|[1-9][0-9]{0,2})\.(0|[1-9][0-9]{0,2})$"),
    # formats
    "date": formatted("date"),
    "point in time": formatted("date-time"),
    "time of day": CLOCK,
    "mail address": formatted("email"),
    "identifier": formatted("uuid"),
    "address of a host": formatted("ipv4"),
    # arrays
    "flags": array(BOOL, 3, 3),
    "matrix": array(array(whole(0, 9), 3, 3), 3, 3),
    "tags": array({"enum": ["red", "green", "blue"]}, 0, 4),
    "pair": {"type": "array", "prefixItems": [WORD, whole(0, 99)], "items": False, "minItems": 2},
    "words": array(WORD, 1, 4),
    "points": array(POINT, 1, 3),
    # objects
    "point": POINT,
    "empty object": closed({}),
    "address": ADDRESS,
    "person": closed({"name": WORD, "age": whole(0, 120), "address": ADDRESS}),
    "all optional": closed({}, {"a": whole(0, 9), "b": BOOL, "c": WORD}),
    "optional in the middle": closed({"first": BOOL, "last": BOOL}, {"note": LINE}),
    "nested four deep": closed({"a": closed({"b": closed({"c": closed({"d": whole(1, 3)})})})}),
    "router's call": closed(
        {"intent": {"enum": ["billing", "technical", "legal", "none"]}, "target": text("^specialists\\.[a-z]{3,12}$")}
    ),
    "ticket": closed(
        {
            "id": text("^T-[0-9]{4,8}$"),
            "priority": {"enum": ["low", "normal", "high"]},
            "subject": LINE,
            "opened": formatted("date"),
        },
        {"assignee": WORD},
    ),
    "invoice": closed(
        {
            "number": text("^[0-9]{4}/[0-9]{2}$"),
            "lines": array(closed({"item": WORD, "quantity": whole(1, 99), "cents": whole(0, 99_999)}), 1, 3),
            "paid": BOOL,
        }
    ),
    "names with odd characters": closed({'a "b"': BOOL, "ü/ñ": BOOL, "x\\y": BOOL, "line\nbreak": BOOL}),
    "unicode constants": {"enum": ["süß", "日本", "😀", "tab\there", 'quote"d']},
    "typed map": {
        "type": "object",
        "properties": {"version": {"const": 1}},
        "required": ["version"],
        "additionalProperties": False,
    },
    # choices
    "word or digit": one_of_kinds(WORD, whole(0, 9)),
    "shapes": one_of_kinds(
        kind("circle", radius=whole(1, 50)),
        kind("square", side=whole(1, 50)),
        kind("polygon", points=array(POINT, 3, 4)),
    ),
    "list of shapes": array(one_of_kinds(kind("dot", at=POINT), kind("line", ends=array(POINT, 2, 2))), 1, 2),
    "result or error": {
        "oneOf": [
            closed({"ok": {"const": True}, "value": whole(0, 9)}),
            closed({"ok": {"const": False}, "message": LINE}),
        ]
    },
    "optional object": closed({"meta": one_of_kinds({"type": "null"}, closed({"source": WORD}))}),
    "merged objects": {
        "allOf": [
            {"type": "object", "properties": {"a": whole(0, 9)}, "required": ["a"]},
            {"type": "object", "properties": {"b": BOOL}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    # references
    "shared definition": {
        **closed({"from": {"$ref": "#/$defs/place"}, "to": {"$ref": "#/$defs/place"}}),
        "$defs": {"place": closed({"lat": whole(-90, 90), "lon": whole(-180, 180)})},
    },
    "definitions in a row": TREE_LEAVES,
    "chain of references": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": closed({"end": BOOL})},
    },
    "tool call": closed(
        {
            "name": {"enum": ["search", "open"]},
            "arguments": one_of_kinds(closed({"query": LINE}), closed({"page": whole(1, 20)})),
        }
    ),
    "event log": closed(
        {
            "events": array(closed({"at": CLOCK, "level": {"enum": ["info", "warn"]}, "text": LINE}), 0, 2),
            "total": whole(0, 1000),
        }
    ),
}
