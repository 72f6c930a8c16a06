"""Events of a streamed answer, chat or completion: what a client reads of them. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

_DATA = b"data:"
_DONE = b"[DONE]"
MAX_REASON_CHARS = 300


class Delta(msgspec.Struct):
    """What a chat chunk adds."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    """One of the ``n`` answers; ``text`` of completions, ``delta`` of chats."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def content(self) -> str:
        return (self.text if self.delta is None else self.delta.content) or ""

    @property
    def thoughts(self) -> str:
        return "" if self.delta is None else self.delta.reasoning_content or self.delta.reasoning or ""

    @property
    def brings_tokens(self) -> bool:
        """Text, thoughts or a part of a tool call; not a role alone, nor an end alone."""
        calls = None if self.delta is None else self.delta.tool_calls
        return bool(self.content or self.thoughts or calls)


class Usage(msgspec.Struct):
    """Tokens as the server counts them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    """One event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class ChunkReader:
    """Reads lines of an event stream. One event is one line, as every server of this kind writes them."""

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(Chunk)
        self.is_done = False

    def read(self, line: bytes) -> Chunk | None:
        """The chunk of a line; None: a comment, an empty line, or the end. ValueError: an event of another kind."""
        if self.is_done or not line.startswith(_DATA):
            return None
        content = line[len(_DATA) :].strip()
        if content == _DONE:
            self.is_done = True
            return None
        return self._decoder.decode(content)


def error_message(value: Any) -> str:
    """The sentence in an error body of OpenAI's shape, or of any other."""
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:MAX_REASON_CHARS]
