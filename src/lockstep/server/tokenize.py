"""``/tokenize`` and ``/detokenize``, in vLLM's shapes: what a model makes of a text, without computing anything."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, model_validator

from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.server.body import LongBodyRoute
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.fields import Body, in_pieces
from lockstep.server.generation import check_tokens_known
from lockstep.server.request_context import context_of
from lockstep.server.serving import serving_of, translated

MAX_TOKEN_IDS = 1 << 20
"""Tokens of one `/detokenize`; more than any context holds."""
MAX_TOKEN_ID = (1 << 31) - 1
MAX_INLINE_BYTES = 4_096
"""Longer bodies are answered on another thread."""
router = APIRouter(route_class=LongBodyRoute, tags=["tokenizer"], responses=ERROR_RESPONSES)


class TokenizeRequest(Body):
    """A prompt or a conversation, exactly one of them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """By default true for a prompt; false for messages, whose template writes them."""
    add_generation_prompt: bool | None = None
    """For messages: false does not end with the beginning of an answer."""
    continue_final_message: bool | None = None
    """For messages: true ends with the last one's content."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is None and (self.chat_template_kwargs is not None or self.tools is not None):
            raise ValueError("chat_template_kwargs and tools belong to messages")
        if self.continue_final_message and (self.messages is None or self.add_special_tokens):
            raise ValueError("continue_final_message belongs to messages, whose template writes special tokens")
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], *in_pieces(MAX_TOKEN_IDS, least=0)]


class DetokenizeResponse(BaseModel):
    prompt: str


@router.post("/tokenize", operation_id="tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Tokens as a request would have them. What no context can hold is refused, as a request with it would be."""
    cluster = serving_of(request).cluster
    card = cluster.card(body.model)
    context_of(request).model = card.name
    tokenizer = cluster.tokenizer(body.model)
    check_tokens_known(tokenizer, {"model": True})
    template_kwargs = serving_of(request).options.chat_template_kwargs

    def answer() -> bytes:
        if card.max_model_len is not None:
            tokenizer.check_length(_texts(body), card.max_model_len - 1)
        tokens = _tokens(tokenizer, body, template_kwargs)
        strings = [tokenizer.decode((token,), skip_special_tokens=False) for token in tokens if body.return_token_strs]
        response = TokenizeResponse(
            count=len(tokens),
            max_model_len=card.max_model_len,
            tokens=tokens,
            token_strs=strings if body.return_token_strs else None,
        )
        return response.model_dump_json().encode()

    return Response(await translated(request, answer, MAX_INLINE_BYTES), media_type="application/json")


@router.post("/detokenize", operation_id="detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """The text of tokens, special ones included."""
    return await translated(request, lambda: _detokenized(body, request), MAX_INLINE_BYTES)


def _detokenized(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    cluster = serving_of(request).cluster
    context_of(request).model = cluster.card(body.model).name
    tokenizer = cluster.tokenizer(body.model)
    check_tokens_known(tokenizer, {"model": True})
    for index, token in enumerate(body.tokens):
        if token >= tokenizer.vocab_size:
            raise InvalidParameterError(
                f"tokens[{index}] is {token}; the model's tokens are 0..{tokenizer.vocab_size - 1}",
                param=f"tokens[{index}]",
            )
    return DetokenizeResponse(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))


def _texts(body: TokenizeRequest) -> list[str]:
    """Texts that are to be tokenised, without a template's tags and without parts of messages that are no text."""
    if body.messages is None:
        return [body.prompt or ""]
    contents = [message.get("content") for message in body.messages]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


def _tokens(tokenizer: Tokenizer, body: TokenizeRequest, template_kwargs: dict[str, Any] | Any) -> list[int]:
    if body.messages is None:
        assert body.prompt is not None
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    variables = {**template_kwargs, **(body.chat_template_kwargs or {})}
    if body.tools is not None:
        variables["tools"] = body.tools
    if not body.add_special_tokens:
        return tokenizer.encode_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final=bool(body.continue_final_message),
            template_kwargs=variables,
        )
    text = tokenizer.render_chat(
        body.messages, add_generation_prompt=body.add_generation_prompt is not False, template_kwargs=variables
    )
    return tokenizer.encode(text)
