"""A lean HTTP/1.1 client: while a run lasts it only notes when which bytes came. JSON is read after the run.

It shares its cores with the server that it measures, so that what it costs is part of what it sees. An event of a
stream costs 15 us here (httptools on uvloop) and 87 to 104 us with httpx2 (benchmarks/client.py), which all else uses.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast

import httptools

from lockstep.bench.target import Target

REQUEST_LIMIT_S = 6 * 3600.0
"""A request that takes longer has failed."""
MAX_BODY_BYTES = 64 << 20
"""Of one answer; a server that sends more is out of its mind."""


@dataclass(slots=True)
class Exchange:
    """One request as it was seen on the wire; times are of `time.perf_counter`."""

    sent_s: float = 0.0
    status: int = 0
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    """When which piece of the body came, in order."""
    ended_s: float = 0.0
    error: str = ""
    """What went wrong with the connection; empty: the response is whole."""
    num_bytes: int = 0


class _Connection(asyncio.Protocol):
    """One connection that carries one exchange at a time."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.is_open = True
        self._done: asyncio.Future[None] | None = None
        self._now_s = 0.0
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser

    def begin(self, request: bytes, exchange: Exchange) -> asyncio.Future[None]:
        """Send a request; the future is done when its response is whole or the connection is not."""
        self.exchange = exchange
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        exchange.sent_s = time.perf_counter()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has all of it and inherits nothing

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        if self.exchange is None:  # nothing was asked: whatever this is, the connection is not usable
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the answer is not HTTP ({error})")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end("the connection was closed before the answer was whole" if error is None else f"connection: {error}")

    def on_body(self, body: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        exchange.reads.append((self._now_s, body))
        exchange.num_bytes += len(body)
        if exchange.num_bytes > MAX_BODY_BYTES:
            self._end(f"the answer is longer than {MAX_BODY_BYTES} bytes")
            self.close()

    def on_message_complete(self) -> None:
        self._end("")
        if not self._parser.should_keep_alive():
            self.close()

    def _end(self, error: str) -> None:
        if self.exchange is None or self._done is None:
            return
        exchange, done, self.exchange = self.exchange, self._done, None
        exchange.ended_s = time.perf_counter()
        exchange.error = error
        exchange.status = self._parser.get_status_code()
        if not done.done():
            done.set_result(None)


class Client:
    """Sends requests, each on a connection of its own while it lasts; idle connections are used again.

    Use it as a context manager in the event loop of the run.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tls = ssl.create_default_context() if target.tls else None
        self._idle: list[_Connection] = []

    async def send(self, request: bytes, exchange: Exchange, limit_s: float = REQUEST_LIMIT_S) -> None:
        """Send one request and fill its exchange; what goes wrong is in there. Cancelling closes the connection."""
        try:
            async with asyncio.timeout(limit_s):
                if await self._on_idle_connection(request, exchange):
                    return
                await self._on(await self._connect(), request, exchange)
        except TimeoutError:
            exchange.error = f"no whole answer within {limit_s:g} s"
        except OSError as error:
            exchange.error = f"cannot connect to {self._target.authority}: {error.strerror or error}"

    async def _on_idle_connection(self, request: bytes, exchange: Exchange) -> bool:
        """False: there is none, or the server had closed it before the request came, so that it may be sent again."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            await self._on(connection, request, exchange)
            return not (exchange.error and exchange.status == 0)
        return False

    async def _on(self, connection: _Connection, request: bytes, exchange: Exchange) -> None:
        try:
            await connection.begin(request, exchange)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        target = self._target
        _, connection = await loop.create_connection(_Connection, target.host, target.port, ssl=self._tls)
        return connection

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports report their end in the next turn of the loop
