"""One call as it is written, read in pieces: its name first of all, then its arguments as they come.

A reader takes text until the call is complete or broken, that is until it cannot become a call of a known function any
more. What it has to tell is handed out once by `take`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto
from typing import Protocol

from lockstep.server.tools.formats import CallFormat
from lockstep.server.tools.json_scanner import JsonScanner

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
