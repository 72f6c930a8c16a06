"""Agreement of answers in one field: the value that a text has there, written so that equal values are equal texts.

A text is JSON as a whole, or has it between fences (```` ```json ````) or in `<tool_call>` blocks, as models write it
that were asked for JSON without a grammar. A field is a path of names and places with dots (``result.total``,
``0.name``); where a name on the way holds JSON in a string, as the arguments of tool calls do, it is read.
``tool_call`` is every call of the answer, its name and its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

TOOL_CALL = "tool_call"
MAX_TEXT = 1 << 20
"""Longer answers have no field."""
_FENCED = re.compile(r"```[a-zA-Z]*[ \t]*\n(.*?)```", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class _NothingThereError(Exception):
    """No JSON, or no such field in it."""


def field_of(text: str, path: str) -> str | None:
    """Canonical JSON of a field of an answer; None: it has none.

    Args:
        path: names and places with dots, or ``tool_call``.
    """
    if len(text) > MAX_TEXT:
        return None
    try:
        value = _document(text)
        value = _calls(value) if path == TOOL_CALL else _at(value, path)
        return msgspec.json.encode(_plain(value), order="sorted").decode()
    except (_NothingThereError, RecursionError):
        return None


def _document(text: str) -> Any:
    """The JSON of an answer; of several tool calls, the list of them."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        pass
    calls = _CALL.findall(text)
    if calls:
        return [_decoded(call) for call in calls]
    fenced = _FENCED.findall(text)
    if len(fenced) == 1:
        return _decoded(fenced[0])
    raise _NothingThereError


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, UnicodeError):
        raise _NothingThereError from None


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(value, str):
            value = _decoded(value)
        if isinstance(value, list) and name.isdecimal() and len(name) < 10 and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            raise _NothingThereError
    return value


def _calls(value: Any) -> list[tuple[str, Any]]:
    """Names and arguments of tool calls, in their order."""
    if isinstance(value, Mapping) and "tool_calls" in value:
        value = value["tool_calls"]
    calls = value if isinstance(value, list) else [value]
    found = []
    for call in calls:
        call = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise _NothingThereError
        arguments = call.get("arguments", call.get("parameters", {}))
        found.append((call["name"], _decoded(arguments) if isinstance(arguments, str) and arguments else arguments))
    return found


def _plain(value: Any) -> Any:
    """A value in which 1.0 is 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
