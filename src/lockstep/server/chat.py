"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from lockstep.cluster.base import Accepted, Cluster
from lockstep.engine.chat_messages import checked_messages
from lockstep.engine.request import Conversation
from lockstep.server.answer import Answer
from lockstep.server.answer_schema import ChatCompletion, documented
from lockstep.server.calls import Caller, check_tokens_known, labels_of, not_stored
from lockstep.server.chat_answer import ChatEncoder
from lockstep.server.chat_calls import ChatCall, chat_call
from lockstep.server.chat_schema import ChatBody
from lockstep.server.choices import CallsReader, Choice
from lockstep.server.heading import heading_of
from lockstep.server.logprobs import Tracer
from lockstep.server.long_bodies import LongBodyRoute
from lockstep.server.record import RequestRecord, record_of
from lockstep.server.responding import AnswerResponse, Job
from lockstep.server.serving import serving_of, translated

router = APIRouter(route_class=LongBodyRoute, tags=["completions"])


@router.post("/v1/chat/completions", responses=documented(ChatCompletion))
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    serving, record = serving_of(request), record_of(request)
    record.model = serving.cluster.card(body.model).name
    record.metadata = labels_of(body)
    caller, tokenizer = Caller(record.tenant, serving.options), serving.cluster.tokenizer(body.model)
    asked = await translated(request, lambda: chat_call(body, caller, tokenizer))

    def make_answer(accepted: Sequence[Accepted]) -> Answer:
        return chat_answer(serving.cluster, body, asked, accepted[0], record)

    job = Job((asked.call,), make_answer, asked.names, bool(body.stream), shows_route=_shows_route(body))
    return AnswerResponse(request, job)


def chat_answer(cluster: Cluster, body: ChatBody, asked: ChatCall, accepted: Accepted, record: RequestRecord) -> Answer:
    """The answer to an accepted call, still empty."""
    params, plan = asked.call.params, asked.plan
    tokenizer = cluster.tokenizer(accepted.model)
    record.warnings = [*not_stored(body), *asked.unheeded(tokenizer)]
    heading = heading_of("chatcmpl", cluster.card(accepted.model), body, record)
    check_tokens_known(
        tokenizer,
        {
            "return_token_ids": bool(body.return_token_ids),
            "stream_options.continuous_usage_stats": heading.continuous_usage,
        },
    )
    encoder = ChatEncoder(
        heading,
        tokenizer,
        echo=_echo(body, asked),
        has_functions=body.functions is not None,
        num_choices=params.n,
        has_logprobs=bool(body.logprobs),
        tells_ids=bool(body.return_token_ids),
        hops=accepted.hops if _shows_route(body) else (),
    )
    end_ids = frozenset(tokenizer.end_token_ids)
    after = accepted.prompt_token_ids[-1] if accepted.prompt_token_ids else None

    def tracer() -> Tracer:
        return Tracer(
            tokenizer,
            after,
            verbatim=params.constraint is not None,
            shown_specials=plan.shown_specials if params.skip_special_tokens else None,
        )

    choices = [
        Choice(
            index,
            tracer=tracer() if body.logprobs else None,
            reader=CallsReader(plan, plan.parser(_new_call_id)) if plan.names else None,
            end_ids=end_ids,
            tells_ids=bool(body.return_token_ids),
            shows_end=params.include_stop_str_in_output,
            num_prompt_tokens=len(accepted.prompt_token_ids),
        )
        for index in range(params.n)
    ]
    return Answer([accepted], choices, encoder)


def _shows_route(body: ChatBody) -> bool:
    """Whether the router's decision is shown as a call: clients with tools of their own would try to execute it."""
    return not (body.tools or body.functions) and body.lockstep_hops is not False


def _echo(body: ChatBody, asked: ChatCall) -> str:
    """What the answer begins with: the last message, where that is the assistant's and it is asked for."""
    prompt = asked.call.prompt
    if not body.echo or body.messages[-1].role != "assistant" or not isinstance(prompt, Conversation):
        return ""
    [last] = checked_messages(prompt.messages[-1:], knows_developer=True)
    return str(last["content"])


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
