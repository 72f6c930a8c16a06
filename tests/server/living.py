"""A real server on a real socket, in a thread of the test process: what it owns can be looked at while it serves."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import httpx2
import uvicorn
import uvloop

from lockstep.cluster.cluster import Cluster
from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from lockstep.server.request_context import RequestContext
from tests.cluster.support import one_model
from tests.server.process import plain_client
from tests.waiting import HANG_S


@dataclass(frozen=True, slots=True)
class Living:
    """A server that is up."""

    url: str
    """Without ``/v1``."""
    cluster: Cluster
    records: list[RequestContext]
    """Of requests that have ended."""

    def client(self) -> httpx2.Client:
        return plain_client(self.url)

    def get(self, path: str) -> httpx2.Response:
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json=body, headers=headers)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)


@contextlib.contextmanager
def living(source: str, options: ServerOptions | None = None, *, name: str = "m") -> Iterator[Living]:
    """Serve a model under a name until the block ends."""
    with living_cluster(one_model(source, (name,)), options) as server:
        yield server


@contextlib.contextmanager
def living_cluster(cluster: Cluster, options: ServerOptions | None = None) -> Iterator[Living]:
    """Start a cluster and serve it until the block ends."""
    records: list[RequestContext] = []
    app = create_app(cluster, options, observers=[lambda record, _: records.append(record)])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off"))
    ready = threading.Event()
    failures: list[BaseException] = []
    listening = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        await cluster.start()
        try:
            ready.set()
            await server.serve([listening])
        finally:
            await cluster.close()

    def main() -> None:
        try:
            uvloop.run(serve())
        except BaseException as error:
            failures.append(error)
            ready.set()

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert ready.wait(HANG_S), "the server did not come up"
    assert not failures, failures
    try:
        yield Living(f"http://127.0.0.1:{listening.getsockname()[1]}", cluster, records)
    finally:
        server.should_exit = True
        thread.join(HANG_S)
        listening.close()
        assert not failures, failures
