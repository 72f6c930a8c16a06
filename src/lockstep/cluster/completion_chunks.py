"""Completion chunks: defines the streamed chunks of any OpenAI-compatible server. Unknown fields are ignored, missing
ones are None. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = "[DONE]"
"""Data of the event that ends a stream."""
MAX_REASON_CHARS = 300
"""Maximum characters of a server's error message."""


class FunctionPart(msgspec.Struct):
    """Part of a tool call's function: the name in the first part, then pieces of its arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct):
    """Addition to one tool call of an answer."""

    index: int = 0
    id: str | None = None
    function: FunctionPart | None = None


class Delta(msgspec.Struct):
    """Addition to a chat message."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(msgspec.Struct):
    """One of the ``n`` choices, with ``text`` for completions and ``delta`` for chats."""

    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def content(self) -> str:
        return (self.text if self.delta is None else self.delta.content) or ""

    @property
    def thoughts(self) -> str:
        return "" if self.delta is None else self.delta.reasoning_content or self.delta.reasoning or ""

    @property
    def brings_tokens(self) -> bool:
        """True for text, reasoning or a part of a tool call; False for a role or an end alone."""
        calls = None if self.delta is None else self.delta.tool_calls
        return bool(self.content or self.thoughts or calls)


class CachedTokens(msgspec.Struct):
    """Details of the prompt tokens."""

    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    """Token counts reported by the server."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None


class CompletionChunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: Any = None


def error_message(value: Any) -> str:
    """Extract the message of an error body in OpenAI's form or any other."""
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:MAX_REASON_CHARS]
