"""Client cost per streamed event: the load generator's client against httpx2, each on asyncio and on uvloop.

    python -m benchmarks.client

A server process without a model streams the same events to 32 connections, paced so that no client waits. Figures are
processor time of this process per event, medians over interleaved rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import httpx2
import uvloop

from lockstep.bench.client import Client, TimedExchange
from lockstep.bench.protocol import Target

EVENTS = 64
PAUSE_S = 0.005
EVENT = (
    b'data: {"id":"chatcmpl-0123456789","object":"chat.completion.chunk","created":1234567890,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
PATH = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request of a connection with the same events."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(EVENTS):
                await asyncio.sleep(PAUSE_S)
                writer.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def listen() -> None:
    server = await asyncio.start_server(stream, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def ours(target: Target, connections: int, requests: int) -> int:
    """Number of events read by the load generator's client."""
    request = target.post(PATH, BODY)

    async def one(client: Client) -> int:
        count = 0
        for _ in range(requests):
            exchange = TimedExchange()
            await client.send(request, exchange)
            count += len(exchange.reads)
        return count

    async with Client(target) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(connections))))


async def with_httpx2(target: Target, connections: int, requests: int) -> int:
    """Number of events read by httpx2, with their times and without parsing."""

    async def one(client: httpx2.AsyncClient) -> int:
        reads: list[tuple[float, bytes]] = []
        for _ in range(requests):
            async with client.stream("POST", f"{target.url}{PATH}", json=BODY) as response:
                reads += [(time.perf_counter(), piece) async for piece in response.aiter_raw()]
        return len(reads)

    async with httpx2.AsyncClient(trust_env=False, timeout=60) as client:
        return sum(await asyncio.gather(*(one(client) for _ in range(connections))))


Measured = Callable[[Target, int, int], Awaitable[int]]
Loop = Callable[[], asyncio.AbstractEventLoop]


def cpu_us(measured: Measured, loop: Loop, target: Target, connections: int, requests: int) -> float:
    async def whole() -> int:
        return await measured(target, connections, requests)

    with asyncio.Runner(loop_factory=loop) as runner:
        before_s = time.process_time()
        count = runner.run(whole())
        return (time.process_time() - before_s) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--requests", type=int, default=4, help="sequential requests per connection (default: 4)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--listen", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.listen:
        asyncio.run(listen())
        return
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.client", "--listen"], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    target = Target.parse(f"http://127.0.0.1:{server.stdout.readline().strip()}")
    loops: dict[str, Loop] = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    clients: dict[str, Measured] = {"bench": ours, "httpx2": with_httpx2}
    seen: dict[tuple[str, str], list[float]] = {}
    try:
        for _ in range(arguments.rounds):
            for client, measured in clients.items():
                for name, loop in loops.items():
                    cost = cpu_us(measured, loop, target, arguments.connections, arguments.requests)
                    seen.setdefault((client, name), []).append(cost)
    finally:
        server.terminate()
        server.wait(10)
    for (client, name), costs in seen.items():
        print(f"{client:8} on {name:8} {statistics.median(costs):7.1f} us of processor time per event")


if __name__ == "__main__":
    main()
