"""Batches in this process: their runner, its store, and a client of the application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from lockstep.server.app import create_app
from lockstep.server.batches import BatchRunner, BatchStore
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import RequestContext
from lockstep.server.serving import Serving
from lockstep.system import SYSTEM, System
from tests.cluster.support import one_model
from tests.server.batches.inputs import CHAT, ENDED, jsonl, line
from tests.waiting import HANG_S, eventually


@dataclass(slots=True)
class Running:
    """One application whose batches run."""

    client: httpx2.AsyncClient
    runner: BatchRunner
    store: BatchStore
    serving: Serving
    answered: list[str] = field(default_factory=list)
    """Ids of the requests of batches that were answered, as often as they were."""

    async def upload(self, num_requests: int, **body: Any) -> httpx2.Response:
        content = jsonl([line(index, **body) for index in range(num_requests)])
        return await self.client.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"})

    async def create(self, file_id: str, window: str = "24h") -> httpx2.Response:
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": window}
        return await self.client.post("/v1/batches", json=body)

    async def begun(self, num_requests: int, **body: Any) -> str:
        """The id of a new batch."""
        uploaded = await self.upload(num_requests, **body)
        found: str = (await self.create(uploaded.json()["id"])).json()["id"]
        return found

    async def batch(self, batch_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get(f"/v1/batches/{batch_id}")).json()
        return found

    async def ended(self, batch_id: str) -> dict[str, Any]:
        async def has_ended() -> bool:
            return (await self.batch(batch_id))["status"] in ENDED

        await eventually(has_ended)
        return await self.batch(batch_id)

    async def results(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        text = (await self.client.get(f"/v1/files/{file_id}/content")).text
        return [json.loads(each) for each in text.splitlines()]


@asynccontextmanager
async def running(
    folder: Path, source: str = "stub://alpha", system: System = SYSTEM, **options: Any
) -> AsyncIterator[Running]:
    cluster, store = one_model(source, ("pocket",)), BatchStore(folder, system=system)
    await cluster.start()
    answered: list[str] = []

    def observe(context: RequestContext, _: float) -> None:
        if context.is_background and context.status == 200:
            answered.append(context.request_id)

    app = create_app(cluster, ServerOptions(**options), (observe,), batch_store=store)
    task = asyncio.create_task(app.state.batches.run())
    try:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test", timeout=HANG_S) as client:
            yield Running(client, app.state.batches, store, app.state.serving, answered)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        store.close()
        await cluster.close()
