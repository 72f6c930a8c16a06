"""A cluster of a manifest, started and closed around a block, and the questions that tests ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.cluster.backend import Backend
from lockstep.cluster.base import Accepted, Hop, Routed
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.planner import PlanPolicy
from lockstep.cluster.snapshot import ModelSnapshot
from lockstep.cluster.state import ClusterOptions
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.system import SYSTEM, System
from lockstep.worker.health import HealthLimits
from lockstep.worker.link import WorkerOptions
from tests.cluster.support import Kind
from tests.waiting import HANG_S

SUPPORT = (Path(__file__).resolve().parents[2] / "examples" / "customer-support.yaml").read_text()
QUICK = PlanPolicy(max_wait_s=0.3, linger_s=0.01)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a call."""

    model: str
    hops: tuple[Hop, ...]
    output: RequestOutput

    @property
    def text(self) -> str:
        return self.output.text


@asynccontextmanager
async def clustered(
    text: str,
    backend: str = "auto",
    kind: Kind = "thread",
    policy: PlanPolicy = QUICK,
    drain_s: float = HANG_S,
    health: HealthLimits | None = None,
    system: System = SYSTEM,
) -> AsyncIterator[Cluster]:
    """A started cluster; at the end of the block nothing may be left open, and all blocks are where they belong."""
    worker = WorkerOptions(kind, health=health or HealthLimits(), system=system)
    options = ClusterOptions(Backend(backend), worker=worker, policy=policy, drain_s=drain_s)
    cluster = Cluster(parse(text), options)
    await asyncio.wait_for(cluster.start(), HANG_S)
    try:
        yield cluster
        assert cluster.num_open == 0
        assert await cluster.check() == ""
        for replica in cluster.snapshot().replicas:
            assert (replica.num_busy, replica.num_waiting) == (0, 0), replica.key
        for model in cluster.snapshot().models:
            assert (model.num_running, model.num_waiting) == (0, 0), model.id
    finally:
        await asyncio.wait_for(cluster.close(), HANG_S)


def asking(
    words: str, model: str | None = None, max_tokens: int = 40, session: str | None = None, **more: object
) -> GenerationRequest:
    conversation = Conversation([{"role": "user", "content": words}])
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(conversation, params, session_id=session, model=model, **more)  # type: ignore[arg-type]  # fields by name


async def ask(cluster: Cluster, call: GenerationRequest) -> Answer:
    async with asyncio.timeout(HANG_S), aclosing(cluster.stream(call)) as stream:
        events = [event async for batch in stream for event in batch if not isinstance(event, Routed)]
    first, last = events[0], events[-1]
    assert isinstance(first, Accepted)
    assert isinstance(last, TokenOutput)
    assert last.request is not None
    return Answer(first.model, first.hops, last.request)


async def say(cluster: Cluster, words: str, model: str | None = None, **more: object) -> Answer:
    return await ask(cluster, asking(words, model, **more))  # type: ignore[arg-type]  # as `asking`


def model_of(cluster: Cluster, id_: str) -> ModelSnapshot:
    return next(model for model in cluster.snapshot().models if model.id == id_)
