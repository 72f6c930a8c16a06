"""Remote models for tests, and a server on a raw socket that answers them as it is told, mostly badly."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from lockstep.cluster.base import Accepted, Event
from lockstep.cluster.breaker import BreakerOptions
from lockstep.cluster.manifest import ModelEntry, Remote, Tier
from lockstep.cluster.remote import RemoteModel, RemoteOptions
from lockstep.cluster.remote_messages import AnswerLimits
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.system import SYSTEM, System
from tests.waiting import HANG_S, eventually

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
KEY = "sk-very-secret"

Reply = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Crooked:
    """Answers its requests with these replies, one after the other and the last one again and again."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self._replies = list(replies)
        self.url = ""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Head and body of each, in order."""
        self.num_open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(line for line in head.lower().splitlines() if line.startswith("content-length"))
            body = await reader.readexactly(int(length.partition(":")[2]))
            reply = self._replies[min(len(self.requests), len(self._replies) - 1)]
            self.requests.append((head, json.loads(body)))
            await reply(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


@contextlib.asynccontextmanager
async def crooked(*replies: Reply) -> AsyncIterator[Crooked]:
    server = Crooked(replies)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    try:
        yield server
    finally:
        listening.close()
        await eventually(lambda: server.num_open == 0)


def says(*pieces: bytes | float | asyncio.Event) -> Reply:
    """Sends these bytes and closes; a number is a pause in seconds, or until the client leaves; an event is awaited."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
            elif isinstance(piece, asyncio.Event):
                await piece.wait()
            else:
                with contextlib.suppress(TimeoutError):
                    assert await asyncio.wait_for(reader.read(), piece) == b""
                    return

    return reply


def refuses(status: int, body: object = None, *headers: str) -> Reply:
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Whatever", *headers, f"Content-Length: {len(data)}", "Connection: close", "", ""]
    return says("\r\n".join(lines).encode() + data)


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chunk(delta: object, finish_reason: str | None = None, index: int = 0, **more: object) -> bytes:
    return event({"choices": [{"index": index, "delta": delta, "finish_reason": finish_reason}], **more})


def whole(*texts: str) -> bytes:
    """A whole answer of two tokens to a prompt of five, three of them cached."""
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    parts = [HEAD, chunk({"role": "assistant", "content": ""}), *(chunk({"content": text}) for text in texts)]
    return b"".join([*parts, chunk({}, "stop"), event({"choices": [], "usage": usage}), event(b"[DONE]")])


@contextlib.asynccontextmanager
async def remote(
    base_url: str,
    *,
    timeout_s: float = HANG_S,
    num_failures: int = 100,
    max_attempts: int = 1,
    rest_s: float = 1.0,
    system: System = SYSTEM,
    silence_s: float | None = None,
    limits: AnswerLimits | None = None,
) -> AsyncIterator[RemoteModel]:
    """A remote model that tries once and never loses its patience, if it is not told otherwise."""
    entry = ModelEntry("far", "hf://a/b", Tier.REMOTE, remote=Remote(base_url, "served", "FAR_KEY", timeout_s))
    breaker = BreakerOptions(num_failures=num_failures, rest_s=rest_s)
    options = RemoteOptions(
        max_attempts, backoff_s=0.01, breaker=breaker, silence_s=silence_s, answer=limits or AnswerLimits()
    )
    model = RemoteModel(entry, KEY, options, system)
    try:
        yield model
        assert model.num_open == 0
    finally:
        await model.close()


def call(text: str = "Hello", params: SamplingParams | None = None, **more: Any) -> GenerationRequest:
    asked = params or SamplingParams(max_tokens=8)
    return GenerationRequest(Conversation([{"role": "user", "content": text}]), asked, **more)


async def events_of(model: RemoteModel, asked: GenerationRequest | None = None) -> list[Event]:
    async with asyncio.timeout(HANG_S), aclosing(model.stream(asked or call())) as stream:
        return [event async for events in stream for event in events]


def tokens_of(events: Sequence[Event]) -> list[TokenOutput]:
    first, *rest = events
    assert first == Accepted("far", ())
    outputs = [event for event in rest if isinstance(event, TokenOutput)]
    assert len(outputs) == len(rest)
    return outputs


def answer_of(events: Sequence[Event]) -> RequestOutput:
    *others, last = tokens_of(events)
    assert last.request is not None
    assert all(output.request is None for output in others)
    return last.request
