"""The outermost middleware: gives each request its record and id, and tells observers when it has ended.

Whatever breaks inside becomes an answer here, so that errors carry the request's id as well. Per streamed chunk it
costs two comparisons.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.server.errors import http_error
from lockstep.server.record import CLIENT_LEFT_STATUS, RequestRecord
from lockstep.server.refusals import refuse

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = b"x-request-id"
WARNING_HEADER = b"x-lockstep-warning"
UNROUTED = "unrouted"
"""The endpoint of requests that no route takes; their paths are the client's and without number."""
_SANE_ID = re.compile(rb"[!-~]{1,128}")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

RecordObserver = Callable[[RequestRecord, float], None]
"""Called with a record whose request has ended and the seconds that it took."""


class RecordMiddleware:
    """Pure ASGI. ``scope["state"]["record"]`` holds the record from here on."""

    def __init__(self, app: ASGIApp, observers: Sequence[RecordObserver], paths: Collection[str] = ()) -> None:
        self._app = app
        self._paths = frozenset(paths)
        """Of routes without parameters: a request that was refused before it was routed is told by them."""
        self._observers = tuple(observers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = _new_record(scope, time.monotonic())
        scope.setdefault("state", {})["record"] = record
        exchange = _Exchange(record, receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as error:  # a defect of ours: told without details, logged with them
            log.exception("request %s failed", record.request_id)
            record.error = http_error(error)
            if exchange.status is None:
                await refuse(record.error, scope, receive, exchange.send)
        finally:
            route = scope.get("route")
            if route is not None:
                record.endpoint = getattr(route, "path", UNROUTED)
            elif record.endpoint not in self._paths:
                record.endpoint = UNROUTED
            record.status = _final_status(record, exchange)
            duration_s = time.monotonic() - record.started_s
            for observe in self._observers:
                observe(record, duration_s)


class _Exchange:
    """The two channels of a request, watched for how it ends."""

    def __init__(self, record: RequestRecord, receive: Receive, send: Send) -> None:
        self._record = record
        self._receive = receive
        self._send = send
        self.status: int | None = None
        self.has_left = False
        """Whether the client went before the answer was complete."""

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._record.is_sent:  # which is said after the end as well
            self.has_left = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [pair for pair in message.get("headers", ()) if pair[0] != REQUEST_ID_HEADER]
            headers.append((REQUEST_ID_HEADER, self._record.request_id.encode()))
            if self._record.warnings:
                headers.append((WARNING_HEADER, "; ".join(self._record.warnings).encode("ascii", "replace")))
            message = {**message, "headers": headers}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._record.is_sent = True


def _new_record(scope: Scope, now_s: float) -> RequestRecord:
    request_id, traceparent = None, None
    for name, value in scope["headers"]:
        if name == REQUEST_ID_HEADER and _SANE_ID.fullmatch(value):
            request_id = value.decode()
        elif name == b"traceparent" and _TRACEPARENT.fullmatch(value):
            traceparent = value.decode()
    return RequestRecord(
        request_id or f"req-{uuid.uuid4().hex}",
        scope["path"],
        now_s,
        method=scope["method"],
        traceparent=traceparent,
    )


def _final_status(record: RequestRecord, exchange: _Exchange) -> int:
    if exchange.has_left or exchange.status is None:
        return CLIENT_LEFT_STATUS
    if record.status is not None:  # a handler that noticed it first
        return record.status
    return exchange.status if record.error is None else record.error.status
