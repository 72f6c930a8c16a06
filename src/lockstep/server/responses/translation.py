"""From a request of the Responses API to one of chat completions, and the parameters' names back: pure.

Both are the same question to a model, so what a parameter does is decided in one place, for chat completions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from lockstep.errors import InvalidParameterError, RequestError
from lockstep.server.calls import in_the_requests_words
from lockstep.server.chat_schema import ChatBody
from lockstep.server.faults import of_validation
from lockstep.server.responses.schema import (
    LOGPROBS,
    AllowedTools,
    FunctionTool,
    NamedTool,
    ResponseBody,
    TextFormat,
    ToolChoice,
    as_json,
)

JsonObject = Mapping[str, Any]

_SAME = (
    "model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "parallel_tool_calls",
    "top_logprobs", "metadata", "user", "safety_identifier", "prompt_cache_key",
    "service_tier", "priority", "cache_salt", "session_id",
    "deadline_ms", "chat_template_kwargs", "stream",
)  # fmt: skip
"""Parameters that both have."""

_NAMES = (
    (re.compile(r"messages\b.*|prompt"), "input"),
    (re.compile(r"max_tokens|max_completion_tokens"), "max_output_tokens"),
    (re.compile(r"response_format(?:\.json_schema)?(\.\w+)?"), r"text.format\1"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"(tools\[\d+\])\.function(\..*)?"), r"\1\2"),
    (re.compile(r"tool_choice(?:\.allowed_tools(\.tools\[\d+\]))?\.function\.name"), r"tool_choice\1.name"),
    (re.compile(r"verbosity"), "text.verbosity"),
    (re.compile(r"logprobs"), "include"),
)
"""What chat completions call a parameter, and what it is called here; others have one name."""


def chat_body(body: ResponseBody, messages: Sequence[JsonObject]) -> ChatBody:
    """The same question as a chat request.

    Raises:
        InvalidParameterError: names the parameter.
    """
    if not messages:
        raise InvalidParameterError("input makes no message; it must hold a text, a message or a call", param="input")
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs is not None and not has_logprobs:
        raise InvalidParameterError(
            f'top_logprobs is given without include of "{LOGPROBS}"; give both or none',
            param="top_logprobs",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidParameterError(
            "stream_options is given without stream; set stream or leave it out", param="stream_options"
        )
    text_format = None if body.text is None else body.text.format
    asked = {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": True if has_logprobs else None,
        "response_format": None if text_format is None else _response_format(text_format),
        "tools": None if body.tools is None else [_tool(tool) for tool in body.tools],
        "tool_choice": _tool_choice(body.tool_choice),
        "verbosity": None if body.text is None else body.text.verbosity,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        **{name: getattr(body, name) for name in _SAME},
    }
    try:
        return ChatBody.model_validate({name: value for name, value in asked.items() if value is not None})
    except ValidationError as error:  # what fits this schema and not that one
        fault = of_validation(error.errors())
        raise InvalidParameterError(fault.message, param=fault.param) from None


def _response_format(said: TextFormat) -> JsonObject:
    about = as_json(said)
    kind = about.pop("type", "text")
    if kind != "json_schema":
        if about:
            raise InvalidParameterError(
                f"text.format.{next(iter(about))} is given with type {kind}; its type is json_schema",
                param="text.format",
            )
        return {"type": kind}
    for name in ("schema", "name"):
        if name not in about:
            raise InvalidParameterError(
                f"text.format.{name} is missing; type json_schema needs it", param=f"text.format.{name}"
            )
    return {"type": kind, "json_schema": about}


def _tool(tool: FunctionTool) -> JsonObject:
    about = as_json(tool)
    return {"type": about.pop("type"), "function": about}


def _tool_choice(choice: ToolChoice | None) -> str | JsonObject | None:
    if choice is None or isinstance(choice, str):
        return choice
    if isinstance(choice, AllowedTools):
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]},
        }
    return _named(choice)


def _named(tool: NamedTool) -> JsonObject:
    return {"type": "function", "function": {"name": tool.name}}


def name_here(param: str) -> str:
    """What this request calls a parameter of chat completions."""
    for pattern, name in _NAMES:
        match = pattern.fullmatch(param)
        if match is not None:
            return match.expand(name)
    return param


def names_here(names: Mapping[str, str]) -> Mapping[str, str]:
    """What this request calls the engine's parameters, from what a chat request calls them."""
    return {engines: name_here(chats) for engines, chats in names.items()}


def in_our_words(error: RequestError) -> RequestError:
    """An error that names a parameter of chat completions, naming ours."""
    return error if error.param is None else in_the_requests_words(error, {error.param: name_here(error.param)})
