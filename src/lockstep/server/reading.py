"""From calls to events: opening all calls of a request, and reading each of them batch by batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive

from lockstep.cluster.base import Accepted, Call, Cluster, Event, EventStream, Routed
from lockstep.errors import RequestError, RequestFailedError
from lockstep.server.calls import in_the_requests_words

T = TypeVar("T")
Feed = Callable[[Sequence[Event]], None]


class ClientLeft(Exception):  # noqa: N818 - nobody's error: the connection is gone
    """The client closed the connection before its answer was complete."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that was accepted, or routed where that is enough."""

    accepted: Accepted
    """Without the prompt's tokens where it was only routed yet."""
    stream: EventStream
    names: Mapping[str, str]
    """What the request calls the engine's parameters, where they differ."""


async def open_calls(
    cluster: Cluster, calls: Sequence[Call], names: Mapping[str, str], *, when_routed: bool = False
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
        results = await _firsts(streams, when_routed)
    except asyncio.CancelledError:
        await close(streams)
        raise
    opened = [
        OpenCall(result, stream, names)
        for result, stream in zip(results, streams, strict=True)
        if isinstance(result, Accepted)
    ]
    if len(opened) == len(calls):
        return opened
    await close(streams)
    for result in results:
        if isinstance(result, RequestError):
            raise in_the_requests_words(result, names)
        if isinstance(result, BaseException):
            raise result
    raise RequestFailedError("a call did not begin with its acceptance; this is a bug in Lockstep")


async def _firsts(streams: Sequence[EventStream], when_routed: bool) -> list[Event | BaseException]:
    """The first event of each, or what it raises; a single one needs no task of its own."""
    if len(streams) > 1:
        return await asyncio.gather(*(_first(stream, when_routed) for stream in streams), return_exceptions=True)
    try:
        return [await _first(streams[0], when_routed)]
    except Exception as error:
        return [error]


async def _first(stream: EventStream, when_routed: bool) -> Event:
    event = await anext(stream)
    if not isinstance(event, Routed):
        return event
    return Accepted(event.model, (), event.hops) if when_routed else await anext(stream)


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
            async for event in stream:
                feed((event,))
    except RequestError as error:
        raise in_the_requests_words(error, call.names) from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client leaves.

    Raises:
        ClientLeft: it did.
    """
    return await unless_gone(disconnected(receive), work)


async def unless_gone(watching: Coroutine[Any, Any, None], work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when ``watching`` returns.

    The work runs in the caller's task and so begins at once, without a turn of the loop in which all other requests
    that came together are read.

    Raises:
        ClientLeft: it was cancelled.
    """
    loop, working = asyncio.get_running_loop(), asyncio.current_task()
    assert working is not None, "a handler runs in a task"
    is_gone = is_over = False

    def leave(watcher: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if not is_over and not watcher.cancelled():
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
