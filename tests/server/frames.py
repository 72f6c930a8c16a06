"""Reading a stream as its client does, strictly: every frame is one JSON object, and the last is ``[DONE]``."""

from __future__ import annotations

import json
from typing import Any


def events_of(stream: bytes | str) -> list[dict[str, Any]]:
    """The objects of a whole stream; comments are left out."""
    text = stream.decode() if isinstance(stream, bytes) else stream
    assert text.endswith("\n\n"), "a frame ends with an empty line"
    frames = [frame for frame in text[:-2].split("\n\n") if not frame.startswith(":")]
    assert frames.pop() == "data: [DONE]", "the last frame says so"
    for frame in frames:
        assert frame.startswith("data: {"), frame
        assert "\n" not in frame, "an event is one line"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def texts_of(events: list[dict[str, Any]]) -> dict[int, str]:
    """Content by choice, of either kind of completion."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", ()):
            piece = choice["text"] if "text" in choice else choice["delta"].get("content")
            texts[choice["index"]] = texts.get(choice["index"], "") + (piece or "")
    return texts
