"""JSON documents: parses top-level members and the elements of one list, each with its line."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from typing import Any, BinaryIO, NamedTuple, NoReturn

from lockstep.errors import TraceError
from lockstep.replay.readers.fields import EXACT_JSON, json_fault, shown

MAX_DOCUMENT_BYTES = 64 << 20
"""Maximum size of a document, which is read whole: half a million requests. Formats with a request per line have no
such limit."""
_PLAIN_JSON = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")


class Located(NamedTuple):
    """A value and its position."""

    value: Any
    line: int
    """Line, from 1."""


Members = dict[str, Located]


def read_text(stream: BinaryIO, name: str) -> str:
    """Read a whole document; TraceError if it is too large or not UTF-8."""
    content = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise TraceError(
            f"{name} is a JSON document of more than {MAX_DOCUMENT_BYTES >> 20} MiB; use a format with a request per "
            "line (Mooncake, Azure), which may have any size"
        )
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise TraceError(f"{name}:{line}: not UTF-8 ({error.reason})") from None


def members(text: str, name: str, exact: Container[str], itemised: str) -> Members:
    """Members of the object in a text.

    Args:
        exact: keys whose values retain the digits of their fractions; NaN and repeated keys in them are refused. The
            other values are read leniently, since other programs wrote them.
        itemised: key of a list whose elements are `Located` too.

    Raises:
        TraceError: the text is not such a document; the message has the line.
    """
    return _Scan(text, name).members(exact, itemised)


class _Scan:
    """A position in a text, and its line."""

    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._at = 0
        self._line_at = 0
        self._line = 1

    def members(self, exact: Container[str], itemised: str) -> Members:
        found: Members = {}
        for _ in self._items("{", "}", "a key"):
            key = self._value(_PLAIN_JSON)
            if not isinstance(key, str):
                self._fault(f"a key in quotes expected, not {shown(key)}")
            self._take(":")
            line = self.line()
            if key in found:
                self._fault(f"{shown(key)} appears twice")
            if key == itemised and self._next() == "[":
                items = self._items("[", "]", "a value")
                found[key] = Located([Located(self._value(EXACT_JSON), at) for at in items], line)
            else:
                found[key] = Located(self._value(EXACT_JSON if key in exact else _PLAIN_JSON), line)
        if self._next():
            self._fault("there is text after the end of the document")
        return found

    def line(self) -> int:
        """Line of the current position, counted from the position of the last call."""
        self._line += self._text.count("\n", self._line_at, self._at)
        self._line_at = self._at
        return self._line

    def _items(self, opening: str, closing: str, what: str) -> Iterator[int]:
        """Line of each item of an object or a list; the caller reads the item before it requests the next."""
        self._take(opening)
        while self._next() != closing:
            yield self.line()
            if self._next() != closing:
                self._take(",")
                if self._next() == closing:
                    self._fault(f"{what} expected after the comma")
        self._take(closing)

    def _value(self, decoder: json.JSONDecoder) -> Any:
        self._next()
        try:
            value, self._at = decoder.raw_decode(self._text, self._at)
        except json.JSONDecodeError as error:
            raise TraceError(f"{self._name}:{error.lineno}: not JSON ({json_fault(error)})") from None
        except (ValueError, ArithmeticError, RecursionError) as error:
            raise TraceError(f"{self._name}:{self.line()}: not JSON ({json_fault(error)})") from None
        return value

    def _next(self) -> str:
        """Next character that is not a space; empty at the end."""
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._text[self._at : self._at + 1]

    def _take(self, expected: str) -> None:
        got = self._next()
        if got != expected:
            self._fault(f"{expected!r} expected, not {got!r}" if got else f"it ends where {expected!r} is expected")
        self._at += 1

    def _fault(self, what: str) -> NoReturn:
        raise TraceError(f"{self._name}:{self.line()}: not JSON ({what})")
