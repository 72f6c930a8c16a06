"""Official clients of other APIs, and their types as the judge of streams."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import anthropic
import ollama
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.waiting import HANG_S

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def anthropic_client(url: str, api_key: str = "none") -> anthropic.Anthropic:
    plain = anthropic.DefaultHttpxClient(
        verify=False, trust_env=False
    )  # reading certificates takes longer than all else
    return anthropic.Anthropic(base_url=url, api_key=api_key, max_retries=0, timeout=HANG_S, http_client=plain)


def given(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body as arguments of the client's `create` and `stream`; what it has no argument for goes past its types."""
    known = inspect.signature(anthropic.resources.Messages.create).parameters
    named = {name: value for name, value in body.items() if name in known}
    return {**named, "extra_body": {name: value for name, value in body.items() if name not in known}}


def ollama_client(url: str, api_key: str | None = None) -> ollama.Client:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return ollama.Client(host=url, headers=headers, timeout=HANG_S, verify=False, trust_env=False)


def events_of(stream: bytes | str) -> list[dict[str, Any]]:
    """The events of a stream of Anthropic's, as they went over the wire."""
    text = stream.decode() if isinstance(stream, bytes) else stream
    assert text.endswith("\n\n"), "an event ends with an empty line"
    events = []
    for frame in text[:-2].split("\n\n"):
        kind, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


def check_events(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A whole stream: in Anthropic's shapes and order, one block open at a time; returns the message that it tells."""
    told = [event for event in events if event["type"] != "ping"]
    for event in told:
        _EVENT.validate_python(event)
    assert [event["type"] for event in told[:1]] == ["message_start"]
    assert [event["type"] for event in told[-2:]] == ["message_delta", "message_stop"]
    blocks: list[dict[str, Any]] = []
    pieces: list[str] = []
    is_open = False
    for event in told[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open, "one block at a time"
            assert event["index"] == len(blocks), "blocks come in order"
            blocks.append(dict(event["content_block"]))
            is_open, pieces = True, []
            continue
        assert is_open, "nothing is said outside of blocks"
        assert event["index"] == len(blocks) - 1
        block = blocks[-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads("".join(pieces))
            continue
        kind = event["delta"]["type"].removesuffix("_delta")
        assert (block["type"], kind) in {
            ("text", "text"), ("thinking", "thinking"), ("thinking", "signature"), ("tool_use", "input_json"),
        }  # fmt: skip
        if kind == "input_json":
            pieces.append(event["delta"]["partial_json"])
        else:
            block[kind] += event["delta"][kind]
    assert not is_open, "every block is closed"
    ending = told[-2]
    message = {**told[0]["message"], **ending["delta"], "content": blocks, "usage": ending["usage"]}
    return Message.model_validate(message, strict=True).model_dump(exclude_unset=True)
