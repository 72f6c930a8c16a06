"""The ASGI response that makes an answer: opens its calls, streams or collects them, and remembers what became of them.

The calls are opened here, before the status line: what refuses them is a status of its own, but for a stream that has
shown its route while a model is loaded for it. The client's leaving aborts them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep.cluster.base import Accepted
from lockstep.engine.request import GenerationRequest
from lockstep.server.reading import ClientLeft, OpenCall, close, open_calls, read, while_connected
from lockstep.server.record import CLIENT_LEFT_STATUS, record_of
from lockstep.server.serving import serving_of
from lockstep.server.sse import EventStream, Shown

CONNECTION_RESET = "the handler is closed"
"""What uvloop says to a `send` into a connection that was reset before `receive` could tell."""


@dataclass(frozen=True, slots=True)
class Job:
    """What there is to answer."""

    calls: Sequence[GenerationRequest]
    make_answer: Callable[[Sequence[Accepted]], Shown]
    """Called when all calls are accepted."""
    param_names: Mapping[str, str]
    """What the request calls the engine's parameters, where they differ."""
    is_stream: bool
    shows_route: bool = False
    """The answer has something to show as soon as it is known who makes it."""
    before_end: Callable[[], Awaitable[None]] | None = None
    """Awaited when the answer is complete and the client does not know it yet; what it raises fails the answer."""


class AnswerResponse(Response):
    """The answer to a job."""

    def __init__(self, request: Request, job: Job) -> None:
        super().__init__()
        self._serving = serving_of(request)
        self._record = record_of(request)
        self._job = job
        self._record.is_stream = job.is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._record
        try:
            await while_connected(receive, self._respond(send), record)
        except ClientLeft:
            record.status = CLIENT_LEFT_STATUS
        except RuntimeError as error:
            if CONNECTION_RESET not in str(error):
                raise
            record.status = CLIENT_LEFT_STATUS

    async def _respond(self, send: Send) -> None:
        job, record = self._job, self._record
        answer: Shown | None = None
        opened: Sequence[OpenCall] = ()
        try:
            opened = await open_calls(
                self._serving.cluster, job.calls, job.param_names, when_routed=job.is_stream and job.shows_route
            )
            record.model = opened[0].accepted.model
            record.hops = [hop for call in opened for hop in call.accepted.hops]
            answer = job.make_answer([call.accepted for call in opened])
            if job.is_stream:
                stream = EventStream(opened, answer, self._serving.options, job.before_end)
                record.error = await stream.run(send)
                return
            await _collect(opened, answer)
            if job.before_end is not None:
                await job.before_end()
            await self._send_whole(answer.whole(), send)
        finally:
            await close([call.stream for call in opened])
            for output in () if answer is None else answer.outputs:
                record.outputs.append(output)
                record.finish_reasons += [completion.finish_reason.value for completion in output.completions]
            record.unfinished += [call.usage for call in opened if not call.is_answered]

    async def _send_whole(self, body: bytes, send: Send) -> None:
        headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _collect(opened: Sequence[OpenCall], answer: Shown) -> None:
    """Read all calls to their end; the first error ends them all."""
    tasks = [
        asyncio.ensure_future(read(call, lambda events, index=index: answer.feed(index, events)))  # type: ignore[misc]  # bound per turn
        for index, call in enumerate(opened)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
