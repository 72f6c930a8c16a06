"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lockstep.cluster.base import Accepted, Cluster
from lockstep.server.answer import Answer
from lockstep.server.answer_schema import Completion, documented
from lockstep.server.calls import Caller, check_tokens_known, labels_of, not_stored
from lockstep.server.choices import Choice
from lockstep.server.completion_answer import CompletionEncoder
from lockstep.server.completion_calls import CompletionCalls, completion_calls
from lockstep.server.completion_schema import CompletionBody
from lockstep.server.heading import heading_of
from lockstep.server.logprobs import Tracer
from lockstep.server.long_bodies import LongBodyRoute
from lockstep.server.record import RequestRecord, record_of
from lockstep.server.responding import AnswerResponse, Job
from lockstep.server.serving import serving_of, translated

router = APIRouter(route_class=LongBodyRoute, tags=["completions"])


@router.post("/v1/completions", responses=documented(Completion))
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Go on with one text or several."""
    serving, record = serving_of(request), record_of(request)
    record.model = serving.cluster.card(body.model).name
    record.metadata = labels_of(body)
    asked = await translated(request, lambda: completion_calls(body, Caller(record.tenant, serving.options)))

    def make_answer(accepted: Sequence[Accepted]) -> Answer:
        return completion_answer(serving.cluster, body, asked, accepted, record)

    return AnswerResponse(request, Job(asked.calls, make_answer, asked.names, bool(body.stream)))


def completion_answer(
    cluster: Cluster, body: CompletionBody, asked: CompletionCalls, accepted: Sequence[Accepted], record: RequestRecord
) -> Answer:
    """The answer to accepted calls, still empty."""
    params = asked.calls[0].params
    tokenizer = cluster.tokenizer(accepted[0].model)
    cut_echo = bool(body.echo) and body.truncate_prompt_tokens is not None
    record.warnings = not_stored(body)
    heading = heading_of("cmpl", cluster.card(accepted[0].model), body, record)
    check_tokens_known(
        tokenizer,
        {
            "return_token_ids": bool(body.return_token_ids),
            "echo": cut_echo,
            "stream_options.continuous_usage_stats": heading.continuous_usage,
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
        heading,
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
