"""The shapes of answers, for the OpenAPI document: `chat_answer.py` and `completion_answer.py` write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class PromptTokensDetails(Shape):
    cached_tokens: int
    """Came from the prefix cache."""


class CompletionTokensDetails(Shape):
    reasoning_tokens: int
    """Before the content, where there were thoughts."""


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class RoutedHop(Shape):
    """One model's part of a routed request."""

    model: str
    completion: str
    """What it said; of several choices the first."""
    intent: str | None
    """What a router's word was read as."""
    latency_ms: float
    usage: Usage


class Extension(Shape):
    """Where the time went, measured at the engine's steps."""

    request_id: str
    queue_ms: float
    ttft_ms: float | None
    tokens_per_second: float | None
    preemptions: int
    session_id: str | None
    warnings: list[str] | None = None
    """What was asked for and is not done, also in the header `x-lockstep-warning`."""
    entry_model: str | None = None
    """Who routed the request; this and the following are there only if somebody did."""
    final_model: str | None = None
    """Who answered it."""
    intent: str | None = None
    """What the routing model's word was read as; null: nothing that the routing rule knows."""
    latency_ms: float | None = None
    """From the arrival of the request to the end of its answer."""
    hops: list[RoutedHop] | None = None
    """All models that were asked, in order; the last one is who answered."""


class Logprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Logprob):
    top_logprobs: list[Logprob]


class ChatLogprobs(Shape):
    content: list[TokenLogprob]
    refusal: None


class AnswerFunction(Shape):
    name: str
    arguments: str


class AnswerToolCall(Shape):
    id: str
    type: Literal["function"]
    function: AnswerFunction


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    """Thoughts before the content."""
    reasoning: str | None = None
    """The same under the name that newer clients read."""
    tool_calls: list[AnswerToolCall] | None = None
    function_call: AnswerFunction | None = None
    """In place of `tool_calls` where the request had `functions`."""


class ChatChoice(Shape):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop string or stop token that ended it; null for the model's own."""
    token_ids: list[int] | None = None


class ChatCompletion(Shape):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    service_tier: Literal["default"] | None = None
    """Where the request named one."""
    lockstep: Extension
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(Shape):
    """Whole texts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: Usage
    system_fingerprint: str | None
    service_tier: Literal["default"] | None = None
    """Where the request named one."""
    lockstep: Extension


def documented(model: type[Shape]) -> dict[int | str, dict[str, Any]]:
    """What a route says of its success: a whole answer, or a stream, for whose events OpenAPI 3.1 has no schema."""
    events = {"example": "data: {...}\n\ndata: [DONE]\n\n"}
    return {200: {"model": model, "description": "The answer.", "content": {"text/event-stream": events}}}
