"""`GET /v1/requests`: requests to models that are in progress, and the latest that have ended.

The rows contain names, counts and times, but no content of prompts or answers, and no keys. Ended requests are kept as
small rows, up to `MAX_ENDED`. Rows of open requests are made from their contexts on demand.
"""

from __future__ import annotations

import itertools
import shlex
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec.structs import replace

from lockstep.core.step import Limit
from lockstep.core.wording import Reached, phrase
from lockstep.engine import wait_reasons
from lockstep.engine.wait_reasons import MIN_INTERVAL_S
from lockstep.server.admission import is_operator
from lockstep.server.body import JSON_TYPE
from lockstep.server.cluster_routes import described, only_of
from lockstep.server.dialect import OPERATIONS
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.request_context import RequestContext, context_of
from lockstep.server.request_rows import Kind, RequestHop, RequestList, RequestReplay, RequestRow, RequestWait, State
from lockstep.server.serving import serving_of
from lockstep.shown import printable
from lockstep.worker import progress
from lockstep.worker.progress import Wait

MAX_ENDED = 512
"""Number of ended requests that are kept."""
DEFAULT_LIMIT = 100
MAX_LIMIT = 4_096
"""Maximum of `limit`, more than the number of open and kept requests."""
MAX_SHOWN_HOPS = 8
"""Maximum number of hops per row. A request with many prompts has several for each."""
MAX_SHOWN_CHARS = 128
"""Maximum number of characters of a name that a client chose."""
MAX_NUMBER = 2**53 - 1
"""Largest integer that JSON numbers represent exactly."""
KINDS: Mapping[str, Kind] = {
    progress.LOADING: "model_loading",
    progress.PLACE: "session",
    wait_reasons.SESSION: "session",
    wait_reasons.RETURNING: "blocks_returning",
    wait_reasons.ADAPTER: "adapter",
    wait_reasons.PRIORITY: "lower_priority",
    Limit.SEQS.name: "no_place",
    Limit.PLACES.name: "no_place",
    Limit.WIDTH.name: "no_place",
    Limit.TOKENS.name: "no_budget",
    Limit.PREFILL.name: "no_budget",
    Limit.BLOCKS.name: "no_block",
    Limit.STALLED.name: "no_block",
    Limit.PREEMPTED.name: "preempted_first",
    Limit.OVERTAKEN.name: "overtaken",
    Limit.SIBLING.name: "sibling",
    Limit.VICTIM.name: "lost_blocks",
}
"""Kind of a wait by the name of its reason where it is detected."""
REFUSED = (401, 403)
"""Statuses of callers that were rejected. Their requests are not kept."""

router = APIRouter(prefix="/v1", tags=["cluster"], responses=ERROR_RESPONSES)


class RequestLog:
    """Open requests, and the latest that have ended. Used on the event loop only."""

    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, RequestContext] = {}
        self._ended: deque[RequestRow] = deque(maxlen=max_ended)

    def begin(self, context: RequestContext) -> None:
        """Add a request."""
        if context.method == "POST" and context.endpoint in OPERATIONS:
            context.number = next(self._numbers)
            self._open[context.number] = context

    def end(self, context: RequestContext, duration_s: float) -> None:
        """Record the end of a request."""
        if self._open.pop(context.number, None) is None or context.status in REFUSED:
            return
        self._ended.append(row_of(context, duration_s, is_ended=True))

    def rows(self) -> Iterator[RequestRow]:
        """Yield the rows of all known requests, in no order."""
        now_s = time.monotonic()
        yield from (row_of(context, now_s - context.started_s) for context in self._open.values())
        yield from self._ended


def row_of(context: RequestContext, duration_s: float, *, is_ended: bool = False) -> RequestRow:
    """Make the row of a request as it is now, or as it ended."""
    totals = context.totals if context.count is None or is_ended else context.count()
    first_s = None if context.first_token_s is None else context.first_token_s - context.started_s
    answering_s = duration_s - first_s if first_s is not None else 0.0
    num_further = totals.num_output_tokens - 1
    error, course = context.error, context.progress
    waited_s = None if course.started_s is None else course.started_s - context.started_s
    is_begun = waited_s is not None or first_s is not None
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
        state="ended" if is_ended else "running" if is_begun else "waiting",
        status=context.status if is_ended else None,
        error=None if error is None else error.code or error.type,
        finish_reasons=tuple(dict.fromkeys(context.finish_reasons)),
        at_s=round(context.at_s, 3),
        waited_ms=None if waited_s is None else _ms(max(0.0, waited_s)),
        ttft_ms=None if first_s is None else _ms(first_s),
        total_ms=_ms(duration_s),
        tokens_per_second=round(num_further / answering_s, 3) if answering_s > 0 and num_further > 0 else None,
        prompt_tokens=totals.num_prompt_tokens,
        cached_tokens=totals.num_cached_tokens,
        output_tokens=totals.num_output_tokens,
        preemptions=totals.num_preemptions,
        waits=tuple(waits_of(course.waits.values(), context.started_s)),
        replay=tuple(RequestReplay(at.model, at.replica, at.seq_id, at.step, None) for at in course.sequences),
    )


