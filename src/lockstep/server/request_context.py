"""Request contexts: hold the state of each HTTP request, from the outermost middleware to the observers of its end.

The middleware creates the context of each request, assigns its id, and calls the observers when the request has ended.
Handlers fill in the other fields. Unhandled exceptions become error responses here, so that these also carry the
request's id. The cost per streamed chunk is two comparisons.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.cluster.base import Hop
from lockstep.server.dialect import OPENAI, Dialect, dialect_of
from lockstep.server.errors import HttpError, http_error
from lockstep.worker.progress import CallProgress

if TYPE_CHECKING:
    from lockstep.engine.outputs import RequestOutput

T = TypeVar("T")

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = b"x-request-id"
SEGMENT_HEADER = b"x-lockstep-segment"
WARNING_HEADER = b"x-lockstep-warning"
UNROUTED = "unrouted"
"""Endpoint label of requests that match no route. Their paths are chosen by clients and unbounded in number."""
_VALID_ID = re.compile(rb"[!-~]{1,128}")
_SEGMENT = re.compile(rb"[ -~]{1,64}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
CLIENT_LEFT_STATUS = 499
"""Status, in logs and metrics, of a request whose client disconnected before the answer."""

PEOPLE = ("user", "safety_identifier", "prompt_cache_key")
"""Labels that identify the end user of a request. Clients may put names and addresses there."""


BACKGROUND = "background"
"""Key of a `Background` in the ``state`` of a scope that has no connection."""


@dataclass(frozen=True, slots=True)
class Background:
    """Tenant of a batch request, which the server sends to itself. It was admitted when its batch was."""

    tenant: str


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """Token counts and times of one HTTP request, over all of its prompts. Times are measured at engine steps."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Number of prompt tokens from the prefix cache. The last output of a call reports it, so only finished prompts
    count."""
    num_output_tokens: int = 0
    num_answered: int = 0
    """Number of prompts whose answers are complete. The times below are theirs."""
    num_unanswered: int = 0
    num_preemptions: int = 0
    queue_s: float = 0.0
    """Longest wait for a first step."""
    ttft_s: float | None = None
    """Earliest first token."""
    total_s: float = 0.0
    """Latest end."""

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput], unanswered: Sequence[tuple[int, int]] = ()) -> Self:
        """Sum the outputs of a request's prompts.

        Args:
            unanswered: numbers of prompt and output tokens of each prompt whose answer was interrupted.
        """
        timings = [output.timings for output in outputs]
        return cls(
            sum(output.num_prompt_tokens for output in outputs) + sum(num_prompt for num_prompt, _ in unanswered),
            sum(output.num_cached_tokens for output in outputs),
            sum(output.num_output_tokens for output in outputs) + sum(num_output for _, num_output in unanswered),
            len(outputs),
            len(unanswered),
            sum(output.num_preemptions for output in outputs),
            max((each.queue_s for each in timings), default=0.0),
            min((each.ttft_s for each in timings if each.ttft_s is not None), default=None),
            max((each.total_s for each in timings), default=0.0),
        )


@dataclass(slots=True)
class RequestContext:
    """State of one request. Created by the outermost middleware; handlers get it from `context_of`."""

    request_id: str
    """The client's ``x-request-id``, or a generated one."""
    endpoint: str
    """Path template of the route. Until the request is routed: the requested path."""
    started_s: float
    """Start time on the monotonic clock."""
    at_s: float = 0.0
    """Start time in Unix time."""
    number: int = 0
    """Sequence number among requests to models, by arrival; 0 for other requests."""
    method: str = ""
    is_background: bool = False
    """True for a batch request, which yields to all others."""
    tenant: str = ""
    """Name of the API key that was used, never the key itself."""
    traceparent: str | None = None
    segment: str = ""
    """The client's ``x-lockstep-segment``: a label for the part of the traffic to which the request belongs."""
    dialect: Dialect = OPENAI
    """The API that the client uses."""
    model: str | None = None
    is_stream: bool = False
    session_id: str | None = None
    priority: int | None = None
    totals: RequestTotals = RequestTotals()
    """Totals of the answering model; set when the request has ended."""
    count: Callable[[], RequestTotals] | None = None
    """Returns the current totals while the request is running."""
    progress: CallProgress = field(default_factory=CallProgress)
    """Progress of the request's calls and the reasons for their waits."""
    first_token_s: float | None = None
    """Time at which the server received its first token, on the monotonic clock."""
    answers: Sequence[str] = ()
    """Texts of the answers. Like `body`, only stored for ``--log-prompts``."""
    hops: list[Hop] = field(default_factory=list)
    """Models that were called before the answering ones. Their tokens are not in `totals`."""
    finish_reasons: list[str] = field(default_factory=list)
    num_unread_calls: int = 0
    """Number of tool calls that could not be parsed and were returned as text."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels set by the client."""
    num_body_bytes: int = 0
    """Size of the request body, once it has been read."""
    body: str | None = None
    """The request body as it was sent."""
    warnings: Sequence[str] = ()
    """Warnings, one sentence each, about requested features that are not supported. Sent in a header and the answer."""
    error: HttpError | None = None
    is_sent: bool = False
    """True once the connection has accepted the whole answer. A disconnect after that is not an abort."""
    status: int | None = None
    """Final status: the response status; for a failed stream, that of its error although the response status was 200;
    `CLIENT_LEFT_STATUS` if the client disconnected before the end."""

    @property
    def num_tokens(self) -> int:
        """Total number of tokens that the request cost, including routing."""
        hops = sum(hop.num_prompt_tokens + hop.num_output_tokens for hop in self.hops)
        return self.totals.num_prompt_tokens + self.totals.num_output_tokens + hops


