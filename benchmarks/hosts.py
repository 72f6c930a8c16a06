"""Faults and cost of a cluster on two Ray nodes of this machine.

    python -m benchmarks.hosts faults [--times 10] [--only worker,actor,raylet,gateway,stall,secret]
    python -m benchmarks.hosts cost [--rounds 5]

Faults: two gateways, two routers and three billing replicas of the embedded model, on two nodes, under load by clients
that ask either gateway one thing after the other and know what each answer must be. A fault is done again and again;
seconds are from it until every replica is ready again, as `/v1/cluster` says. Cost: the same stub manifest with
``hosts:`` and without, asked in turns at half of what the slower one answers, or another share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.hosts.two_nodes import Nodes, started

MANIFEST = """\
cluster: two-hosts
{hosts}
models:
  router: {{source: '{source}'}}
  billing: {{source: '{source}', engine: {{max_num_seqs: 63}}}}
"""
HOSTS = """\
hosts:
  ray: {address}
  secret: {secret}
"""
SEVERAL = """\
  replicas:
    router: {num: 2, resources: {CPU: 0.25}, spread: true}
    billing: {num: 3, resources: {CPU: 0.25}, spread: true}
"""
ALONE = ""
"""One replica of each model, as without ``hosts:``."""
NUM_REPLICAS = 5
CLIENTS = 8
QUESTIONS = tuple(f"Where is my order number {number}?" for number in range(12))
LIMIT_S = 120.0
LOOK_S = 0.02
STALL_S = 20.0
FAULTS = ("worker", "actor", "raylet", "gateway", "stall", "secret")


class Gateway:
    """One `lockstep serve`."""

    def __init__(self, folder: Path, name: str, nodes: Nodes | None) -> None:
        self.manifest = folder / f"{name}.yaml"
        self.http = httpx2.AsyncClient(timeout=LIMIT_S, limits=httpx2.Limits(max_connections=None), trust_env=False)
        self.process: Process | None = None
        self._environment = dict(os.environ) if nodes is None else {**os.environ, **nodes.environment}

    async def start(self) -> None:
        command = [sys.executable, "-m", "lockstep", "serve", "--manifest", str(self.manifest), "--port", "0"]
        self.process = await asyncio.create_subprocess_exec(
            *command, "--disable-log-requests", stdout=PIPE, stderr=DEVNULL, env=self._environment
        )
        assert self.process.stdout is not None
        url = ""
        while not url:
            line = await self.process.stdout.readline()
            assert line, "it ended before it was ready"
            found = re.search(rb"ready on (http://\S+),", line)
            url = found[1].decode() if found else ""
        self.http.base_url = url

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()

    async def ask(self, model: str, question: str, max_tokens: int = 12) -> tuple[int, str]:
        """The status, and the text or the error's code."""
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
        body |= {"temperature": 0}
        answer = await self.http.post("/v1/chat/completions", json=body)
        told = answer.json()
        if answer.status_code != 200:
            return answer.status_code, told["error"]["code"]
        return 200, told["choices"][0]["message"]["content"]

    async def places(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.http.get("/v1/cluster")).json()["places"]
        return found

    async def num_ready(self) -> int:
        try:
            return sum(place["state"] == "ready" and not place["reason"] for place in await self.places())
        except httpx2.HTTPError:
            return 0


class Load:
    """Clients, and what they saw."""

    def __init__(self, gateways: Sequence[Gateway]) -> None:
        self.gateways = gateways
        self.expected: dict[tuple[str, str], str] = {}
        self.seen: Counter[str] = Counter()
        self.slowest_s = 0.0

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
                self.seen[f"connection: {type(error).__name__}"] += 1
                await asyncio.sleep(LOOK_S)
                continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            if status == 200:
                self.seen["right" if text == self.expected[model, question] else "WRONG"] += 1
            else:
                self.seen[f"{status} {text}"] += 1
                await asyncio.sleep(LOOK_S)

    def told(self) -> str:
        seen, slowest_s = dict(sorted(self.seen.items())), self.slowest_s
        self.seen.clear()
        self.slowest_s = 0.0
        return f"clients saw {seen}; the slowest answer took {slowest_s:.1f} s"


