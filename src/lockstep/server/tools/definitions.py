"""The functions and the choice that a request names, checked. Shapes: OpenAI's chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import closed

MAX_TOOLS = 128
"""Functions that one request may describe, as many as OpenAI takes."""
MAX_SCHEMA_DEPTH = 64
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""What a function that describes no parameters takes."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One function."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments, an object's."""
    strict: bool
    """Whether a call must obey the schema also where the model is free to call or not."""

    @property
    def shown(self) -> dict[str, Any]:
        """As templates want it."""
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.parameters}}

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """What a forced call's arguments obey: the schema, and no parameter that it does not declare."""
        schema = closed({"type": "object", **self.parameters})
        assert isinstance(schema, dict), "a closed object is one"
        return schema


class ChoiceMode(Enum):
    """How free the model is."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request says about calling."""

    mode: ChoiceMode
    names: tuple[str, ...] | None = None
    """Of the functions that may be called; of mode `NAMED` the one that must be. None: all."""

    def takes(self, name: str) -> bool:
        """Whether a function may be called, if any."""
        return self.names is None or name in self.names


def checked_tools(tools: object) -> tuple[Tool, ...]:
    """The functions of a request.

    Raises:
        InvalidParameterError: ``param`` names the place, e.g. ``tools[2].function.name``.
    """
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise _wrong("tools", tools, "a list of functions")
    if len(tools) > MAX_TOOLS:
        raise InvalidParameterError(f"tools has {len(tools)} entries; it must have at most {MAX_TOOLS}", param="tools")
    checked = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    seen: dict[str, int] = {}
    for index, tool in enumerate(checked):
        if seen.setdefault(tool.name, index) != index:
            where = f"tools[{index}].function.name"
            raise InvalidParameterError(
                f"{where} is {tool.name!r}, the name of tools[{seen[tool.name]}] too; names must differ", param=where
            )
    return checked


def checked_choice(choice: object, tools: Sequence[Tool]) -> Choice:
    """What is chosen; None: ``auto`` where there are functions.

    Raises:
        InvalidParameterError: it is no choice, or of a function that is not there.
    """
    if choice is None:
        return Choice(ChoiceMode.AUTO if tools else ChoiceMode.NONE)
    right = 'none, auto, required or {"type": "function", "function": {"name": "..."}}'
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise _wrong("tool_choice", choice, right)
        if choice == "required" and not tools:
            raise InvalidParameterError("tool_choice is 'required', but there are no tools", param="tool_choice")
        return Choice(ChoiceMode(choice) if tools else ChoiceMode.NONE)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), tools)
    return Choice(ChoiceMode.NAMED, (_chosen(choice, "tool_choice", tools, right),))


def _allowed(allowed: object, tools: Sequence[Tool]) -> Choice:
    """Some of the functions, which the model may or must call."""
    where, right = "tool_choice.allowed_tools", '{"mode": "auto" or "required", "tools": [...]}'
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    chosen = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(chosen, Sequence) or isinstance(chosen, str) or not chosen:
        raise _wrong(where, allowed, right)
    right = '{"type": "function", "function": {"name": "..."}}'
    names = (_chosen(one, f"{where}.tools[{index}]", tools, right) for index, one in enumerate(chosen))
    return Choice(ChoiceMode(mode), tuple(dict.fromkeys(names)))


def _chosen(choice: object, where: str, tools: Sequence[Tool], right: str) -> str:
    """The name of a function that is there."""
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _wrong(where, choice, right)
    if name not in {tool.name for tool in tools}:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidParameterError(
            f"{where} names the function {name!r}, which is not among the tools ({known})",
            param=f"{where}.function.name",
        )
    return name


def _tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise _wrong(where, tool, 'an object, {"type": "function", "function": {...}}')
    if tool.get("type", "function") != "function":
        raise _wrong(f"{where}.type", tool.get("type"), "function")
    where = f"{where}.function"
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(where, function, "an object with a name")
    name, about = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(f"{where}.name", name, "1..64 letters of a-z, A-Z, 0-9, _ and -")
    if about is not None and not isinstance(about, str):
        raise _wrong(f"{where}.description", about, "a string")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _wrong(f"{where}.strict", strict, "true or false")
    return Tool(name, about, _parameters(function.get("parameters"), f"{where}.parameters"), bool(strict))


def _parameters(schema: object, where: str) -> Mapping[str, Any]:
    if schema is None:
        return NO_PARAMETERS
    if not isinstance(schema, Mapping):
        raise _wrong(where, schema, "a JSON schema of an object")
    if schema.get("type", "object") != "object":
        raise _wrong(f"{where}.type", schema["type"], "object")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise _wrong(f"{where}.properties", properties, "an object")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise InvalidParameterError(f"{where} is nested more than {MAX_SCHEMA_DEPTH} deep", param=where)
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidParameterError(f"{where} is not JSON: {error}", param=where) from None
    return dict(schema)


def _depth(value: object) -> int:
    """Levels of lists and objects, counted without recursion and no further than matters."""
    level, depth = [value], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        children: list[object] = []
        for node in level:
            if isinstance(node, Mapping):
                children.extend(node.values())
            elif isinstance(node, (list, tuple)):
                children.extend(node)
        level, depth = children, depth + 1
    return depth


def _wrong(where: str, value: object, right: str) -> InvalidParameterError:
    shown = repr(value)
    if len(shown) > 80:
        shown = f"{shown[:77]}..."
    return InvalidParameterError(f"{where} is {shown}; it must be {right}", param=where)
