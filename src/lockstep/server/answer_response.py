"""ASGI response of a generating endpoint: opens the engine calls, streams or collects the answer, records the outcome.

The calls are opened here, before the status line is sent, so a rejected call gets its own HTTP status. The exception is
a stream that has already shown its route while a model is being loaded. A client disconnect aborts the calls.

Output that has not been sent is the only buffer between the engine and the client. While a client is slow, reading
continues and pending output is merged into longer chunks, up to a limit. Each wake-up sends all new output at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep.cluster.base import Accepted, Event, EventStream, Routed, ShownChunk
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import RequestError, RequestFailedError, SlowReaderError
from lockstep.server.answer import Extension, Framing, Headers, Usage, extension_of, recorded_headers, usage_of
from lockstep.server.choices import Choice
from lockstep.server.errors import HttpError, http_error
from lockstep.server.generation import with_request_param_names
from lockstep.server.request_context import (
    CLIENT_LEFT_STATUS,
    ClientLeft,
    RequestContext,
    RequestTotals,
    context_of,
    disconnected,
    while_connected,
)
from lockstep.server.serving import serving_of

A = TypeVar("A")
T = TypeVar("T")

MAX_OPENING = 64
"""Maximum number of calls of one request that wait for acceptance at the same time."""
MIN_WATCH_S = 0.05
"""Minimum interval, in seconds, between two checks for a silent stream."""
CONNECTION_RESET = "the handler is closed"
"""Error message of uvloop for a `send` into a connection that was reset before `receive` could report it."""


class Encoder(Protocol):
    """Wire format of one endpoint's answers."""

    @property
    def framing(self) -> Framing:
        """Framing of the streams (SSE or lines of JSON)."""
        ...

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Return the frames to send before the first token."""
        ...

    def chunk(self, choice: Choice, answer: Answer | None) -> bytes:
        """Return the frames for the new output of a choice. ``answer`` is set for the last choice of the last chunk."""
        ...

    def end(self, answer: Answer) -> bytes:
        """Return the last frames of a completed stream."""
        ...

    def failed(self, error: HttpError) -> bytes:
        """Return the last frames of a failed stream."""
        ...

    def whole(self, answer: Answer) -> bytes:
        """Return the body of an answer that is not streamed."""
        ...


class Answer:
    """Answer under construction: receives the events of one or more calls, returns new frames or the complete body."""

    def __init__(
        self, accepted: Sequence[Accepted], choices: Sequence[Choice], encoder: Encoder, context: RequestContext
    ) -> None:
        assert len(choices) % len(accepted) == 0, "every call has the same number of choices"
        self.accepted = list(accepted)
        self.choices = choices
        self.num_pending_bytes = 0
        """Approximate number of bytes that have not been sent yet."""
        self._encoder = encoder
        self._context = context
        self._choices_per_call = len(choices) // len(accepted)
        self._outputs: list[RequestOutput | None] = [None] * len(accepted)
        self._num_open = len(accepted)
        self._changed: list[Choice] = []
        self._opening = encoder.opening(choices)
        self._shown_tokens = [0] * len(choices)
        self._shown_us = round(context.started_s * 1e6)
        self.shown: list[ShownChunk] | None = None
        """Chunks that were sent; None if chunks are not recorded."""

    @property
    def is_complete(self) -> bool:
        return self._num_open == 0

    @property
    def outputs(self) -> list[RequestOutput]:
        """Outputs of the calls that have finished."""
        return [output for output in self._outputs if output is not None]

    @property
    def unanswered(self) -> list[tuple[int, int]]:
        """Numbers of prompt and output tokens of each call that has not finished.

        Prompt tokens count once the call has produced a token. Only the last output reports the cached tokens.
        """
        counts: list[tuple[int, int]] = []
        for call, accepted in enumerate(self.accepted):
            if self._outputs[call] is None:
                num_output = sum(choice.num_tokens for choice in self._choices_of(call))
                counts.append((len(accepted.prompt_token_ids) if num_output else 0, num_output))
        return counts

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(choice.num_reasoning_tokens for choice in self.choices if choice.has_thoughts)

    @property
    def totals(self) -> RequestTotals:
        return RequestTotals.of(self.outputs)

    @property
    def usage(self) -> Usage:
        totals = self.totals
        if self.choices[0].is_silent:
            totals = replace(totals, num_output_tokens=0)
        return usage_of(totals, self.num_reasoning_tokens)

    @property
    def extension(self) -> Extension:
        return extension_of(self._context, self.totals, self.accepted, self.outputs)

    def _choices_of(self, call: int) -> Sequence[Choice]:
        first = call * self._choices_per_call
        return self.choices[first : first + self._choices_per_call]

    def feed(self, call: int, events: Sequence[Event]) -> None:
        """Add events of one call, in order.

        Raises:
                RequestFailedError: a sequence ended without a result.
        """
        first = call * self._choices_per_call
        for event in events:
            if not isinstance(event, TokenOutput):
                if isinstance(event, Accepted) and event.prompt_token_ids:  # the answer already exists
                    self.accepted[call] = event
                    for choice in self._choices_of(call):
                        choice.set_prompt(event.prompt_token_ids)
                continue
            choice = self.choices[first + event.index]
            before = choice.num_pending_bytes
            choice.feed(event)
            self.num_pending_bytes += choice.num_pending_bytes - before
            if not choice.is_queued and choice.has_updates:
                choice.is_queued = True
                self._changed.append(choice)
            if event.request is not None:
                self._outputs[call] = event.request
                self._num_open -= 1

    def take(self) -> bytes:
        """Return the frames of all output since the last call: one piece per choice, however many outputs arrived."""
        changed, opening = self._changed, self._opening
        if opening:
            self._opening = b""
            return opening + self.take()
        if not changed:
            return b""
        self._changed = []
        self.num_pending_bytes = 0
        if len(changed) == 1 and self._num_open:
            return self._show(changed[0], None)
        last = changed[-1] if self.is_complete else None
        return b"".join([self._show(choice, self if choice is last else None) for choice in changed])

    def _show(self, choice: Choice, answer: Answer | None) -> bytes:
        if self.shown is not None:
            now_us, before = round(time.monotonic() * 1e6), self._shown_tokens[choice.index]
            self.shown.append((choice.index, choice.num_tokens - before, now_us - self._shown_us))
            self._shown_tokens[choice.index], self._shown_us = choice.num_tokens, now_us
        data = self._encoder.chunk(choice, answer)
        choice.shown()
        choice.is_queued = False
        return data

    def end(self) -> bytes:
        """Return the last frames of a completed stream."""
        return self._encoder.end(self)

    @property
    def framing(self) -> Framing:
        """Framing of the stream."""
        return self._encoder.framing

    def failed(self, error: HttpError) -> bytes:
        """Return the last frames of a failed stream."""
        return self._encoder.failed(error)

    def whole(self) -> bytes:
        """Return the body of an answer that is not streamed."""
        return self._encoder.whole(self)


class AnswerResponse(Response):
    """Response to a request of one or more calls. Each instance is used once.

    Args:
        make_answer: creates the answer once all calls are accepted.
        param_names: request parameter names by engine parameter name, where the two differ.
        shows_route: the stream starts as soon as the call is routed, because its first frames show the route.
        before_end: awaited when the answer is complete, before its end is sent. If it raises, the answer fails.
    """

    def __init__(
        self,
        request: Request,
        calls: Sequence[GenerationRequest],
        make_answer: Callable[[Sequence[Accepted]], Answer],
        param_names: Mapping[str, str],
        *,
        is_stream: bool,
        shows_route: bool = False,
        before_end: Callable[[Answer], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__()
        self._serving, self._context = serving_of(request), context_of(request)
        self._calls = calls
        self._make_answer = make_answer
        self._param_names = param_names
        self._is_stream = self._context.is_stream = is_stream
        self._shows_route = shows_route
        self._before_end = before_end
        self._loop = asyncio.get_running_loop()
        self._wakeup = _Wakeup(self._loop)
        self._is_taken = asyncio.Event()
        """Set when all received output has been sent. With `keeps_chunks`, the reader waits for it."""
        self._keeps_chunks = is_stream and self._serving.cluster.keeps_chunks
        self._failure: Exception | None = None
        self._sent_s = self._loop.time()
        self._is_sending = False
        self._context.priority = self._calls[0].priority

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        try:
            watching = self._watch(receive) if self._is_stream else disconnected(receive)
            await while_connected(watching, self._respond(send), context)
        except ClientLeft:
            context.status = CLIENT_LEFT_STATUS
        except RequestError as error:
            raise with_request_param_names(error, self._param_names) from None
        except RuntimeError as error:
            if CONNECTION_RESET not in str(error):
                raise
            context.status = CLIENT_LEFT_STATUS

    async def _respond(self, send: Send) -> None:
        context = self._context
        streams = [self._serving.cluster.stream(call, context.progress) for call in self._calls]
        answer: Answer | None = None
        readers: list[asyncio.Task[None]] = []
        try:
            accepted = await accepted_of(streams, when_routed=self._is_stream and self._shows_route)
            context.model = accepted[0].model
            context.hops = [hop for each in accepted for hop in each.hops]
            answer = self._make_answer(accepted)
            context.count = lambda: RequestTotals.of(answer.outputs, answer.unanswered)
            if self._is_stream and len(streams) == 1 and self._serving.cluster.records_chunks:
                answer.shown = []
            readers = [self._loop.create_task(self._read(answer, call, each)) for call, each in enumerate(streams)]
            if self._is_stream:
                context.error = await self._write(answer, send, recorded_headers(accepted))
            else:
                await asyncio.gather(*readers)
                await self._send_whole(answer, send, recorded_headers(accepted))
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            for stream in streams:  # aborts calls that have not finished
                await stream.aclose()
            if answer is not None:
                if answer.shown is not None:
                    self._serving.cluster.shown(context.progress, answer.shown)
                outputs = answer.outputs
                conclude(context, outputs, answer.unanswered)
                context.num_unread_calls = sum(choice.num_unread_calls for choice in answer.choices)
                context.count = None
                context.finish_reasons = [each.finish_reason.value for output in outputs for each in output.completions]

    async def _read(self, answer: Answer, call: int, stream: EventStream) -> None:
        """Add the events of a call to the answer until the call ends. The first failure ends all calls."""
        limit, context = self._serving.options.max_pending_bytes, self._context
        try:
            async with aclosing(stream):
                async for events in stream:
                    answer.feed(call, events)
                    if context.first_token_s is None and isinstance(events[0], TokenOutput):
                        context.first_token_s = time.monotonic()
                    self._wakeup.set()
                    if self._keeps_chunks and not answer.is_complete:
                        self._is_taken.clear()
                        await self._is_taken.wait()
                    if self._is_stream and answer.num_pending_bytes > limit:
                        raise SlowReaderError(
                            f"the client reads too slowly: more than {limit} bytes of the answer are pending; "
                            "the stream was ended"
                        )
        except Exception as error:  # any error must end the stream with an error event
            if not self._is_stream:
                raise
            self._failure = self._failure or error
            self._wakeup.set()

    async def _send_whole(self, answer: Answer, send: Send, others: Headers) -> None:
        if self._before_end is not None:
            await self._before_end(answer)
        body = answer.whole()
        headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *others)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _write(self, answer: Answer, send: Send, headers: Headers) -> HttpError | None:
        """Stream the answer. Return the error that was sent to the client, if any."""
        wakeup = self._wakeup
        self._sent_s = self._loop.time()
        wakeup.set()  # there may be frames to send before the first token
        await send({"type": "http.response.start", "status": 200, "headers": [*answer.framing.headers, *headers]})
        while True:
            self._is_taken.set()
            await wakeup.wait()
            frames = answer.take()
            if self._failure is None and answer.is_complete and self._before_end is not None:
                try:
                    await self._before_end(answer)
                except Exception as error:  # any error must end the stream with an error event
                    self._failure = error
            if self._failure is not None:
                fault = self._fault_of(self._failure)
                await self._put(send, frames + answer.failed(fault), more=False)
                return fault
            if answer.is_complete:
                await self._put(send, frames + answer.end(), more=False)
                return None
            if frames:
                await self._put(send, frames, more=True)
            elif self._silence_s >= self._serving.options.ping_interval_s:
                await self._put(send, answer.framing.ping, more=True)

    def _fault_of(self, failure: Exception) -> HttpError:
        if isinstance(failure, RequestError):
            failure = with_request_param_names(failure, self._param_names)
        return self._context.dialect.with_own_status(http_error(failure))

    async def _put(self, send: Send, data: bytes, *, more: bool) -> None:
        self._is_sending = True
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._is_sending = False
        self._sent_s = self._loop.time()

    @property
    def _silence_s(self) -> float:
        return self._loop.time() - self._sent_s

    async def _watch(self, receive: Receive) -> None:
        """Wake the writer when a ping is due. Return when the client has disconnected or has stopped reading."""
        interval_s = self._serving.options.ping_interval_s
        leaving = self._loop.create_task(disconnected(receive))
        try:
            while not (leaving.done() or (self._is_sending and self._silence_s >= self._serving.options.max_stall_s)):
                await asyncio.wait((leaving,), timeout=max(interval_s - self._silence_s, MIN_WATCH_S))
                if self._silence_s >= interval_s:
                    self._wakeup.set()
        finally:
            leaving.cancel()


def conclude(
    context: RequestContext, outputs: Sequence[RequestOutput], unanswered: Sequence[tuple[int, int]] = ()
) -> None:
    """Record the outcome of a request's prompts in its context. The arguments are those of `RequestTotals.of`."""
    context.totals = RequestTotals.of(outputs, unanswered)
    if context.body is not None:
        context.answers = [completion.text for output in outputs for completion in output.completions]


