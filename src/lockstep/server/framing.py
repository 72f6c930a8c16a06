"""Framing of answers and streams: server-sent events and lines of JSON, as bytes and in the OpenAPI document.

An encoder (`lockstep.server.answer_response.Encoder`) decides what is sent; this module decides how it is delimited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

DATA, END = b"data: ", b"\n\n"
"""Start of an event's data, and the end of an event. Encoders that build a frame of parts need them."""
encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Framing:
    """Framing of a stream, independent of its content."""

    content_type: bytes
    ping: bytes
    """Bytes that are sent while there is no output."""

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        return (
            (b"content-type", self.content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        )


SSE_TYPE, JSON_LINES_TYPE = b"text/event-stream", b"application/x-ndjson"


def data_frame(data: bytes) -> bytes:
    """Frame an event without a name, as OpenAI's clients read it."""
    return DATA + data + END


def event_frame(event: Mapping[str, Any], *, name: str = "", event_id: int | None = None) -> bytes:
    """Frame an event as JSON under its name, which is its member ``type`` if none is given."""
    head = b"" if event_id is None else b"id: %d\n" % event_id
    return head + b"event: " + (name or event["type"]).encode() + b"\n" + data_frame(encode(event))


def event_frames(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Frame events that have their names in the member ``type``."""
    return b"".join([event_frame(event) for event in events])


def json_line(members: Mapping[str, Any]) -> bytes:
    """Frame an object as one line of JSON."""
    return encode(members) + b"\n"


SSE = Framing(SSE_TYPE + b"; charset=utf-8", b": ping" + END)


def documented(
    shape: Any, example: str = "data: {...}\n\ndata: [DONE]\n\n", what: str = "The answer.", kind: bytes = SSE_TYPE
) -> dict[int | str, dict[str, Any]]:
    """OpenAPI success response of a route: a complete answer, or a stream, whose events OpenAPI 3.1 cannot describe.

    Args:
        shape: the complete answer.
        example: beginning of a stream.
        what: description of the answer.
        kind: content type of the stream.
    """
    return {200: {"model": shape, "description": what, "content": {kind.decode(): {"example": example}}}}
