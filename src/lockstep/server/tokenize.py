"""Tokenizer endpoints: serve ``/tokenize`` and ``/detokenize`` in vLLM's format, without any model computation."""

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
from lockstep.server.serving import card_of, serving_of, translated

MAX_TOKEN_IDS = 1 << 20
"""Maximum number of tokens for `/detokenize`. No context is this long."""
MAX_TOKEN_ID = (1 << 31) - 1
MAX_INLINE_BYTES = 4_096
"""Maximum size of a body that is processed on the event loop. Longer ones use another thread."""
router = APIRouter(route_class=LongBodyRoute, tags=["tokenizer"], responses=ERROR_RESPONSES)


class TokenizeRequest(Body):
    """A prompt or a conversation. Exactly one must be given."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt; false for messages, whose template adds the special tokens."""
    add_generation_prompt: bool | None = None
    """For messages. False: the prompt does not end with the start of an answer."""
    continue_final_message: bool | None = None
    """For messages. True: the prompt ends with the content of the last message."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        if self.messages is None and (self.chat_template_kwargs is not None or self.tools is not None):
            raise ValueError("chat_template_kwargs and tools require messages")
        if self.continue_final_message and (self.messages is None or self.add_special_tokens):
            raise ValueError("continue_final_message requires messages, and add_special_tokens must be false")
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
    """Tokenize a prompt as a request would. Input that does not fit in the context is rejected, as for a request."""
    card = card_of(request, body.model)
    tokenizer = card.tokenizer
    check_tokens_known(tokenizer, {"model": True})
    template_kwargs = serving_of(request).options.chat_template_kwargs

    def answer() -> bytes:
        if card.max_model_len is not None:
            tokenizer.check_length(_texts(body), card.max_model_len - 1)
        tokens = _tokens(tokenizer, body, template_kwargs)
        strings = [tokenizer.decode((token,), skip_special_tokens=False) for token in tokens if body.return_token_strs]
        response = TokenizeResponse(
            count=len(tokens),
            max_model_len=card.shown_max_model_len,
            tokens=tokens,
            token_strs=strings if body.return_token_strs else None,
        )
        return response.model_dump_json().encode()

    return Response(await translated(request, answer, MAX_INLINE_BYTES), media_type="application/json")


@router.post("/detokenize", operation_id="detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """Convert tokens to text, including special tokens."""
    return await translated(request, lambda: _detokenized(body, request), MAX_INLINE_BYTES)


def _detokenized(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    tokenizer = card_of(request, body.model).tokenizer
    check_tokens_known(tokenizer, {"model": True})
    for index, token in enumerate(body.tokens):
        if token >= tokenizer.vocab_size:
            raise InvalidParameterError(
                f"tokens[{index}] is {token}; the model's tokens are 0..{tokenizer.vocab_size - 1}",
                param=f"tokens[{index}]",
            )
    return DetokenizeResponse(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))


def _texts(body: TokenizeRequest) -> list[str]:
    """Texts to tokenize, without template tags and without message parts that are not text."""
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