async def until(is_so: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await is_so():
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise SystemExit(f"{what} did not come within {LIMIT_S:g} s") from None


class Faults:
    """What is done to a cluster, each until all replicas are ready again."""

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
                told = (await gateway.http.get("/v1/cluster")).json()
                print(*(f"  {each}" for each in (*told["places"], *told["hosts"])), sep="\n")
            raise

    async def _fewer(self) -> None:
        """Until one is missed; a replica that nobody misses was never lost."""

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
        """A third gateway comes with another secret, and is let nowhere."""
        secret, nodes = self._folder / "other", self.nodes
        secret.write_text("another secret of more than sixteen bytes\n")
        secret.chmod(0o600)
        third = Gateway(self._folder, "third", nodes)
        third.manifest.write_text(
            self.gateways[0].manifest.read_text().replace(str(self._folder / "secret"), str(secret))
        )
        starting = asyncio.create_task(third.start())
        await asyncio.wait([starting], timeout=5.0)
        assert not starting.done(), "it was let in"
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await third.stop()

    async def after_raylet(self) -> None:
        """Another node in its place, with its share of replicas."""
        self.nodes.add("host_b")
        drained = False

        async def shared() -> bool:
            nonlocal drained
            places = await self.gateways[0].places()
            num = sum(str(place["host"]) == "host_b" for place in places)
            hosts = {host["name"]: host for host in (await self.gateways[0].http.get("/v1/cluster")).json()["hosts"]}
            if num < 2 and not drained and hosts.get("host_b", {}).get("is_there"):
                drained = (await self.gateways[0].http.post("/v1/cluster/hosts/host_a/drain")).status_code == 200
            return bool(num >= 2)

        await until(shared, "replicas on the new node")
        await self.gateways[0].http.delete("/v1/cluster/hosts/host_a/drain")
        await self.ready()


async def faults(times: int, names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as name, started() as nodes:
        folder = Path(name)
        async with cluster(folder, nodes, "pocket://") as gateways:
            bench, load = Faults(nodes, gateways, folder), Load(gateways)
            await bench.ready()
            await load.learn()
            clients = [asyncio.create_task(load.client(number)) for number in range(CLIENTS)]
            try:
                await asyncio.sleep(2.0)
                print(f"without a fault, 2 s: {load.told()}", flush=True)
                for fault in names:
                    seconds = []
                    for _ in range(times):
                        began_s = time.monotonic()
                        await getattr(bench, fault)()
                        await bench.ready()
                        seconds.append(time.monotonic() - began_s)
                        if fault == "raylet":
                            await bench.after_raylet()
                    spread = f"{min(seconds):.1f} / {statistics.median(seconds):.1f} / {max(seconds):.1f}"
                    print(f"{fault}, {times} times: {spread} s (least, median, most); {load.told()}", flush=True)
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)


class Cost:
    """One of two servers of the same manifest, and what it took."""

    def __init__(self, name: str, gateway: Gateway, processes: Callable[[], list[psutil.Process]]) -> None:
        self.name = name
        self.gateway = gateway
        self._processes = processes
        self.results: list[dict[str, float]] = []

    async def run(self, rate: float, num: int, seed: int, *more: str) -> dict[str, float]:
        """One measurement by `lockstep bench serve`, with the processor time of all processes."""
        command = [sys.executable, "-m", "lockstep", "bench", "serve", "--base-url", str(self.gateway.http.base_url)]
        command += ["--model", "billing", "--request-rate", str(rate), "--num-prompts", str(num), "--seed", str(seed)]
        command += ["--random-input-len", "200", "--random-output-len", "32", "--ignore-eos", "--json", *more]
        before_s = self._cpu_s()
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
        text, _ = await process.communicate()
        found = json.loads(text)
        found["cpu_us_per_token"] = (self._cpu_s() - before_s) * 1e6 / found["total_output_tokens"]
        return {key: value for key, value in found.items() if isinstance(value, int | float)}

    def _cpu_s(self) -> float:
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


CONCURRENCY = 16
COSTS = ("median_ttft_ms", "p99_ttft_ms", "output_throughput", "cpu_us_per_token")


async def cost(rounds: int, num: int, share: float) -> None:
    """Both servers asked in turns: first all at once, then at half of that rate."""
    with tempfile.TemporaryDirectory() as name, started() as nodes:
        folders = Path(name, "one"), Path(name, "two")
        for folder in folders:
            folder.mkdir()
        async with (
            cluster(folders[0], None, "stub://a", 1) as (plain,),
            cluster(folders[1], nodes, "stub://a", 1, ALONE) as (hosted,),
        ):
            await until(lambda: _is_ready(hosted), "every replica")
            both = [
                Cost("without hosts", plain, lambda: _tree(plain)),
                Cost("with hosts", hosted, lambda: [*_tree(hosted), *nodes.processes]),
            ]
            for each in both:
                await each.run(float("inf"), num // 4, 0)
            most = [await each.run(float("inf"), num, 0, "--max-concurrency", str(CONCURRENCY)) for each in both]
            rate = min(found["request_throughput"] for found in most) * share
            for each, found in zip(both, most, strict=True):
                print(f"{each.name}, {CONCURRENCY} at a time: {found['output_throughput']:.0f} tokens/s", flush=True)
            print(f"{share:.0%} of that: {rate:.0f} requests/s, {rounds} rounds of {num} requests in turns")
            for turn in range(rounds):
                for each in both if turn % 2 else both[::-1]:
                    each.results.append(await each.run(rate, num, turn + 1))
            for key in COSTS:
                pairs = [(a[key], b[key]) for a, b in zip(both[0].results, both[1].results, strict=True)]
                more = sorted(b - a for a, b in pairs)
                ratio = statistics.median(b / a for a, b in pairs)
                middle = [statistics.median(values) for values in zip(*pairs, strict=True)]
                print(
                    f"{key}: {middle[0]:.2f} without, {middle[1]:.2f} with; more by {statistics.median(more):.2f}"
                    f" ({more[0]:.2f} to {more[-1]:.2f}), ratio {ratio:.3f}"
                )


async def _is_ready(gateway: Gateway) -> bool:
    return await gateway.num_ready() == 2


def _tree(gateway: Gateway) -> list[psutil.Process]:
    assert gateway.process is not None
    server = psutil.Process(gateway.process.pid)
    return [server, *server.children(recursive=True)]


@contextlib.asynccontextmanager
async def cluster(
    folder: Path, nodes: Nodes | None, source: str, num_gateways: int = 2, replicas: str = SEVERAL
) -> AsyncIterator[list[Gateway]]:
    """Gateways of one manifest; without nodes, on this machine alone."""
    secret = folder / "secret"
    secret.write_text("a secret of more than sixteen bytes\n")
    secret.chmod(0o600)
    hosts = "" if nodes is None else HOSTS.format(address=nodes.address, secret=secret) + replicas
    gateways = [Gateway(folder, f"gateway{number}", nodes) for number in range(num_gateways)]
    for gateway in gateways:
        gateway.manifest.write_text(MANIFEST.format(hosts=hosts, source=source))
    try:
        await asyncio.gather(*(gateway.start() for gateway in gateways))
        yield gateways
    finally:
        for gateway in gateways:
            await gateway.stop()
            await gateway.http.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    breaking = commands.add_parser("faults")
    breaking.add_argument("--times", type=int, default=10)
    breaking.add_argument("--only", default=",".join(FAULTS))
    costing = commands.add_parser("cost")
    costing.add_argument("--rounds", type=int, default=5)
    costing.add_argument("--num", type=int, default=1000)
    costing.add_argument("--share", type=float, default=0.5, help="of the requests that the slower one can answer")
    arguments = parser.parse_args()
    if arguments.command == "cost":
        asyncio.run(cost(arguments.rounds, arguments.num, arguments.share))
    else:
        asyncio.run(faults(arguments.times, arguments.only.split(",")))


if __name__ == "__main__":
    main()
