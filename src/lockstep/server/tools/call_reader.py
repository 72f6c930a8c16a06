"""Readers of single calls as families of models write them: one row a family, JSON in pieces, and a call in pieces.

A reader takes text until the call is complete or broken, that is until it cannot become a call of a known function any
more. What it has to tell is handed out once by `take`.

Sources: the chat templates of Qwen 2.5 and 3 and Hermes 2 (hermes), of Llama 3.1 and 3.2 (llama3_json), and of Mistral
v0.3 (mistral_list) and Small 3.2 (mistral_named).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls: each as ``{"name": ..., <key>: {...}}``, or as a name, a marker and arguments."""

    name: str
    begin: str
    """The marker that announces calls."""
    close: str = ""
    """What may follow the last call; with `each`, every call."""
    key: str = "arguments"
    open: str = ""
    """What stands between ``begin`` and the first call."""
    between: str = ""
    """What separates calls."""
    each: bool = False
    """Whether every call has its own ``begin`` and ``close``."""
    bare: bool = False
    """Whether an answer may begin with a call and no marker."""
    arguments_marker: str = ""
    """Not empty: a call is written as name, this, arguments."""
    layout: str = ""
    """White space that a forced call has after ``begin`` and before ``close``."""
    has_short_ids: bool = False
    """The template takes ids of 9 letters and digits only."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and must be seen all the same."""
        return tuple(text for text in (self.begin, self.arguments_marker, self.close) if len(text) > 1)


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", each=True, layout="\n")
"""Also what models are told whose template knows no tools."""
LLAMA3_JSON = CallFormat("llama3_json", "<|python_tag|>", key="parameters", between=";", bare=True)
MISTRAL_LIST = CallFormat("mistral_list", "[TOOL_CALLS]", "]", open="[", between=",", has_short_ids=True)
MISTRAL_NAMED = CallFormat("mistral_named", "[TOOL_CALLS]", arguments_marker="[ARGS]", each=True, has_short_ids=True)

SIGNS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<tool_call>",), HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL_LIST),
    (("<|python_tag|>",), LLAMA3_JSON),
    (('"parameters": ', '{"name": '), LLAMA3_JSON),
)
"""What a template that knows tools must hold, all of it, for a format; the first row that fits."""


def format_of(template: str | None, knows_tools: bool) -> CallFormat:
    """The format that a chat template teaches its model; hermes where it teaches none."""
    if template is None or not knows_tools:
        return HERMES
    return next((row for signs, row in SIGNS if all(sign in template for sign in signs)), HERMES)


MAX_DEPTH = 64
"""Lists and objects within each other; deeper ones are no arguments of a call."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_BLANK_RUN = re.compile(r"[ \t\n\r]*")
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
                at = _end(_BLANK_RUN, text, at)
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


ARGUMENT_KEYS = ("arguments", "parameters")
"""Both are understood in every format: models mix them up."""
OTHER_KEYS = ("type", "id")
"""May stand beside them, and say nothing here."""
MAX_KEY_CHARS = 64 * 6 + 2
"""Of a key or name with its quotes, every character an escape."""
_BLANKS = " \t\n\r"
_NAME_PART = re.compile(r"[a-zA-Z0-9_-]*")


class CallReader(Protocol):
    """Reads one call."""

    is_complete: bool
    is_broken: bool
    num_regretted: int
    """Of a broken one: characters that it took last and that may begin something else."""

    def read(self, text: str, at: int) -> int:
        """Take the text from ``at`` on; returns up to where."""
        ...

    def take(self) -> tuple[str, str] | None:
        """The function's name and what of the arguments is new; None: nothing yet to tell."""
        ...


