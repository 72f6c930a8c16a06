"""Chunks of streamed completions as clients read them from any OpenAI-compatible server: what is not known is passed
over, and what may lack is None. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = "[DONE]"
"""Data of the event that ends a stream."""
MAX_REASON_CHARS = 300
"""Of a server's own words."""


class FunctionPart(msgspec.Struct):
    """Part of a called function: its name in the first one, then pieces of its arguments."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct):
    """Addition to one call of an answer."""

    index: int = 0
    id: str | None = None
    function: FunctionPart | None = None


class Delta(msgspec.Struct):
    """Addition of a chat chunk."""

    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class Choice(msgspec.Struct):
    """One of the ``n`` answers; ``text`` of completions, ``delta`` of chats."""

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
        """True for text, thoughts or a part of a tool call; not for a role alone, nor an end alone."""
        calls = None if self.delta is None else self.delta.tool_calls
        return bool(self.content or self.thoughts or calls)


class CachedTokens(msgspec.Struct):
    """Details of a prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Tokens as the server counts them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


def error_message(value: Any) -> str:
    """The sentence in an error body of OpenAI's shape, or of any other."""
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:MAX_REASON_CHARS]
