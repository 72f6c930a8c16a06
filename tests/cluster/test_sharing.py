"""Models that name one artifact: one copy of the weights in the worker's memory, and steps that they share."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from lockstep.cluster.cluster import Cluster
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from tests.cluster.clusters import ask, clustered
from tests.waiting import HANG_S

NUM_MODELS = 10
NUM_TOKENS = 200


def manifest(num_models: int) -> str:
    return (
        "cluster: shared\nsessions: {sweep_interval: 10ms}\nresources: {kv_budget: 64MB}\nmodels:\n  extra:\n"
        + "".join(
            f"    - {{id: m{number}, source: 'pocket://', system_prompt: 'You are number {number}.'}}\n"
            for number in range(num_models)
        )
    )


def worker_bytes(cluster: Cluster) -> int:
    """The worker's memory, what it shares with other processes in parts (PSS, see proc(5))."""
    assert cluster.worker_pid is not None
    rollup = Path(f"/proc/{cluster.worker_pid}/smaps_rollup").read_text()
    [kilobytes] = re.findall(r"^Pss:\s*(\d+) kB$", rollup, re.MULTILINE)
    return int(kilobytes) * 1024


async def steps_of_ten_answers(cluster: Cluster) -> int:
    """Number of steps in which ten requests were answered, in turn by all models."""
    names = [model.id for model in cluster.snapshot().models]
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    conversation = Conversation([{"role": "user", "content": "Hello"}])
    calls = [GenerationRequest(conversation, params, model=names[index % len(names)]) for index in range(NUM_MODELS)]
    answers = await asyncio.gather(*(ask(cluster, call) for call in calls))
    assert {answer.model for answer in answers} == set(names)
    [metrics] = (await cluster.metrics()).values()
    return metrics.counters["num_steps"]


async def test_ten_models_of_one_artifact_take_the_memory_of_one_and_share_steps() -> None:
    used: dict[int, int] = {}
    for num_models in (1, NUM_MODELS):
        async with asyncio.timeout(HANG_S), clustered(manifest(num_models), kind="process") as cluster:
            [replica] = cluster.snapshot().replicas
            assert len(replica.models) == num_models
            assert replica.measured_bytes is not None
            num_steps = await steps_of_ten_answers(cluster)
            assert num_steps < NUM_MODELS * NUM_TOKENS / 2, "most tokens in steps of several requests"
            used[num_models], copy_bytes = worker_bytes(cluster), replica.measured_bytes
    assert used[NUM_MODELS] - used[1] < copy_bytes / 4, "nine further copies would be 36 times that"
