"""The body of `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import ConfigDict, Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from lockstep.cluster.base import Accepted, Cluster
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError
from lockstep.executors.sampling_params import MAX_LOGPROBS
from lockstep.server.answer import Answer, ResponseMetadata, encode, frame, metadata_of
from lockstep.server.answer_response import AnswerResponse, Job
from lockstep.server.answer_schema import Completion, documented
from lockstep.server.body import LongBodyRoute
from lockstep.server.choices import Choice
from lockstep.server.fields import MAX_SEQUENCE_TOKENS, TextOrTokens, Tokens, absent, tokens_or_list
from lockstep.server.generation import (
    Caller,
    GenerationBody,
    call_of,
    check_shared,
    check_tokens_known,
    constraint_of,
    labels_of,
    not_stored,
    param_names,
    sampling_params,
)
from lockstep.server.logprobs import Tracer, completion_logprobs, prompt_entries, prompt_logprobs
from lockstep.server.request_context import RequestContext, context_of
from lockstep.server.serving import serving_of, translated

MAX_PROMPTS = 1_024
"""Of one request; each is a call of its own, and all must find a place in the queue."""


Prompts = Annotated[
    Annotated[str, Tag("[text]")]
    | Annotated[Tokens, Tag("[tokens]")]
    | Annotated[list[TextOrTokens], Field(min_length=1, max_length=MAX_PROMPTS), Tag("[list]")],
    Discriminator(tokens_or_list),
]


class CompletionBody(GenerationBody):
    """What a model is to go on with, and how."""

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
    """Text, token ids, or a list of either; choices are numbered prompt by prompt."""
    max_tokens: Annotated[int | None, Field(ge=1, le=MAX_SEQUENCE_TOKENS)] = 16
    """Null: what the context leaves."""
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    """How many of the most likely tokens to tell besides the chosen one."""
    echo: bool | None = None
    """Begin the text with the prompt."""
    suffix: Annotated[None, absent("texts are only gone on with here, not filled in")] = None


router = APIRouter(route_class=LongBodyRoute, tags=["completions"])


@router.post("/v1/completions", responses=documented(Completion))
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Go on with one text or several."""
    serving, context = serving_of(request), context_of(request)
    context.model = serving.cluster.card(body.model).name
    context.labels = labels_of(body)
    asked = await translated(request, lambda: completion_calls(body, Caller(context.tenant, serving.options)))

    def make_answer(accepted: Sequence[Accepted]) -> Answer:
        return completion_answer(serving.cluster, body, asked, accepted, context)

    return AnswerResponse(request, Job(asked.calls, make_answer, asked.names, bool(body.stream)))


def completion_answer(
    cluster: Cluster,
    body: CompletionBody,
    asked: CompletionCalls,
    accepted: Sequence[Accepted],
    context: RequestContext,
) -> Answer:
    """The answer to accepted calls, still empty."""
    params = asked.calls[0].params
    tokenizer = cluster.tokenizer(accepted[0].model)
    cut_echo = bool(body.echo) and body.truncate_prompt_tokens is not None
    context.warnings = not_stored(body)
    metadata = metadata_of("cmpl", cluster.card(accepted[0].model), body, context)
    check_tokens_known(
        tokenizer,
        {
            "return_token_ids": bool(body.return_token_ids),
            "echo": cut_echo,
            "stream_options.continuous_usage_stats": metadata.continuous_usage,
        },
    )
    echoes = [""] * len(accepted)
    if body.echo:
        whole = body.truncate_prompt_tokens is None
        echoes = [
            prompt if isinstance(prompt, str) and whole else tokenizer.decode(call.prompt_token_ids)
            for prompt, call in zip(asked.prompts, accepted, strict=True)
        ]
    encoder = CompletionEncoder(
        metadata,
        tokenizer,
        num_choices=params.n,
        echoes=echoes,
        has_echo=bool(body.echo),
        has_logprobs=body.logprobs is not None,
        tells_ids=bool(body.return_token_ids),
        tells_prompt_logprobs=body.prompt_logprobs is not None,
    )
    end_ids = frozenset(tokenizer.end_token_ids)

    def tracer(one: Accepted) -> Tracer:
        return Tracer(
            tokenizer,
            one.prompt_token_ids[-1],
            verbatim=params.constraint is not None,
            shown_specials=() if params.skip_special_tokens else None,
        )

    choices = [
        Choice(
            call * params.n + index,
            tracer=None if body.logprobs is None else tracer(one),
            end_ids=end_ids,
            tells_ids=bool(body.return_token_ids),
            shows_end=params.include_stop_str_in_output,
            num_prompt_tokens=len(one.prompt_token_ids),
        )
        for call, one in enumerate(accepted)
        for index in range(params.n)
    ]
    return Answer(accepted, choices, encoder)


Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompletionCalls:
    """The calls, and what the request calls the engine's parameters."""

    calls: tuple[GenerationRequest, ...]
    prompts: tuple[Prompt, ...]
    names: Mapping[str, str]