def waits_of(found: Iterable[Wait], arrival_s: float) -> Iterator[RequestWait]:
    """Yield wait reasons in words, one for each kind and model: the last one reported."""
    kept: dict[tuple[str, Kind], tuple[str, float, float]] = {}
    for wait in found:
        kind, words = KINDS.get(wait.reason.limit), _words(wait)
        if kind is None or not words:
            continue
        before, first_s, last_s = kept.get((wait.model, kind), (words, wait.first_s, wait.last_s))
        latest = words if wait.last_s > last_s + MIN_INTERVAL_S / 2 else before  # the first one of a moment
        kept[wait.model, kind] = (latest, min(first_s, wait.first_s), max(last_s, wait.last_s))
    for (model, kind), (words, first_s, last_s) in kept.items():
        yield RequestWait(model, kind, words, _ms(max(0.0, first_s - arrival_s)), _ms(last_s - first_s))


def _words(wait: Wait) -> str:
    reason, others = wait.reason, _others(wait.reason.num_others)
    match reason.limit:
        case progress.LOADING:
            return "the model is not loaded"
        case progress.PLACE | wait_reasons.SESSION:
            held = f": {reason.used} of {reason.most} are held" if reason.most else ""
            return f"all sessions of the model are busy{held}"
        case wait_reasons.RETURNING:
            return "blocks of its prompt are being brought back from host memory or disk"
        case wait_reasons.ADAPTER:
            return "all slots for adapters are in use"
        case wait_reasons.PRIORITY:
            return f"{others} of a higher priority {'goes' if reason.num_others == 1 else 'go'} first"
    assert wait.config is not None, "a planner has a config"
    reached = Reached(Limit[reason.limit], reason.used, reason.most, reason.needed, others, reason.num_others)
    return phrase(reached._replace(num_stages=wait.num_stages), wait.config)


def _others(count: int) -> str:
    """Describe other requests without their ids, which the caller may not see."""
    return "another request" if count == 1 else f"{count} other requests"


def plain(text: str) -> str:
    """Shorten a name that a client chose, and replace characters that do not print."""
    return printable(text[:MAX_SHOWN_CHARS])


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
    """Select rows, newest first.

    Args:
        caller: name of the API key whose requests are selected; None: all requests.
        model: model that answered, or was called before; None: any.
        states: selected states; empty: all.
        after: number of a request; only later requests are selected.
        limit: maximum number of rows.
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
    model: Annotated[
        str | None, Query(max_length=256, description="Only requests for which this model was called.")
    ] = None,
    session_id: Annotated[str | None, Query(max_length=256, description="Only requests of this session.")] = None,
    status: Annotated[int | None, Query(ge=100, le=599, description="Only requests with this final status.")] = None,
    state: Annotated[list[State] | None, Query(description="Only requests in this state. Can be repeated.")] = None,
    after: Annotated[int, Query(ge=0, le=MAX_NUMBER, description="Only requests after the one with this number.")] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LIMIT, description="Maximum number of entries.")] = DEFAULT_LIMIT,
) -> Response:
    """Requests to models that are in progress, and the latest that have ended: times, tokens and routes, newest first.
    A key sees its own requests. An admin key sees all requests, as does every caller of a server without keys."""
    tenant, log = context_of(request).tenant, request.app.state.request_log
    rows = chosen(
        log.rows(),
        caller=only_of(request),
        model=model,
        session_id=session_id,
        status=status,
        states=state or (),
        after=after,
        limit=limit,
    )
    options, directory = serving_of(request).options, serving_of(request).cluster.recording
    shown = tuple(with_recording(row, directory, is_operator(tenant, options)) for row in rows)
    return Response(msgspec.json.encode(RequestList("list", shown)), media_type=JSON_TYPE)


def with_recording(row: RequestRow, directory: str | None, is_operator: bool) -> RequestRow:
    """Add the place in the recording to a row, if there is a recording."""
    if directory is None:
        return replace(row, replay=())
    words = ("lockstep", "replay", "--verify", directory, f"--request={row.id}")
    command = shlex.join(words) if is_operator else None
    return replace(row, replay=tuple(replace(at, command=command) for at in row.replay))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
