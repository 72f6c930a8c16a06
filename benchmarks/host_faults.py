"""Faults of a cluster on two Ray nodes of this machine, and the same faults of one server without ``hosts:``.

    python -m benchmarks.hosts faults [--times 10] [--only worker,actor,...]

The cluster has two gateways, two routers and three billing replicas of the embedded model. Clients send one request
after the other to either gateway and check each answer. Each fault is repeated; the faults of `ON_FRESH_NODES` get new
nodes each time. Each line has the seconds until every replica is ready again in `/v1/cluster`, or until the fault has
had its effect, and the longest wait of a client for an answer or an error.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks.hosts import LOOK_S, EndedError, Gateway, cluster, made, until
from tests.hosts.two_nodes import Nodes, started

NUM_REPLICAS = 5
CLIENTS = 8
QUESTIONS = tuple(f"Where is my order number {number}?" for number in range(12))
STALL_S = 20.0
HEAD_AWAY_S = 60.0
ERROR_PAUSE_S = 0.2
AFTER_S = 25.0
"""Observation time after the last replica is lost: longer than a request may wait for a replica."""
NO_TLS = "  tls: {ca: /none/ca.pem, cert: /none/cert.pem, key: /none/key.pem}\n"
"""`hosts` fields of a manifest that no worker can use."""


class Load:
    """Clients and their observations."""

    def __init__(self, gateways: Sequence[Gateway]) -> None:
        self.gateways = gateways
        self.expected: dict[tuple[str, str], str] = {}
        self.seen: Counter[str] = Counter()
        self.longest_s = 0.0

    async def learn(self) -> None:
        for model in ("router", "billing"):
            for question in QUESTIONS:
                status, text = await self.gateways[0].ask(model, question)
                assert status == 200, text
                self.expected[model, question] = text

    async def client(self, number: int) -> None:
        turn = number
        while True:
            turn += 1
            model, question = ("router", "billing")[turn % 2], QUESTIONS[turn % len(QUESTIONS)]
            began_s = time.monotonic()
            try:
                status, text = await self.gateways[(number + turn) % len(self.gateways)].ask(model, question)
            except httpx2.HTTPError as error:
                self._note(f"connection: {type(error).__name__}", began_s)
                await asyncio.sleep(LOOK_S)
                continue
            if status == 200:
                self._note("right" if text == self.expected[model, question] else "WRONG", began_s)
            else:
                self._note(f"{status} {text}", began_s)
                await asyncio.sleep(ERROR_PAUSE_S)

    def _note(self, outcome: str, began_s: float) -> None:
        self.seen[outcome] += 1
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the clients during the block."""
        clients = [asyncio.create_task(self.client(number)) for number in range(CLIENTS)]
        try:
            yield
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


class Results:
    """Seconds and outcomes of all repetitions of one fault."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.seen: Counter[str] = Counter()
        self.longest_s = 0.0
        self.num_lines: list[int] = []
        self.num_tracebacks = 0

    def take(self, seconds: float, load: Load | None = None) -> None:
        """Add one repetition with the clients' observations since the previous one."""
        self.seconds.append(seconds)
        if load is not None:
            self.seen += load.seen
            self.longest_s = max(self.longest_s, load.longest_s)
            load.seen.clear()
            load.longest_s = 0.0

    def take_logs(self, gateways: Sequence[Gateway]) -> None:
        """Count the lines and tracebacks in each gateway's log."""
        texts = [gateway.log.read_text() for gateway in gateways]
        self.num_lines += [len(text.splitlines()) for text in texts]
        self.num_tracebacks += sum(text.count("Traceback") for text in texts)

    def show(self) -> None:
        """Print one line with all results."""
        least, middle, most = min(self.seconds), statistics.median(self.seconds), max(self.seconds)
        parts = [
            f"{self.name}, {len(self.seconds)} times: {least:.1f} / {middle:.1f} / {most:.1f} s (least, median, most)",
            f"clients saw {dict(sorted(self.seen.items()))}",
            f"longest wait of a client {self.longest_s:.1f} s",
        ]
        if self.num_lines:
            parts.append(f"at most {max(self.num_lines)} lines of a gateway's log, {self.num_tracebacks} tracebacks")
        print("; ".join(parts), flush=True)