class _Part(Enum):
    OPEN = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class JsonCallReader:
    """``{"name": ..., "arguments": {...}}``, the keys in any order."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._part = _Part.OPEN
        self._scanner = JsonScanner()
        self._word = ""
        """The key, or the value that is no arguments, as far as it was read."""
        self._key = ""
        self._name: str | None = None
        self._has_arguments = False
        self._arguments = ""
        """Not handed out yet."""
        self.is_complete = False
        self.is_broken = False
        self.num_regretted = 0

    def read(self, text: str, at: int) -> int:
        while at < len(text) and not (self.is_complete or self.is_broken):
            if self._part in (_Part.KEY, _Part.VALUE):
                at = self._read_json(text, at)
            elif text[at] in _BLANKS or self._take_mark(text[at]):
                at += 1
        return at

    def take(self) -> tuple[str, str] | None:
        if self._name is None or not self._arguments:
            return None
        fragment, self._arguments = self._arguments, ""
        return self._name, fragment

    def _take_mark(self, char: str) -> bool:
        part = self._part
        if part is _Part.OPEN and char == "{":
            self._begin(_Part.KEY)
        elif part is _Part.COLON and char == ":":
            self._begin(_Part.VALUE)
        elif part is _Part.COMMA_OR_END and char == ",":
            self._begin(_Part.KEY)
        elif part is _Part.COMMA_OR_END and char == "}" and self._name is not None:
            self.is_complete = True
            self._arguments += "" if self._has_arguments else "{}"
        else:
            self.is_broken = True
            return False
        return True

    def _begin(self, part: _Part) -> None:
        self._part, self._scanner, self._word = part, JsonScanner(), ""

    def _read_json(self, text: str, at: int) -> int:
        """A key or value: its first character must be of the right kind, and only arguments may be long."""
        is_arguments = self._part is _Part.VALUE and self._key in ARGUMENT_KEYS
        if not self._word and not (is_arguments and self._has_arguments):
            if text[at] in _BLANKS:
                return at + 1
            if text[at] != ("{" if is_arguments else '"'):
                self.is_broken = True
                return at
        end = self._scanner.read(text, at)
        if is_arguments:
            self._arguments += text[at:end]
            self._has_arguments = True
        else:
            self._word += text[at:end]
        self.is_broken = self._scanner.is_broken or len(self._word) > MAX_KEY_CHARS
        if self._scanner.is_complete and not self.is_broken:
            self._end(is_arguments)
        return end

    def _end(self, is_arguments: bool) -> None:
        if self._part is _Part.KEY:
            self._key = json.loads(self._word)
            again = (self._key == "name" and self._name is not None) or (
                self._key in ARGUMENT_KEYS and self._has_arguments
            )
            self.is_broken = again or self._key not in ("name", *ARGUMENT_KEYS, *OTHER_KEYS)
            self._part = _Part.COLON
            return
        if self._key == "name":
            name = json.loads(self._word)
            self.is_broken = name not in self._names
            self._name = None if self.is_broken else name
        self._part = _Part.COMMA_OR_END


class NamedCallReader:
    """A name, a marker and arguments."""

    def __init__(self, names: Collection[str], marker: str) -> None:
        self._names = names
        self._marker = marker
        self._name = ""
        self._num_matched = 0
        """Characters of the marker."""
        self._scanner: JsonScanner | None = None
        self._has_arguments = False
        self._arguments = ""
        self.is_complete = False
        self.is_broken = False
        self.num_regretted = 0

    def read(self, text: str, at: int) -> int:
        while at < len(text) and not (self.is_complete or self.is_broken):
            if self._scanner is not None:
                at = self._read_arguments(self._scanner, text, at)
            elif self._num_matched:
                at = self._read_marker(text, at)
            else:
                at = self._read_name(text, at)
        return at

    def take(self) -> tuple[str, str] | None:
        if not self._arguments:
            return None
        fragment, self._arguments = self._arguments, ""
        return self._name, fragment

    def _read_name(self, text: str, at: int) -> int:
        match = _NAME_PART.match(text, at)
        assert match is not None, "the pattern matches the empty text"
        self._name += match[0]
        end = match.end()
        self.is_broken = not any(name.startswith(self._name) for name in self._names)
        if end == len(text) or self.is_broken:
            return end
        if text[end] != self._marker[0] or self._name not in self._names:
            self.is_broken = True
            return end
        self._num_matched = 1
        return end + 1

    def _read_marker(self, text: str, at: int) -> int:
        if text[at] != self._marker[self._num_matched]:
            self.is_broken, self.num_regretted = True, self._num_matched
            return at
        self._num_matched += 1
        if self._num_matched == len(self._marker):
            self._scanner = JsonScanner()
        return at + 1

    def _read_arguments(self, scanner: JsonScanner, text: str, at: int) -> int:
        if not self._has_arguments:
            if text[at] in _BLANKS:
                return at + 1
            if text[at] != "{":
                self.is_broken = True
                return at
            self._has_arguments = True
        end = scanner.read(text, at)
        self._arguments += text[at:end]
        self.is_complete, self.is_broken = scanner.is_complete, scanner.is_broken
        return end


def reader_of(call_format: CallFormat, names: Collection[str]) -> CallReader:
    """A reader for the next call of a format."""
    if call_format.arguments_marker:
        return NamedCallReader(names, call_format.arguments_marker)
    return JsonCallReader(names)
