"""Readers of tool calls with non-JSON arguments: parse a single call, and choose the reader for a call format.

Arguments are translated to JSON as they arrive: each piece of text yields a piece of JSON. The concatenated result does
not depend on how the text was split.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from lockstep.server.tools.argument_schemas import property_of, types_of
from lockstep.server.tools.call_formats import LITERALS, PYTHON, CallFormat, CallKind, LiteralSyntax
from lockstep.server.tools.call_reader import (
    ATOM,
    BLANKS,
    MAX_DEPTH,
    MAX_KEY_CHARS,
    CallReader,
    JsonCallReader,
    NamedCallReader,
    end_of,
    num_partial_chars,
)

BARE_KEY_CHAR = r"""[^\s=:,(){}\[\]<>'"]"""
_KEY = re.compile(f"{BARE_KEY_CHAR}*")
_WORD = re.compile(r"[-+.0-9A-Za-z_]*")
_ESCAPE = re.compile(r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<o>[0-7]{1,3}))")
_HALF_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2})?")
_SIMPLE_ESCAPES: Mapping[str, str] = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "\\": "\\", "'": "'",
    '"': '"', "/": "/",
}  # fmt: skip
"""Python's escapes, and JSON's escape of the slash."""
_MAX_CODE_POINT = 0x10FFFF
_AFTER_STRINGS = ",:)]}"


class _Expect(Enum):
    NAME = auto()
    ITEM_OR_END = auto()
    ASSIGNMENT = auto()
    VALUE = auto()
    COMMA_OR_END = auto()
    STRING = auto()


@dataclass(slots=True)
class _Frame:
    """Arguments, an object or a list that is being read."""

    close: str
    json_close: str
    assign: str = ""
    """Separator after a key; empty in a list."""
    has_bare_keys: bool = False
    num_items: int = 0