class Faults:
    """Faults of a cluster, each of which returns when all replicas are ready again."""

    def __init__(self, nodes: Nodes, gateways: list[Gateway], folder: Path) -> None:
        self.nodes = nodes
        self.gateways = gateways
        self._folder = folder
        self._turn = 0

    async def ready(self) -> None:
        async def look() -> bool:
            return await self.gateways[0].num_ready() == NUM_REPLICAS == await self.gateways[1].num_ready()

        try:
            await until(look, "every replica")
        except SystemExit:
            for gateway in self.gateways:
                response = (await gateway.http.get("/v1/cluster")).json()
                print(*(f"  {each}" for each in (*response["places"], *response["hosts"])), sep="\n")
            raise

    async def _fewer(self) -> None:
        """Wait until a gateway reports fewer ready replicas."""

        async def look() -> bool:
            return await self.gateways[0].num_ready() < NUM_REPLICAS

        await until(look, "the loss")

    async def _next(self) -> dict[str, Any]:
        self._turn += 1
        places = await self.gateways[0].places()
        return places[self._turn % len(places)]

    async def worker(self) -> None:
        os.kill((await self._next())["pid"], signal.SIGKILL)
        await self._fewer()

    async def actor(self) -> None:
        worker = psutil.Process((await self._next())["pid"])
        os.kill(worker.ppid(), signal.SIGKILL)
        await self._fewer()

    async def raylet(self) -> None:
        self.nodes.kill("host_b")
        await self._fewer()

    async def gateway(self) -> None:
        self._turn += 1
        gateway = self.gateways[self._turn % 2]
        assert gateway.process is not None
        gateway.process.kill()
        await gateway.process.wait()
        await gateway.start()

    async def stall(self) -> None:
        pid = (await self._next())["pid"]
        os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        try:
            await self._fewer()
            await asyncio.sleep(max(0.0, STALL_S - (time.monotonic() - stopped_s)))
        finally:
            os.kill(pid, signal.SIGCONT)

    async def secret(self) -> None:
        """A third gateway has another secret: it is refused, and exits with the reason."""
        secret, nodes = self._folder / "other", self.nodes
        secret.write_text("another secret of more than sixteen bytes\n")
        secret.chmod(0o600)
        third = Gateway(self._folder, "third", nodes)
        own = self.gateways[0].manifest.read_text()
        third.manifest.write_text(own.replace(str(self._folder / "secret"), str(secret)))
        last_line = ""
        try:
            await third.start()
        except EndedError as error:
            last_line = str(error)
        assert "another secret" in last_line, last_line or "the gateway was accepted"

    async def drain(self) -> None:
        """Drain a host, and readmit it when it is empty; one host after the other."""
        self._turn += 1
        host, http = ("host_b", "host_a")[self._turn % 2], self.gateways[self._turn % 2].http
        answer = await http.post(f"/v1/cluster/hosts/{host}/drain")
        assert answer.status_code == 200, answer.text

        async def is_empty() -> bool:
            return all(place["host"] != host for place in await self.gateways[0].places())

        await until(is_empty, f"{host} without replicas")
        await http.delete(f"/v1/cluster/hosts/{host}/drain")

    async def after_raylet(self) -> None:
        """Start a new node, and wait until it has its share of replicas and no host is drained."""
        self.nodes.add("host_b")
        while await self._num_on_host_b() < 2:
            await until(self._is_host_a_drained, "a host that can be drained")
            await until(self._is_shared, "replicas on the new node")
            await self.gateways[0].http.delete("/v1/cluster/hosts/host_a/drain")
            await self.ready()

    async def _num_on_host_b(self) -> int:
        places = await self.gateways[0].places()
        return sum(place["host"] == "host_b" and place["state"] == "ready" for place in places)

    async def _is_shared(self) -> bool:
        return await self._num_on_host_b() >= 2

    async def _is_host_a_drained(self) -> bool:
        """Drain host A as soon as the other host can take its replicas."""
        if await self._is_shared():
            return True
        return (await self.gateways[0].http.post("/v1/cluster/hosts/host_a/drain")).status_code == 200


