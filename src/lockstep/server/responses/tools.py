"""Tools of the Responses API: those that a client runs, as functions for the model, and calls of these as items.

A ``custom`` tool takes free text: the model is shown a function of one text, and its call comes back as a
``custom_tool_call``. A ``namespace`` holds functions of one origin: the model is shown each under both names, and a
call has the namespace beside the name. Tools that a server or a machine of OpenAI's runs are left out, and a warning
names them.
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
"""The parameter of a custom tool's function."""
BETWEEN = "__"
"""Stands between a namespace and a name in what the model is shown."""
MAX_NAME_CHARS = 64
HOSTED = (
    *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation"),
    *("local_shell", "mcp", "shell", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview"),
    "web_search_preview_2025_03_11",
)
"""Types of tools that are left out."""


class FunctionTool(Marked):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    """A JSON schema; absent: no parameters."""
    strict: bool | None = None
    """The arguments obey the schema."""
    defer_loading: bool | None = None
    """Unused: the model is shown every tool from the beginning."""


class TextTool(Marked):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: JsonObject | None = None
    """A grammar of the text is not enforced; there is a warning."""
    defer_loading: bool | None = None


PlainTool = Annotated[
    Annotated[FunctionTool, Tag("[function]")] | Annotated[TextTool, Tag("[custom]")],
    Discriminator(lambda value: "[custom]" if _kind(value) == "custom" else "[function]"),
]


class NamespaceTool(Marked):
    """Tools of one origin."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    """Unused: each tool has its own."""
    tools: Annotated[list[PlainTool], Field(max_length=MAX_TOOLS)]


class HostedTool(Marked):
    """A tool that is left out; its other members are those of its type."""

    __pydantic_extra__: dict[str, Any] = Field(init=False)
    type: Literal[HOSTED]  # type: ignore[valid-type]  # a table, not one name after another
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
    """One function as the model is shown it, and the tool that it stands for."""

    name: str
    """The function's."""
    place: int
    """Index in the request of the tool, or of the namespace that holds it."""
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
        """The item of a call, without its id and status."""
        about = {"call_id": call.id, "name": self.tool.name}
        if self.namespace is not None:
            about["namespace"] = self.namespace
        if isinstance(self.tool, TextTool):
            return {"type": "custom_tool_call", **about, "input": _input(call)}
        return {"type": "function_call", **about, "arguments": call.arguments}


def shown_tools(tools: Sequence[ResponseTool]) -> list[ShownTool]:
    """The functions that the model is shown, in order."""
    shown: list[ShownTool] = []
    for place, tool in enumerate(tools):
        if isinstance(tool, FunctionTool | TextTool):
            shown.append(ShownTool(tool.name, place, tool))
        elif isinstance(tool, NamespaceTool):
            named = [(shown_name(tool.name, each.name), each) for each in tool.tools]
            shown += [ShownTool(name, place, each, tool.name) for name, each in named if len(name) <= MAX_NAME_CHARS]
    return shown


def shown_name(namespace: str | None, name: str) -> str:
    """The name under which the model is shown a tool."""
    return name if namespace is None else f"{namespace}{BETWEEN}{name}"


def tool_warnings(tools: Sequence[ResponseTool]) -> Iterator[str]:
    """Warnings of tools that the model is not shown, and of what is not enforced."""
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        if isinstance(tool, HostedTool):
            yield f"{where}: {tool.type} does not run here, so the model is not shown it"
        elif isinstance(tool, TextTool) and (tool.format or {}).get("type", "text") != "text":
            yield f"{where}.format: the input of {tool.name} is not held to a grammar"
        elif isinstance(tool, NamespaceTool):
            for index, each in enumerate(tool.tools):
                if len(shown_name(tool.name, each.name)) > MAX_NAME_CHARS:
                    yield f"{where}.tools[{index}]: left out, as its name and the namespace's have over 64 characters"


def arguments_of(text: str) -> str:
    """The arguments of a custom tool's function, for a call that comes back as its input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _input(call: ToolCall) -> str:
    """The text that a custom tool is called with; all that was written where the model did not say which it is."""
    text = json.loads(bytes(call.arguments_object)).get(INPUT)
    return text if isinstance(text, str) else call.arguments
