"""Grammar builder for call arguments that are not one JSON object, in llguidance's dialect of Lark.

Arguments are generated in the order of the schema. The grammar always enforces declared and required properties, types,
`enum`, `const`, choices and local references. Values that are JSON (all values in Python syntax; numbers, objects and
lists between tags) obey everything that JSON grammars enforce. Strings between markers or tags obey length and
`pattern`, but not `format`. Gemma's lists obey the length. Conditions across several arguments are not enforced.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.errors import InvalidParameterError
from lockstep.server.tools.argument_schemas import MAX_REFERENCES, list_of, properties_of, resolved, size_of, type_of
from lockstep.server.tools.call_formats import CallFormat
from lockstep.server.tools.markup_readers import BARE_KEY_CHAR, PARAMETER_END, TAG_KEY_CHAR

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Layout of JSON as written by Python, in which templates show JSON to models."""
_UNESCAPED_SLASH, _SLASH = re.compile(r"(?<!\\)/"), r"\\/"
_FREE_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
"""Pattern of a key that the schema does not declare."""
_COMMA = ' "," '
_DEFINITIONS = ("$defs", "definitions")
MarkerId = Callable[[str], int | None]
"""Returns the token that encodes exactly the given text but is not text for grammars, or None."""


def lark_marker(text: str, marker_id: MarkerId) -> str:
    """Lark expression of a marker: its token if it has one, otherwise its characters."""
    token = marker_id(text) if text else None
    return lark_literal(text) if token is None else f"<[{token}]>"


