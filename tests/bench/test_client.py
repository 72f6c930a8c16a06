"""The lean client on real sockets, with servers that misbehave byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lockstep.bench.client import Client, TimedExchange
from lockstep.bench.protocol import Target
from tests.waiting import HANG_S

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@asynccontextmanager
async def listening(*answers: bytes, keep_open: bool = True) -> AsyncIterator[tuple[Target, list[int]]]:
    """A server that answers the n-th request of each connection with the n-th answer, and then closes or hangs."""
    connections: list[int] = []

    handlers: list[asyncio.Task[None]] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.append(task)
        connections.append(0)
        mine = len(connections) - 1
        for answer in answers:
            if not await reader.read(65536):
                break
            connections[mine] += 1
            writer.write(answer)
            await writer.drain()
        if keep_open:
            await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield Target("127.0.0.1", server.sockets[0].getsockname()[1], False, ""), connections
    finally:
        server.close()
        await asyncio.wait_for(asyncio.gather(*handlers), HANG_S)


async def ask(client: Client, limit_s: float = HANG_S) -> TimedExchange:
    exchange = TimedExchange()
    await client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", exchange, limit_s)
    return exchange


async def test_one_connection_carries_one_request_after_another() -> None:
    async with listening(OK, OK, OK) as (target, connections), Client(target) as client:
        for _ in range(3):
            exchange = await ask(client)
            assert (exchange.status, exchange.error) == (200, "")
            assert b"".join(piece for _, piece in exchange.reads) == b"ok"
            assert exchange.sent_s <= exchange.reads[0][0] <= exchange.ended_s
    assert connections == [3]


async def test_a_connection_that_the_server_closed_meanwhile_costs_no_request() -> None:
    async with listening(OK, keep_open=False) as (target, connections), Client(target) as client:
        assert [(await ask(client)).error for _ in range(3)] == ["", "", ""]
    assert connections == [1, 1, 1]


async def test_close_is_obeyed() -> None:
    last = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    async with listening(last, OK) as (target, connections), Client(target) as client:
        assert [(await ask(client)).error for _ in range(2)] == ["", ""]
    assert connections == [1, 1]


async def test_chunks_are_kept_apart_with_their_times() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    async with listening(chunked) as (target, _), Client(target) as client:
        exchange = await ask(client)
    assert [piece for _, piece in exchange.reads] == [b"abc", b"de"]
    assert exchange.num_bytes == 5


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "the connection closed before the answer was complete"),
        (b"", "the connection closed before the answer was complete"),
        (b"SMTP ready\r\n\r\n", "the answer is not HTTP"),
    ],
)
async def test_a_broken_response_reports_the_reason(answer: bytes, reason: str) -> None:
    async with listening(answer, keep_open=False) as (target, _), Client(target) as client:
        assert reason in (await ask(client)).error


async def test_silence_ends_at_the_limit_and_the_connection_is_closed() -> None:
    async with listening(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n") as (target, _), Client(target) as client:
        assert (await ask(client, limit_s=0.05)).error == "no complete answer within 0.05 s"


async def test_a_refused_connection_is_an_error_of_the_exchange() -> None:
    async with listening() as (target, _):
        pass
    async with Client(target) as client:
        assert (await ask(client)).error.startswith(f"cannot connect to {target.authority}: ")


async def test_an_endless_answer_is_cut() -> None:
    async with (
        listening(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + b"x" * 50) as (target, _),
        Client(target, max_body_bytes=10) as client,
    ):
        assert (await ask(client)).error == "the answer is longer than 10 bytes"