class LiteralCallReader(CallReader):
    """Reader of ``name(key=value, ...)`` and similar forms. Values are Python literals, JSON literals, or quoted
    strings.

    The reader accepts more than a compiler: trailing commas, line breaks in strings, numbers with leading zeros, and an
    unescaped quote inside a string (``'it's'``) if no character that can follow a string comes after it.
    """

    def __init__(self, names: Collection[str], syntax: LiteralSyntax) -> None:
        super().__init__(names)
        self._syntax = syntax
        self._expect = _Expect.NAME
        self._frames: list[_Frame] = []
        self._quote = ""
        """Closing quote of the string that is being read."""
        self._in_key = False

    def _read_part(self, text: str, at: int) -> int:
        if self._expect is _Expect.STRING:
            return self._in_string(text, at)
        at = end_of(BLANKS, text, at)
        return at if at == len(text) else _STEPS[self._expect](self, text, at)

    def _at_name(self, text: str, at: int) -> int:
        syntax = self._syntax
        end = self._read_name(text, at, syntax.prefix, syntax.open)
        if self._name is not None:
            self._open(_Frame(syntax.close, "}", syntax.assign, has_bare_keys=True), "{")
        return end

    def _at_item(self, text: str, at: int) -> int:
        frame = self._frames[-1]
        if text[at] == frame.close:
            return self._close(at)
        if not frame.assign:
            return self._at_value(text, at)
        quote = self._quote_at(text, at)
        if quote is None:
            return at
        if quote:
            return self._begin_string(quote, at, in_key=True)
        end = end_of(_KEY, text, at)
        if not frame.has_bare_keys or end - at > MAX_KEY_CHARS or at == end < len(text):
            return self._break(at)
        if end == len(text):
            return at
        self._begin_item()
        self.arguments += f'"{_escaped(text[at:end])}"'
        self._expect = _Expect.ASSIGNMENT
        return end

    def _at_assignment(self, text: str, at: int) -> int:
        if text[at] != self._frames[-1].assign:
            return self._break(at)
        self.arguments += ": "
        self._expect = _Expect.VALUE
        return at + 1

    def _at_value(self, text: str, at: int) -> int:
        quote = self._quote_at(text, at)
        if quote is None:
            return at
        if quote:
            return self._begin_string(quote, at, in_key=False)
        if text[at] in "[{":
            return self._begin_nested(text[at], at)
        end = end_of(_WORD, text, at)
        if at < end == len(text):
            return at
        value = LITERALS.get(text[at:end]) or _number(text[at:end])
        if value is None:
            return self._break(at)
        self._begin_value()
        self.arguments += value
        self._expect = _Expect.COMMA_OR_END
        return end

    def _at_comma(self, text: str, at: int) -> int:
        if text[at] == self._frames[-1].close:
            return self._close(at)
        if text[at] != ",":
            return self._break(at)
        self._expect = _Expect.ITEM_OR_END
        return at + 1

    def _quote_at(self, text: str, at: int) -> str | None:
        """The quote that starts here, or an empty string; None: more text is needed to decide."""
        rest = text[at : at + max(map(len, self._syntax.quotes))]
        for quote in self._syntax.quotes:
            if rest.startswith(quote):
                return quote
            if quote.startswith(rest):
                return None
        return ""

    def _begin_string(self, quote: str, at: int, *, in_key: bool) -> int:
        if in_key:
            self._begin_item()
        else:
            self._begin_value()
        self.arguments += '"'
        self._quote, self._in_key, self._expect = quote, in_key, _Expect.STRING
        return at + len(quote)

    def _in_string(self, text: str, at: int) -> int:
        quote = self._quote
        end, escape = text.find(quote, at), text.find("\\", at) if self._syntax.has_escapes else -1
        if escape >= 0 and (end < 0 or escape < end):
            self.arguments += _escaped(text[at:escape])
            return self._at_escape(text, escape)
        if end < 0:
            end = len(text) - num_partial_chars(text[at:], quote)
            self.arguments += _escaped(text[at:end])
            return end
        self.arguments += _escaped(text[at:end])
        after = end + len(quote)
        follower = end_of(BLANKS, text, after)
        if len(quote) == 1 and follower == len(text):
            return end
        if len(quote) == 1 and text[follower] not in _AFTER_STRINGS:
            self.arguments += _escaped(quote)
            return after
        self.arguments += '"'
        self._expect = _Expect.ASSIGNMENT if self._in_key else _Expect.COMMA_OR_END
        return after

    def _at_escape(self, text: str, at: int) -> int:
        if _HALF_ESCAPE.fullmatch(text, at) is not None:
            return at
        match = _ESCAPE.match(text, at)
        if match is None:
            char = text[at + 1]
            self.arguments += _escaped(_SIMPLE_ESCAPES.get(char, f"\\{char}"))
            return at + 2
        if match["u"] is not None:
            self.arguments += match[0]  # also valid in JSON; two of them may encode one character
            return match.end()
        digits, base = (match["o"], 8) if match["o"] is not None else (match["x"] or match["U"], 16)
        code_point = int(digits, base)
        if code_point > _MAX_CODE_POINT:
            return self._break(at)
        self.arguments += _escaped(chr(code_point))
        return match.end()

    def _begin_nested(self, char: str, at: int) -> int:
        if len(self._frames) >= MAX_DEPTH:
            return self._break(at)
        self._begin_value()
        if char == "[":
            self._open(_Frame("]", "]"), "[")
        else:
            self._open(_Frame("}", "}", ":", self._syntax.has_bare_keys), "{")
        return at + 1

    def _begin_item(self) -> None:
        frame = self._frames[-1]
        self.arguments += ", " if frame.num_items else ""
        frame.num_items += 1

    def _begin_value(self) -> None:
        if not self._frames[-1].assign:
            self._begin_item()

    def _open(self, frame: _Frame, json_open: str) -> None:
        self._frames.append(frame)
        self.arguments += json_open
        self._expect = _Expect.ITEM_OR_END

    def _close(self, at: int) -> int:
        self.arguments += self._frames.pop().json_close
        self._expect = _Expect.COMMA_OR_END
        self.is_complete = not self._frames
        return at + 1


_STEPS: Mapping[_Expect, Callable[[LiteralCallReader, str, int], int]] = {
    _Expect.NAME: LiteralCallReader._at_name,
    _Expect.ITEM_OR_END: LiteralCallReader._at_item,
    _Expect.ASSIGNMENT: LiteralCallReader._at_assignment,
    _Expect.VALUE: LiteralCallReader._at_value,
    _Expect.COMMA_OR_END: LiteralCallReader._at_comma,
}


