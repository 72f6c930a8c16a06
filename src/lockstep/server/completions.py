"""Completions endpoint: the body of `POST /v1/completions`, its calls (one per prompt) and the encoding of answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter
from pydantic import ConfigDict, Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from lockstep.cluster.base import Accepted
from lockstep.cluster.cluster import Cluster
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.executors.sampling_params import MAX_LOGPROBS
from lockstep.server.answer import Extension, ResponseMetadata, Usage, documented, encode, metadata_of
from lockstep.server.answer_response import Answer, AnswerResponse
from lockstep.server.body import LongBodyRoute
from lockstep.server.choices import Choice, open_choices
from lockstep.server.chunk_encoder import ChunkEncoder
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.fields import (
    FinishReasonName,
    Shape,
    TextOrTokens,
    Tokens,
    tokens_or_list,
    unsupported,
)
from lockstep.server.generation import (
    Caller,
    GenerationBody,
    MaxTokens,
    bounded,
    call_of,
    caller_of,
    check_shared,
    check_tokens_known,
    constraint_of,
    labels_of,
    param_names,
    sampling_params,
)
from lockstep.server.logprobs import CompletionLogprobs, completion_logprobs, prompt_entries, prompt_logprobs
from lockstep.server.request_context import RequestContext, context_of
from lockstep.server.serving import card_of, serving_of, translated

MAX_PROMPTS = 1_024
"""Maximum number of prompts per request. Each is a separate call, and all of them must fit in the queue."""


Prompts = Annotated[
    Annotated[str, Tag("[text]")]
    | Annotated[Tokens, Tag("[tokens]")]
    | Annotated[list[TextOrTokens], Field(min_length=1, max_length=MAX_PROMPTS), Tag("[list]")],
    Discriminator(tokens_or_list),
]


class CompletionBody(GenerationBody):
    """Texts for a model to complete, with the parameters of the answer."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "Once", "max_tokens": 4},
                {"prompt": ["Once", "Twice"], "n": 2, "echo": True, "max_tokens": 4, "temperature": 0.5, "seed": 1},
                {"prompt": [1, 2, 3], "logprobs": 2, "max_tokens": 4, "stream": True},
            ]
        }
    )

    prompt: Prompts
    """Text, token ids, or a list of either. Choices are numbered in the order of the prompts."""
    max_tokens: MaxTokens | None = 16
    """Maximum number of tokens. Null or -1: the rest of the context. 0: only the prompt is returned; requires
    `echo`."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """Number of most likely tokens to return in addition to the chosen one."""
    add_special_tokens: Literal[True] | None = None
    """Only true is supported: the tokenizer adds its special tokens to text prompts."""
    echo: bool | None = None
    """True: the text starts with the prompt."""
    suffix: Annotated[None, unsupported("fill-in-the-middle is not supported")] = None


router = APIRouter(route_class=LongBodyRoute, tags=["completions"], responses=ERROR_RESPONSES)


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonName
    stop_reason: int | str | None
    token_ids: NotRequired[Sequence[int] | None]
    prompt_token_ids: NotRequired[Sequence[int] | None]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None] | None]


class Completion(Shape):
    """A complete answer."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]
    usage: Usage
    system_fingerprint: str | None
    service_tier: NotRequired[Literal["default"] | None]
    """Present if the request set one."""
    lockstep: Extension


