"""Small things that several server tests share: the application without a process, and bytes over a socket."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2
from fastapi import APIRouter

from lockstep.server.app import ROUTERS, create_app
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import RequestObserver
from tests.cluster.support import one_model
from tests.waiting import HANG_S

JSON = {"Content-Type": "application/json"}
NAME = "org/alpha"


@contextlib.asynccontextmanager
async def client_of(
    source: str = "stub://alpha",
    options: ServerOptions | None = None,
    observers: tuple[RequestObserver, ...] = (),
    headers: dict[str, str] | None = None,
    routers: Sequence[APIRouter] = ROUTERS,
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of an application that serves a model as `NAME` (alias ``alpha``), in this process."""
    cluster = one_model(source, (NAME, "alpha"))
    await cluster.start()
    try:
        transport = httpx2.ASGITransport(app=create_app(cluster, options, observers, routers=routers))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            yield client
    finally:
        await cluster.close()


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error of a refusal, whose body must have OpenAI's shape and nothing else."""
    body = response.json()
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


def connect(base_url: str) -> socket.socket:
    parts = urlsplit(base_url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=HANG_S)


def received(connection: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    chunks = []
    with contextlib.suppress(ConnectionResetError):  # closed with bytes of ours unread
        while chunk := connection.recv(65_536):
            chunks.append(chunk)
    return b"".join(chunks)


def exchange(base_url: str, data: bytes) -> bytes:
    """What a server answers to raw bytes before it closes; the request must ask for closing."""
    with connect(base_url) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may refuse before it has read all
            connection.sendall(data)
        return received(connection)
