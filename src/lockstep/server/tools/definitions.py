"""Function definitions and tool choices: define OpenAI's shapes, and check rules that the shapes cannot express."""

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
"""Maximum number of functions per request, as in OpenAI's API."""
MAX_SCHEMA_DEPTH = 64
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function without parameters."""
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Marked):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    """JSON schema of the arguments; absent: no parameters."""
    strict: bool | None = None
    """True: the arguments obey the schema."""


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
    """A subset of the tools. The model is shown all tools but can only call these."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_kind(value: object) -> str:
    """Tag of the `tool_choice` form that a value is parsed as."""
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
    """A function as the model is shown it."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    """JSON schema of the arguments. Its type is object."""
    strict: bool
    """Whether a call must obey the schema even if the model is free to call or not."""
    where: str
    """Path in the request, for example ``tools[2].function``."""

    @property
    def shown(self) -> dict[str, Any]:
        """The function in the form that templates expect."""
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": self.parameters}}

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """Schema of a forced call's arguments, which does not allow undeclared parameters."""
        schema = closed({"type": "object", **self.parameters})
        assert isinstance(schema, dict), "the closed form of an object schema is an object"
        return schema


class ChoiceMode(Enum):
    """Modes in which the model can or must call functions."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class CheckedChoice:
    """The functions that a request allows or requires the model to call."""

    mode: ChoiceMode
    names: tuple[str, ...] | None = None
    """Names of the functions that can be called; with mode `NAMED`, the one that must be called. None: all."""

    def allows(self, name: str) -> bool:
        """True if the choice allows calls of a function."""
        return self.names is None or name in self.names


def checked_tools(functions: Sequence[Function]) -> tuple[CallableTool, ...]:
    """Check the functions of a request.

    Raises:
        InvalidParameterError: a function is invalid; ``param`` names its path, for example ``tools[2].function.name``.
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
                f"{where} is {tool.name!r}, also used by tools[{seen[tool.name]}]; names must differ", param=where
            )
    return checked


def checked_choice(choice: ToolChoice | None, tools: Sequence[CallableTool]) -> CheckedChoice:
    """Check a choice against the functions. None means ``auto`` if there are any.

    Raises:
        InvalidParameterError: the choice names an unknown function.
    """
    if choice == "required" and not tools:
        raise InvalidParameterError("tool_choice is 'required', but the request has no tools", param="tool_choice")
    if choice is None or isinstance(choice, str):
        return CheckedChoice(ChoiceMode(choice or "auto") if tools else ChoiceMode.NONE)
    if isinstance(choice, NamedToolChoice):
        return CheckedChoice(ChoiceMode.NAMED, (_known(choice, "tool_choice", tools),))
    allowed, where = choice.allowed_tools, "tool_choice.allowed_tools.tools"
    names = (_known(one, f"{where}[{index}]", tools) for index, one in enumerate(allowed.tools))
    return CheckedChoice(ChoiceMode(allowed.mode), tuple(dict.fromkeys(names)))


def _known(choice: NamedToolChoice, where: str, tools: Sequence[CallableTool]) -> str:
    """Return the function name of a choice, after checking that it exists."""
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
        raise InvalidParameterError(f"{where} is nested more than {MAX_SCHEMA_DEPTH} levels deep", param=where)
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidParameterError(f"{where} is not JSON: {error}", param=where) from None
    return dict(schema)


def _depth(value: object) -> int:
    """Nesting depth of lists and objects, counted without recursion up to the limit."""
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