@router.post("/v1/completions", responses=documented(Completion))
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Complete one or more texts."""
    serving, context = serving_of(request), context_of(request)
    card_of(request, body.model)
    context.labels, context.session_id = labels_of(body), body.session_id
    caller = caller_of(request)
    completion = await translated(request, lambda: completion_calls(body, caller))

    def make_answer(accepted: Sequence[Accepted]) -> Answer:
        return completion_answer(serving.cluster, body, completion, accepted, context)

    return AnswerResponse(request, completion.calls, make_answer, completion.names, is_stream=bool(body.stream))


def completion_answer(
    cluster: Cluster,
    body: CompletionBody,
    completion: CompletionCalls,
    accepted: Sequence[Accepted],
    context: RequestContext,
) -> Answer:
    """Create the answer to accepted calls, still empty."""
    params, returns_ids = completion.calls[0].params, bool(body.return_token_ids)
    card, cuts_prompt = cluster.card(accepted[0].model), body.truncate_prompt_tokens is not None
    tokenizer = card.tokenizer
    context.warnings = body.warnings
    metadata = metadata_of("cmpl", card, body)
    check_tokens_known(
        tokenizer,
        {
            "return_token_ids": returns_ids,
            "echo": bool(body.echo) and cuts_prompt,
            "stream_options.continuous_usage_stats": metadata.continuous_usage,
        },
    )
    echoes = [""] * len(accepted)
    if body.echo:
        echoes = [
            prompt if isinstance(prompt, str) and not cuts_prompt else tokenizer.decode(call.prompt_token_ids)
            for prompt, call in zip(completion.prompts, accepted, strict=True)
        ]
    choices = [
        choice
        for index, call in enumerate(accepted)
        for choice in open_choices(params, tokenizer, call, first_index=index * params.n, returns_ids=returns_ids)
    ]
    for choice in choices:
        choice.is_silent = body.max_tokens == 0
    return Answer(accepted, choices, CompletionEncoder(metadata, tokenizer, body, params.n, echoes), context)


Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionCalls:
    """The calls of a request, and the request's names of the engine's parameters."""

    calls: tuple[GenerationRequest, ...]
    prompts: tuple[Prompt, ...]
    names: Mapping[str, str]


def completion_calls(body: CompletionBody, caller: Caller) -> CompletionCalls:
    """Convert a completion request to engine calls, one per prompt.

    Raises:
        InvalidParameterError: a parameter is invalid; the error names it.
    """
    check_shared(body, caller.options)
    if body.echo and body.logprobs is not None and body.stream:
        raise InvalidParameterError(
            "echo with logprobs cannot be streamed; leave out one of echo, logprobs and stream", param="echo"
        )
    if body.max_tokens == 0 and not body.echo:
        raise InvalidParameterError(
            "max_tokens is 0, so the answer would be empty; set echo, or allow at least 1", param="max_tokens"
        )
    constrained = constraint_of(body)
    max_tokens = 1 if body.max_tokens == 0 else bounded(body.max_tokens)  # for 0, one token is computed
    params = sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs, constraint=constrained.constraint)
    of_prompt = max(
        (k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None), default=None
    )
    prompts = prompts_of(body.prompt)
    calls = tuple(call_of(body, caller, prompt, params, prompt_logprobs=of_prompt) for prompt in prompts)
    return CompletionCalls(calls, prompts, param_names(constrained.param))


def prompts_of(given: str | Sequence[int] | Sequence[str | Sequence[int]]) -> tuple[Prompt, ...]:
    """Split the parameter into single prompts."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        return (tuple(given),)  # type: ignore[arg-type]  # token ids, as the first one is
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in given)  # type: ignore[arg-type]  # as above


class CompletionEncoder(ChunkEncoder):
    """Encodes completions: the chunks of a stream, or the complete answer.

    Args:
        num_choices: number of choices per prompt.
        echoes: text that starts the choices of each prompt; empty strings without echo.
    """

    def __init__(
        self,
        metadata: ResponseMetadata,
        tokenizer: Tokenizer,
        body: CompletionBody,
        num_choices: int,
        echoes: Sequence[str],
    ) -> None:
        text = b'"text":', b',"logprobs":null,"finish_reason":null}]'
        plain = {"text": "", "logprobs": None, "finish_reason": None}
        super().__init__(metadata, "text_completion", plain, text, num_choices * len(echoes))
        self._tokenizer = tokenizer
        self._body = body
        self._num_choices = num_choices
        self._echoes = echoes

    def beginning(self, choice: Choice) -> Iterator[Mapping[str, Any]]:
        if echo := self._echo(choice):
            yield {"text": echo}

    def updates(self, choice: Choice) -> Iterator[Mapping[str, Any]]:
        if choice.text or choice.entries or choice.token_ids:
            members: dict[str, Any] = {"text": choice.text}
            if choice.entries:
                members["logprobs"] = completion_logprobs(choice.entries, len(self._echo(choice)))
            if choice.token_ids:
                members["token_ids"] = choice.token_ids
            yield members

    def ending(self, choice: Choice) -> Mapping[str, Any]:
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def whole(self, answer: Answer) -> bytes:
        metadata, outputs = self.metadata, answer.outputs
        completion: Completion = {
            "id": metadata.id,
            "object": "text_completion",
            "created": metadata.created_s,
            "model": metadata.model,
            "choices": [
                self._whole_choice(choice, outputs[choice.index // self._num_choices]) for choice in answer.choices
            ],
            "usage": answer.usage,
            "system_fingerprint": metadata.fingerprint,
            **metadata.tier,
            "lockstep": answer.extension,
        }
        return encode(completion)

    def _whole_choice(self, choice: Choice, output: RequestOutput) -> CompletionChoice:
        body, echo = self._body, self._echo(choice)
        prompt_ids, of_prompt = output.prompt_token_ids, output.prompt_logprobs
        logprobs = None if body.logprobs is None else completion_logprobs(choice.entries, len(echo))
        if logprobs is not None and body.echo and of_prompt is not None:
            before = completion_logprobs(prompt_entries(self._tokenizer, prompt_ids, of_prompt))
            logprobs = {
                "tokens": before["tokens"] + logprobs["tokens"],
                "token_logprobs": before["token_logprobs"] + logprobs["token_logprobs"],
                "top_logprobs": before["top_logprobs"] + logprobs["top_logprobs"],
                "text_offset": before["text_offset"] + logprobs["text_offset"],
            }
        whole: CompletionChoice = {
            "index": choice.index,
            "text": echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.ended_by,
            "stop_reason": choice.stop_reason,
        }
        if body.return_token_ids:
            whole["token_ids"], whole["prompt_token_ids"] = choice.token_ids, prompt_ids
        if body.prompt_logprobs is not None and of_prompt is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt_ids, of_prompt)
        return whole

    def _echo(self, choice: Choice) -> str:
        return self._echoes[choice.index // self._num_choices]
