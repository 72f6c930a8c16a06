"""From calls to events: opening all calls of a request, and reading each of them batch by batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive

from lockstep.cluster.base import Accepted, Cluster, Event, EventStream, Routed
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import RequestError, RequestFailedError
from lockstep.server.calls import in_the_requests_words
from lockstep.server.record import RequestRecord, Usage

A = TypeVar("A")
T = TypeVar("T")
Feed = Callable[[Sequence[Event]], None]

MAX_OPENING = 64
"""Calls of one request that are on their way to their acceptance at once."""


class ClientLeft(Exception):  # noqa: N818 - nobody's error: the connection is gone
    """The client closed the connection before its answer was complete."""


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
    except BaseException as error:
        await close(streams)
        if isinstance(error, RequestError):
            raise in_the_requests_words(error, names) from None
        raise
    opened = [
        OpenCall(first, stream, names)
        for first, stream in zip(firsts, streams, strict=True)
        if isinstance(first, Accepted)
    ]
    if len(opened) == len(calls):
        return opened
    await close(streams)
    raise RequestFailedError("a call did not begin with its acceptance; this is a bug in Lockstep")


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


async def _first(stream: EventStream, when_routed: bool) -> Event:
    (event,) = await anext(stream)
    if isinstance(event, Routed):
        if when_routed:
            return Accepted(event.model, (), event.hops)
        (event,) = await anext(stream)
    return event


async def close(streams: Sequence[EventStream]) -> None:
    """Leave the streams; what has not ended is aborted."""
    for stream in streams:
        await stream.aclose()


async def read(call: OpenCall, feed: Feed) -> None:
    """Feed a call's events until it ends.

    Raises:
        LockstepError: what ended the call.
    """
    try:
        async with aclosing(call.stream) as stream:
            async for events in stream:
                for event in events:
                    if isinstance(event, TokenOutput):
                        call.num_output_tokens += len(event.token_ids)
                        call.is_answered = event.request is not None
                    elif isinstance(event, Accepted):
                        call.accepted = event
                feed(events)
    except RequestError as error:
        raise in_the_requests_words(error, call.names) from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], record: RequestRecord) -> T:
    """The result of some work, which is cancelled when the client leaves.

    Raises:
        ClientLeft: it did, before the whole answer was sent. After that a server says of every client that it is gone.
    """
    return await unless_gone(disconnected(receive), work, lambda: record.is_sent)


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
