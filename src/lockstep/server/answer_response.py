"""The ASGI response that makes an answer: opens its calls, streams or collects them, and remembers what became of them.

The calls are opened here, before the status line: what refuses them is a status of its own, but for a stream that has
shown its route while a model is loaded for it. The client's leaving aborts them. Between the engine and the client
stands what has not yet been shown, and nothing else: reading goes on while a client is slow, what waits for it becomes
fewer and longer chunks, and beyond a bound its stream is ended. One `send` per wake-up carries all that is new.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep.cluster.base import Accepted, Event, EventStream, Routed
from lockstep.cluster.cluster import Cluster
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import RequestError, RequestFailedError, SlowReaderError
from lockstep.server.errors import HttpError, http_error
from lockstep.server.generation import in_the_requests_words
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import CLIENT_LEFT_STATUS, RequestContext, Usage, context_of
from lockstep.server.serving import serving_of

A = TypeVar("A")
T = TypeVar("T")

MAX_OPENING = 64
"""Calls of one request that are on their way to their acceptance at once."""
PING = b": ping\n\n"
MIN_WATCH_S = 0.05
"""The watch over silence looks no oftener."""
MAX_STALL_S = 60.0
"""A client that takes nothing for so long is left."""
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
CONNECTION_RESET = "the handler is closed"
"""What uvloop says to a `send` into a connection that was reset before `receive` could tell."""


class PendingAnswer(Protocol):
    """An answer in the making; `lockstep.server.answer.Answer` is one."""

    @property
    def is_complete(self) -> bool: ...

    @property
    def outputs(self) -> list[RequestOutput]:
        """Of the calls that came to their end."""
        ...

    @property
    def num_pending_bytes(self) -> int:
        """What waits to be shown, roughly."""
        ...

    def feed(self, call: int, events: Sequence[Event]) -> None:
        """Take events of one call, in order."""
        ...

    def take(self) -> bytes:
        """Frames of what has come since the last call; may be empty."""
        ...

    def end(self) -> bytes:
        """The last frames of an answer that is complete."""
        ...

    def failed(self, error: HttpError) -> bytes:
        """The last frames of one that will never be."""
        ...

    def whole(self) -> bytes:
        """The answer that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """What there is to answer."""

    calls: Sequence[GenerationRequest]
    make_answer: Callable[[Sequence[Accepted]], PendingAnswer]
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
        self._record = context_of(request)
        self._job = job
        self._record.is_stream = job.is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._record
        try:
            await while_connected(receive, self._respond(send), context)
        except ClientLeft:
            context.status = CLIENT_LEFT_STATUS
        except RuntimeError as error:
            if CONNECTION_RESET not in str(error):
                raise
            context.status = CLIENT_LEFT_STATUS

    async def _respond(self, send: Send) -> None:
        job, context = self._job, self._record
        answer: PendingAnswer | None = None
        opened: Sequence[OpenCall] = ()
        try:
            opened = await open_calls(
                self._serving.cluster, job.calls, job.param_names, when_routed=job.is_stream and job.shows_route
            )
            context.model = opened[0].accepted.model
            context.hops = [hop for call in opened for hop in call.accepted.hops]
            answer = job.make_answer([call.accepted for call in opened])
            if job.is_stream:
                stream = AnswerStream(opened, answer, self._serving.options, job.before_end)
                context.error = await stream.run(send)
                return
            await _collect(opened, answer)
            if job.before_end is not None:
                await job.before_end()
            body = answer.whole()
            headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        finally:
            await _close([call.stream for call in opened])
            for output in () if answer is None else answer.outputs:
                context.outputs.append(output)
                context.finish_reasons += [completion.finish_reason.value for completion in output.completions]
            context.unfinished += [call.usage for call in opened if not call.is_answered]


