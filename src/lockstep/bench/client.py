"""Lean HTTP/1.1 client of benchmarks: during a run it only stores received bytes with their times, and parses no JSON.

The client shares its cores with the measured server, so its own cost affects the measurement. An event of a stream
costs 15 us here (httptools on uvloop) and 87 to 104 us with httpx2 (benchmarks/client.py), which other clients use.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import httptools

from lockstep.bench.protocol import EventLineReader, Target, reason_of
from lockstep.cluster.completion_chunks import ChunkUsage, CompletionChunk, error_message

REQUEST_LIMIT_S = 6 * 3600.0
"""Maximum seconds of a request; a longer one has failed."""
OK = 200
MAX_BODY_BYTES = 64 << 20
"""Maximum bytes of an answer; a longer one has failed."""


@dataclass(slots=True)
class TimedExchange:
    """A request with the received bytes and their times, which are of `time.perf_counter`."""

    sent_s: float = 0.0
    status: int = 0
    """HTTP status; 0: no response."""
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    """Pieces of the body with the times of their arrival, in order."""
    ended_s: float = 0.0
    error: str = ""
    """Error of the connection; empty: the response is complete."""
    num_bytes: int = 0


class _Connection(asyncio.Protocol):
    """One connection that carries one exchange at a time."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self.exchange: TimedExchange | None = None
        self.is_open = True
        self._done: asyncio.Future[None] | None = None
        self._now_s = 0.0
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser

    def begin(self, request: bytes, exchange: TimedExchange) -> asyncio.Future[None]:
        """Send a request; the future is done when the response is complete or the connection has failed."""
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
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class has its methods, but is no subclass

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        if self.exchange is None:  # data without a request: the connection is not usable
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"the answer is not HTTP ({error})")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end("the connection closed before the answer was complete" if error is None else f"connection: {error}")

    def on_body(self, body: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        exchange.reads.append((self._now_s, body))
        exchange.num_bytes += len(body)
        if exchange.num_bytes > self._max_body_bytes:
            self._end(f"the answer is longer than {self._max_body_bytes} bytes")
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
    """Sends requests, one at a time per connection. Idle connections are reused.

    Use it as a context manager in the event loop of the run.
    """

    def __init__(self, target: Target, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._target = target
        self._max_body_bytes = max_body_bytes
        self._tls = ssl.create_default_context() if target.tls else None
        self._idle: list[_Connection] = []

    async def send(self, request: bytes, exchange: TimedExchange, limit_s: float = REQUEST_LIMIT_S) -> None:
        """Send one request and fill its exchange, also with an error. Cancellation closes the connection."""
        try:
            async with asyncio.timeout(limit_s):
                if await self._on_idle_connection(request, exchange):
                    return
                await self._on(await self._connect(), request, exchange)
        except TimeoutError:
            exchange.error = f"no complete answer within {limit_s:g} s"
        except OSError as error:
            exchange.error = f"cannot connect to {self._target.authority}: {error.strerror or error}"

    async def _on_idle_connection(self, request: bytes, exchange: TimedExchange) -> bool:
        """Send a request on an idle connection.

        False: there is none, or the server closed it before it received the request, which may be sent again.
        """
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            await self._on(connection, request, exchange)
            return not (exchange.error and exchange.status == 0)
        return False

    async def _on(self, connection: _Connection, request: bytes, exchange: TimedExchange) -> None:
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
        _, connection = await loop.create_connection(
            lambda: _Connection(self._max_body_bytes), target.host, target.port, ssl=self._tls
        )
        return connection

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # transports report their end in the next iteration of the loop


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measurements of one request; durations in seconds.

    Tokens arrive in chunks, each with one time. As in `vllm bench serve`, the inter-token latency (ITL) is the time
    between chunks, independent of their number of tokens, and is 0 between chunks of one read. The time per output
    token (TPOT) divides by the count in the server's ``usage``. Unlike there, a chunk with only the role is no token,
    so a server that sends it early does not have a short time to first token.
    """

    is_success: bool
    start_s: float
    """Time at which the request was due, or was sent if it had no due time, of `time.perf_counter`. Latencies begin
    here."""
    ttft_s: float = 0.0
    itl_s: tuple[float, ...] = ()
    e2el_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""
    send_delay_s: float = 0.0
    """Seconds from the start to the actual sending."""

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; 0 if there is none."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


def read_exchange(exchange: TimedExchange, start_s: float, prompt_tokens: int | None) -> Outcome:
    """Measure one exchange. The function is pure, and is called after the load.

    Args:
        start_s: start of latencies, on the exchange's clock.
        prompt_tokens: requested number of prompt tokens, used if the server reports none.
    """
    delay_s = max(0.0, exchange.sent_s - start_s)
    error = exchange.error
    if not error and exchange.status != OK:
        error = f"HTTP {exchange.status}: {reason_of(b''.join(piece for _, piece in exchange.reads))}"
    if not error:
        try:
            return _measure(exchange, start_s, prompt_tokens, delay_s)
        except ValueError as fault:
            error = str(fault)
    return Outcome(False, start_s, error=error, send_delay_s=delay_s)


def _measure(exchange: TimedExchange, start_s: float, prompt_tokens: int | None, delay_s: float) -> Outcome:
    """Measure a complete stream; ValueError if the answer reports an error or is incomplete."""
    tokens_s: list[float] = []
    text: list[str] = []
    last_s: float | None = None
    usage = ChunkUsage()
    for at_s, chunk in _chunks(exchange):
        if chunk.error is not None:
            raise ValueError(f"error within the stream: {error_message(chunk.error)}")
        usage = chunk.usage or usage
        if chunk.choices:
            last_s = at_s
            text += [choice.thoughts + choice.content for choice in chunk.choices]
            if any(choice.brings_tokens for choice in chunk.choices):
                tokens_s.append(at_s)
    if last_s is None:
        raise ValueError("the answer has no completion chunk")
    if not tokens_s:  # tokens without text, e.g. half a character: the last chunk counts as one
        tokens_s.append(last_s)
    return Outcome(
        True,
        start_s,
        ttft_s=tokens_s[0] - start_s,
        itl_s=tuple(after - before for before, after in pairwise(tokens_s)),
        e2el_s=last_s - start_s,
        prompt_tokens=usage.prompt_tokens if usage.prompt_tokens is not None else prompt_tokens or 0,
        output_tokens=usage.completion_tokens if usage.completion_tokens is not None else len(tokens_s),
        text="".join(text),
        send_delay_s=delay_s,
    )


def _chunks(exchange: TimedExchange) -> Iterator[tuple[float, CompletionChunk]]:
    """Events with the time of the read that completed each; ValueError for an event of another kind."""
    reader = EventLineReader()
    rest = b""
    for at_s, piece in [*exchange.reads, (exchange.ended_s, b"\n")]:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            chunk = reader.read(line)
            if chunk is not None:
                yield at_s, chunk