def _escaped(text: str) -> str:
    """Escape text as part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _number(word: str) -> str | None:
    """Convert a Python number to JSON; None if the word is not a number."""
    if ATOM.fullmatch(word) is not None:
        return word
    for base in (0, 10):
        try:
            return str(int(word, base))
        except ValueError:
            continue
    try:
        value = float(word)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None


_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
TAG_KEY_CHAR = r"[^>\n]"
_PARAMETER_KEY = re.compile(f"{TAG_KEY_CHAR}*")
_TEXT = frozenset(["string"])


class _Tag(Enum):
    FUNCTION = auto()
    PARAMETER_OR_END = auto()
    TEXT = auto()
    """A string value, which is passed on as it arrives."""
    VALUE = auto()
    """A value whose type is known only at its end."""


class TaggedCallReader(CallReader):
    """Reader of ``<function=name>``, ``<parameter=key>`` with a value each, and their closing tags.

    A value is text; the schema determines its JSON type. One line break after the opening tag and one before the
    closing tag belong to the tags.

    Args:
        schemas: schemas of the arguments by function name.
    """

    def __init__(self, names: Collection[str], schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(names)
        self._schemas = schemas
        self._tag = _Tag.FUNCTION
        self._types: frozenset[str] = frozenset()
        """Allowed types of the value that is being read."""
        self._is_at_begin = False
        """True if the next line break would belong to the opening tag."""

    def _read_part(self, text: str, at: int) -> int:
        if self._tag in (_Tag.TEXT, _Tag.VALUE):
            return self._in_value(text, at)
        at = end_of(BLANKS, text, at)
        if at == len(text):
            return at
        if self._tag is _Tag.PARAMETER_OR_END:
            return self._at_parameter(text, at)
        end = self._read_name(text, at, _FUNCTION, ">")
        if self._name is not None:
            self.arguments += "{"
            self._tag = _Tag.PARAMETER_OR_END
        return end

    def _at_parameter(self, text: str, at: int) -> int:
        if text.startswith(_FUNCTION_END, at):
            self.arguments += "}"
            self.is_complete = True
            return at + len(_FUNCTION_END)
        seen = text[at : at + len(_FUNCTION_END)]
        if seen != _PARAMETER and (_FUNCTION_END.startswith(seen) or _PARAMETER.startswith(seen)):
            return at
        begin = at + len(_PARAMETER)
        end = end_of(_PARAMETER_KEY, text, begin)
        if not text.startswith(_PARAMETER, at) or end - begin > MAX_KEY_CHARS or text[end : end + 1] not in ("", ">"):
            return self._break(at)
        if end == len(text):
            return at
        self._begin_value(text[begin:end])
        return end + 1

    def _begin_value(self, key: str) -> None:
        schema = self._schemas.get(self._name or "", {})
        self._types = types_of(property_of(key, schema), schema)
        separator = "" if self.arguments == "{" else ", "
        self.arguments += f'{separator}"{_escaped(key)}": '
        self._is_at_begin = True
        self._tag = _Tag.TEXT if self._types <= _TEXT else _Tag.VALUE
        if self._tag is _Tag.TEXT:
            self.arguments += '"'

    def _in_value(self, text: str, at: int) -> int:
        if self._is_at_begin:
            self._is_at_begin = False
            if text[at] == "\n":
                at += 1
        end = text.find(PARAMETER_END, at)
        if end >= 0:
            value = text[at:end].removesuffix("\n")
            self.arguments += f'{_escaped(value)}"' if self._tag is _Tag.TEXT else typed(value, self._types)
            self._tag = _Tag.PARAMETER_OR_END
            return end + len(PARAMETER_END)
        if self._tag is _Tag.TEXT:
            rest = text[at:]
            end = len(text) - max(num_partial_chars(rest, "\n" + PARAMETER_END), num_partial_chars(rest, PARAMETER_END))
            self.arguments += _escaped(text[at:end])
            return end
        return at


_KINDS: Mapping[str, str] = {
    '"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null",
}  # fmt: skip
"""JSON type by the first character of a value. Any other character starts a number."""


def typed(text: str, types: frozenset[str]) -> str:
    """Convert a value that was written as text to JSON: a literal if its type is allowed, otherwise a string."""
    value = _literal(text)
    if value is not None:
        kind = _KINDS.get(value[0]) or ("number" if {".", "e", "E"} & set(value) else "integer")
        if kind in types or (kind == "integer" and "number" in types) or "string" not in types:
            return value
    return f'"{_escaped(text)}"'


def _literal(text: str) -> str | None:
    """Convert a literal to JSON; None if the text is not exactly one literal."""
    reader, frame = LiteralCallReader((), PYTHON), _Frame("]", "]")
    reader._open(frame, "[")
    is_whole = reader.read(f"{text}]") == len(text) + 1 and reader.is_complete
    return reader.arguments[1:-1] if is_whole and frame.num_items == 1 else None


def reader_of(
    call_format: CallFormat, names: Collection[str], schemas: Mapping[str, Mapping[str, Any]] | None = None
) -> CallReader:
    """Create a reader for the next call in a format.

    Args:
        schemas: schemas of the arguments by function name. Required for formats with untyped values.
    """
    if call_format.kind is CallKind.NAMED:
        return NamedCallReader(names, call_format.arguments_marker, call_format.id_marker)
    if call_format.kind is CallKind.TAGGED:
        return TaggedCallReader(names, schemas or {})
    if call_format.kind is CallKind.LITERAL:
        assert call_format.syntax is not None, "a literal format has a syntax"
        return LiteralCallReader(names, call_format.syntax)
    return JsonCallReader(names)