async def _collect(opened: Sequence[OpenCall], answer: PendingAnswer) -> None:
    """Read all calls to their end; the first error ends them all."""
    tasks = [
        asyncio.ensure_future(call.read(lambda events, index=index: answer.feed(index, events)))  # type: ignore[misc]  # bound per turn
        for index, call in enumerate(opened)
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class OpenCall:
    """A call that was accepted, or routed where that is enough."""

    accepted: Accepted
    """Without the prompt's tokens where it was only routed yet."""
    stream: EventStream
    names: Mapping[str, str]
    """What the request calls the engine's parameters, where they differ."""
    num_output_tokens: int = 0
    """That have come; counted by `read`."""
    is_answered: bool = False
    """Whether its last output has come, which has all its numbers."""

    @property
    def usage(self) -> Usage:
        """What is known of a call that broke off. Its prompt counts as soon as a token came of it; how much of that
        was cached only the last output would have told."""
        num_prompt_tokens = len(self.accepted.prompt_token_ids) if self.num_output_tokens else 0
        return Usage(num_prompt_tokens, 0, self.num_output_tokens)

    async def read(self, feed: Callable[[Sequence[Event]], None]) -> None:
        """Feed the call's events until it ends.

        Raises:
            LockstepError: what ended the call.
        """
        try:
            async with aclosing(self.stream) as stream:
                async for events in stream:
                    for event in events:
                        if isinstance(event, TokenOutput):
                            self.num_output_tokens += len(event.token_ids)
                            self.is_answered = event.request is not None
                        elif isinstance(event, Accepted):
                            self.accepted = event
                    feed(events)
        except RequestError as error:
            raise in_the_requests_words(error, self.names) from None


async def open_calls(
    cluster: Cluster, calls: Sequence[GenerationRequest], names: Mapping[str, str], *, when_routed: bool = False
) -> list[OpenCall]:
    """All calls of a request, or none of them.

    Args:
        names: what the request calls the engine's parameters, for errors.
        when_routed: do not wait for acceptance where it is known who answers, and that this takes time.

    Raises:
        LockstepError: one of them is refused.
    """
    streams = [cluster.stream(call) for call in calls]
    try:
        firsts = await all_of(lambda stream: _first(stream, when_routed), streams, MAX_OPENING)
        opened = [
            OpenCall(first, stream, names)
            for first, stream in zip(firsts, streams, strict=True)
            if isinstance(first, Accepted)
        ]
        if len(opened) < len(calls):
            raise RequestFailedError("a call did not begin with its acceptance; this is a bug in Lockstep")
        return opened
    except BaseException as error:
        await _close(streams)
        if isinstance(error, RequestError):
            raise in_the_requests_words(error, names) from None
        raise


async def _first(stream: EventStream, when_routed: bool) -> Event:
    (event,) = await anext(stream)
    if isinstance(event, Routed):
        if when_routed:
            return Accepted(event.model, (), event.hops)
        (event,) = await anext(stream)
    return event


async def _close(streams: Sequence[EventStream]) -> None:
    """Leave the streams; what has not ended is aborted."""
    for stream in streams:
        await stream.aclose()


async def all_of(work: Callable[[A], Coroutine[Any, Any, T]], items: Sequence[A], most: int) -> list[T]:
    """The results of some work on each item, in order; begun in order as well, ``most`` at once at most.

    The first in order that fails ends them all, and nothing is begun that is far behind it: of a thousand prompts
    whose first is too long, nobody reads the last.
    """
    if len(items) == 1:
        return [await work(items[0])]  # which needs no task of its own
    results: list[T] = []
    running: deque[asyncio.Task[T]] = deque()
    loop = asyncio.get_running_loop()
    try:
        for item in items:
            if len(running) == most:
                results.append(await running.popleft())
            running.append(loop.create_task(work(item)))
        while running:
            results.append(await running.popleft())
        return results
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class AnswerStream:
    """One stream, from the acceptance of its calls to its last frame. `run` is used once.

    Args:
        before_end: awaited when the answer is complete; what it raises is told as its failure.
    """

    def __init__(
        self,
        opened: Sequence[OpenCall],
        answer: PendingAnswer,
        options: ServerOptions,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._opened = opened
        self._answer = answer
        self._before_end = before_end
        self._ping_interval_s = options.ping_interval_s
        self._max_pending_bytes = options.max_pending_bytes
        self._news = _News(asyncio.get_running_loop())
        self._news.set()  # an answer may have something to show before its first token
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()
        self._is_sending = False

    async def run(self, send: Send) -> HttpError | None:
        """Stream the answer; returns what the client was told went wrong.

        Raises:
            ClientLeft: the client takes nothing any more.
        """
        readers = [self._loop.create_task(self._read(call, opened)) for call, opened in enumerate(self._opened)]
        try:
            return await unless_gone(self._watch(), self._write(send))
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, call: int, opened: OpenCall) -> None:
        answer, news, limit = self._answer, self._news, self._max_pending_bytes

        def feed(events: Sequence[Event]) -> None:
            answer.feed(call, events)
            news.set()
            if answer.num_pending_bytes > limit:
                raise SlowReaderError(
                    f"the client is too slow: more than {limit} bytes of its answer wait to be read; "
                    "the stream was ended"
                )

        try:
            await opened.read(feed)
        except Exception as error:  # whatever it is, the client is told and the stream has its end
            self._failure = self._failure or error
            news.set()

    async def _write(self, send: Send) -> HttpError | None:
        answer, news = self._answer, self._news
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        while True:
            await news.wait()
            frames = answer.take()
            if self._failure is None and answer.is_complete:
                self._failure = await self._settle()
            if self._failure is not None:
                error = http_error(self._failure)
                await self._put(send, frames + answer.failed(error), more=False)
                return error
            if answer.is_complete:
                await self._put(send, frames + answer.end(), more=False)
                return None
            if frames:
                await self._put(send, frames, more=True)
            elif self._silence_s >= self._ping_interval_s:
                await self._put(send, PING, more=True)

    async def _settle(self) -> Exception | None:
        """Do what must be done before the client may know that its answer is complete; returns why it failed."""
        try:
            if self._before_end is not None:
                await self._before_end()
        except Exception as error:  # whatever it is, the client is told and the stream has its end
            return error
        return None

    async def _put(self, send: Send, data: bytes, *, more: bool) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._is_sending = False
        self._sent_s = self._loop.time()

    @property
    def _silence_s(self) -> float:
        return self._loop.time() - self._sent_s

    async def _watch(self) -> None:
        """Wake the writer in silence; returns when its client takes nothing any more."""
        while not (self._is_sending and self._silence_s >= MAX_STALL_S):
            await asyncio.sleep(max(self._ping_interval_s - self._silence_s, MIN_WATCH_S))
            if self._silence_s >= self._ping_interval_s:
                self._news.set()


class _News:
    """Wakes one waiter; several calls before it looks are one. An `asyncio.Event` costs twice as much."""

    __slots__ = ("_has_come", "_loop", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._has_come = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._has_come = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until there is news; it is none any more afterwards."""
        if not self._has_come:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_come = False


class ClientLeft(Exception):  # noqa: N818 - nobody's error: the connection is gone
    """The client closed the connection before its answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], context: RequestContext) -> T:
    """The result of some work, which is cancelled when the client leaves.

    Raises:
        ClientLeft: it did, before the whole answer was sent. After that a server says of every client that it is gone.
    """
    return await unless_gone(disconnected(receive), work, lambda: context.is_sent)


async def unless_gone(
    watching: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T], is_settled: Callable[[], bool] = lambda: False
) -> T:
    """The result of some work, which is cancelled when ``watching`` returns.

    The work runs in the caller's task and so begins at once, without a turn of the loop in which all other requests
    that came together are read.

    Args:
        is_settled: asked when ``watching`` returns; whether that means nothing any more.

    Raises:
        ClientLeft: it was cancelled.
    """
    loop, working = asyncio.get_running_loop(), asyncio.current_task()
    assert working is not None, "a handler runs in a task"
    is_gone = is_over = False

    def leave(watcher: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if not (is_over or watcher.cancelled() or is_settled()):
            is_gone = True
            working.cancel()

    watcher = loop.create_task(watching)
    watcher.add_done_callback(leave)
    try:
        return await work
    except asyncio.CancelledError:
        if is_gone and working.uncancel() == 0:  # and nobody else wanted its end
            raise ClientLeft from None
        raise
    finally:
        is_over = True
        watcher.cancel()


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