def completion_calls(body: CompletionBody, caller: Caller) -> CompletionCalls:
    """What the cluster is asked.

    Raises:
        InvalidParameterError: names the parameter.
    """
    check_shared(body, caller.options)
    if body.echo and body.logprobs is not None and body.stream:
        raise InvalidParameterError(
            "echo with logprobs cannot be streamed; leave out one of echo, logprobs and stream", param="echo"
        )
    constrained = constraint_of(body)
    params = sampling_params(
        body, max_tokens=body.max_tokens, logprobs=body.logprobs, constraint=constrained.constraint
    )
    of_prompt = max(
        (k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None), default=None
    )
    prompts = prompts_of(body.prompt)
    calls = tuple(call_of(body, caller, prompt, params, prompt_logprobs=of_prompt) for prompt in prompts)
    return CompletionCalls(calls, prompts, param_names(constrained.param))


def prompts_of(given: str | Sequence[int] | Sequence[str | Sequence[int]]) -> tuple[Prompt, ...]:
    """Each prompt by itself."""
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        return (tuple(given),)  # type: ignore[arg-type]  # token ids, by its first
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in given)  # type: ignore[arg-type]  # as above


_TEXT_TAIL = b',"logprobs":null,"finish_reason":null}]'


class CompletionEncoder:
    """Implements `lockstep.server.answer.Encoder`.

    Args:
        num_choices: of each prompt.
        echoes: the text that each prompt's choices begin with; empty strings where nothing is echoed.
    """

    def __init__(
        self,
        metadata: ResponseMetadata,
        tokenizer: Tokenizer,
        *,
        num_choices: int,
        echoes: Sequence[str],
        has_echo: bool,
        has_logprobs: bool,
        tells_ids: bool,
        tells_prompt_logprobs: bool,
    ) -> None:
        self.metadata = metadata
        self._tokenizer = tokenizer
        self._num_choices = num_choices
        self._echoes = echoes
        self._has_echo = has_echo
        self._has_logprobs = has_logprobs
        self._tells_ids = tells_ids
        self._tells_prompt_logprobs = tells_prompt_logprobs
        self._head = metadata.chunk_head("text_completion")
        self._text_heads = [
            b"data: " + self._head + b',"choices":[{"index":%d,"text":' % index
            for index in range(num_choices * len(echoes))
        ]
        self._text_tail = _TEXT_TAIL + metadata.chunk_usage() + b"}\n\n"

    def opening(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def chunk(self, choice: Choice, extension: dict[str, Any] | None) -> bytes:
        opening = b""
        if not choice.has_begun:
            choice.has_begun = True
            echo = self._echo(choice)
            opening = self._frame(choice, {"text": echo}, is_echo=True) if echo else b""
        if choice.is_plain:
            tail = self._text_tail
            if self.metadata.continuous_usage:
                tail = _TEXT_TAIL + self.metadata.chunk_usage(choice.usage) + b"}\n\n"
            return opening + self._text_heads[choice.index] + encode(choice.text) + tail
        frames = [opening]
        if choice.text or choice.entries or choice.token_ids:
            told: dict[str, Any] = {"text": choice.text}
            if choice.entries:
                told["logprobs"] = completion_logprobs(choice.entries, len(self._echo(choice)))
            if choice.token_ids:
                told["token_ids"] = choice.token_ids
            frames.append(self._frame(choice, told))
        if choice.finish_reason is not None:
            ending = {"text": "", "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            frames.append(self._frame(choice, ending, extension))
        return b"".join(frames)

    def usage_chunk(self, usage: dict[str, Any], extension: dict[str, Any]) -> bytes:
        return frame(self._head + b',"choices":[],' + encode({"usage": usage, "lockstep": extension})[1:])

    def whole(self, answer: Answer) -> bytes:
        metadata = self.metadata
        outputs = answer.outputs
        body: dict[str, Any] = {
            "id": metadata.id,
            "object": "text_completion",
            "created": metadata.created_s,
            "model": metadata.model,
            "choices": [
                self._whole_choice(choice, outputs[choice.index // self._num_choices]) for choice in answer.choices
            ],
            "usage": answer.usage,
            "system_fingerprint": metadata.fingerprint,
            **metadata.told_tier,
            "lockstep": answer.extension,
        }
        return encode(body)

    def _whole_choice(self, choice: Choice, output: RequestOutput) -> dict[str, Any]:
        echo, prompt_ids, of_prompt = self._echo(choice), output.prompt_token_ids, output.prompt_logprobs
        logprobs = None
        if self._has_logprobs:
            logprobs = completion_logprobs(choice.entries, len(echo))
            if self._has_echo and of_prompt is not None:
                before = completion_logprobs(prompt_entries(self._tokenizer, prompt_ids, of_prompt))
                logprobs = {key: before[key] + logprobs[key] for key in logprobs}
        told: dict[str, Any] = {
            "index": choice.index,
            "text": echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._tells_ids:
            told |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt_ids}
        if self._tells_prompt_logprobs and of_prompt is not None:
            told["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt_ids, of_prompt)
        return told

    def _echo(self, choice: Choice) -> str:
        return self._echoes[choice.index // self._num_choices]

    def _frame(
        self, choice: Choice, told: dict[str, Any], extension: dict[str, Any] | None = None, *, is_echo: bool = False
    ) -> bytes:
        usage = choice.usage_before if is_echo else choice.usage
        told = {"index": choice.index, "logprobs": None, "finish_reason": None, **told}
        more = b"" if extension is None else b',"lockstep":' + encode(extension)
        return frame(
            self._head + b',"choices":[' + encode(told) + b"]" + self.metadata.chunk_usage(usage) + more + b"}"
        )
