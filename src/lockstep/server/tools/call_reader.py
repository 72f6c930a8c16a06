"""Readers of single calls written as JSON: parse a call that arrives in pieces, and return its arguments in pieces.

A reader consumes text until the call is complete or broken. A call is broken when it can no longer become a call of a
known function. Text that further text may change (part of a name, number or escape) is not consumed until that text
arrives. Readers of other syntaxes are in `lockstep.server.tools.markup_readers`.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

MAX_DEPTH = 64
"""Maximum nesting depth of lists and objects in arguments. A call with deeper nesting is broken."""
BLANKS = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
"""Characters of a string up to its end, an invalid character or an incomplete escape."""
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
ATOM = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CLOSING = {"{": "}", "[": "]"}


class _Expect(Enum):
    VALUE = auto()
    ITEM_OR_END = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()


_VALUES = (_Expect.VALUE, _Expect.ITEM_OR_END)
_KEYS = (_Expect.KEY, _Expect.KEY_OR_END)
_ENDS = (_Expect.COMMA_OR_END, _Expect.ITEM_OR_END, _Expect.KEY_OR_END)


@dataclass(slots=True)
class JsonScanner:
    """Incremental scanner of one JSON value. A top-level number is complete once the character after it is known."""

    is_complete: bool = False
    is_broken: bool = False
    _expect: _Expect = _Expect.VALUE
    _in_key: bool = False
    _stack: list[str] = field(default_factory=list)
    """Closing brackets and braces that are expected, innermost last."""

    def read(self, text: str, at: int) -> int:
        """Scan the text from ``at``. Return the end of the value, or of the part that is certain."""
        before = -1
        while before < at < len(text) and not (self.is_complete or self.is_broken):
            before = at
            at = self._in_string(text, at) if self._expect is _Expect.STRING else self._between(text, at)
        return at

    def _in_string(self, text: str, at: int) -> int:
        end = end_of(_STRING, text, at)
        if text[end : end + 1] == '"':
            self._expect = _Expect.COLON
            if not self._in_key:
                self._end_value()
            return end + 1
        self.is_broken = not _is_half_string(text, end)
        return end

    def _between(self, text: str, at: int) -> int:
        """Scan one punctuation character, number or literal, after blanks."""
        at = end_of(BLANKS, text, at)
        if at == len(text):
            return at
        char, expect = text[at], self._expect
        if expect in _ENDS and self._stack and char == self._stack[-1]:
            self._stack.pop()
            self._end_value()
        elif expect is _Expect.COMMA_OR_END and char == ",":
            self._expect = _Expect.KEY if self._stack[-1] == "}" else _Expect.VALUE
        elif expect is _Expect.COLON and char == ":":
            self._expect = _Expect.VALUE
        elif char == '"' and expect in _VALUES + _KEYS:
            self._expect, self._in_key = _Expect.STRING, expect in _KEYS
        elif char in _CLOSING and expect in _VALUES and len(self._stack) < MAX_DEPTH:
            self._stack.append(_CLOSING[char])
            self._expect = _Expect.KEY_OR_END if char == "{" else _Expect.ITEM_OR_END
        elif expect in _VALUES:
            return self._atom(text, at)
        else:
            self.is_broken = True
            return at
        return at + 1

    def _atom(self, text: str, at: int) -> int:
        end = end_of(_WORD, text, at)
        if at < end == len(text):
            return at
        if ATOM.fullmatch(text, at, end) is None:
            self.is_broken = True
            return at
        self._end_value()
        return end

    def _end_value(self) -> None:
        self._expect = _Expect.COMMA_OR_END
        self.is_complete = not self._stack


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of a match that may be empty."""
    match = pattern.match(text, at)
    assert match is not None, "the pattern matches an empty string"
    return match.end()


def num_partial_chars(text: str, marker: str) -> int:
    """Number of characters at the end of the text that are an incomplete marker."""
    most = min(len(marker) - 1, len(text))
    if marker[0] not in text[len(text) - most :]:
        return 0
    return next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0)


