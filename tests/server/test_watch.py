"""Events of a cluster over HTTP: on time, in order, from where a watcher was, and ended with the server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import Message

from lockstep.cluster.events import EVENTS
from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from lockstep.server.watch import MAX_WATCHERS, description
from tests.server.managing import Managed
from tests.waiting import HANG_S


class Watcher:
    """One connection to the application, read message by message as a server would."""

    def __init__(self, app: FastAPI, query: str = "", headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.messages: list[Message] = []
        self.has_left = asyncio.Event()
        self._news = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "method": "GET",
            "path": "/v1/events",
            "raw_path": b"/v1/events",
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(b"host", b"test"), *headers],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    @property
    def events(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Id, type and data of every whole event."""
        frames = [frame.split("\n") for frame in self.text.split("\n\n") if frame and not frame.startswith(":")]
        return [
            (first.removeprefix("id: "), second.removeprefix("event: "), json.loads(third.removeprefix("data: ")))
            for first, second, third in frames
        ]

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_S):
            while not is_so():
                self._news.clear()
                await self._news.wait()

    async def _receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.messages.append(message)
        self._news.set()


@contextlib.asynccontextmanager
async def watching(
    query: str = "", headers: tuple[tuple[bytes, bytes], ...] = (), before: int = 0, ping_interval_s: float = 15.0
) -> AsyncIterator[tuple[Watcher, Managed, FastAPI]]:
    """A watcher of a cluster in which so much has happened before."""
    cluster = Managed()
    app = create_app(cluster, ServerOptions(ping_interval_s=ping_interval_s))
    for _ in range(before):
        await cluster.load_model("org/legal")
    watcher = Watcher(app, query, headers)
    await watcher.until(lambda: "watching" in watcher.text)
    try:
        yield watcher, cluster, app
    finally:
        watcher.has_left.set()
        await asyncio.wait_for(watcher.task, HANG_S)
        assert app.state.watchers.num_open == 0


async def test_a_watcher_receives_events_from_its_start_on() -> None:
    async with watching(before=2) as (watcher, cluster, _):
        await cluster.unload_model("org/legal")
        await cluster.replace("x: 1")
        await watcher.until(lambda: len(watcher.events) == 2)
    assert watcher.status == 200
    (first_id, first_type, first), (second_id, second_type, _) = watcher.events
    assert (first_id, first_type, second_id, second_type) == ("3", "tier_changed", "4", "manifest_replaced")
    assert first.keys() == {"at_s", *EVENTS["tier_changed"]}
    assert (first["from"], first["to"]) == ("resident", "standby")


@pytest.mark.parametrize(("query", "headers"), [("after=1", ()), ("", ((b"last-event-id", b"1"),))])
async def test_reconnected_watcher_continues_after_its_last_event(
    query: str, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    async with watching(query, headers, before=3) as (watcher, _, _):
        await watcher.until(lambda: len(watcher.events) == 2)
    assert [id_ for id_, _, _ in watcher.events] == ["2", "3"]


async def test_types_are_chosen_by_name() -> None:
    async with watching("type=manifest_replaced&type=hop") as (watcher, cluster, _):
        await cluster.load_model("org/legal")
        await cluster.replace("x: 1")
        await watcher.until(lambda: bool(watcher.events))
    assert [type_ for _, type_, _ in watcher.events] == ["manifest_replaced"]


async def test_silence_is_broken_by_comments() -> None:
    async with watching(ping_interval_s=0.01) as (watcher, _, _):
        await watcher.until(lambda: watcher.text.count(": ping\n\n") >= 2)


async def test_the_stream_ends_when_the_server_drains() -> None:
    async with watching() as (watcher, _, app):
        app.state.serving.lifecycle.on_signal()
        await asyncio.wait_for(watcher.task, HANG_S)
    assert watcher.messages[-1].get("more_body", False) is False


async def test_watchers_are_limited_in_number() -> None:
    async with watching() as (_, _, app):
        for _ in range(MAX_WATCHERS - 1):
            app.state.watchers.enter()
        refused = Watcher(app)
        await asyncio.wait_for(refused.task, HANG_S)
        for _ in range(MAX_WATCHERS - 1):
            app.state.watchers.leave()
    assert refused.status == 429


async def test_an_unknown_type_is_refused_with_those_there_are() -> None:
    app = create_app(Managed())
    refused = Watcher(app, "type=zebra")
    await asyncio.wait_for(refused.task, HANG_S)
    assert refused.status == 400
    assert "tier_changed" in refused.text


def test_the_manual_has_every_type_with_its_fields() -> None:
    manual = (Path(__file__).resolve().parents[2] / "docs" / "watching.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", manual.split("## Events")[1], re.MULTILINE))
    assert {type_: set(re.findall(r"`(\w+)`", row)) for type_, row in rows.items()} == {
        type_: set(fields) for type_, fields in EVENTS.items()
    }


def test_every_type_and_field_is_in_the_document() -> None:
    document = create_app(Managed()).openapi()
    told = document["paths"]["/v1/events"]["get"]["responses"]["200"]["description"]
    assert told == description()
    for type_, fields in EVENTS.items():
        line = next(line for line in told.splitlines() if line.startswith(f"- `{type_}`"))
        assert all(f"`{name}`" in line for name in fields)