# -- faults on new nodes, each of which records its duration -----------------------------------------------------------


async def head(folder: Path, results: Results) -> None:
    """Ray's head is stopped for 60 s, after which all nodes exit."""

    def kill(nodes: Nodes) -> None:
        next(each for each in nodes.processes if each.name() == "gcs_server").kill()

    await _gone(folder, results, kill, HEAD_AWAY_S)


async def raylets(folder: Path, results: Results) -> None:
    """The raylets of both nodes are killed, and with them all processes that they started."""

    def kill(nodes: Nodes) -> None:
        for name in ("host_a", "host_b"):
            nodes.kill(name)

    await _gone(folder, results, kill, 0.0)


async def _gone(folder: Path, results: Results, kill: Callable[[Nodes], None], away_s: float) -> None:
    """Wait until both gateways report no ready replica and no host, while clients continue to send requests."""
    with started() as nodes:
        async with cluster(folder, nodes, "pocket://") as gateways:
            bench, load = Faults(nodes, gateways, folder), Load(gateways)
            await bench.ready()
            await load.learn()
            for gateway in gateways:
                gateway.log.write_text("")
            async with load.running():
                began_s = time.monotonic()
                kill(nodes)
                await asyncio.sleep(away_s)

                async def are_gone() -> bool:
                    shown = [(await gateway.http.get("/v1/cluster")).json() for gateway in gateways]
                    ready = [place for each in shown for place in each["places"] if place["state"] == "ready"]
                    return not ready and not any(host["is_there"] for each in shown for host in each["hosts"])

                await until(are_gone, "the loss of all")
                seconds = time.monotonic() - began_s
                await asyncio.sleep(AFTER_S)
            results.take(seconds, load)
            results.take_logs(gateways)


async def invalid(folder: Path, results: Results) -> None:
    """The first manifest has invalid hosts; its file is then corrected, and the next start serves it."""
    with started() as nodes:
        gateway = made(folder, nodes, "pocket://", 1)[0]
        good = gateway.manifest.read_text()
        gateway.manifest.write_text(good.replace("  replicas:\n", f"{NO_TLS}  replicas:\n"))
        with suppress(EndedError):
            await gateway.start()
        gateway.manifest.write_text(good)
        began_s = time.monotonic()
        await gateway.start()
        results.take(time.monotonic() - began_s)
        await gateway.stop()


async def twins(folder: Path, results: Results) -> None:
    """Two gateways start within a second on newly started nodes."""
    with started() as nodes:
        began_s = time.monotonic()
        async with cluster(folder, nodes, "pocket://"):
            results.take(time.monotonic() - began_s)


async def drain_alone(folder: Path, results: Results) -> None:
    """Draining of the only host is refused, without an effect on clients."""
    with started(names=("host_a",)) as nodes:
        async with cluster(folder, nodes, "pocket://") as gateways:
            bench, load = Faults(nodes, gateways, folder), Load(gateways)
            await bench.ready()
            await load.learn()
            async with load.running():
                began_s = time.monotonic()
                answer = await gateways[0].http.post("/v1/cluster/hosts/host_a/drain")
                assert answer.status_code == 409, answer.text
                seconds = time.monotonic() - began_s
                await asyncio.sleep(2.0)
            results.take(seconds, load)


# -- the same faults of one server without hosts ----------------------------------------------------------------------


