"""Server cost of a streamed token: CPU time from an event of the cluster to the client's socket.

    python -m benchmarks.sse [--streams 32] [--tokens 500]

The cluster is a clock that emits one token per step for every stream without computation. Server, uvicorn and sockets
are real; the client is another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence

import uvicorn
import uvloop

from lockstep.cluster.base import Accepted, Event
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import Manifest
from lockstep.core.request import FinishReason
from lockstep.engine.outputs import Completion, RequestOutput, Timings, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from lockstep.worker.progress import CallProgress

STEP_S = 0.002
ROUNDS = 3
CLIENT = "--client"


class Metronome(Cluster):
    """A stub cluster without computation: all open streams get a token at the same time, as from a step."""

    def __init__(self, num_streams: int) -> None:
        super().__init__(Manifest.of_model("stub://metronome", ("metronome",)))
        self._num_streams = num_streams
        self._mailboxes: list[asyncio.Queue[TokenOutput]] = []
        self._begin = asyncio.Event()

    async def stream(
        self, call: GenerationRequest, progress: CallProgress | None = None
    ) -> AsyncGenerator[Sequence[Event], None]:
        mailbox: asyncio.Queue[TokenOutput] = asyncio.Queue()
        self._mailboxes.append(mailbox)
        if len(self._mailboxes) == self._num_streams:
            self._begin.set()
        yield (Accepted("metronome", (1,)),)
        while True:
            output = await mailbox.get()
            yield (output,)
            if output.request is not None:
                return

    async def beat(self, num_tokens: int) -> None:
        """One round: wait for all streams, then emit ``num_tokens`` tokens to each."""
        await self._begin.wait()
        self._begin.clear()
        mailboxes, self._mailboxes = self._mailboxes, []
        completion = Completion(0, "", (65,) * num_tokens, FinishReason.LENGTH, None, None)
        whole = RequestOutput(1, (1,), (completion,), 0, 0, Timings(0.0, 0.0, 1.0))
        token = TokenOutput(1, 0, (65,), " token")
        last = TokenOutput(1, 0, (65,), " token", FinishReason.LENGTH, request=whole)
        for step in range(num_tokens):
            for mailbox in mailboxes:
                mailbox.put_nowait(last if step == num_tokens - 1 else token)
            await asyncio.sleep(STEP_S)


def read_streams(port: int, num_streams: int, num_tokens: int) -> None:
    """Client process: opens all streams and reads them to their end."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": num_tokens})
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(request)
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ, bytearray())
    while selector.get_map():
        for key, _ in selector.select():
            answered = key.fileobj
            assert isinstance(answered, socket.socket)
            data = answered.recv(1 << 16)
            key.data.extend(data)
            if not data:
                assert b"data: [DONE]" in key.data, "every stream is complete"
                selector.unregister(answered)
                answered.close()


async def measure(num_streams: int, num_tokens: int) -> None:
    cluster = Metronome(num_streams)
    await cluster.start()
    app = create_app(cluster, ServerOptions(log_requests=False))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    serving = asyncio.ensure_future(server.serve([listening]))
    for _ in range(ROUNDS):
        command = (sys.executable, "-m", "benchmarks.sse", CLIENT, *map(str, (port, num_streams, num_tokens)))
        client = subprocess.Popen(command)
        before_s = time.process_time()
        await cluster.beat(num_tokens)
        while client.poll() is None:
            await asyncio.sleep(0.01)
        spent_s = time.process_time() - before_s
        print(
            f"{num_streams} streams of {num_tokens} tokens: {spent_s / (num_streams * num_tokens) * 1e6:.1f} "
            "us per token"
        )
    server.should_exit = True
    await serving
    await cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Server cost of a streamed token.")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument(
        CLIENT, nargs=3, type=int, metavar=("PORT", "STREAMS", "TOKENS"), help="run as the client process"
    )
    arguments = parser.parse_args()
    if arguments.client:
        read_streams(*arguments.client)
    else:
        uvloop.run(measure(arguments.streams, arguments.tokens))


if __name__ == "__main__":
    main()
