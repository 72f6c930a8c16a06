"""Responses API output: collects the output of a call as items, and describes each change as one of OpenAI's events.

A response is a list of items: reasoning, text, tool calls. One item is open at a time; output of another kind closes
it. Events have consecutive sequence numbers. The last event is exactly one of `response.completed`,
`response.incomplete` and `response.failed`. The shapes are those of OpenAI's Responses API reference.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NotRequired

from lockstep.server.answer import SSE, Extension, encode, event_frames
from lockstep.server.answer_response import Answer
from lockstep.server.choices import Choice
from lockstep.server.errors import HttpError
from lockstep.server.fields import Shape
from lockstep.server.logprobs import Entry, TokenLogprob, chat_logprobs
from lockstep.server.responses.tools import ShownTool
from lockstep.server.responses.translation import (
    CALL_PREFIX,
    CUSTOM_CALL_PREFIX,
    MESSAGE_PREFIX,
    REASONING_PREFIX,
    JsonObject,
    NewId,
)
from lockstep.server.tools.parser import ToolCall

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningText(Shape):
    type: Literal["reasoning_text"]
    text: str


class ReasoningOutput(Shape):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    status: Status


class FunctionCall(Shape):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[str | None]
    """Namespace of the tool, if the request put it into one."""
    arguments: str
    status: Status


class CustomToolCall(Shape):
    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: NotRequired[str | None]
    input: str


class InputTokensDetails(Shape):
    cached_tokens: int
    """Number of tokens that came from the prefix cache."""
    cache_write_tokens: int
    """Always 0: cache writes are not charged."""


class OutputTokensDetails(Shape):
    reasoning_tokens: int
    """Number of tokens before the content, if the answer has reasoning."""


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Shape):
    reason: Literal["max_output_tokens"]


class ResponseFault(Shape):
    code: str
    message: str


class ResponseObject(Shape):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputMessage | ReasoningOutput | FunctionCall | CustomToolCall]
    usage: ResponseUsage | None
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    previous_response_id: str | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    user: str | None
    lockstep: NotRequired[Extension | None]


class ItemKind(Enum):
    """Kind of an item. The value is the prefix of item ids of this kind."""

    THOUGHTS = REASONING_PREFIX
    TEXT = MESSAGE_PREFIX
    CALL = CALL_PREFIX
    CUSTOM_CALL = CUSTOM_CALL_PREFIX

    @property
    def is_call(self) -> bool:
        return self in (ItemKind.CALL, ItemKind.CUSTOM_CALL)

    @property
    def text_member(self) -> str:
        """Name of the member of a call item that holds its text."""
        return "input" if self is ItemKind.CUSTOM_CALL else "arguments"

    @property
    def event(self) -> str:
        """Prefix of the event names for a call's text."""
        return f"response.{'custom_tool_call_input' if self is ItemKind.CUSTOM_CALL else 'function_call_arguments'}"


@dataclass(slots=True)
class _OpenItem:
    """The item that is being written."""

    kind: ItemKind
    fields: JsonObject
    pieces: list[str] = field(default_factory=list)
    logprobs: list[JsonObject] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self) -> dict[str, Any]:
        """Current content part."""
        if self.kind is ItemKind.THOUGHTS:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def item(self, status: str) -> dict[str, Any]:
        """Current state of the whole item."""
        match self.kind:
            case ItemKind.THOUGHTS:
                return {**self.fields, "type": "reasoning", "summary": [], "content": [self.part()], "status": status}
            case ItemKind.TEXT:
                return {
                    **self.fields,
                    "type": "message",
                    "role": "assistant",
                    "status": status,
                    "content": [self.part()],
                }
            case ItemKind.CALL:
                return {**self.fields, "arguments": self.text, "status": status}
            case ItemKind.CUSTOM_CALL:  # has no status
                return {**self.fields, "input": self.text}

    def just_opened(self) -> dict[str, Any]:
        item = self.item("in_progress")
        return item if self.kind.is_call else {**item, "content": []}


