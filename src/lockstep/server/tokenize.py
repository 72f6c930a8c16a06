"""``/tokenize`` and ``/detokenize``, in vLLM's shapes: what a model makes of a text, without computing anything."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.server.calls import check_tokens_known
from lockstep.server.record import record_of
from lockstep.server.serving import serving_of

MAX_TOKEN_IDS = 1 << 20
"""Tokens of one `/detokenize`; more than any context holds."""
MAX_TOKEN_ID = (1 << 31) - 1
router = APIRouter(tags=["tokenizer"])


class TokenizeRequest(BaseModel):
    """A prompt or a conversation, exactly one of them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """By default true for a prompt; false for messages, whose template writes them."""
    add_generation_prompt: bool = True
    """For messages: end with the beginning of an answer."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.messages is None and (self.chat_template_kwargs is not None or self.tools is not None):
            raise ValueError("chat_template_kwargs and tools belong to messages")
        return self


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(max_length=MAX_TOKEN_IDS)]


class DetokenizeResponse(BaseModel):
    prompt: str


@router.post("/tokenize", operation_id="tokenize")
def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
    """Tokens as a request would have them. Not on the event loop: a long text takes long."""
    cluster = serving_of(request).cluster
    card = cluster.card(body.model)
    record_of(request).model = card.name
    tokenizer = cluster.tokenizer(body.model)
    check_tokens_known(tokenizer, {"model": True})
    tokens = _tokens(tokenizer, body, serving_of(request).options.chat_template_kwargs)
    strings = [tokenizer.decode((token,), skip_special_tokens=False) for token in tokens]
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=card.max_model_len,
        tokens=tokens,
        token_strs=strings if body.return_token_strs else None,
    )


@router.post("/detokenize", operation_id="detokenize")
def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """The text of tokens, special ones included."""
    cluster = serving_of(request).cluster
    record_of(request).model = cluster.card(body.model).name
    tokenizer = cluster.tokenizer(body.model)
    check_tokens_known(tokenizer, {"model": True})
    for index, token in enumerate(body.tokens):
        if token >= tokenizer.vocab_size:
            raise InvalidParameterError(
                f"tokens[{index}] is {token}; the model's tokens are 0..{tokenizer.vocab_size - 1}",
                param=f"tokens[{index}]",
            )
    return DetokenizeResponse(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))


def _tokens(tokenizer: Tokenizer, body: TokenizeRequest, template_kwargs: dict[str, Any] | Any) -> list[int]:
    if body.messages is None:
        assert body.prompt is not None
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    variables = {**template_kwargs, **(body.chat_template_kwargs or {})}
    if body.tools is not None:
        variables["tools"] = body.tools
    if not body.add_special_tokens:
        return tokenizer.encode_chat(
            body.messages, add_generation_prompt=body.add_generation_prompt, template_kwargs=variables
        )
    text = tokenizer.render_chat(
        body.messages, add_generation_prompt=body.add_generation_prompt, template_kwargs=variables
    )
    return tokenizer.encode(text)
