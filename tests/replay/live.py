"""A live cluster under mixed load: bursts, disconnecting clients, deadlines, sessions, small pools, grammars."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

from lockstep.core.request import FinishReason, Request
from lockstep.replay.playback import Playback
from lockstep.replay.rerun import AppliedCommand, DecidedStep
from lockstep.replay.trace import Trace
from lockstep.worker.flight.entries import Aborted, Added, CacheReset, Filled, Named, Pinned, Unpinned
from tests.server.process import ServerProcess, plain_async_client

MANIFEST = """\
cluster: recorded
models:
  router:
    source: stub://router?token_us=2
    priority: critical
  specialists:
    - id: small
      source: pocket://
      max_active_sessions: 2
      engine: {num_blocks: 7, host_kv_memory_bytes: 256KB, max_num_seqs: 6, max_num_batched_tokens: 48,
               max_chunk_tokens: 24, max_num_decode_seqs: 4, order: priority}
    - id: other
      source: pocket://
      engine: {num_blocks: 8, max_num_seqs: 4, max_num_batched_tokens: 40, preemption: recompute, order: fair}
    - id: fake
      source: stub://fake?token_us=20
      priority: high
      max_active_sessions: 3
      engine: {num_blocks: 16, host_kv_memory_bytes: 1KB, max_num_seqs: 8, max_num_batched_tokens: 64, order: priority}
routing:
  entry: router
  dispatch_rule: router.output.intent -> specialists.{intent}
"""
MODELS = ("small", "other", "fake", "fake")
BURST = 12
SENTENCE = "the quick brown fox jumps over a lazy dog and then asks for its invoice again because of an error"
WORDS = SENTENCE.split()


def manifest_in(folder: Path) -> Path:
    path = folder / "recorded.yaml"
    path.write_text(MANIFEST)
    return path


async def mixed_load(
    server: ServerProcess, num_requests: int, seed: int, models: tuple[str, ...] = MODELS
) -> Counter[int]:
    """Send requests in bursts; returns the statuses by number, 0 for disconnected clients."""
    draw = random.Random(seed)
    statuses: Counter[int] = Counter()
    async with plain_async_client(server.base_url) as client:
        for first in range(0, num_requests, BURST):
            bodies = [_body(draw) for _ in range(BURST)]
            burst = asyncio.gather(*[_ask(client, body, draw.random() < 0.15) for body in bodies])
            if first % (3 * BURST) == 0:
                await client.delete(f"/v1/sessions/s{draw.randrange(5)}")
            statuses.update(await burst)
    return statuses


def _body(draw: random.Random) -> dict[str, Any]:
    prefix = " ".join(WORDS[: draw.choice((0, 8, 16, 18))])
    prompt = f"{prefix} {' '.join(draw.choices(WORDS, k=draw.randrange(1, 12)))}"
    model = draw.choice(MODELS)
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt[: 60 if model == "fake" else 400],
        "max_tokens": draw.choice((4, 12, 40, 64)),
        "temperature": draw.choice((0.0, 0.8)),
        "seed": draw.randrange(1 << 40),
        "ignore_eos": draw.random() < 0.8,
        "priority": draw.choice((-1, 0, 1)),
        "user": f"user {draw.randrange(3)}",
    }
    kind = draw.random()
    if kind < 0.2:
        body["session_id"] = f"s{draw.randrange(5)}"
    elif kind < 0.3:
        body["deadline_ms"] = draw.choice((1, 40, 150))
    elif kind < 0.4:
        body |= {"guided_regex": "the answer is (yes|no), for certain reasons", "ignore_eos": False}
    elif kind < 0.5:
        body["n"] = 2
    elif kind < 0.55:
        body["logprobs"] = 2
    return body


async def _ask(client: httpx2.AsyncClient, body: dict[str, Any], leaves: bool) -> int:
    if not leaves:
        return (await client.post("/v1/completions", json=body)).status_code
    with contextlib.suppress(httpx2.HTTPError):
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for _ in response.aiter_lines():
                break
    return 0


def entry_counts(trace: Trace) -> Counter[str]:
    """Counts of the kinds of entries in a recording, so that tests verify a recording with all of them."""
    seen: Counter[str] = Counter()
    for event in Playback(trace.entries()).play():
        match event:
            case AppliedCommand(_, Added(request=Request(priority=priority)), _):
                seen.update(["requests", f"priority {priority}"])
            case AppliedCommand(_, Aborted(reason=reason), _):
                seen[reason.value] += 1
            case AppliedCommand(_, Named(), _):
                seen["answers"] += 1
            case AppliedCommand(_, Pinned(), _):
                seen["pins"] += 1
            case AppliedCommand(_, Unpinned(), _):
                seen["sweeps"] += 1
            case AppliedCommand(_, Filled(), _):
                seen["fills"] += 1
            case AppliedCommand(_, CacheReset(), _):
                seen["resets"] += 1
            case DecidedStep() as step:
                seen.update(["steps", f"steps of {step.engine}"])
                seen["preemptions"] += len(step.plan.preempted)
                seen["swaps"] += len(step.plan.swap_out)
                seen["evictions"] += len(step.plan.evicted)
                seen["us"] += step.timing.duration_us
                for end in step.finished:
                    seen["hits"] += end.num_cached_tokens > 0
                if step.events is None:
                    seen["failures"] += 1
                else:
                    seen["forced"] += sum(count > 1 for count in step.events.num_tokens)
                    seen["stops"] += sum(end.reason is FinishReason.STOP for end in step.events.finished)
    return seen