class OneHost:
    """Faults of a server with all models on its machine, each of which returns when it is ready again."""

    def __init__(self, server: Gateway) -> None:
        self.server = server

    @property
    def _worker(self) -> psutil.Process:
        assert self.server.process is not None
        children = psutil.Process(self.server.process.pid).children(recursive=True)
        return next(each for each in children if "lockstep.worker.child" in each.cmdline())

    async def _until_health(self, status: int) -> None:
        async def is_so() -> bool:
            return (await self.server.http.get("/health")).status_code == status

        await until(is_so, f"health of {status}")

    async def one_worker(self) -> None:
        """The worker is killed."""
        self._worker.kill()
        await self._until_health(503)
        await self._until_health(200)

    async def one_stall(self) -> None:
        """The worker is stopped temporarily."""
        worker = self._worker
        worker.suspend()
        await asyncio.sleep(STALL_S)
        worker.resume()
        await self._until_health(200)

    async def one_server(self) -> None:
        """The server is killed, and restarted by hand."""
        assert self.server.process is not None
        self.server.process.kill()
        await self.server.process.wait()
        await self.server.start()

    async def one_invalid(self) -> None:
        """An invalid manifest is put, then the corrected one."""
        good = self.server.manifest.read_text()
        for text, expected in ((good.replace("max_num_seqs: 63", "block_size: 7"), 422), (good, 200)):
            answer = await self.server.http.put(
                "/v1/manifest", content=text, headers={"Content-Type": "application/yaml"}
            )
            assert answer.status_code == expected, answer.text


ON_FRESH_NODES: dict[str, Callable[[Path, Results], Awaitable[None]]] = {
    "head": head,
    "raylets": raylets,
    "invalid": invalid,
    "twins": twins,
    "drain_alone": drain_alone,
}
ON_NODES = ("worker", "actor", "raylet", "drain", "gateway", "stall", "secret")
ON_ONE_HOST = ("one_worker", "one_stall", "one_server", "one_invalid")


async def faults(times: int, names: Sequence[str] = ()) -> None:
    """Repeat faults, and print a line for each kind; no names: all faults."""
    names = names or (*ON_NODES, *ON_FRESH_NODES, *ON_ONE_HOST)
    if unknown := [name for name in names if name not in (*ON_NODES, *ON_FRESH_NODES, *ON_ONE_HOST)]:
        raise SystemExit(f"unknown faults: {', '.join(unknown)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if on_nodes := [each for each in ON_NODES if each in names]:
            await _on_nodes(folder, times, on_nodes)
        for each in [each for each in ON_FRESH_NODES if each in names]:
            results = Results(each)
            for _ in range(times):
                await ON_FRESH_NODES[each](folder, results)
            results.show()
        if on_one := [each for each in ON_ONE_HOST if each in names]:
            await _on_one_host(folder, times, on_one)


async def _on_nodes(folder: Path, times: int, names: Sequence[str]) -> None:
    with started() as nodes:
        async with cluster(folder, nodes, "pocket://") as gateways:
            bench, load = Faults(nodes, gateways, folder), Load(gateways)
            await bench.ready()
            await load.learn()
            async with load.running():
                for name in names:
                    results = Results(name)
                    for _ in range(times):
                        began_s = time.monotonic()
                        await getattr(bench, name)()
                        await bench.ready()
                        results.take(time.monotonic() - began_s, load)
                        if name == "raylet":
                            await bench.after_raylet()
                    results.show()


async def _on_one_host(folder: Path, times: int, names: Sequence[str]) -> None:
    async with cluster(folder, None, "pocket://", 1) as (server,):
        bench, load = OneHost(server), Load((server,))
        await load.learn()
        async with load.running():
            for name in names:
                results = Results(name)
                for _ in range(times):
                    began_s = time.monotonic()
                    await getattr(bench, name)()
                    await asyncio.sleep(1.0)
                    results.take(time.monotonic() - began_s - 1.0, load)
                results.show()
