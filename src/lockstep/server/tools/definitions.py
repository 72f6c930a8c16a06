"""Functions and choices of a request: their shapes, which are OpenAI's, and what shapes alone cannot refuse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import closed
from lockstep.server.fields import Body, JsonObject, Marked, text_or_object

MAX_TOOLS = 128
"""Functions that one request may describe, as many as OpenAI takes."""
MAX_SCHEMA_DEPTH = 64
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""What a function that describes no parameters takes."""
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Marked):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    """A JSON schema; absent: no parameters."""
    strict: bool | None = None
    """The arguments obey the schema."""


class Tool(Marked):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: FunctionName


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Body):
    """Some of the tools: the model is informed of all, and may call these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_kind(value: object) -> str:
    """The form of `tool_choice` that a value is intended to be, as a tag."""
    if isinstance(value, dict):
        return "[allowed]" if value.get("type") == "allowed_tools" else "[object]"
    return "[text]"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[text]")]
    | Annotated[NamedToolChoice, Tag("[object]")]
    | Annotated[AllowedToolsChoice, Tag("[allowed]")],
    Discriminator(choice_kind),
]
FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("[text]")] | Annotated[NamedFunction, Tag("[object]")],
    Discriminator(text_or_object),
]


@dataclass(frozen=True, slots=True)
class CallableTool:
    """One function as a model is informed of it."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments, an object's."""
    strict: bool
    """Whether a call must obey the schema also where the model is free to call or not."""
    where: str
    """Its place in the request, e.g. ``tools[2].function``."""

    @property
    def shown(self) -> dict[str, Any]:
        """As templates want it."""
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.parameters}}

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema of a forced call's arguments: the function's, without parameters that it does not declare."""
        schema = closed({"type": "object", **self.parameters})
        assert isinstance(schema, dict), "a closed object is one"
        return schema


class ChoiceMode(Enum):
    """Freedom of the model to call functions."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class CheckedChoice:
    """A request's choice of the functions that may or must be called."""

    mode: ChoiceMode
    names: tuple[str, ...] | None = None
    """Of the functions that may be called; of mode `NAMED` the one that must be. None: all."""

    def takes(self, name: str) -> bool:
        """True if a function may be called, if any may."""
        return self.names is None or name in self.names


def checked_tools(functions: Sequence[Function]) -> tuple[CallableTool, ...]:
    """The functions of a request.

    Raises:
        InvalidParameterError: ``param`` names the place, e.g. ``tools[2].function.name``.
    """
    checked = tuple(
        CallableTool(
            function.name,
            function.description,
            _parameters(function.parameters, f"tools[{index}].function.parameters"),
            bool(function.strict),
            f"tools[{index}].function",
        )
        for index, function in enumerate(functions)
    )
    seen: dict[str, int] = {}
    for index, tool in enumerate(checked):
        if seen.setdefault(tool.name, index) != index:
            where = f"tools[{index}].function.name"
            raise InvalidParameterError(
                f"{where} is {tool.name!r}, the name of tools[{seen[tool.name]}] too; names must differ", param=where
            )
    return checked


def checked_choice(choice: ToolChoice | None, tools: Sequence[CallableTool]) -> CheckedChoice:
    """Check a choice against the functions; None means ``auto`` where there are any.

    Raises:
        InvalidParameterError: it is of a function that is not there.
    """
    if choice == "required" and not tools:
        raise InvalidParameterError("tool_choice is 'required', but there are no tools", param="tool_choice")
    if choice is None or isinstance(choice, str):
        return CheckedChoice(ChoiceMode(choice or "auto") if tools else ChoiceMode.NONE)
    if isinstance(choice, NamedToolChoice):
        return CheckedChoice(ChoiceMode.NAMED, (_known(choice, "tool_choice", tools),))
    allowed, where = choice.allowed_tools, "tool_choice.allowed_tools.tools"
    names = (_known(one, f"{where}[{index}]", tools) for index, one in enumerate(allowed.tools))
    return CheckedChoice(ChoiceMode(allowed.mode), tuple(dict.fromkeys(names)))


def _known(choice: NamedToolChoice, where: str, tools: Sequence[CallableTool]) -> str:
    """The name of a function that is there."""
    name = choice.function.name
    if name not in {tool.name for tool in tools}:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidParameterError(
            f"{where} names the function {name!r}, which is not among the tools ({known})",
            param=f"{where}.function.name",
        )
    return name


def _parameters(schema: Mapping[str, Any] | None, where: str) -> Mapping[str, Any]:
    if schema is None:
        return NO_PARAMETERS
    if schema.get("type", "object") != "object":
        raise InvalidParameterError.of(f"{where}.type", schema["type"], "object")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise InvalidParameterError.of(f"{where}.properties", properties, "an object")
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
