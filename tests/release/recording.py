"""Recordings of real servers and devices for tests: requests with given settings and concurrent load."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.release.decisions import with_decisions
from lockstep.release.evidence import gather
from lockstep.release.gate import judge
from lockstep.release.policy import Layer, policy_of
from lockstep.release.recordings import read_recordings
from lockstep.release.store import open_store
from lockstep.release.verdict import Verdict
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Submit
from tests.replay.live import WORDS
from tests.server.process import IN_THREAD, plain_async_client, serve
from tests.worker.support import running

SMALL = LoadOptions(EngineOptions(num_blocks=64))
ONLY_OUTPUTS: dict[str, Any] = {
    "min_pairs": 1,
    "max_latency_p95_ratio": None,
    "max_ttft_p95_ratio": None,
    "max_decode_p95_ratio": None,
    "max_kv_pressure_p95_increase": None,
    "min_join_rate": 0.7,
}
"""Policy that ignores times, because the machine has other load. Some candidates answer further requests, so some of
their records have no pair."""


def load(num_requests: int, seed: int, max_tokens: Sequence[int] = (8, 24)) -> list[tuple[str, dict[str, Any]]]:
    """Requests by their callers' ids, every second one greedy; equal seeds give equal requests."""
    draw = random.Random(seed)
    return [
        (
            f"{seed}.{number:03}",
            {
                "model": "m",
                "prompt": " ".join(draw.choices(WORDS, k=draw.randrange(4, 40))),
                "max_tokens": draw.choice(max_tokens),
                "temperature": 0.9 * (number % 2),
                "seed": number,
                "ignore_eos": True,
            },
        )
        for number in range(num_requests)
    ]


def generation_requests(requests: Iterable[tuple[str, dict[str, Any]]]) -> list[GenerationRequest]:
    """The same requests for a device."""
    fields = ("max_tokens", "temperature", "seed", "ignore_eos")
    return [
        GenerationRequest(body["prompt"], SamplingParams(**{name: body[name] for name in fields}), external_id=name)
        for name, body in requests
    ]


def recorded(
    folder: Path, source: str, *flags: str, requests: Sequence[tuple[str, dict[str, Any]]], at_once: int = 8
) -> Path:
    """Recording of a server that answers these requests, with limited concurrency."""
    told = ("--served-model-name", "m", "--log-level", "error", "--trace", str(folder))
    with serve(source, *IN_THREAD, *told, *flags) as server:
        asyncio.run(_ask(server.base_url, requests, at_once))
        assert server.stop() == 0
    return folder


async def _ask(base_url: str, requests: Sequence[tuple[str, dict[str, Any]]], at_once: int) -> None:
    async with plain_async_client(base_url) as client:
        for first in range(0, len(requests), at_once):
            some = requests[first : first + at_once]
            asked = [client.post("/v1/completions", json=body, headers={"X-Request-Id": id_}) for id_, body in some]
            for response in await asyncio.gather(*asked):
                assert response.status_code == 200, response.text


def recorded_in_process(
    folder: Path,
    requests: Iterable[GenerationRequest],
    *,
    key_file: str = "",
    has_content: bool = False,
    source: str = "stub://alpha",
    options: LoadOptions = SMALL,
) -> Path:
    """Recording of a device that answers requests one after the other."""
    with running(trace=TraceOptions(str(folder), has_content=has_content, key_file=key_file)) as bench:
        bench.ready("a", source, options)
        for number, request in enumerate(requests):
            bench.tell(Submit(number, "a", request))
            bench.answer(number)
    return folder


def judged(baseline: Path, candidate: Path, **policy: Any) -> Verdict:
    """Verdict on two recordings, by a policy of outputs with the given changes."""
    with open_store() as store:
        found = read_recordings(store, [baseline, candidate])
        rules = policy_of(Layer("test", {**ONLY_OUTPUTS, **policy}))
        verdict = judge(rules, gather(store, rules), found.sources)
    return with_decisions(verdict, found.decisions(), found.notes)
