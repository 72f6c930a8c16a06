"""`GET /v1/requests`: requests to models that are being answered, and the latest that have ended.

Nothing of a prompt, an answer or a key is in it: names, counts and times. What has ended is kept as a small row, and as
many as `MAX_ENDED`; what is open is read from its context when somebody asks.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response

from lockstep.server.admission import sees_all
from lockstep.server.body import JSON_TYPE
from lockstep.server.cluster_routes import described
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.request_context import RequestContext, context_of
from lockstep.server.serving import serving_of

MAX_ENDED = 512
"""Requests that are remembered after their end."""
DEFAULT_LIMIT = 100
MAX_LIMIT = 4_096
"""More than are ever open and remembered."""
MAX_SHOWN_HOPS = 8
"""Of one request; one with many prompts has some for each."""
MAX_SHOWN_CHARS = 128
"""Of a name that a client chose."""
MAX_NUMBER = 2**53 - 1
"""What a JSON number holds exactly."""
LISTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"})
REFUSED = (401, 403)
"""Statuses of callers who are not let in, and are therefore not remembered."""

router = APIRouter(prefix="/v1", tags=["cluster"], responses=ERROR_RESPONSES)
State = Literal["waiting", "running", "ended"]


class RequestHop(msgspec.Struct, frozen=True):
    """A model that was asked before the one that answered."""

    model: str
    intent: str | None
    """What the rule read from its answer; null: nothing that it knows."""
    target: str | None
    """Who answers next; null: nobody, the hop's own answer stood."""
    latency_ms: float


class RequestRow(msgspec.Struct, frozen=True):
    """One request, over all of its prompts. What is null is not known, not yet, or does not apply."""

    number: int
    """By arrival, from 1; what `after` takes."""
    id: str
    """Its `x-request-id`."""
    endpoint: str
    model: str | None
    """Who answers."""
    hops: tuple[RequestHop, ...]
    """Who was asked before, in order."""
    session_id: str | None
    caller: str
    """Name of the API key that was used; never the key."""
    priority: int | None
    stream: bool
    state: State
    """`waiting` until something of it is computed."""
    status: int | None
    """Of the HTTP answer, or of the error in its stream; 499: the client left."""
    error: str | None
    """Code of the error that it ended with."""
    finish_reasons: tuple[str, ...]
    """Of its choices, each reason once."""
    at_s: float
    """Arrival, in Unix time."""
    waited_ms: float | None
    """From its arrival to the first step that computed something of it."""
    ttft_ms: float | None
    """From its arrival to its first token."""
    total_ms: float
    """From its arrival to its end, or so far."""
    tokens_per_second: float | None
    """Those after the first token, by the time since then; null until there is one."""
    prompt_tokens: int
    cached_tokens: int
    """Of prompts that were answered."""
    output_tokens: int
    preemptions: int


class RequestList(msgspec.Struct, frozen=True):
    """Requests, newest first."""

    object: str
    data: tuple[RequestRow, ...]


class RequestLog:
    """Requests that are open, and the latest that have ended. Event loop only."""

    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, RequestContext] = {}
        self._ended: deque[RequestRow] = deque(maxlen=max_ended)

    def begin(self, context: RequestContext) -> None:
        """A request has come."""
        if context.method == "POST" and context.endpoint in LISTED:
            context.number = next(self._numbers)
            self._open[context.number] = context

    def end(self, context: RequestContext, duration_s: float) -> None:
        """A request has ended, after so many seconds."""
        if self._open.pop(context.number, None) is None or context.status in REFUSED:
            return
        self._ended.append(row_of(context, duration_s, is_ended=True))

    def rows(self) -> Iterator[RequestRow]:
        """All that are known, in no order."""
        now_s = time.monotonic()
        yield from (row_of(context, now_s - context.started_s) for context in self._open.values())
        yield from self._ended