def lark_literal(text: str) -> str:
    """Quote text as a Lark string; empty for empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def lark_pattern(text: str) -> str:
    """Escape text as part of a Lark pattern."""
    return re.escape(text).replace("/", r"\/")


class ArgumentGrammar:
    """Builds the grammar rules for the arguments of one function.

    Args:
        name: prefix of all rule names.
        schema: schema of the arguments. Its objects are closed where undeclared properties are not allowed.
    """

    def __init__(self, call_format: CallFormat, marker_id: MarkerId, name: str, schema: Mapping[str, Any]) -> None:
        self._format = call_format
        self._marker_id = marker_id
        self._name = name
        self._schema = schema
        self._definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
        self._by_reference: dict[str, str] = {}
        self._numbers = itertools.count()
        self.rules: list[str] = []

    def call(self, function: str) -> str:
        """Return the expression of a whole call, and add the rules that it needs to ``rules``."""
        syntax = self._format.syntax
        if syntax is None:
            head, separator, tail = f"<function={function}>\n", "", "</function>"
        else:
            head, separator, tail = syntax.prefix + function + syntax.open, syntax.separator, syntax.close
        arguments = self._pairs(resolved(self._schema, self._schema), separator)
        return f"{lark_literal(head)} {arguments} {lark_literal(tail)}"

    def _argument(self, key: str, value: str) -> str:
        """Return the expression of one argument. ``key`` is a Lark expression."""
        if self._format.syntax is None:
            return f'"<parameter=" {key} ">\\n" {value} "\\n{PARAMETER_END}\\n"'
        return f"{key} {lark_literal(self._format.syntax.assign)} {value}"

    def _pairs(self, schema: Mapping[str, Any], separator: str) -> str:
        """Expression of an object's declared properties in order. Without any, arbitrary ones if the schema allows
        them."""
        properties = properties_of(schema)
        required = [key for key in list_of(schema, "required") if isinstance(key, str)]
        keys = list(dict.fromkeys([*properties, *required]))
        others = schema.get("additionalProperties", True)
        if not keys and others is not False:
            one = self._argument(self._add("KEY", _FREE_KEY), self._value(others))
            return f"({one} ({lark_literal(separator)} {one})*)?"
        items: list[tuple[str, bool]] = []
        for key in keys:
            if re.fullmatch(f"{self._key_pattern}+", key) is not None:
                value = self._value(properties.get(key, True))
                items.append((self._argument(lark_literal(key), value), key in required))
            elif key in required:
                raise InvalidParameterError(
                    f"the parameter {key!r} cannot be written in the {self._format.name} call format; rename it",
                    param="tools",
                )
        return self._sequence(items, lark_literal(separator))

    @property
    def _key_pattern(self) -> str:
        """Pattern of a single character of a key."""
        return TAG_KEY_CHAR if self._format.syntax is None else BARE_KEY_CHAR

    def _sequence(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Expression of items in order, with separators between present ones. Each is given with whether it is
        required."""
        if not separator:
            return " ".join(item if is_required else f"({item})?" for item, is_required in items)
        start, rest, may_be_empty = "", "", True
        for item, is_required in reversed(items):
            item = self._add("item", item)
            first = f"{item} {rest}"
            start = self._add("start", first if is_required or not start else f"{first} | {start}")
            rest = f"{separator} {item} {rest}" if is_required else f"({separator} {item})? {rest}"
            rest = self._add("rest", rest)
            may_be_empty = may_be_empty and not is_required
        return f"({start})?" if start and may_be_empty else start

    def _value(self, schema: object) -> str:
        """Return the expression of a value."""
        if self._format.syntax is not None and not self._is_gemma:
            return self._json(schema)
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            return self._own_value(schema if isinstance(schema, dict) else {})
        if reference not in self._by_reference:
            name = self._by_reference[reference] = self._new("reference")
            self.rules.append(f"{name}: {self._own_value(resolved(schema, self._schema))}")
        return self._by_reference[reference]

    def _own_value(self, schema: Mapping[str, Any], num_joined: int = 0) -> str:
        if values := list_of(schema, "enum") or ([schema["const"]] if "const" in schema else []):
            return self._any_of([self._constant(value) for value in values])
        if choices := list_of(schema, "anyOf") or list_of(schema, "oneOf"):
            return self._any_of([self._value(choice) for choice in choices])
        if (parts := list_of(schema, "allOf")) and num_joined < MAX_REFERENCES:
            joined: dict[str, Any] = {}
            for part in parts:
                joined |= resolved(part, self._schema)
            return self._own_value(joined, num_joined + 1)
        named = schema.get("type")
        types = [kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)]
        if not types:
            types = ["object"] if "properties" in schema else ["array"] if "items" in schema else []
        return self._any_of([self._of_type(kind, schema) for kind in types]) if types else self._anything()

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return self._quoted(self._text(schema))
        if self._is_gemma and kind == "array":
            return self._list(schema)
        if self._is_gemma and kind == "object":
            return f'"{{" {self._pairs(schema, ",")} "}}"'
        return self._json({**schema, "type": kind})

    def _anything(self) -> str:
        if not self._is_gemma:
            return self._text({})
        if "any" not in self._by_reference:
            name = self._by_reference["any"] = self._new("any")
            types = ("string", "array", "object", "number", "boolean", "null")
            self.rules.append(f"{name}: {self._any_of([self._of_type(kind, {}) for kind in types])}")
        return self._by_reference["any"]

    def _list(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items", True))
        least, most = size_of(schema, "minItems") or 0, size_of(schema, "maxItems")
        if most == 0:
            return '"[]"'
        more = "" if most == 1 else f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _text(self, schema: Mapping[str, Any]) -> str:
        """Return a terminal for strings between markers or tags."""
        stop = PARAMETER_END if self._format.syntax is None else self._format.syntax.quotes[0]
        least, most = size_of(schema, "minLength") or 0, size_of(schema, "maxLength")
        parts = [f"/(?s:.){{{least},{'' if most is None else most}}}/", f"~/(?s:.*){lark_pattern(stop)}(?s:.*)/"]
        if isinstance(pattern := schema.get("pattern"), str):
            head = "" if pattern.startswith("^") else "(?s:.*)"
            tail = "" if re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) else "(?s:.*)"
            inner = pattern.removeprefix("^")[: None if tail else -1]
            parts.append(f"/{head}({_UNESCAPED_SLASH.sub(_SLASH, inner)}){tail}/")
        return self._add("TEXT", " & ".join(parts))

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return self._quoted(lark_literal(value))
        if self._is_gemma and isinstance(value, list):
            return f'"[" {_COMMA.join(map(self._constant, value))} "]"'
        if self._is_gemma and isinstance(value, dict):
            pairs = [self._argument(lark_literal(key), self._constant(each)) for key, each in value.items()]
            return f'"{{" {_COMMA.join(pairs)} "}}"'
        return self._json({"const": value, "type": type_of(value)})

    def _quoted(self, text: str) -> str:
        if self._format.syntax is None:
            return text or '""'
        quote = lark_marker(self._format.syntax.quotes[0], self._marker_id)
        return f"{quote} {text} {quote}"

    def _json(self, schema: object) -> str:
        whole = {**(schema if isinstance(schema, dict) else {}), "x-guidance": LAYOUT}
        if '"$ref"' in json.dumps(schema):
            whole |= self._definitions
        return self._add("json", f"%json {json.dumps(whole, ensure_ascii=False)}")

    def _any_of(self, options: Sequence[str]) -> str:
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    @property
    def _is_gemma(self) -> bool:
        """True if nested values use the format's own syntax."""
        return self._format.syntax is not None and self._format.syntax.has_bare_keys

    def _new(self, kind: str) -> str:
        """Return a new rule name, or a new terminal name if the kind is in capitals."""
        name = f"{self._name}_{kind}_{next(self._numbers)}"
        return name.upper() if kind.isupper() else name

    def _add(self, kind: str, body: str) -> str:
        name = self._new(kind)
        self.rules.append(f"{name}: {body}")
        return name
