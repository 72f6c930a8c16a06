"""A model behind the server's interface, opened and closed around a block, and the questions that tests ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Literal

from lockstep.cluster.base import Accepted, Call, Event, Prompt
from lockstep.cluster.single import SingleModel, SingleModelOptions
from lockstep.engine.loading import LoadOptions
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.sizing import EngineOptions
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.health import HealthLimits
from lockstep.worker.options import WorkerOptions
from tests.waiting import HANG_S

Kind = Literal["thread", "process"]
NAME = "served"
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)


def model_of(source: str, kind: Kind, health: HealthLimits | None = None, **scheduler: object) -> SingleModel:
    load = LoadOptions(EngineOptions(num_blocks=512, scheduler=scheduler))
    worker = WorkerOptions(kind, health=health or HealthLimits())
    return SingleModel(SingleModelOptions(source, (NAME, "alias"), load, worker))


@asynccontextmanager
async def served(
    source: str, kind: Kind, health: HealthLimits | None = None, **scheduler: object
) -> AsyncIterator[SingleModel]:
    """A started model; closed, with its process gone, at the end of the block."""
    model = model_of(source, kind, health, **scheduler)
    await asyncio.wait_for(model.start(), HANG_S)
    try:
        yield model
    finally:
        await asyncio.wait_for(model.close(), HANG_S)


def call(prompt: Prompt, params: SamplingParams | None = None, **more: object) -> Call:
    return Call(NAME, prompt, params or SamplingParams(max_tokens=40), **more)  # type: ignore[arg-type]  # fields by name


async def events_of(model: SingleModel, asked: Call) -> list[Event]:
    async with aclosing(model.stream(asked)) as stream:
        return [event async for event in stream]


async def answer(model: SingleModel, asked: Call) -> RequestOutput:
    last = (await events_of(model, asked))[-1]
    assert isinstance(last, TokenOutput)
    assert last.request is not None
    return last.request


async def read(model: SingleModel, asked: Call, num_tokens: int) -> None:
    """Read so many outputs and leave."""
    async with aclosing(model.stream(asked)) as stream:
        seen = 0
        async for event in stream:
            seen += isinstance(event, TokenOutput)
            if seen >= num_tokens:
                return


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for a truth that comes by itself."""
    async with asyncio.timeout(HANG_S):
        while not is_so():
            await asyncio.sleep(0.01)


async def running(model: SingleModel, num_requests: int) -> None:
    """Wait until so many are being computed."""
    async with asyncio.timeout(HANG_S):
        while (await model.metrics())[NAME].gauges["num_requests_running"] != num_requests:
            await asyncio.sleep(0.01)


async def settled(model: SingleModel) -> None:
    """Nothing is open any more, in the server and in the worker, and all blocks are where they belong."""
    assert model.num_open == 0
    assert model.worker.num_open == 0
    async with asyncio.timeout(HANG_S):
        while True:
            checked = await model.worker.check()
            assert checked is not None
            assert checked.fault == ""
            if checked.num_open == 0:
                break
            await asyncio.sleep(0.01)
    assert not any((await model.metrics())[NAME].gauges.values())


def tokens_of(events: Sequence[Event]) -> list[TokenOutput]:
    first, *rest = events
    assert isinstance(first, Accepted)
    outputs = [event for event in rest if isinstance(event, TokenOutput)]
    assert len(outputs) == len(rest)
    return outputs
