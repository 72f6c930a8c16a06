"""Effect of very large requests on other clients: `/health`, a running stream and memory during bursts of them.

    python -m benchmarks.large_requests [--model pocket://] [--requests 20] [--megabytes 7.9] [--only KIND]

For each kind of body a real `lockstep serve` gets that many requests at once. A second process polls `/health` and
reads one stream after the other. Targets: `/health` below 50 ms at p99, no gap above 200 ms in a stream, and memory
within 50 MB of the initial value afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

HEALTH_EVERY_S = 0.01
LIMIT_S = 300.0
"""Time limit of one request in seconds."""
MIN_WATCH_S = 3.0
"""Minimum observation time in seconds, so that percentiles have enough values."""
SETTLE_S = 2.0
"""Delay after a burst before memory is read, in seconds."""
WATCH = "--watch"
STREAM = {"prompt": "Once", "max_tokens": 1_000, "ignore_eos": True, "stream": True}
WORDS = "The quick brown fox, 27 years old, jumps over the lazy dog. "


def repeated(text: str, num_bytes: int) -> str:
    return (text * (num_bytes // len(text) + 1))[:num_bytes]


def listed(item: str, num_bytes: int) -> str:
    return "[" + ",".join([item] * (num_bytes // (len(item) + 1))) + "]"


def chat(messages: str, more: str = "") -> str:
    return f'{{"messages":{messages}{more}}}'


Body = Callable[[int], str]
KINDS: Mapping[str, tuple[str, Body]] = {
    "chat, one message": (
        "/v1/chat/completions",
        lambda n: json.dumps({"messages": [{"role": "user", "content": repeated(WORDS, n)}]}),
    ),
    "chat, tiny messages": (
        "/v1/chat/completions",
        lambda n: chat(listed('{"role":"user","content":"a"}', n)),
    ),
    "chat, text parts": (
        "/v1/chat/completions",
        lambda n: chat('[{"role":"user","content":' + listed('{"type":"text","text":"a"}', n) + "}]"),
    ),
    "chat, unknown members": (
        "/v1/chat/completions",
        lambda n: chat('[{"role":"user","content":"a"}]', "".join(f',"x{i}":1' for i in range(n // 12))),
    ),
    "chat, one tool": (
        "/v1/chat/completions",
        lambda n: chat(
            '[{"role":"user","content":"a"}]',
            ',"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{'
            + ",".join(f'"p{i}":{{"type":"string"}}' for i in range(n // 28))
            + "}}}}]",
        ),
    ),
    "chat, a long schema": (
        "/v1/chat/completions",
        lambda n: chat('[{"role":"user","content":"a"}]', ',"guided_json":{"enum":' + listed('"ab"', n) + "}"),
    ),
    "completion, one prompt": ("/v1/completions", lambda n: json.dumps({"prompt": repeated(WORDS, n)})),
    "completion, one letter": ("/v1/completions", lambda n: json.dumps({"prompt": "a" * n})),
    "completion, escapes": ("/v1/completions", lambda n: '{"prompt":"' + repeated("\\u00e9", n // 6 * 6) + '"}'),
    "completion, prompts": (
        "/v1/completions",
        lambda n: json.dumps({"prompt": [repeated(WORDS, n // 1_000)] * 1_000}),
    ),
    "completion, token ids": ("/v1/completions", lambda n: '{"prompt":' + listed("1", n) + "}"),
    "completion, a long regex": (
        "/v1/completions",
        lambda n: json.dumps({"prompt": "a", "guided_regex": repeated("(a|b)", n)}),
    ),
    "completion, empty lists": ("/v1/completions", lambda n: '{"prompt":' + listed("[]", n) + "}"),
    "responses": ("/v1/responses", lambda n: json.dumps({"input": repeated(WORDS, n)})),
    "responses, items": ("/v1/responses", lambda n: '{"input":' + listed('{"role":"user","content":"a"}', n) + "}"),
    "embeddings": ("/v1/embeddings", lambda n: json.dumps({"input": [repeated(WORDS, n // 200)] * 200})),
    "tokenize": ("/tokenize", lambda n: json.dumps({"prompt": repeated(WORDS, n)})),
    "detokenize": ("/detokenize", lambda n: '{"tokens":' + listed("65", n) + "}"),
}


def main() -> None:
    arguments = _arguments()
    if arguments.watch:
        asyncio.run(Watch(*arguments.watch.rsplit(":", 1)).run())
        return
    num_bytes = int(arguments.megabytes * 1e6)
    server = subprocess.Popen(
        [sys.executable, "-m", "lockstep", "serve", arguments.model, "--port", "0", "--disable-log-requests"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = _ready(server)
        print(f"{arguments.model}: {arguments.requests} requests of {arguments.megabytes:g} MB at once")
        print(
            f"{'':26}{'answers':>24}{'seconds':>9}{'health p50':>12}{'p99':>7}{'max':>7}"
            f"{'stream gap':>12}{'MB before':>11}{'after':>7}"
        )
        _measure(address, server.pid, "nothing", "", b"", 0)
        for kind, (path, make) in KINDS.items():
            if arguments.only in kind:
                _measure(address, server.pid, kind, path, make(num_bytes).encode(), arguments.requests)
    finally:
        server.terminate()
        server.wait()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="pocket://")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=7.9)
    parser.add_argument("--only", default="", help="only kinds with this text in their name")
    parser.add_argument(WATCH, help=argparse.SUPPRESS)
    return parser.parse_args()


def _ready(server: subprocess.Popen[str]) -> str:
    """Host and port of a server, once it is ready."""
    assert server.stdout is not None
    for line in server.stdout:
        found = re.search(r"ready on http://(\S+?),? ", line)
        if found:
            return found[1]
    raise SystemExit("the server did not start")


def _measure(address: str, pid: int, kind: str, path: str, body: bytes, num_requests: int) -> None:
    time.sleep(SETTLE_S)
    before = _megabytes(pid)
    watch = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.large_requests", WATCH, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
    )
    assert watch.stdout is not None
    watch.stdout.readline()  # returns when its stream has begun
    answers: Counter[str] = Counter()
    senders = [threading.Thread(target=_send, args=(address, path, body, answers)) for _ in range(num_requests)]
    began_s = time.monotonic()
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    took_s = time.monotonic() - began_s
    time.sleep(max(0.0, MIN_WATCH_S - took_s))
    seen = json.loads(watch.communicate("\n")[0])
    time.sleep(SETTLE_S)
    results = ", ".join(f"{count} x {status}" for status, count in sorted(answers.items()))
    print(
        f"{kind:26}{results:>24}{took_s:9.1f}{seen['p50']:9.1f} ms{seen['p99']:7.1f}{seen['max']:7.1f}"
        f"{seen['gap']:9.0f} ms{before:11.0f}{_megabytes(pid):7.0f}",
        flush=True,
    )


def _megabytes(pid: int) -> float:
    """Resident memory of the server and its worker."""
    server = psutil.Process(pid)
    return sum(process.memory_info().rss for process in (server, *server.children(recursive=True))) / 1e6


def _send(address: str, path: str, body: bytes, answers: Counter[str]) -> None:
    connection = HTTPConnection(address, timeout=LIMIT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        code = json.loads(data)["error"]["code"] if response.status >= 400 else ""
        answers[f"{response.status} {code}".strip()] += 1
    except OSError as error:
        answers[type(error).__name__] += 1
    finally:
        connection.close()


class Watch:
    """Observer process: polls and reads until its input ends, then prints its results in milliseconds."""

    def __init__(self, host: str, port: str) -> None:
        self._host, self._port = host, int(port)
        self._latencies_s: list[float] = []
        self._gap_s = 0.0

    async def run(self) -> None:
        watching = [asyncio.create_task(self._ask()), asyncio.create_task(self._stream())]
        await asyncio.sleep(0.5)
        self._latencies_s.clear()
        print("watching", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        for task in watching:
            task.cancel()
        ordered = sorted(self._latencies_s)
        results = {
            "p50": ordered[len(ordered) // 2],
            "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
            "max": ordered[-1],
            "gap": self._gap_s,
        }
        print(json.dumps({name: value * 1e3 for name, value in results.items()}))

    async def _request(self, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(f"{head} HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n".encode())
        writer.write(b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return reader, writer

    async def _ask(self) -> None:
        while True:
            began_s = time.perf_counter()
            reader, writer = await self._request("GET /health")
            await reader.read()
            self._latencies_s.append(time.perf_counter() - began_s)
            writer.close()
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _stream(self) -> None:
        body: dict[str, Any] = STREAM
        while True:
            reader, writer = await self._request("POST /v1/completions", json.dumps(body).encode())
            await reader.readuntil(b"data:")  # before that it waits in the queue
            last_s = time.perf_counter()
            while await reader.read(1 << 16):
                now_s = time.perf_counter()
                self._gap_s, last_s = max(self._gap_s, now_s - last_s), now_s
            writer.close()


if __name__ == "__main__":
    main()
