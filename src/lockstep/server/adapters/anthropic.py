"""Anthropic's Messages API: serves `/v1/messages`, its token counting, and `/v1/models` in Anthropic's format.

A message is a list of blocks: thinking, text, tool uses. One block is open at a time. Tool uses are sent in one piece
at the end of the answer, because an incomplete one may turn out to be text. The router's decision is in the extension
`lockstep`, which is not part of Anthropic's API.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Query
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from lockstep.cluster.base import Accepted, ModelCard
from lockstep.engine.request import Conversation
from lockstep.errors import InvalidParameterError
from lockstep.server.adapters.anthropic_body import CountBody, MessagesBody, chat_body, table_for, warnings_of
from lockstep.server.answer import SSE, Extension, Framing, documented, encode, event_frame, event_frames
from lockstep.server.answer_response import Answer
from lockstep.server.body import LongBodyRoute
from lockstep.server.chat_adapter import adapted_call, answer_as_chat
from lockstep.server.choices import Choice
from lockstep.server.dialect import ANTHROPIC, AnthropicErrorBody
from lockstep.server.errors import HttpError, documented_errors
from lockstep.server.fields import Shape
from lockstep.server.generation import check_tokens_known
from lockstep.server.request_context import context_of
from lockstep.server.serving import card_of, serving_of, translated
from lockstep.server.tools.parser import ToolCall

MAX_MODELS = 1_000
"""Maximum page size, as in Anthropic's API. So is the default page size below."""
DEFAULT_MODELS = 20
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
FRAMING = Framing(SSE.content_type, event_frame({"type": "ping"}))


class TextContent(Shape):
    type: Literal["text"]
    text: str


class ThinkingContent(Shape):
    type: Literal["thinking"]
    thinking: str
    signature: str
    """A fingerprint of the thinking text. It is not checked when it is sent back."""


