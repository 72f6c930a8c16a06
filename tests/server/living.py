"""A real server on a real socket, in a thread of the test process: what it owns can be looked at while it serves."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
import uvloop

from lockstep.cluster.base import Cluster
from lockstep.server.app import create_app
from lockstep.server.options import ServerOptions
from lockstep.server.record import RequestRecord
from tests.cluster.support import one_model

START_S = 60.0
UNTIL_S = 20.0


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for a truth that comes by itself."""
    end_s = time.monotonic() + UNTIL_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Living:
    """A server that is up."""

    url: str
    """Without ``/v1``."""
    cluster: Cluster
    records: list[RequestRecord]
    """Of requests that have ended."""

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)


@contextlib.contextmanager
def living(source: str, options: ServerOptions | None = None, *, name: str = "m") -> Iterator[Living]:
    """Serve a model under a name until the block ends."""
    cluster = one_model(source, (name,))
    records: list[RequestRecord] = []
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
    assert ready.wait(START_S), "the server did not come up"
    assert not failures, failures
    try:
        yield Living(f"http://127.0.0.1:{listening.getsockname()[1]}", cluster, records)
    finally:
        server.should_exit = True
        thread.join(START_S)
        listening.close()
        assert not failures, failures
