"""An answer on its way to the client as server-sent events.

Between the engine and the client stands what has not yet been shown, and nothing else: reading goes on while a client
is slow, what waits for it becomes fewer and longer chunks, and beyond a bound its stream is ended. One `send` per
wake-up carries all that is new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from starlette.types import Send

from lockstep.cluster.base import Event
from lockstep.engine.outputs import RequestOutput
from lockstep.errors import RequestFailedError
from lockstep.server.errors import HttpError, http_error
from lockstep.server.options import ServerOptions
from lockstep.server.reading import OpenCall, read, unless_gone

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


class Shown(Protocol):
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


class EventStream:
    """One stream, from the acceptance of its calls to its last frame. `run` is used once.

    Args:
        before_end: awaited when the answer is complete; what it raises is told as its failure.
    """

    def __init__(
        self,
        opened: Sequence[OpenCall],
        answer: Shown,
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
                raise RequestFailedError(
                    f"the client is too slow: more than {limit} bytes of its answer wait to be read; "
                    "the stream was ended"
                )

        try:
            await read(opened, feed)
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
