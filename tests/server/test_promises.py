"""What a server promises its operator at three in the morning, tried on a whole one: pocket, its worker a process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from typing import Any

import httpx2
import psutil
import pytest

from tests.server.process import ServerProcess, plain_async_client, serve
from tests.server.support import connect
from tests.waiting import HANG_S, eventually, until

FLAGS = ("--served-model-name", "pocket", "--enable-debug-endpoints", "--max-num-seqs", "32")
PROMPT = "I was charged twice for my subscription last week"
NUM_OTHERS = 31


def body(prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    return {"model": "pocket", "messages": [{"role": "user", "content": prompt}], **more}


def gauges(text: str) -> dict[str, float]:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: sum(map(float, re.findall(rf"^lockstep:{name}{{.*}} (\S+)$", text, re.MULTILINE))) for name in names}


def total(text: str, name: str) -> float:
    [value] = re.findall(rf"^lockstep:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return float(value)


async def content(client: httpx2.AsyncClient, asked: dict[str, Any]) -> str:
    response = await client.post("/v1/chat/completions", json=asked)
    response.raise_for_status()
    return str(response.json()["choices"][0]["message"]["content"])


async def frames(
    client: httpx2.AsyncClient, asked: dict[str, Any], begun: asyncio.Semaphore | None = None
) -> list[str]:
    """The data of every frame of a stream; the semaphore is told of the first."""
    told: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                told.append(line.removeprefix("data: "))
                if begun is not None and len(told) == 1:
                    begun.release()
    return told


async def streaming(client: httpx2.AsyncClient, count: int, **more: Any) -> list[asyncio.Task[list[str]]]:
    """So many streams, all of which have begun."""
    begun = asyncio.Semaphore(0)
    asked = [body(f"{number} {PROMPT}", **more) for number in range(count)]
    tasks = [asyncio.create_task(frames(client, each, begun)) for each in asked]
    for _ in range(count):
        await asyncio.wait_for(begun.acquire(), HANG_S)
    return tasks


def text_of(told: list[str]) -> str:
    assert told[-1] == "[DONE]"
    deltas = [choice["delta"] for frame in told[:-1] for choice in json.loads(frame)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def settled(server: ServerProcess) -> str:
    """The metrics once nothing is open any more; the blocks are conserved then."""
    text = ""

    def is_idle() -> bool:
        nonlocal text
        text = client.get("/metrics").text
        return not any(gauges(text).values()) and not client.get("/load").json()["server_load"]

    with server.client() as client:
        until(is_idle, "nothing is open")
        assert client.get("/debug/check").json()["ok"] is True
    return text


def worker_of(server: ServerProcess) -> psutil.Process:
    """The one child of a server that runs its models."""
    children = psutil.Process(server.pid).children()
    [worker] = [child for child in children if "lockstep.worker.child" in child.cmdline()]
    return worker


@pytest.fixture(scope="module")
def pocket() -> Any:
    with serve("pocket://", *FLAGS) as running:
        yield running


async def test_counts_over_http_are_exact(pocket: ServerProcess) -> None:
    """R requests of T tokens: R first tokens, R(T-1) latencies between tokens, and all tokens in the steps."""
    num_requests, num_tokens = 5, 9
    before = settled(pocket)
    asked = body(max_tokens=num_tokens, ignore_eos=True, cache_salt="alone")
    async with plain_async_client(pocket.base_url) as client:
        answers = [(await client.post("/v1/chat/completions", json=asked)).json() for _ in range(num_requests)]
    after = settled(pocket)

    def grown(name: str) -> float:
        return total(after, name) - total(before, name)

    assert grown("time_to_first_token_seconds_count") == num_requests
    assert grown("inter_token_latency_seconds_count") == num_requests * (num_tokens - 1)
    assert grown("generation_tokens_total") == num_requests * num_tokens
    usage = [answer["usage"] for answer in answers]
    computed = sum(told["prompt_tokens"] - told["prompt_tokens_details"]["cached_tokens"] for told in usage)
    assert grown("iteration_tokens_total_sum") == computed + num_requests * num_tokens
    assert grown("iteration_tokens_total_count") == num_requests * num_tokens


async def test_200_clients_that_give_up_are_forgotten_and_the_next_is_answered(pocket: ServerProcess) -> None:
    async with plain_async_client(pocket.base_url, timeout_s=0.5) as impatient:
        asked = body(max_tokens=1500, ignore_eos=True)
        answers = await asyncio.gather(
            *(impatient.post("/v1/chat/completions", json=asked) for _ in range(200)), return_exceptions=True
        )
    gave_up = sum(isinstance(answer, httpx2.TimeoutException) for answer in answers)
    assert gave_up > 100, f"only {gave_up} gave up: nothing was tried"
    async with plain_async_client(pocket.base_url) as client:
        assert await content(client, body(max_tokens=4))
    settled(pocket)


async def test_500_clients_that_connect_and_drop_leave_nothing(pocket: ServerProcess) -> None:
    asked = json.dumps(body(max_tokens=400, ignore_eos=True, stream=True)).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(asked), asked)
    )
    cuts = (0, 20, len(request) - 5, len(request), len(request))
    for index in range(500):
        with connect(pocket.base_url) as connection:
            connection.sendall(request[: cuts[index % len(cuts)]])
            if index % 2:  # a reset instead of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    async with plain_async_client(pocket.base_url) as client:
        assert await content(client, body(max_tokens=4))
    settled(pocket)


async def test_answer_is_independent_of_batch_streaming_and_worker_restart(pocket: ServerProcess) -> None:
    """Streamed and not, alone and among 31 others, before and after the worker's death: the same bytes."""
    asked = body(max_tokens=48, temperature=0.8, seed=7)
    async with plain_async_client(pocket.base_url) as client:
        alone = await content(client, asked)
        told = {"streamed": text_of(await frames(client, asked))}
        others = await streaming(client, NUM_OTHERS, max_tokens=200)
        told["busy"], told["busy, streamed"] = await asyncio.gather(
            content(client, asked), asyncio.create_task(streamed(client, asked))
        )
        await asyncio.gather(*others)
        worker_of(pocket).kill()
        await serving_again(client)
        told["after a crash"] = await content(client, asked)
        told["after a crash, streamed"] = text_of(await frames(client, asked))
    settled(pocket)
    assert told == dict.fromkeys(told, alone)
    assert len(alone) > 20


