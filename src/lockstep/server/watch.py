"""Event stream endpoint: serves the cluster's events at `GET /v1/events` as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep.cluster.events import EVENTS, LAGGED, ClusterEvent
from lockstep.errors import InvalidParameterError, QueueFullError
from lockstep.server.answer import SSE, event_frame
from lockstep.server.cluster_routes import only_of
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import disconnected
from lockstep.server.serving import Lifecycle, Traffic, serving_of

MAX_WATCHERS = 64
"""Maximum number of watchers. Every event is encoded once per watcher."""
MAX_EVENT_ID = 2**53 - 1
"""Largest event id. It is the largest integer that JSON numbers represent exactly."""
router = APIRouter(tags=["cluster"], responses=ERROR_RESPONSES)


def description() -> str:
    """Description of all event types and their fields for the OpenAPI document."""
    lines = [
        f"- `{type_}`: " + "; ".join(f"`{name}` {what}" for name, what in fields.items())
        for type_, fields in EVENTS.items()
    ]
    return "\n".join(
        [
            "Each event has `id`, `event` (its type) and `data`: a JSON object with `at_s` (Unix time) and its fields.",
            "",
            *lines,
        ]
    )


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": description(),
        "content": {"text/event-stream": {"example": "id: 7\nevent: tier_changed\ndata: {...}\n\n"}},
    }
}


@router.get("/v1/events", responses=DOCUMENTED, response_class=Response, operation_id="watch_events")
async def watch_events(
    request: Request,
    after: Annotated[int | None, Query(ge=0, le=MAX_EVENT_ID, description="Start after this event id.")] = None,
    types: Annotated[list[str] | None, Query(alias="type", description="Event types; may be repeated.")] = None,
    last_event_id: Annotated[str | None, Header(description="Like `after`; sent by browsers on reconnect.")] = None,
) -> Response:
    """Stream events from now on, or after a given event. A comment is sent after 15 s without an event. Events about
    requests and sessions are visible to the key that they belong to and to admin keys; on a server without keys, to all
    callers."""
    serving, watchers = serving_of(request), request.app.state.watchers
    for type_ in types or ():
        if type_ not in EVENTS:
            raise InvalidParameterError(f"type is {type_[:64]!r}; it must be one of {', '.join(EVENTS)}", param="type")
    if watchers.num_open >= MAX_WATCHERS:
        raise QueueFullError(f"the limit of {MAX_WATCHERS} watchers is reached; try again later")
    if after is None and last_event_id is not None and last_event_id.isdecimal():
        after = min(int(last_event_id[:16]), MAX_EVENT_ID)
    types_shown, own = {*types, LAGGED} if types else EVENTS.keys(), only_of(request)

    def is_shown(event: ClusterEvent) -> bool:
        return event.type in types_shown and (own is None or event.concerns(own))

    log = serving.cluster.events
    events = log.subscribe(log.last_id if after is None else after)
    return WatchResponse(events, is_shown, watchers, serving.lifecycle, serving.options)


class WatchResponse(Response):
    """Sends events as they arrive. The event log limits how far a slow watcher can fall behind."""

    def __init__(
        self,
        events: AsyncGenerator[ClusterEvent, None],
        is_shown: Callable[[ClusterEvent], bool],
        watchers: Traffic,
        lifecycle: Lifecycle,
        options: ServerOptions,
    ) -> None:
        super().__init__()
        self._events = events
        self._is_shown = is_shown
        self._watchers = watchers
        self._lifecycle = lifecycle
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._watchers.enter()
        tasks = [
            asyncio.ensure_future(work) for work in (self._write(send), disconnected(receive), self._lifecycle.drains())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                with contextlib.suppress(TimeoutError):  # the client stopped reading: treat it as disconnected
                    tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._events.aclose()
            self._watchers.leave()
        if tasks[2] in done:
            await send({"type": "http.response.body", "body": b""})

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE.headers})
        await self._put(send, b": watching\n\n")
        following = asyncio.ensure_future(anext(self._events))
        try:
            while True:
                done, _ = await asyncio.wait((following,), timeout=self._options.ping_interval_s)
                if not done:
                    await self._put(send, SSE.ping)
                    continue
                event = following.result()
                following = asyncio.ensure_future(anext(self._events))
                if self._is_shown(event):
                    await self._put(send, frame_of(event))
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await following

    async def _put(self, send: Send, data: bytes) -> None:
        async with asyncio.timeout(self._options.max_stall_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})


def frame_of(event: ClusterEvent) -> bytes:
    return event_frame({"at_s": event.at_s, **event.fields}, name=event.type, event_id=event.id)
