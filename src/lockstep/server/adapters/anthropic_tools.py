"""Tools of Anthropic's Messages API: converts custom tools and versioned tools to functions.

The types of versioned tools contain a version date. Some run at the client, like an agent's shell and editor: the model
is shown a function with the input schema that Anthropic publishes for the type. The others run on Anthropic's servers
or need image input: they are left out, with a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from lockstep.errors import InvalidParameterError
from lockstep.server.fields import JsonObject, Marked
from lockstep.server.tools.definitions import FunctionName

VERSIONED = r"^([a-z][a-z0-9_]{0,47}_[0-9]{8}|mcp_toolset)$"
"""Pattern of the types of tools that Anthropic defines."""


class CustomTool(Marked):
    """A function that the model can call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    """True: the input obeys the schema."""
    eager_input_streaming: bool | None = None
    """Ignored: a call is sent when it is complete."""
    input_examples: list[JsonObject] | None = None
    """Not shown to the model; a warning reports this."""
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    """Only false is supported: the model is shown every tool from the start."""


class VersionedTool(Marked):
    """A tool that Anthropic defines, by type and version. Further members depend on the type."""

    __pydantic_extra__: dict[str, Any] = Field(init=False)
    type: Annotated[str, Field(pattern=VERSIONED)]
    """`bash_*`, `text_editor_*` and `memory_*` become functions that the client runs. Others are left out."""
    name: FunctionName | None = None
    strict: bool | None = None
    """True: the input obeys the schema."""


MessagesTool = Annotated[
    Annotated[CustomTool, Tag("[custom]")] | Annotated[VersionedTool, Tag("[versioned]")],
    Discriminator(
        lambda value: _tag(value.get("type") if isinstance(value, dict) else getattr(value, "type", None)),
        custom_error_type="tool_kind",
        custom_error_message="A tool's type must be custom or a versioned Anthropic type such as bash_20250124",
    ),
]


def _tag(kind: object) -> str | None:
    if kind in (None, "custom"):
        return "[custom]"
    return "[versioned]" if isinstance(kind, str) and re.search(VERSIONED, kind) else None


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "First and last line to view; -1: to the end.",
}
_FILE: Mapping[str, Any] = {
    "path": _text("Path of the file or directory."),
    "file_text": _text("For create: the content of the new file."),
    "old_str": _text("For str_replace: the text to replace, which must occur in the file exactly once."),
    "new_str": _text("For str_replace: the replacement text."),
    "insert_line": {"type": "integer", "description": "For insert: the line before the new text; 0: at the start."},
    "view_range": _RANGE,
}
_INSERTED = _text("For insert: the text to insert.")


def _schema(properties: Mapping[str, Any], *required: str, commands: Sequence[str] = ()) -> JsonObject:
    command = {"command": {"type": "string", "enum": list(commands)}} if commands else {}
    return {"type": "object", "properties": {**command, **properties}, "required": list(required)}


_EDITS = ("view", "create", "str_replace", "insert")
_OLD_EDITOR = _schema(_FILE, "command", "path", commands=(*_EDITS, "undo_edit"))
CLIENT_TOOLS: tuple[tuple[str, str, JsonObject], ...] = (
    (
        "bash_",
        "Run a command in a persistent shell.",
        _schema({
            "command": _text("The command to run."),
            "restart": {"type": "boolean", "description": "True: restart the shell, without a command."},
        }),
    ),
    ("text_editor_20241022", "View, create and edit files.", _OLD_EDITOR),
    ("text_editor_20250124", "View, create and edit files.", _OLD_EDITOR),
    (
        "text_editor_20250429",
        "View, create and edit files.",
        _schema(_FILE, "command", "path", commands=_EDITS),
    ),
    (
        "text_editor_",
        "View, create and edit files.",
        _schema({**_FILE, "insert_text": _INSERTED}, "command", "path", commands=_EDITS),
    ),
    (
        "memory_",
        "View and edit memory files that persist beyond this conversation.",
        _schema(
            {
                **_FILE,
                "insert_text": _INSERTED,
                "old_path": _text("For rename: the old path."),
                "new_path": _text("For rename: the new path."),
            },
            "command",
            commands=(*_EDITS, "delete", "rename"),
        ),
    ),
)  # fmt: skip
"""Prefixes of tool types with the description and the input schema. The first matching prefix applies."""


def functions_of(tools: Sequence[MessagesTool]) -> dict[int, dict[str, Any]]:
    """Convert tools to functions of a chat request, each by the index of its tool in the request."""
    found = {index: _function(tool) for index, tool in enumerate(tools)}
    return {index: {"type": "function", "function": function} for index, function in found.items() if function}


def _function(tool: MessagesTool) -> dict[str, Any] | None:
    """Return the function that represents a tool; None if a client of this server cannot run the tool."""
    if isinstance(tool, CustomTool):
        about = {"name": tool.name, "description": tool.description, "strict": tool.strict}
        return {**{key: value for key, value in about.items() if value is not None}, "parameters": tool.input_schema}
    for begin, description, schema in CLIENT_TOOLS:
        if tool.type.startswith(begin):
            name = tool.name or begin.rstrip("_")
            return {"name": name, "description": description, "parameters": schema, "strict": bool(tool.strict)}
    return None


def tool_warnings(tools: Sequence[MessagesTool]) -> Iterator[str]:
    """Warnings about tools that are left out, and about tool options that have no effect."""
    for index, tool in enumerate(tools):
        if _function(tool) is None:
            yield f"tools[{index}]: {tool.type} is not supported, so it is not shown to the model"
    if any(isinstance(tool, CustomTool) and tool.input_examples for tool in tools):
        yield "tools.input_examples: has no effect, because only the description is shown to the model"


def check_choosable(name: str, tools: Sequence[MessagesTool]) -> None:
    """Reject the choice of a tool that is left out. The check of functions rejects unknown names."""
    for tool in tools:
        if tool.name == name and _function(tool) is None:
            raise InvalidParameterError(
                f"tool_choice.name is {name!r}, of type {tool.type}, which is not supported; choose a function",
                param="tool_choice.name",
            )