class ToolUseContent(Shape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingTokens(Shape):
    thinking_tokens: int


class MessageUsage(Shape):
    """Token counts. The prompt has `input_tokens` plus `cache_read_input_tokens` tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    """Always 0: cache writes are not charged."""
    cache_read_input_tokens: int
    """Number of tokens that came from the prefix cache."""
    output_tokens: int
    output_tokens_details: ThinkingTokens
    service_tier: Literal["standard"]


class MessageObject(Shape):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    lockstep: NotRequired[Extension | None]


class TokenCount(Shape):
    """Number of tokens of a prompt."""

    input_tokens: int


class MessagesEncoder:
    """Encoder of one call with one choice as blocks and events. Implements `lockstep.server.answer_response.Encoder`.

    Args:
        max_tokens: token limit of the answer. An answer that is cut before it has filled the context.
        hides_thoughts: leave thinking blocks empty.
    """

    framing = FRAMING

    def __init__(self, model: str, max_tokens: int, request_id: str, *, hides_thoughts: bool = False) -> None:
        self._base = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
        self._max_tokens = max_tokens
        self._request_id = request_id
        self._hides_thoughts = hides_thoughts
        self._blocks: list[dict[str, Any]] = []
        """Blocks of the message. All but the last are closed."""
        self._pieces: list[str] = []
        """Pieces of the open block's content."""
        self._is_open = False
        self._events: list[dict[str, Any]] = []

    def opening(self, choices: Sequence[Choice]) -> bytes:
        usage = _usage(choices[0].num_prompt_tokens, 0, 0, 0)
        message: dict[str, Any] = {
            **self._base,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        self._events.append({"type": "message_start", "message": message})
        return self._frames()

    def chunk(self, choice: Choice, answer: Answer | None) -> bytes:
        self._write(choice)
        return self._frames()

    def end(self, answer: Answer) -> bytes:
        message = self._final(answer)
        delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        members = {"usage": message["usage"], "lockstep": answer.extension}
        self._events += [{"type": "message_delta", "delta": delta, **members}, {"type": "message_stop"}]
        return self._frames()

    def failed(self, error: HttpError) -> bytes:
        self._events.append(dict(ANTHROPIC.error_body(error, self._request_id)))
        return self._frames()

    def whole(self, answer: Answer) -> bytes:
        self._write(answer.choices[0])
        return encode({**self._final(answer), "lockstep": answer.extension})

    def _write(self, choice: Choice) -> None:
        if choice.reasoning:
            self._append("thinking", choice.reasoning)
        if choice.text:
            self._append("text", choice.text)

    def _append(self, kind: Literal["thinking", "text"], text: str) -> None:
        """Append text to the open block if it is of the given kind, otherwise to a new block."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            self._close()
            block = {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
            self._start(block)
            self._is_open = True
        self._pieces.append(text)
        if kind == "text" or not self._hides_thoughts:
            self._delta({"type": f"{kind}_delta", kind: text})

    def _close(self) -> None:
        if not self._is_open:
            return
        block, text = self._blocks[-1], "".join(self._pieces)
        if block["type"] == "thinking":
            signature = signature_of(text)
            self._blocks[-1] = {**block, "thinking": "" if self._hides_thoughts else text, "signature": signature}
            self._delta({"type": "signature_delta", "signature": signature})
        else:
            self._blocks[-1] = {**block, "text": text}
        self._stop()

    def _use_tool(self, call: ToolCall) -> None:
        """Add a complete tool use block."""
        use = {"type": "tool_use", "id": call.id, "name": call.name}
        self._start({**use, "input": {}})
        self._blocks[-1] = {**use, "input": call.arguments_object}
        self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        self._stop()

    def _start(self, block: dict[str, Any]) -> None:
        self._blocks.append(block)
        self._events.append({"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block})

    def _delta(self, delta: dict[str, str]) -> None:
        self._events.append({"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta})

    def _stop(self) -> None:
        self._events.append({"type": "content_block_stop", "index": len(self._blocks) - 1})
        self._pieces, self._is_open = [], False

    def _final(self, answer: Answer) -> dict[str, Any]:
        """Close the message of a complete answer, including tool uses, and return it."""
        [choice], totals = answer.choices, answer.totals
        self._close()
        for call in choice.whole_calls:
            self._use_tool(call)
        is_stop_string = choice.finish_reason == "stop" and isinstance(choice.stop_reason, str)
        thoughts = answer.num_reasoning_tokens
        return {
            **self._base,
            "content": self._blocks,
            "stop_reason": self._stop_reason(choice, totals.num_output_tokens),
            "stop_sequence": choice.stop_reason if is_stop_string else None,
            "usage": _usage(totals.num_prompt_tokens, totals.num_cached_tokens, totals.num_output_tokens, thoughts),
        }

    def _stop_reason(self, choice: Choice, num_output_tokens: int) -> StopReason:
        if choice.finish_reason == "length":
            is_context = num_output_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_context else "max_tokens"
        if choice.whole_calls:
            return "tool_use"
        return "stop_sequence" if isinstance(choice.stop_reason, str) else "end_turn"

    def _frames(self) -> bytes:
        events, self._events = self._events, []
        return event_frames(events)


def signature_of(thoughts: str) -> str:
    """Fingerprint of thinking text, in the member that holds Anthropic's own signature."""
    digest = hashlib.blake2b(thoughts.encode("utf-8", "surrogatepass"), digest_size=24).digest()
    return base64.b64encode(digest).decode()


def _usage(num_prompt: int, num_cached: int, num_output: int, num_thoughts: int) -> MessageUsage:
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
        "output_tokens_details": {"thinking_tokens": num_thoughts},
        "service_tier": "standard",
    }


_ERRORS = documented_errors(AnthropicErrorBody)
_EXAMPLE = 'event: message_start\ndata: {"type":"message_start",...}\n\n'
router = APIRouter(route_class=LongBodyRoute, tags=["messages"], responses=_ERRORS)


@router.post(
    "/v1/messages",
    responses=documented(MessageObject, _EXAMPLE, "The message."),
    operation_id="create_message",
)
async def create_message(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation (Anthropic's Messages API)."""
    request_id = context_of(request).request_id
    hides_thoughts = body.thinking is not None and body.thinking.display == "omitted"

    def make_encoder(accepted: Accepted) -> MessagesEncoder:
        return MessagesEncoder(accepted.model, body.max_tokens, request_id, hides_thoughts=hides_thoughts)

    return await answer_as_chat(
        request,
        body.model,
        lambda: chat_body(body),
        table_for(body),
        make_encoder,
        is_stream=bool(body.stream),
        new_call_id=lambda: f"toolu_{secrets.token_hex(12)}",
        warnings=warnings_of(body),
    )


@router.post("/v1/messages/count_tokens", response_model=TokenCount, operation_id="count_message_tokens")
async def count_message_tokens(body: CountBody, request: Request) -> Response:
    """Count the prompt tokens of a conversation, without any computation by the model. The count may exceed the context
    length. If the cluster routes requests, the entry model's tokenizer is used."""
    tokenizer = card_of(request, body.model).tokenizer
    check_tokens_known(tokenizer, {"model": True})

    def count() -> int:
        prompt = adapted_call(request, lambda: chat_body(body), table_for(body), tokenizer)[0].prompt
        assert isinstance(prompt, Conversation), "the prompt of a chat is a conversation"
        ids = tokenizer.encode_chat(
            prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
            continue_final=prompt.continue_final,
            template_kwargs=prompt.template_kwargs,
        )
        return len(ids)

    return JSONResponse({"input_tokens": await translated(request, count)})


class _AnthropicRoute(APIRoute):
    """Route for a path that OpenAI's API has as well. It matches only requests with Anthropic's version header."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http" or scope["state"]["context"].dialect is not ANTHROPIC:
            return Match.NONE, {}
        return super().matches(scope)


models_router = APIRouter(prefix="/v1/models", route_class=_AnthropicRoute, include_in_schema=False)


@models_router.get("")
async def list_messages_models(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_MODELS)] = DEFAULT_MODELS,
    after_id: Annotated[str | None, Query(max_length=256)] = None,
    before_id: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    """All names that requests can use, including aliases (Anthropic's format)."""
    cards = serving_of(request).cluster.cards()
    models = [_model(name, card) for card in cards for name in (card.name, *card.aliases)]
    return JSONResponse(page_of(models, limit, after_id, before_id))


@models_router.get("/{model_id:path}")
async def retrieve_messages_model(model_id: str, request: Request) -> Response:
    """One model (Anthropic's format)."""
    return JSONResponse(_model(model_id, serving_of(request).cluster.card(model_id)))


def page_of(
    models: Sequence[Mapping[str, Any]], limit: int, after_id: str | None = None, before_id: str | None = None
) -> dict[str, Any]:
    """Return one page of models: those after a model, those before a model, or the first ones.

    Raises:
        InvalidParameterError: no model has the given id, or both ids are given.
    """
    if after_id is not None and before_id is not None:
        raise InvalidParameterError("after_id and before_id are both given; give only one of them", param="before_id")
    ids = [model["id"] for model in models]
    first, end = 0, len(ids)
    for name, given in (("after_id", after_id), ("before_id", before_id)):
        if given is not None and given not in ids:
            raise InvalidParameterError(f"{name} is {given!r}, which is not the id of a model", param=name)
    if after_id is not None:
        first = ids.index(after_id) + 1
    if before_id is not None:
        end = ids.index(before_id)
        first = max(0, end - limit)
    page = list(models[first : min(end, first + limit)])
    has_more = first > 0 if before_id is not None else first + limit < end
    return {
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": has_more,
    }


def _model(name: str, card: ModelCard) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(card.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card.max_model_len,
        "max_tokens": card.max_model_len,
    }