async def accepted_of(streams: Sequence[EventStream], *, when_routed: bool = False) -> list[Accepted]:
    """Wait until all calls of a request are accepted.

    Args:
        when_routed: for a call that reports its route first (a model is being loaded), do not wait for acceptance.

    Raises:
        LockstepError: a call is rejected.
    """

    async def first(stream: EventStream) -> Accepted:
        (event,) = await anext(stream)
        if isinstance(event, Routed):
            if when_routed:
                return Accepted(event.model, (), event.hops)
            (event,) = await anext(stream)
        if not isinstance(event, Accepted):
            raise RequestFailedError("the first event of a call was not its acceptance; this is a bug in Lockstep")
        return event

    return await all_of(first, streams, MAX_OPENING)


async def all_of(work: Callable[[A], Coroutine[Any, Any, T]], items: Sequence[A], most: int) -> list[T]:
    """Run ``work`` on each item, at most ``most`` at a time. Items are started, and results returned, in order.

    The first failure, in item order, cancels the rest. Items far behind a failed item are never started: if the first
    of a thousand prompts is too long, the last one is not tokenized.
    """
    if len(items) == 1:
        return [await work(items[0])]  # no separate task is needed
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


class _Wakeup:
    """Event for one waiter that resets itself. An `asyncio.Event` costs twice as much."""

    __slots__ = ("_is_set", "_loop", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until `set` is called, then reset."""
        if not self._is_set:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False
