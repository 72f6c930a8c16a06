"""Contexts of HTTP requests: what is known of one while it is served, from the outermost middleware to its observers.

The middleware makes each request's context, gives it its id, and tells observers when it has ended; handlers fill it in
between. Whatever breaks inside becomes an answer here, so that errors carry the request's id as well. Per streamed
chunk it costs two comparisons.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.cluster.base import Hop
from lockstep.engine.request import GenerationRequest
from lockstep.server.dialect import OPENAI, Dialect, dialect_of
from lockstep.server.errors import HttpError, http_error
from lockstep.worker.progress import CallProgress

T = TypeVar("T")

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = b"x-request-id"
SEGMENT_HEADER = b"x-lockstep-segment"
WARNING_HEADER = b"x-lockstep-warning"
UNROUTED = "unrouted"
"""The endpoint of requests that no route takes; their paths are the client's and without number."""
_SANE_ID = re.compile(rb"[!-~]{1,128}")
_SEGMENT = re.compile(rb"[ -~]{1,64}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
CLIENT_LEFT_STATUS = 499
"""In logs and metrics, of a request whose client left: it gets no answer."""

PEOPLE = ("user", "safety_identifier", "prompt_cache_key")
"""Labels that say whom a request was sent for; clients put names and addresses there."""


BACKGROUND = "background"
"""Key in the ``state`` of a scope that no connection brought: its `Background`."""


BACKGROUND_PRIORITY = 2**31 - 1
"""Priority class of such requests, behind all that a client may choose."""


@dataclass(frozen=True, slots=True)
class Background:
    """Owner of a request that the server makes itself, of a batch: it was let in when the batch was."""

    tenant: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens and times of one HTTP request, over all of its prompts; the times are taken at the engine's steps."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Only of prompts that were answered: the last output of a call has it."""
    num_output_tokens: int = 0
    num_answered: int = 0
    """Prompts whose answers came to their end; what follows is theirs."""
    num_unanswered: int = 0
    num_preemptions: int = 0
    queue_s: float = 0.0
    """The longest wait for a first step."""
    ttft_s: float | None = None
    """The earliest first token."""
    total_s: float = 0.0
    """The latest end."""


@dataclass(slots=True)
class RequestContext:
    """Made by the outermost middleware, found by handlers with `context_of`."""

    request_id: str
    """The client's ``x-request-id``, or ours."""
    endpoint: str
    """The route's path, with its parameters as names; until the request is routed what the client requested."""
    started_s: float
    """On the monotonic clock."""
    at_s: float = 0.0
    """The same in Unix time."""
    number: int = 0
    """By arrival, among requests to models; 0: it is none."""
    method: str = ""
    is_background: bool = False
    """True for a request of a batch, which all others go before."""
    tenant: str = ""
    """Name of the API key that was used; never the key."""
    traceparent: str | None = None
    segment: str = ""
    """The client's ``x-lockstep-segment``: the part of the traffic that the request belongs to."""
    dialect: Dialect = OPENAI
    """Which API the client speaks."""
    model: str | None = None
    is_stream: bool = False
    session_id: str | None = None
    priority: int | None = None
    totals: Totals = Totals()
    """Of those who answered; known when the request has ended."""
    count: Callable[[], Totals] | None = None
    """The same so far, while the request is being answered."""
    progress: CallProgress = field(default_factory=CallProgress)
    """How far its calls have come, and what they waited for."""
    first_token_s: float | None = None
    """When the server had its first token, on the monotonic clock."""
    answers: Sequence[str] = ()
    """Texts of the answers; kept for ``--log-prompts`` only, as is `body`."""
    hops: list[Hop] = field(default_factory=list)
    """Of models that were called before those that answered; their tokens are not in `totals`."""
    finish_reasons: list[str] = field(default_factory=list)
    num_unread_calls: int = 0
    """Times that what began as a call of a function could not be read as one, and was shown as text."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The client's own labels."""
    num_body_bytes: int = 0
    """Of the request, once it has been read."""
    body: str | None = None
    """The request as it was sent."""
    warnings: Sequence[str] = ()
    """What was requested and is not done, a sentence each; stated in a header and in the answer."""
    error: HttpError | None = None
    is_sent: bool = False
    """The connection has taken the whole answer. What it tells of from then on is no departure."""
    status: int | None = None
    """How it ended: the client's status; of a stream that failed, its error's, although its head had 200;
    `CLIENT_LEFT_STATUS` when the client left before the end."""

    def placed(self, calls: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
        """The request's calls in its priority class."""
        if not self.is_background:
            return calls
        return [replace(call, priority=BACKGROUND_PRIORITY) for call in calls]

    @property
    def num_tokens(self) -> int:
        """Tokens that the request cost in all, routing included."""
        hops = sum(hop.num_prompt_tokens + hop.num_output_tokens for hop in self.hops)
        return self.totals.num_prompt_tokens + self.totals.num_output_tokens + hops


def context_of(request: Request) -> RequestContext:
    """The context of a request that came through the server's middleware."""
    context: RequestContext = request.state.context
    return context


RequestObserver = Callable[[RequestContext, float], None]
"""Called with the context of a request that has ended and the seconds that it took."""


class ContextMiddleware:
    """Pure ASGI. ``scope["state"]["context"]`` holds the context from here on."""

    def __init__(
        self,
        app: ASGIApp,
        observers: Sequence[RequestObserver],
        paths: Collection[str] = (),
        on_begin: Callable[[RequestContext], None] = lambda context: None,
    ) -> None:
        self._app = app
        self._on_begin = on_begin
        self._paths = frozenset(paths)
        """Of routes without parameters: a request that was refused before it was routed is counted under them."""
        self._observers = tuple(observers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].endswith("/"):  # clients join base URLs and paths as they like
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        context = _new_context(scope, time.monotonic())
        scope.setdefault("state", {})["context"] = context
        self._on_begin(context)
        exchange = _Exchange(context, receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:  # a defect of ours: told without details, logged with them
            log.exception("request %s failed", context.request_id)
            if exchange.status is None:
                await refuse(http_error(error), scope, receive, exchange.send)
            else:
                context.error = http_error(error)
        finally:
            route = scope.get("route")
            if route is not None:
                context.endpoint = getattr(route, "path", UNROUTED)
            elif context.endpoint not in self._paths:
                context.endpoint = UNROUTED
            context.status = _final_status(context, exchange)
            duration_s = time.monotonic() - context.started_s
            for observe in self._observers:
                observe(context, duration_s)


@dataclass(slots=True)
class _Exchange:
    """The two channels of a request, watched for how it ends."""

    _context: RequestContext
    _receive: Receive
    _send: Send
    status: int | None = None
    has_left: bool = False
    """Whether the client went before the answer was complete."""

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._context.is_sent:  # which is said after the end as well
            self.has_left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [pair for pair in message.get("headers", ()) if pair[0] != REQUEST_ID_HEADER]
            names = (REQUEST_ID_HEADER, self._context.dialect.id_header)
            headers += [(name, self._context.request_id.encode()) for name in names if name is not None]
            if self._context.warnings:
                headers.append((WARNING_HEADER, "; ".join(self._context.warnings).encode("ascii", "replace")))
            message = {**message, "headers": headers}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._context.is_sent = True


def _new_context(scope: Scope, now_s: float) -> RequestContext:
    request_id, traceparent, segment = None, None, ""
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and _SANE_ID.fullmatch(value):
            request_id = value.decode()
        elif name == b"traceparent" and _TRACEPARENT.fullmatch(value):
            traceparent = value.decode()
        elif name == SEGMENT_HEADER and _SEGMENT.fullmatch(value):
            segment = value.decode()
    background: Background | None = scope.get("state", {}).get(BACKGROUND)
    return RequestContext(
        request_id or f"req-{uuid.uuid4().hex}",
        scope["path"],
        now_s,
        at_s=time.time(),
        method=scope["method"],
        is_background=background is not None,
        tenant="" if background is None else background.tenant,
        traceparent=traceparent,
        segment=segment,
        dialect=dialect_of(scope["path"], scope["headers"]),
    )


def _final_status(context: RequestContext, exchange: _Exchange) -> int:
    if exchange.has_left or exchange.status is None:
        return CLIENT_LEFT_STATUS
    if context.status is not None:  # a handler that noticed it first
        return context.status
    return exchange.status if context.error is None else context.error.status


async def refuse(error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error from inside a middleware; the request's context notes it."""
    context: RequestContext = scope["state"]["context"]
    await refusal(error, context)(scope, receive, send)


def refusal(error: HttpError, context: RequestContext) -> JSONResponse:
    """The answer to a request that is refused, in its dialect; its context notes it."""
    context.error = context.dialect.put(error)
    return context.dialect.response(context.error, context.request_id)


class ClientLeft(Exception):  # noqa: N818 - nobody's error: the connection is gone
    """The client closed the connection before its answer was complete."""


async def unless_gone(watching: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T], context: RequestContext) -> T:
    """The result of some work, which is cancelled when ``watching`` returns: the client has left.

    The work runs in the caller's task and so begins at once, without a turn of the loop in which all other requests
    that came together are read.

    Raises:
        ClientLeft: it did, before the whole answer was sent. After that a server says of every client that it is gone.
    """
    loop, working = asyncio.get_running_loop(), asyncio.current_task()
    assert working is not None, "a handler runs in a task"
    is_gone = is_over = False

    def leave(watcher: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if not (is_over or watcher.cancelled() or context.is_sent):
            is_gone = True
            working.cancel()

    watcher = loop.create_task(watching)
    watcher.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and working.uncancel() == 0:  # and nothing else wanted its end
            raise ClientLeft from None
        raise
    finally:
        is_over = True
        watcher.cancel()


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
