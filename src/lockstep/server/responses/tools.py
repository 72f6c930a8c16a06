"""Tools of the Responses API: converts client tools to functions, and calls of these functions to items.

A ``custom`` tool takes free text: the model is shown a function with one string parameter, and its calls are returned
as ``custom_tool_call`` items. A ``namespace`` groups functions: the model is shown each function under the combined
name, and call items have the namespace in a member of its own. Tools that run on OpenAI's servers or machines are left
out, with a warning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lockstep.server.fields import JsonObject, Marked, Name
from lockstep.server.tools.definitions import MAX_TOOLS, FunctionName
from lockstep.server.tools.parser import ToolCall

INPUT = "input"
"""Name of the parameter of a custom tool's function."""
BETWEEN = "__"
"""Separator between namespace and name in the name that the model is shown."""
MAX_NAME_CHARS = 64
HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation"),
    *("local_shell", "mcp", "shell", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
    "web_search_preview_2025_03_11",
)
"""Types of tools that are left out."""


class FunctionTool(Marked):
    """A function that the model can call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    """JSON schema of the arguments; absent: no parameters."""
    strict: bool | None = None
    """True: the arguments obey the schema."""
    defer_loading: bool | None = None
    """Ignored: the model is shown every tool from the start."""


class TextTool(Marked):
    """A tool with free-text input."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: JsonObject | None = None
    """Grammar of the text. It is not enforced; a warning reports this."""
    defer_loading: bool | None = None


PlainTool = Annotated[
    Annotated[FunctionTool, Tag("[function]")] | Annotated[TextTool, Tag("[custom]")],
    Discriminator(lambda value: "[custom]" if _kind(value) == "custom" else "[function]"),
]


class NamespaceTool(Marked):
    """A group of tools."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    """Ignored: each tool has its own description."""
    tools: Annotated[list[PlainTool], Field(max_length=MAX_TOOLS)]


class HostedTool(Marked):
    """A tool that is left out. Further members depend on the type."""

    __pydantic_extra__: dict[str, Any] = Field(init=False)
    type: Literal[HOSTED]  # type: ignore[valid-type]  # the values come from a table
    name: Name | None = None


def _kind(value: object) -> object:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _tag(value: object) -> str | None:
    kind = _kind(value)
    if kind in ("function", "custom", "namespace"):
        return f"[{kind}]"
    return "[hosted]" if kind in HOSTED else None


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[TextTool, Tag("[custom]")]
    | Annotated[NamespaceTool, Tag("[namespace]")]
    | Annotated[HostedTool, Tag("[hosted]")],
    Discriminator(
        _tag,
        custom_error_type="tool_kind",
        custom_error_message=f"A tool's type must be one of function, custom, namespace, {', '.join(HOSTED)}",
    ),
]


@dataclass(frozen=True, slots=True)
class ShownTool:
    """A function as the model is shown it, with the tool that it represents."""

    name: str
    """Name of the function."""
    place: int
    """Index in the request of the tool, or of the namespace that contains it."""
    tool: FunctionTool | TextTool
    namespace: str | None = None

    @property
    def function(self) -> dict[str, Any]:
        tool = self.tool
        about: dict[str, Any] = {"name": self.name, "description": tool.description}
        if isinstance(tool, TextTool):
            text = {"type": "string", "description": "The whole input of the tool."}
            about["parameters"] = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
        else:
            about |= {"parameters": tool.parameters, "strict": tool.strict}
        return {key: value for key, value in about.items() if value is not None}

    def call_item(self, call: ToolCall) -> dict[str, Any]:
        """Convert a call to an item, without id and status."""
        about = {"call_id": call.id, "name": self.tool.name}
        if self.namespace is not None:
            about["namespace"] = self.namespace
        if isinstance(self.tool, TextTool):
            return {"type": "custom_tool_call", **about, "input": _input(call)}
        return {"type": "function_call", **about, "arguments": call.arguments}


def shown_tools(tools: Sequence[ResponseTool]) -> list[ShownTool]:
    """Return the functions that the model is shown, in order."""
    shown: list[ShownTool] = []
    for place, tool in enumerate(tools):
        if isinstance(tool, FunctionTool | TextTool):
            shown.append(ShownTool(tool.name, place, tool))
        elif isinstance(tool, NamespaceTool):
            named = [(shown_name(tool.name, each.name), each) for each in tool.tools]
            shown += [ShownTool(name, place, each, tool.name) for name, each in named if len(name) <= MAX_NAME_CHARS]
    return shown


def shown_name(namespace: str | None, name: str) -> str:
    """Name of a tool that the model is shown."""
    return name if namespace is None else f"{namespace}{BETWEEN}{name}"


def tool_warnings(tools: Sequence[ResponseTool]) -> Iterator[str]:
    """Warnings about tools that are left out, and about formats that are not enforced."""
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if isinstance(tool, HostedTool):
            yield f"{where}: {tool.type} is not supported, so it is not shown to the model"
        elif isinstance(tool, TextTool) and (tool.format or {}).get("type", "text") != "text":
            yield f"{where}.format: the grammar of {tool.name} is not enforced"
        elif isinstance(tool, NamespaceTool):
            for index, each in enumerate(tool.tools):
                if len(shown_name(tool.name, each.name)) > MAX_NAME_CHARS:
                    yield f"{where}.tools[{index}]: left out: name and namespace exceed 64 characters"


def arguments_of(text: str) -> str:
    """Arguments of a custom tool's function for a call that the client sent back as text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _input(call: ToolCall) -> str:
    """Input text of a custom tool call; all arguments as written if the model did not name the parameter."""
    text = json.loads(bytes(call.arguments_object)).get(INPUT)
    return text if isinstance(text, str) else call.arguments