async def streamed(client: httpx2.AsyncClient, asked: dict[str, Any]) -> str:
    return text_of(await frames(client, asked))


async def serving_again(client: httpx2.AsyncClient) -> None:
    async def is_serving() -> bool:
        return (await client.post("/v1/chat/completions", json=body(max_tokens=1))).status_code == 200

    await eventually(is_serving)


async def test_a_worker_that_is_killed_under_load_ends_its_requests_and_the_server_serves_again(
    pocket: ServerProcess,
) -> None:
    async with plain_async_client(pocket.base_url) as client:
        streams = await streaming(client, 32, max_tokens=1900, ignore_eos=True)
        first = worker_of(pocket)
        first.kill()
        for told in await asyncio.gather(*streams):
            assert told[-1] == "[DONE]"
            assert json.loads(told[-2])["error"]["code"] == "worker_lost"
        refused = await client.post("/v1/chat/completions", json=body(max_tokens=1))
        assert refused.status_code in (200, 503)
        assert refused.status_code == 200 or int(refused.headers["retry-after"]) >= 1
        await serving_again(client)
    assert worker_of(pocket).pid != first.pid
    settled(pocket)


async def test_a_server_that_is_killed_leaves_no_worker_and_starts_again() -> None:
    with serve("pocket://", *FLAGS) as server:
        async with plain_async_client(server.base_url) as client:
            streams = await streaming(client, 8, max_tokens=1900, ignore_eos=True)
            worker, port = worker_of(server), server.base_url.rpartition(":")[2]
            os.kill(server.pid, signal.SIGKILL)
            await asyncio.gather(*streams, return_exceptions=True)
        worker.wait(HANG_S)
    with serve("pocket://", *FLAGS, "--port", port) as again:
        async with plain_async_client(again.base_url) as client:
            assert await content(client, body(max_tokens=4))
