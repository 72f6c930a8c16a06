"""The shapes of what the Responses API answers, for the OpenAPI document: `events.py` and `listing.py` write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.server.answer_schema import Extension, Shape, TokenLogprob

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
    arguments: str
    status: Status


class InputTokensDetails(Shape):
    cached_tokens: int
    """Came from the prefix cache."""
    cache_write_tokens: int
    """None is charged for."""


class OutputTokensDetails(Shape):
    reasoning_tokens: int
    """Before the content, where there were thoughts."""


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
    output: list[OutputMessage | ReasoningOutput | FunctionCall]
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
    lockstep: Extension | None = None


class DeletedResponse(Shape):
    """What is left of a response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(Shape):
    """One page of a conversation."""

    object: Literal["list"]
    data: Annotated[list[dict[str, Any]], Field(max_length=100)]
    first_id: str
    last_id: str
    has_more: bool


def documented_events() -> dict[int | str, dict[str, Any]]:
    """What creating a response says of its success: a whole response, or a stream of events."""
    events = {"example": "event: response.created\ndata: {...}\n\n"}
    return {200: {"model": ResponseObject, "description": "The response.", "content": {"text/event-stream": events}}}
