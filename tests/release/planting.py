"""Mirrored runs for tests: the same requests to two real servers, with observations of both sides.

Faults of a gateway between server and client are simulated when the client reads events; changed settings are settings
of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from lockstep.cli.main import invoke
from tests.server.process import plain_async_client

Observation = dict[str, Any]
Pair = dict[str, Observation]
DOCUMENT = "Pages of a document that somebody has to read before an answer is written. " * 12
_GAUGE = r"^lockstep:{}{{[^}}]*}} (\S+)$"
_NUM_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')


@dataclass(frozen=True)
class Request:
    """One request to both sides."""

    id: str
    segment: str
    prompt: str
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Endpoint:
    """A server as one side of a mirror."""

    url: str
    replica: str = "r1"
    version: str = "v1"
    change: Callable[[Request, dict[str, Any]], None] | None = None
    """Function that changes the bodies of requests."""


def requests_of(name: str, count: int = 48, **body: Any) -> list[Request]:
    """Short chats and long documents alternately; prompts are unique to this run, so no cache holds them."""
    found = []
    for number in range(count):
        is_document = number % 3 == 2
        prompt = f"{name} {number}: " + (DOCUMENT if is_document else "hello, how are you today?")
        found.append(Request(f"{name}.{number}", "documents" if is_document else "chat", prompt, body))
    return found


async def mirror(
    baseline: Endpoint, candidates: Sequence[Endpoint], waves: Sequence[Sequence[Request]], concurrency: int = 2
) -> list[Pair]:
    """Send waves of requests to both sides, each request to both at the same time.

    Args:
        candidates: replicas, asked in turn.
        concurrency: requests that are open at once, of each side; 0: whole waves.
    """
    start_s = time.monotonic()
    pairs: list[Pair] = []
    async with plain_async_client("") as client:
        models = {each.url: await _model_of(client, each.url) for each in (baseline, *candidates)}
        number = 0
        for wave in waves:
            limit = asyncio.Semaphore(concurrency or len(wave))

            async def one(request: Request, candidate: Endpoint, limit: asyncio.Semaphore = limit) -> Pair:
                async with limit:
                    sides = {"baseline": baseline, "candidate": candidate}
                    found = await asyncio.gather(
                        *(_observe(client, each, models[each.url], request, start_s) for each in sides.values())
                    )
                    return dict(zip(sides, found, strict=True))

            tasks = [one(request, candidates[(number + at) % len(candidates)]) for at, request in enumerate(wave)]
            number += len(wave)
            pairs += await asyncio.gather(*tasks)
    return pairs


async def _model_of(client: httpx2.AsyncClient, url: str) -> str:
    answer = await client.get(f"{url}/v1/models")
    return str(answer.json()["data"][0]["id"])


async def _observe(
    client: httpx2.AsyncClient, server: Endpoint, model: str, request: Request, start_s: float
) -> Observation:
    pressure = await _pressure(client, server.url)
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": request.prompt}],
        "max_tokens": 12,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **request.body,
    }
    if server.change is not None:
        server.change(request, body)
    found: Observation = {
        "request_id": request.id,
        "ts": time.monotonic() - start_s,
        "model": "m",
        "model_version": server.version,
        "backend": "lockstep",
        "route_id": "main",
        "replica_id": server.replica,
        "scheduler": "continuous-batching",
        "segment": request.segment,
        **pressure,
    }
    tokens: list[tuple[int, float]] = []
    begin_s = time.monotonic()
    try:
        error = await _stream(client, server.url, body, tokens, found, begin_s)
    except httpx2.HTTPError as fault:
        error = type(fault).__name__
    if error:
        return {**found, "ok": False, "error": error}
    events = [
        {"index": index, "token_id": token, "elapsed_ms": elapsed} for index, (token, elapsed) in enumerate(tokens)
    ]
    return {
        **found,
        "ok": True,
        "latency_ms": 1e3 * (time.monotonic() - begin_s),
        "token_ids": [token for token, _ in tokens],
        "stream_events": events,
    }


async def _stream(
    client: httpx2.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    tokens: list[tuple[int, float]],
    found: Observation,
    begin_s: float,
) -> str:
    """Read an answer; returns the failure."""
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            return f"HTTP {response.status_code}"
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return str(chunk["error"].get("message") or chunk["error"])[:80]
            elapsed_ms = 1e3 * (time.monotonic() - begin_s)
            for choice in chunk["choices"]:
                tokens += [(token, elapsed_ms) for token in choice.get("token_ids") or ()]
            if usage := chunk.get("usage"):
                found["prompt_tokens"] = usage["prompt_tokens"]
                found["output_tokens"] = usage["completion_tokens"]
    return ""


async def _pressure(client: httpx2.AsyncClient, url: str) -> Observation:
    """Queue and KV pool of a server at the arrival of a request."""
    text = (await client.get(f"{url}/metrics")).text
    gauges = {}
    for name in ("num_requests_waiting", "kv_cache_usage_perc"):
        match = re.search(_GAUGE.format(name), text, re.MULTILINE)
        gauges[name] = float(match[1]) if match else 0.0
    total = _NUM_BLOCKS.search(text)
    blocks = float(total[1]) if total else 1.0
    return {
        "queue_depth": gauges["num_requests_waiting"],
        "kv_used": blocks * gauges["kv_cache_usage_perc"],
        "kv_total": blocks,
    }


def judged(pairs: Sequence[Pair], folder: Path, policy: Mapping[str, Any]) -> dict[str, Any]:
    """Verdict of `lockstep gate` on the records of both sides, in one file each."""
    for side in ("baseline", "candidate"):
        lines = [json.dumps(pair[side]) + "\n" for pair in pairs if side in pair]
        (folder / f"{side}.jsonl").write_text("".join(lines))
    (folder / "policy.json").write_text(json.dumps(policy))
    files = [str(folder / name) for name in ("baseline.jsonl", "candidate.jsonl")]
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        code = invoke(["gate", *files, "--policy", str(folder / "policy.json"), "--json"])
    assert code in (0, 1, 2), written.getvalue()
    found: dict[str, Any] = json.loads(written.getvalue())
    return found