def _is_half_string(text: str, end: int) -> bool:
    """True if a string that was scanned up to ``end`` may continue with further text."""
    return end == len(text) or _HALF_ESCAPE.fullmatch(text, end) is not None


ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys of the arguments. Both are accepted in every format, because models mix them up."""
OTHER_KEYS = ("type", "id")
"""Further keys that are allowed and ignored."""
MAX_KEY_CHARS = 64 * 6 + 2
"""Maximum length of a key or name with its quotes, if every character is an escape."""
_NAME = re.compile(r"[a-zA-Z0-9_-]*")


class CallReader(ABC):
    """Reader of one call. The collected arguments are JSON, whatever their syntax in the text.

    Args:
        names: names of the functions that can be called.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._name: str | None = None
        self._scanner: JsonScanner | None = None
        """Set while arguments are being read."""
        self._has_arguments = False
        self._num_taken = 0
        """Number of characters of the arguments that `take` has returned."""
        self.arguments = ""
        """Arguments read so far."""
        self.is_complete = False
        self.is_broken = False

    def read(self, text: str) -> int:
        """Consume the certain part of the text, and return its length."""
        before, at = -1, 0
        while before < at < len(text) and not (self.is_complete or self.is_broken):
            before = at
            if self._scanner is not None:
                at = self._read_arguments(self._scanner, text, at)
            else:
                at = self._read_part(text, at)
        return at

    def take(self) -> tuple[str, str] | None:
        """Return the function name and new text of the arguments; None if there is nothing new."""
        if self._name is None or self._num_taken == len(self.arguments):
            return None
        fragment, self._num_taken = self.arguments[self._num_taken :], len(self.arguments)
        return self._name, fragment

    @abstractmethod
    def _read_part(self, text: str, at: int) -> int:
        """Consume one punctuation character or word outside the arguments. Return ``at`` if more text is needed."""

    def _end_arguments(self) -> None:
        """Handle the end of arguments that were read as JSON."""
        self.is_complete = True

    def _read_name(self, text: str, at: int, before: str, after: str) -> int:
        """Consume the name of a known function between two markers, once it is complete."""
        seen = text[at : at + len(before)]
        if seen != before:
            return at if before.startswith(seen) else self._break(at)
        begin = at + len(before)
        end = end_of(_NAME, text, begin)
        name, rest = text[begin:end], text[end : end + len(after)]
        known = any(each.startswith(name) for each in self._names) if not rest else name in self._names
        if not known or not after.startswith(rest):
            return self._break(end)
        if rest != after:
            return at
        self._name = name
        return end + len(rest)

    def _begin_arguments(self, text: str, at: int) -> int:
        if text[at] != "{":
            return self._break(at)
        self._scanner, self._has_arguments = JsonScanner(), True
        return self._read_arguments(self._scanner, text, at)

    def _read_arguments(self, scanner: JsonScanner, text: str, at: int) -> int:
        end = scanner.read(text, at)
        self.arguments += text[at:end]
        self.is_broken = scanner.is_broken
        if scanner.is_complete:
            self._scanner = None
            self._end_arguments()
        return end

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at


class _Part(Enum):
    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


_MARKS: Mapping[tuple[_Part, str], _Part] = {
    (_Part.OPEN, "{"): _Part.KEY,
    (_Part.COLON, ":"): _Part.VALUE,
    (_Part.COMMA_OR_END, ","): _Part.KEY,
}


class JsonCallReader(CallReader):
    """Reader of ``{"name": ..., "arguments": {...}}``, with the keys in any order."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._part = _Part.OPEN
        self._key = ""

    def _read_part(self, text: str, at: int) -> int:
        char, part = text[at], self._part
        if char in " \t\n\r":
            return at + 1
        if part is _Part.VALUE and self._key in ARGUMENT_KEYS:
            return self._begin_arguments(text, at)
        if part in (_Part.KEY, _Part.VALUE):
            return self._read_word(text, at)
        if (part, char) in _MARKS:
            self._part = _MARKS[part, char]
        elif part is _Part.COMMA_OR_END and char == "}" and self._name is not None:
            self.is_complete = True
            self.arguments += "" if self._has_arguments else "{}"
        else:
            return self._break(at)
        return at + 1

    def _read_word(self, text: str, at: int) -> int:
        """Consume a key, or a value other than the arguments: a string of limited length."""
        if text[at] != '"':
            return self._break(at)
        end = end_of(_STRING, text, at + 1)
        if end - at > MAX_KEY_CHARS:
            return self._break(at)
        if text[end : end + 1] == '"':
            self._end_word(json.loads(text[at : end + 1]))
            return end + 1
        return at if _is_half_string(text, end) else self._break(end)

    def _end_word(self, word: str) -> None:
        if self._part is _Part.KEY:
            self._key, self._part = word, _Part.COLON
            again = self._name is not None if word == "name" else self._has_arguments and word in ARGUMENT_KEYS
            self.is_broken = again or word not in ("name", *ARGUMENT_KEYS, *OTHER_KEYS)
            return
        if self._key == "name":
            self.is_broken = word not in self._names
            self._name = None if self.is_broken else word
        self._part = _Part.COMMA_OR_END

    def _end_arguments(self) -> None:
        self._part = _Part.COMMA_OR_END


class NamedCallReader(CallReader):
    """Reader of a name, a marker and arguments. An id with its own marker may follow the name."""

    def __init__(self, names: Collection[str], marker: str, id_marker: str = "") -> None:
        super().__init__(names)
        self._marker = marker
        self._id_marker = id_marker
        self._is_in_id = False

    def _read_part(self, text: str, at: int) -> int:
        if self._is_in_id:
            return self._read_id(text, at)
        if self._name is not None:
            return at + 1 if text[at] in " \t\n\r" else self._begin_arguments(text, at)
        end = end_of(_NAME, text, at)
        head = self._id_marker[:2]
        has_id = bool(head) and text.startswith(head, end)
        end = self._read_name(text, at, "", self._id_marker if has_id else self._marker)
        self._is_in_id = has_id and self._name is not None
        return end

    def _read_id(self, text: str, at: int) -> int:
        end = end_of(_NAME, text, at)
        rest = text[end : end + len(self._marker)]
        if end - at > MAX_KEY_CHARS or not self._marker.startswith(rest):
            return self._break(at)
        self._is_in_id = rest != self._marker
        return at if self._is_in_id else end + len(rest)
