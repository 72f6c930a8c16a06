"""A small server of OpenAI's shape on a real socket, whose answers and faults a test decides."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.waiting import HANG_S, until

MODEL = "alpha"


@dataclass
class Behaviour:
    """What the server does, and what it saw."""

    token_delay_s: float = 0.0
    has_tokenize: bool = True
    takes_ids: bool = True
    has_usage: bool = True
    fail_every: int = 0
    """Every n-th generation is refused with 503."""
    break_every: int = 0
    """Every n-th stream ends with an error frame after its first token."""
    hang_after: int | None = None
    """Streams after so many never end."""
    api_key: str | None = None
    sends_thoughts: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0
    num_left: int = 0
    """Streams that their client left."""

    def measured(self) -> list[dict[str, Any]]:
        """Bodies of streamed requests; calibration is not streamed."""
        return [body for body in self.bodies if body.get("stream")]


def count_tokens(prompt: Any) -> int:
    """One token a word, ids are tokens."""
    return len(prompt) if isinstance(prompt, list) else len(prompt.split())


def _prompt_of(body: dict[str, Any]) -> Any:
    if "messages" in body:
        return " ".join(message["content"] for message in body["messages"]) + " template adds three"
    return body["prompt"]


def build(behaviour: Behaviour) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        return _unauthorized(request, behaviour) or JSONResponse({"object": "list", "data": [{"id": MODEL}]})

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        if not behaviour.has_tokenize:
            return JSONResponse({"detail": "Not Found"}, 404)
        tokens = [sum(word.encode()) for word in (await request.json())["prompt"].split()]
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": 8192})

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return _unauthorized(request, behaviour) or _answer(behaviour, await request.json())

    return app


def _unauthorized(request: Request, behaviour: Behaviour) -> Response | None:
    if behaviour.api_key is None or request.headers.get("authorization") == f"Bearer {behaviour.api_key}":
        return None
    return _refusal(401, "the key is missing or wrong", "authentication_error")


def _refusal(code: int, message: str, kind: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, code)


def _answer(behaviour: Behaviour, body: dict[str, Any]) -> Response:
    behaviour.bodies.append(body)
    if body["model"] != MODEL:
        return _refusal(404, f"The model `{body['model']}` does not exist.", "not_found_error")
    prompt = _prompt_of(body)
    if isinstance(prompt, list) and not behaviour.takes_ids:
        return _refusal(400, "prompt must be text", "invalid_request_error")
    usage = {"prompt_tokens": count_tokens(prompt), "completion_tokens": body["max_tokens"], "total_tokens": 0}
    if not body.get("stream"):
        return JSONResponse({"choices": [{"text": "x"}], "usage": usage})
    behaviour.arrivals_s.append(time.perf_counter())
    number = len(behaviour.measured())
    if behaviour.fail_every and number % behaviour.fail_every == 0:
        return _refusal(503, "the queue is full", "unavailable")
    frames = _frames(behaviour, body, usage, number)
    return StreamingResponse(frames, media_type="text/event-stream")


async def _frames(
    behaviour: Behaviour, body: dict[str, Any], usage: dict[str, int], number: int
) -> AsyncIterator[bytes]:
    is_chat = "messages" in body
    breaks = bool(behaviour.break_every) and number % behaviour.break_every == 0
    hangs = behaviour.hang_after is not None and number > behaviour.hang_after
    behaviour.num_open += 1
    behaviour.max_open = max(behaviour.max_open, behaviour.num_open)
    is_whole = False
    try:
        if is_chat:
            yield _frame({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for index in range(body["max_tokens"]):
            await asyncio.sleep(behaviour.token_delay_s)
            word = f"word{index} "
            thought = behaviour.sends_thoughts and index < 2
            delta = {"reasoning_content": word} if thought else {"content": word}
            yield _frame({"choices": [{"index": 0, "delta": delta} if is_chat else {"index": 0, "text": word}]})
            if breaks:
                yield _frame({"error": {"message": "the worker was lost", "type": "server_error", "code": 500}})
                return
        while hangs:
            await asyncio.sleep(0.02)
        last: dict[str, Any] = {"index": 0, "delta": {}} if is_chat else {"index": 0, "text": ""}
        yield _frame({"choices": [last | {"finish_reason": "length"}]})
        if behaviour.has_usage:
            yield _frame({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"
        is_whole = True
    finally:
        behaviour.num_open -= 1
        behaviour.num_left += not is_whole and not breaks


def _frame(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The server in a thread on a free port; gives its base URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(build(behaviour), log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until(lambda: server.started, "the stand-in starts")
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(HANG_S)
