"""Small replicas for tests of hosts, links to them, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.hosts.values import Demand, ReplicaStatus
from lockstep.worker.link import WorkerOptions
from lockstep.worker.network import WorkerAddress
from lockstep.worker.supervised import SupervisedWorker
from tests.waiting import HANG_S, eventually
from tests.worker.support import SHORT, ask

SMALL = LoadOptions(EngineOptions(num_blocks=64))


def demand(key: str = "a", source: str = "stub://alpha", **more: object) -> Demand:
    return Demand(key, source, SMALL, **more)  # type: ignore[arg-type]  # fields by name


def write_secret(folder: Path) -> str:
    path = folder / "secret"
    path.write_text("a secret of more than sixteen bytes\n")
    return str(path)


@asynccontextmanager
async def gateway(place: ReplicaStatus, secret: str) -> AsyncIterator[SupervisedWorker]:
    """A link to a placed replica, by which its worker can be asked as one of our own."""
    address = WorkerAddress(place.address, place.port, secret)
    worker = SupervisedWorker(WorkerOptions("network", address=address))
    await worker.start()
    try:
        await eventually(lambda: worker.loaded(place.key) is not None, f"{place} is there")
        yield worker
    finally:
        await asyncio.wait_for(worker.close(), HANG_S)


async def answer(place: ReplicaStatus, secret: str, text: str) -> str:
    """What a placed replica answers to a prompt."""
    async with gateway(place, secret) as worker:
        mailbox = worker.submit(place.key, ask(text, SHORT))
        try:
            async with asyncio.timeout(HANG_S):
                while True:
                    for output in await mailbox.take():
                        if output.request is not None:
                            return output.request.text
        finally:
            worker.leave(mailbox)