def context_of(request: Request) -> RequestContext:
    """Context of a request that has passed the server's middleware."""
    context: RequestContext = request.state.context
    return context


RequestObserver = Callable[[RequestContext, float], None]
"""Called with the context of a finished request and its duration in seconds."""


class ContextMiddleware:
    """Pure ASGI middleware that stores a new context in ``scope["state"]["context"]``."""

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
        """Paths of routes without parameters. A request that is rejected before routing is counted under its path."""
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
        except Exception as error:  # a bug in the server: the client receives no details, the log does
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
    """The receive and send channels of a request, with the state needed for its final status."""

    _context: RequestContext
    _receive: Receive
    _send: Send
    status: int | None = None
    has_left: bool = False
    """True if the client disconnected before the answer was complete."""

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._context.is_sent:  # also sent after the end
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
        if name == REQUEST_ID_HEADER and _VALID_ID.fullmatch(value):
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
    if context.status is not None:  # set by a handler
        return context.status
    return exchange.status if context.error is None else context.error.status


async def refuse(error: HttpError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send an error response from inside a middleware, and record the error in the request's context."""
    context: RequestContext = scope["state"]["context"]
    await refusal(error, context)(scope, receive, send)


def refusal(error: HttpError, context: RequestContext) -> JSONResponse:
    """Create the error response to a rejected request in its dialect, and record the error in its context."""
    context.error = context.dialect.with_own_status(error)
    return context.dialect.response(context.error, context.request_id)


class ClientLeft(Exception):  # noqa: N818 - not an error: the connection is closed
    """The client closed the connection before its answer was complete."""


async def while_connected(watch: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T], context: RequestContext) -> T:
    """Run ``work``, and cancel it if ``watch`` returns first because the client has disconnected.

    The work runs in the caller's task, so it starts immediately and does not wait for an iteration of the event loop
    that reads all other new requests.

    Raises:
        ClientLeft: the client disconnected before the whole answer was sent. ASGI servers report a disconnect after
            every complete answer as well, which is ignored.
    """
    loop, working = asyncio.get_running_loop(), asyncio.current_task()
    assert working is not None, "a handler runs in a task"
    is_gone = is_over = False

    def leave(watcher: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if not (is_over or watcher.cancelled() or context.is_sent):
            is_gone = True
            working.cancel()

    watcher = loop.create_task(watch)
    watcher.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and working.uncancel() == 0:  # and nothing else cancelled the task
            raise ClientLeft from None
        raise
    finally:
        is_over = True
        watcher.cancel()


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
