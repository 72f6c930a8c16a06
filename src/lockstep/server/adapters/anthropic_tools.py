"""Tools of Anthropic's Messages API: functions, and tools whose type names a version.

Some of the latter run at the client, as an agent's shell and editor do: the model is shown a function with the input
that Anthropic publishes for the type. The others run at Anthropic's servers, or show the model pictures: they are left
out, and a warning names them.
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
"""Types of tools that Anthropic defines."""


class CustomTool(Marked):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    """The input obeys the schema."""
    eager_input_streaming: bool | None = None
    """A hint; a call is sent when it is whole."""
    input_examples: list[JsonObject] | None = None
    """Not shown to the model; there is a warning."""
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    """The model is informed of every tool from the beginning."""


class VersionedTool(Marked):
    """A tool that Anthropic defines, by its type and version; members beside these are those of its type."""

    __pydantic_extra__: dict[str, Any] = Field(init=False)
    type: Annotated[str, Field(pattern=VERSIONED)]
    """`bash_*`, `text_editor_*` and `memory_*` are functions that the client runs. Others are left out."""
    name: FunctionName | None = None
    strict: bool | None = None
    """The input obeys the schema."""


MessagesTool = Annotated[
    Annotated[CustomTool, Tag("[custom]")] | Annotated[VersionedTool, Tag("[versioned]")],
    Discriminator(
        lambda value: _tag(value.get("type") if isinstance(value, dict) else getattr(value, "type", None)),
        custom_error_type="tool_kind",
        custom_error_message="A tool's type must be custom, or one of Anthropic's with its version (bash_20250124)",
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
    "old_str": _text("For str_replace: the text to replace, which is in the file once."),
    "new_str": _text("For str_replace: the text in its place."),
    "insert_line": {"type": "integer", "description": "For insert: the line after which the text goes; 0: before all."},
    "view_range": _RANGE,
}
_INSERTED = _text("For insert: the text.")


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
        "View and edit the files of a memory that lasts beyond this conversation.",
        _schema(
            {
                **_FILE,
                "insert_text": _INSERTED,
                "old_path": _text("For rename: the path."),
                "new_path": _text("For rename: the new path."),
            },
            "command",
            commands=(*_EDITS, "delete", "rename"),
        ),
    ),
)  # fmt: skip
"""Beginnings of types, the first that fits, with a description and the schema of the input."""


def functions_of(tools: Sequence[MessagesTool]) -> tuple[list[dict[str, Any]], list[int]]:
    """The tools as functions of a chat request, and the place of each in the request."""
    found = [(index, function) for index, tool in enumerate(tools) if (function := _function(tool)) is not None]
    return [{"type": "function", "function": function} for _, function in found], [index for index, _ in found]


def _function(tool: MessagesTool) -> dict[str, Any] | None:
    """The function that the model is shown for a tool; None: it cannot be run by a client of this server."""
    if isinstance(tool, CustomTool):
        about = {"name": tool.name, "description": tool.description, "strict": tool.strict}
        return {**{key: value for key, value in about.items() if value is not None}, "parameters": tool.input_schema}
    for begin, description, schema in CLIENT_TOOLS:
        if tool.type.startswith(begin):
            name = tool.name or begin.rstrip("_")
            return {"name": name, "description": description, "parameters": schema, "strict": bool(tool.strict)}
    return None


def tool_warnings(tools: Sequence[MessagesTool]) -> Iterator[str]:
    """Warnings of tools that are left out, and of what is not done with others."""
    for index, tool in enumerate(tools):
        if _function(tool) is None:
            yield f"tools[{index}]: {tool.type} does not run here, so the model is not shown it"
    if any(isinstance(tool, CustomTool) and tool.input_examples for tool in tools):
        yield "tools.input_examples: examples are not shown to the model; its description is"


def check_choosable(name: str, tools: Sequence[MessagesTool]) -> None:
    """Refuse the choice of a tool that is left out; one that is not there is refused where functions are checked."""
    for tool in tools:
        if tool.name == name and _function(tool) is None:
            raise InvalidParameterError(
                f"tool_choice.name is {name!r}, of type {tool.type}, which does not run here; choose a function",
                param="tool_choice.name",
            )
