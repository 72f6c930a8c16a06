"""Execution of batch requests: calls the application in process, without a socket.

A batch request therefore has the same validation, limits, records and response bytes as a request over HTTP.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from lockstep.server.batches.input_file import BatchRequest
from lockstep.server.batches.job import BatchJob, Reply, request_id_of
from lockstep.server.body import JSON_TYPE
from lockstep.server.request_context import BACKGROUND, REQUEST_ID_HEADER, Background
from lockstep.system import SYSTEM, System

RETRIED = frozenset({408, 429, 502, 503})
"""Statuses after which a request is retried: a full queue, a model that is loading, an error of a remote server."""
MAX_TRIES = 60
"""Maximum number of attempts per request; with the maximum delay, half an hour in total."""
MAX_LOST_TRIES = 3
"""Maximum number of attempts for a request during which the worker process died, as the request may be the cause."""
FIRST_WAIT_S = 0.25
MAX_WAIT_S = 30.0


class InProcessServer:
    """Calls the application for batch requests."""

    def __init__(self, app: ASGIApp, system: System = SYSTEM) -> None:
        self._app = app
        self.system = system

    async def send(self, request: BatchRequest, tenant: str, request_id: str) -> Reply:
        """Send one request. Cancellation aborts it within one step, but a complete answer is returned."""
        state = {BACKGROUND: Background(tenant)}
        headers = [
            (b"content-type", JSON_TYPE.encode()),
            (b"content-length", b"%d" % len(request.body)),
            (REQUEST_ID_HEADER, request_id.encode()),
        ]
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": request.url,
            "raw_path": request.url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": None,
            "server": None,
            "state": state,
        }
        exchange = _Exchange(request.body)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if not exchange.is_complete:
                raise
        return exchange.reply(request_id)


class _Exchange:
    """The receive and send channels of one request."""

    def __init__(self, body: bytes) -> None:
        self._left = [body]
        self._start: Message | None = None
        self._pieces: list[bytes] = []
        self.is_complete = False
        """True if the whole answer was sent."""

    async def receive(self) -> Message:
        if self._left:
            return {"type": "http.request", "body": self._left.pop(), "more_body": False}
        await asyncio.get_running_loop().create_future()  # the client never disconnects
        raise AssertionError("only cancellation ends this wait")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._pieces.append(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)

    def reply(self, request_id: str) -> Reply:
        assert self._start is not None, "the application has answered"
        status, headers = self._start["status"], dict(self._start.get("headers", ()))
        retry_after_s = None
        if status in RETRIED:
            given = headers.get(b"retry-after", b"")
            retry_after_s = float(given) if given.isdigit() else 0.0
        return Reply(status, request_id, b"".join(self._pieces), retry_after_s)


async def answer(server: InProcessServer, job: BatchJob, index: int, request: BatchRequest) -> Reply:
    """Execute one request of a job, with retries for temporary failures."""
    num_lost = 0
    for attempt in range(MAX_TRIES):
        reply = await server.send(request, job.tenant, request_id_of(job.name, index))
        if reply.retry_after_s is None:
            return reply
        num_lost += _is_lost(reply)
        if num_lost >= MAX_LOST_TRIES:
            return reply
        await server.system.sleep(wait_s(attempt, reply.retry_after_s, random.random()))
    return reply


def wait_s(attempt: int, retry_after_s: float, part: float) -> float:
    """Delay before the next attempt in seconds: exponential backoff of at least Retry-After, with random jitter."""
    longest = min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempt, 16))
    return max(retry_after_s, longest * (0.5 + part / 2))


def _is_lost(reply: Reply) -> bool:
    try:
        found: Any = msgspec.json.decode(reply.body)
        return bool(found["error"]["code"] == "worker_lost")
    except (msgspec.DecodeError, KeyError, TypeError):
        return False


async def run_job(job: BatchJob, server: InProcessServer, num_at_once: int, on_answer: Callable[[], None]) -> None:
    """Execute all requests of a job, ``num_at_once`` concurrently. On cancellation, results so far stay in the journal.

    Raises:
        OSError: a result cannot be written.
    """

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None, "runs as a task of the group"
        while not task.cancelling() and (index := job.take()) is not None:
            request = job.request(index)
            reply = await answer(server, job, index, request)
            job.answer(index, request, reply)
            on_answer()

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_at_once):
                tasks.create_task(work())
    except ExceptionGroup as group:  # the first failure cancelled the others, or all had the same
        raise group.exceptions[0] from None
