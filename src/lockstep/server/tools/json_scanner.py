"""JSON that arrives in pieces: how far a text is one value, or the beginning of one. The grammar is RFC 8259's."""

from __future__ import annotations

import re
from enum import Enum, auto

MAX_DEPTH = 64
"""Lists and objects within each other; deeper ones are no arguments of a call."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_BLANKS = re.compile(r"[ \t\n\r]*")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"


class _Expect(Enum):
    VALUE = auto()
    ITEM_OR_END = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPED = auto()
    HEX = auto()
    NUMBER = auto()
    LITERAL = auto()


_BETWEEN = frozenset([_Expect.VALUE, _Expect.ITEM_OR_END, _Expect.KEY_OR_END, _Expect.KEY, _Expect.COLON])
_BLANKS_MAY_COME = _BETWEEN | {_Expect.COMMA_OR_END}

_NUMBER: dict[str, dict[str, str]] = {
    "minus": {"0": "zero", "1": "whole"},
    "zero": {".": "point", "e": "e"},
    "whole": {"0": "whole", "1": "whole", ".": "point", "e": "e"},
    "point": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "e"},
    "e": {"0": "exponent", "1": "exponent", "+": "sign", "-": "sign"},
    "sign": {"0": "exponent", "1": "exponent"},
    "exponent": {"0": "exponent", "1": "exponent"},
}
"""Part of a number and class of a character (1 stands for 1..9) to the next part."""
_WHOLE_NUMBERS = ("zero", "whole", "fraction", "exponent")


class JsonScanner:
    """Follows one value. A number that nothing encloses is complete with the character after it."""

    __slots__ = ("_expect", "_in_key", "_rest", "_stack", "is_broken", "is_complete")

    def __init__(self) -> None:
        self._expect = _Expect.VALUE
        self._stack: list[str] = []
        self._rest = ""
        """Of a literal, what is missing; of a number, the part it is in; of an escape, one letter per missing digit."""
        self._in_key = False
        self.is_complete = False
        self.is_broken = False

    def read(self, text: str, at: int) -> int:
        """Follow the text from ``at`` on; returns where the value, or what can be one, ends."""
        while at < len(text) and not (self.is_complete or self.is_broken):
            if self._expect is _Expect.STRING:
                at = _end(_PLAIN, text, at)
            elif self._expect in _BLANKS_MAY_COME:
                at = _end(_BLANKS, text, at)
            if at < len(text) and self._take(text[at]):
                at += 1
        return at

    def _take(self, char: str) -> bool:
        """Move on by a character; False: it is not the value's, or is looked at again."""
        expect = self._expect
        if expect is _Expect.STRING:
            if char == "\\":
                self._expect = _Expect.ESCAPED
            elif char == '"':
                self._end_string()
            else:
                return self._break()
        elif expect is _Expect.ESCAPED:
            if char != "u" and char not in _ESCAPES:
                return self._break()
            self._expect, self._rest = (_Expect.HEX, "hhhh") if char == "u" else (_Expect.STRING, "")
        elif expect is _Expect.HEX:
            if char not in _HEX:
                return self._break()
            self._rest = self._rest[1:]
            self._expect = _Expect.HEX if self._rest else _Expect.STRING
        elif expect is _Expect.NUMBER:
            return self._take_digit(char)
        elif expect is _Expect.LITERAL:
            if not self._rest.startswith(char):
                return self._break()
            self._rest = self._rest[1:]
            if not self._rest:
                self._end_value()
        else:
            return self._take_between(char)
        return True

    def _take_between(self, char: str) -> bool:
        expect = self._expect
        may_end = expect in (_Expect.COMMA_OR_END, _Expect.ITEM_OR_END, _Expect.KEY_OR_END)
        if may_end and self._stack and char == self._stack[-1]:
            self._stack.pop()
            self._end_value()
        elif expect is _Expect.COMMA_OR_END and char == ",":
            self._expect = _Expect.KEY if self._stack[-1] == "}" else _Expect.VALUE
        elif expect in (_Expect.KEY, _Expect.KEY_OR_END) and char == '"':
            self._expect, self._in_key = _Expect.STRING, True
        elif expect is _Expect.COLON and char == ":":
            self._expect = _Expect.VALUE
        elif expect in (_Expect.VALUE, _Expect.ITEM_OR_END):
            return self._begin_value(char)
        else:
            return self._break()
        return True

    def _begin_value(self, char: str) -> bool:
        if char == '"':
            self._expect, self._in_key = _Expect.STRING, False
        elif char in "{[" and len(self._stack) < MAX_DEPTH:
            self._stack.append("}" if char == "{" else "]")
            self._expect = _Expect.KEY_OR_END if char == "{" else _Expect.ITEM_OR_END
        elif char in _LITERALS:
            self._expect, self._rest = _Expect.LITERAL, _LITERALS[char]
        elif char == "-" or char in "0123456789":
            self._expect, self._rest = _Expect.NUMBER, {"-": "minus", "0": "zero"}.get(char, "whole")
        else:
            return self._break()
        return True

    def _take_digit(self, char: str) -> bool:
        kind = "1" if char in "123456789" else "e" if char == "E" else char
        following = _NUMBER[self._rest].get(kind)
        if following is not None:
            self._rest = following
            return True
        if self._rest not in _WHOLE_NUMBERS:
            return self._break()
        self._end_value()
        return False

    def _end_string(self) -> None:
        if self._in_key:
            self._expect = _Expect.COLON
        else:
            self._end_value()

    def _end_value(self) -> None:
        self._expect = _Expect.COMMA_OR_END
        self.is_complete = not self._stack

    def _break(self) -> bool:
        self.is_broken = True
        return False


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a run that may be empty ends."""
    match = pattern.match(text, at)
    assert match is not None, "the pattern matches the empty text"
    return match.end()
