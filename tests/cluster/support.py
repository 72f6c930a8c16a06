"""A model behind the server's interface, opened and closed around a block, and the questions that tests ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal

from lockstep.cluster.base import Accepted, Event
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import Manifest
from lockstep.cluster.resolve import LoadProgress
from lockstep.cluster.state import ClusterOptions
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import GenerationRequest, Prompt
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.health import HealthLimits
from lockstep.worker.link import WorkerOptions
from lockstep.worker.supervised import SupervisedWorker
from tests.waiting import HANG_S, eventually

Kind = Literal["thread", "process"]
NAME = "served"
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)


def one_model(
    source: str,
    names: Sequence[str] = (NAME,),
    load: LoadOptions | None = None,
    worker: WorkerOptions | None = None,
    progress: LoadProgress | None = None,
) -> Cluster:
    """As `lockstep serve SOURCE` makes it; with the model in a thread of this process if nothing is said."""
    options = ClusterOptions(load=load or LoadOptions(), worker=worker or WorkerOptions(), is_fixed=True)
    return Cluster(Manifest.of_model(source, names), options, progress=progress)


def model_of(source: str, kind: Kind, health: HealthLimits | None = None, **scheduler: Any) -> Cluster:
    load = LoadOptions(EngineOptions(num_blocks=512, **scheduler))
    return one_model(source, (NAME, "alias"), load, WorkerOptions(kind, health=health or HealthLimits()))


def worker_of(model: Cluster) -> SupervisedWorker:
    worker = model.state.worker
    assert isinstance(worker, SupervisedWorker), "it has no hosts"
    return worker


@asynccontextmanager
async def served(
    source: str, kind: Kind, health: HealthLimits | None = None, **scheduler: object
) -> AsyncIterator[Cluster]:
    """A started model; closed, with its process gone, at the end of the block."""
    model = model_of(source, kind, health, **scheduler)
    await asyncio.wait_for(model.start(), HANG_S)
    try:
        yield model
    finally:
        await asyncio.wait_for(model.close(), HANG_S)


def call(prompt: Prompt, params: SamplingParams | None = None, **more: object) -> GenerationRequest:
    return GenerationRequest(prompt, params or SamplingParams(max_tokens=40), model=NAME, **more)  # type: ignore[arg-type]  # fields by name


async def events_of(model: Cluster, asked: GenerationRequest) -> list[Event]:
    async with aclosing(model.stream(asked)) as stream:
        return [event async for events in stream for event in events]


async def answer(model: Cluster, asked: GenerationRequest) -> RequestOutput:
    last = (await events_of(model, asked))[-1]
    assert isinstance(last, TokenOutput)
    assert last.request is not None
    return last.request


async def read(model: Cluster, asked: GenerationRequest, num_tokens: int) -> None:
    """Read so many outputs and leave."""
    async with aclosing(model.stream(asked)) as stream:
        seen = 0
        async for events in stream:
            seen += sum(isinstance(event, TokenOutput) for event in events)
            if seen >= num_tokens:
                return


async def running(model: Cluster, num_requests: int) -> None:
    """Wait until so many are being computed."""

    async def are_running() -> bool:
        return (await model.metrics())[NAME].gauges["num_requests_running"] == num_requests

    await eventually(are_running)


async def settled(model: Cluster) -> None:
    """Nothing is open any more, in the server and in the worker, and all blocks are where they belong."""
    assert model.num_open == 0
    assert worker_of(model).num_open == 0

    async def has_none_open() -> bool:
        checked = await worker_of(model).check()
        assert checked is not None
        assert checked.fault == ""
        return checked.num_open == 0

    await eventually(has_none_open)
    assert not any((await model.metrics())[NAME].gauges.values())


def tokens_of(events: Sequence[Event]) -> list[TokenOutput]:
    first, *rest = events
    assert isinstance(first, Accepted)
    outputs = [event for event in rest if isinstance(event, TokenOutput)]
    assert len(outputs) == len(rest)
    return outputs