def row_of(context: RequestContext, duration_s: float, *, is_ended: bool = False) -> RequestRow:
    """A request as it is now, or as it ended."""
    totals = context.totals if context.count is None or is_ended else context.count()
    first_s = None if context.first_token_s is None else context.first_token_s - context.started_s
    answering_s = duration_s - first_s if first_s is not None else 0.0
    num_further = totals.num_output_tokens - 1
    is_timed = is_ended and totals.num_answered > 0
    error = context.error
    return RequestRow(
        number=context.number,
        id=plain(context.request_id),
        endpoint=context.endpoint,
        model=context.model,
        hops=tuple(
            RequestHop(hop.model, hop.intent, hop.target, _ms(hop.latency_s)) for hop in context.hops[:MAX_SHOWN_HOPS]
        ),
        session_id=None if context.session_id is None else plain(context.session_id),
        caller=context.tenant,
        priority=context.priority,
        stream=context.is_stream,
        state="ended" if is_ended else "waiting" if first_s is None else "running",
        status=context.status if is_ended else None,
        error=None if error is None else error.code or error.type,
        finish_reasons=tuple(dict.fromkeys(context.finish_reasons)),
        at_s=round(context.at_s, 3),
        waited_ms=_ms(totals.queue_s) if is_timed else None,
        ttft_ms=None if first_s is None else _ms(first_s),
        total_ms=_ms(duration_s),
        tokens_per_second=round(num_further / answering_s, 3) if answering_s > 0 and num_further > 0 else None,
        prompt_tokens=totals.num_prompt_tokens,
        cached_tokens=totals.num_cached_tokens,
        output_tokens=totals.num_output_tokens,
        preemptions=totals.num_preemptions,
    )


def plain(text: str) -> str:
    """A name that a client chose, short and without what does not print."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text[:MAX_SHOWN_CHARS])


def chosen(
    rows: Iterable[RequestRow],
    *,
    caller: str | None = None,
    model: str | None = None,
    session_id: str | None = None,
    status: int | None = None,
    states: Collection[State] = (),
    after: int = 0,
    limit: int = DEFAULT_LIMIT,
) -> list[RequestRow]:
    """The newest of those that are asked for, newest first.

    Args:
        caller: only this one's; None: everybody's.
        model: that answered, or was asked before.
        states: empty: any.
        after: number of a request; only those that came after it.
    """
    session = None if session_id is None else plain(session_id)
    found = [
        row
        for row in rows
        if row.number > after
        and (caller is None or row.caller == caller)
        and (model is None or row.model == model or any(hop.model == model for hop in row.hops))
        and (session is None or row.session_id == session)
        and (status is None or row.status == status)
        and (not states or row.state in states)
    ]
    found.sort(key=lambda row: row.number, reverse=True)
    return found[:limit]


@router.get("/requests", responses=described(RequestList), response_class=Response, operation_id="list_requests")
async def list_requests(
    request: Request,
    model: Annotated[str | None, Query(max_length=256, description="Who answered, or was asked before.")] = None,
    session_id: Annotated[str | None, Query(max_length=256, description="Of this conversation.")] = None,
    status: Annotated[int | None, Query(ge=100, le=599, description="Ended with this status.")] = None,
    state: Annotated[list[State] | None, Query(description="In this state; may be repeated.")] = None,
    after: Annotated[int, Query(ge=0, le=MAX_NUMBER, description="Came after the request of this number.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT, description="As many of the newest at most.")] = DEFAULT_LIMIT,
) -> Response:
    """Requests to models that are being answered, and the latest that have ended: times, tokens and routes, newest
    first. A key sees its own; an admin key everybody's, and where there are no keys, everybody does."""
    tenant, log = context_of(request).tenant, request.app.state.request_log
    rows = chosen(
        log.rows(),
        caller=None if sees_all(tenant, serving_of(request).options) else tenant,
        model=model,
        session_id=session_id,
        status=status,
        states=state or (),
        after=after,
        limit=limit,
    )
    return Response(msgspec.json.encode(RequestList("list", tuple(rows))), media_type=JSON_TYPE)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