class ResponseWriter:
    """Converts generated output to items and events, in order.

    Args:
        base: constant members of the response object.
        new_id: generates item ids.
    """

    def __init__(self, base: JsonObject, new_id: NewId) -> None:
        self._base = base
        self._new_id = new_id
        self._closed: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._events: list[dict[str, Any]] = []
        self._num_events = 0
        self._is_ended = False

    def begin(self) -> None:
        response = self._response("in_progress")
        self._add("response.created", response=response)
        self._add("response.in_progress", response=response)

    def write_thoughts(self, text: str) -> None:
        item = self._writing(ItemKind.THOUGHTS)
        item.pieces.append(text)
        self._add_of_part("response.reasoning_text.delta", item, delta=text)

    def write_text(self, text: str, logprobs: Sequence[JsonObject] = ()) -> None:
        item = self._writing(ItemKind.TEXT)
        item.pieces.append(text)
        item.logprobs.extend(logprobs)
        self._add_of_part("response.output_text.delta", item, delta=text, logprobs=list(logprobs))

    def end_text(self, *, is_cut: bool) -> None:
        """Close the open item, because no text follows. ``is_cut``: the token limit was reached."""
        self._close("incomplete" if is_cut else "completed")

    def write_call(self, call: JsonObject, *, is_cut: bool = False) -> None:
        """Add a tool call. ``is_cut``: the token limit was reached and the arguments are incomplete."""
        self._close("completed")
        fields = dict(call)
        kind = ItemKind.CUSTOM_CALL if fields["type"] == "custom_tool_call" else ItemKind.CALL
        text = fields.pop(kind.text_member)
        item = _OpenItem(kind, {"id": self._new_id(kind.value), **fields})
        self._begin_item(item)
        item.pieces.append(text)
        self._add_of_item(f"{kind.event}.delta", item, delta=text)
        self._close("incomplete" if is_cut else "completed")

    def complete(self, completed_at_s: int, **fields: Any) -> JsonObject:
        """Return the response object of a completed answer, with further fields. Pass it to `end`."""
        self._end_output("completed")
        return self._response("completed", completed_at=completed_at_s, **fields)

    def cut(self, **fields: Any) -> JsonObject:
        """Return the response object of an answer that reached the token limit, with further fields. See `end`."""
        self._end_output("incomplete")
        return self._response("incomplete", incomplete_details={"reason": "max_output_tokens"}, **fields)

    def fail(self, code: str, message: str) -> JsonObject:
        """Return the response object of a failed answer, with the output so far. Pass it to `end`."""
        if self._open is not None:
            self._closed.append(self._open.item("incomplete"))
            self._open = None
        return self._response("failed", error={"code": code, "message": message})

    def end(self, response: JsonObject) -> None:
        """Add the last event, which reports the final status."""
        assert not self._is_ended, "a response ends once"
        self._is_ended = True
        self._add(f"response.{response['status']}", response=response)

    def take_events(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _end_output(self, status: str) -> None:
        """Close the open item. An answer without any output becomes one empty message."""
        if self._open is None and not self._closed:
            self._writing(ItemKind.TEXT)
        self._close(status)

    def _writing(self, kind: ItemKind) -> _OpenItem:
        """Return the open item if it is of the given kind, otherwise a new one."""
        if self._open is not None and self._open.kind is kind:
            return self._open
        self._close("completed")
        item = _OpenItem(kind, {"id": self._new_id(kind.value)})
        self._begin_item(item)
        self._add_of_part("response.content_part.added", item, part=item.part())
        return item

    def _begin_item(self, item: _OpenItem) -> None:
        self._open = item
        self._add("response.output_item.added", output_index=len(self._closed), item=item.just_opened())

    def _close(self, status: str) -> None:
        item = self._open
        if item is None:
            return
        match item.kind:
            case ItemKind.THOUGHTS:
                self._add_of_part("response.reasoning_text.done", item, text=item.text)
            case ItemKind.TEXT:
                self._add_of_part("response.output_text.done", item, text=item.text, logprobs=list(item.logprobs))
            case ItemKind.CALL | ItemKind.CUSTOM_CALL:
                self._add_of_item(f"{item.kind.event}.done", item, **{item.kind.text_member: item.text})
        if not item.kind.is_call:
            self._add_of_part("response.content_part.done", item, part=item.part())
        done = item.item(status)
        self._add("response.output_item.done", output_index=len(self._closed), item=done)
        self._closed.append(done)
        self._open = None

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        outcome = {
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": list(self._closed),
            "usage": None,
        }
        return {**self._base, **outcome, **fields}

    def _add_of_part(self, type_: str, item: _OpenItem, **fields: Any) -> None:
        self._add_of_item(type_, item, content_index=0, **fields)

    def _add_of_item(self, type_: str, item: _OpenItem, **fields: Any) -> None:
        self._add(type_, item_id=item.fields["id"], output_index=len(self._closed), **fields)

    def _add(self, type_: str, **fields: Any) -> None:
        self._events.append({"type": type_, "sequence_number": self._num_events, **fields})
        self._num_events += 1


_CODES: Mapping[int, str] = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Error codes in a response object by HTTP status, with OpenAI's names."""


class ResponseEncoder:
    """Encoder of one call with one choice as items and events. Implements `lockstep.server.answer_response.Encoder`.

    Args:
        writer: a new writer.
        tools: tools that the model was shown.
    """

    framing = SSE

    def __init__(self, writer: ResponseWriter, tools: Sequence[ShownTool] = ()) -> None:
        self._writer = writer
        self._tools = {shown.name: shown for shown in tools}
        self._final: JsonObject | None = None
        self._entries: list[Entry] = []
        """Log-probabilities of tokens whose text is not complete yet."""
        self._has_text = False

    def opening(self, choices: Sequence[Choice]) -> bytes:
        self._writer.begin()
        return self._frames()

    def chunk(self, choice: Choice, answer: Answer | None) -> bytes:
        self._write(choice)
        return self._frames()

    def final(self, answer: Answer) -> JsonObject:
        """Response object of a complete answer."""
        if self._final is None:
            [choice], writer = answer.choices, self._writer
            self._write(choice)
            is_cut = choice.finish_reason == "length"
            if self._entries and self._has_text and not choice.whole_calls:  # otherwise they belong to the calls
                writer.write_text("", self._take_entries())
            writer.end_text(is_cut=is_cut)
            for call in choice.whole_calls:
                writer.write_call(self._call_item(call), is_cut=call.is_cut)
            fields = {"usage": _usage_of(answer), "lockstep": answer.extension}
            self._final = writer.cut(**fields) if is_cut else writer.complete(int(time.time()), **fields)
        return self._final

    def _call_item(self, call: ToolCall) -> JsonObject:
        shown = self._tools.get(call.name)
        if shown is None:  # a remote server's model called a function that was not offered
            return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
        return shown.call_item(call)

    def end(self, answer: Answer) -> bytes:
        self._writer.end(self.final(answer))
        return self._frames()

    def failed(self, error: HttpError) -> bytes:
        self._writer.end(self._writer.fail(_CODES.get(error.status, "server_error"), error.message))
        return self._frames()

    def whole(self, answer: Answer) -> bytes:
        return encode(self.final(answer))

    def _write(self, choice: Choice) -> None:
        """Pass new output to the writer. Calls are sent at the end, because an incomplete one may turn out to be
        text."""
        if choice.reasoning:
            self._writer.write_thoughts(choice.reasoning)
        if choice.text or not choice.reasoning:  # entries that came with reasoning only belong to the reasoning
            self._entries += choice.entries
        if choice.text:
            self._writer.write_text(choice.text, self._take_entries())
            self._has_text = True
        choice.shown()

    def _take_entries(self) -> Sequence[JsonObject]:
        entries, self._entries = self._entries, []
        content: Sequence[JsonObject] = chat_logprobs(entries)["content"]
        return content

    def _frames(self) -> bytes:
        return event_frames(self._writer.take_events())


def _usage_of(answer: Answer) -> ResponseUsage:
    totals = answer.totals
    return {
        "input_tokens": totals.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": totals.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": totals.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
        "total_tokens": totals.num_prompt_tokens + totals.num_output_tokens,
    }
