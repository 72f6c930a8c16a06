"""Faults and cost of a cluster on two Ray nodes of this machine.

    python -m benchmarks.hosts faults [--times 10] [--only worker,actor,...]
    python -m benchmarks.hosts cost [--rounds 5]

Faults: see `benchmarks.host_faults`. Cost: the same stub manifest with and without ``hosts:``, loaded alternately at
half of the slower one's throughput, or another share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
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
LIMIT_S = 120.0
LOOK_S = 0.02


class EndedError(Exception):
    """A server exited before it was ready; has its last line."""


class Gateway:
    """One `lockstep serve` process."""

    def __init__(self, folder: Path, name: str, nodes: Nodes | None) -> None:
        self.manifest = folder / f"{name}.yaml"
        self.http = httpx2.AsyncClient(timeout=LIMIT_S, limits=httpx2.Limits(max_connections=None), trust_env=False)
        self.process: Process | None = None
        self.log = folder / f"{name}.log"
        self._environment = dict(os.environ) if nodes is None else {**os.environ, **nodes.environment}

    async def start(self) -> None:
        command = [sys.executable, "-m", "lockstep", "serve", "--manifest", str(self.manifest), "--port", "0"]
        with open(self.log, "a") as errors:
            self.process = await asyncio.create_subprocess_exec(
                *command, "--disable-log-requests", stdout=PIPE, stderr=errors, env=self._environment
            )
        assert self.process.stdout is not None
        url = ""
        while not url:
            line = await self.process.stdout.readline()
            if not line:
                raise EndedError(self.log.read_text().strip().splitlines()[-1])
            found = re.search(rb"ready on (http://\S+),", line)
            url = found[1].decode() if found else ""
        self.http.base_url = url

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()

    async def ask(self, model: str, question: str, max_tokens: int = 12) -> tuple[int, str]:
        """Send a request; returns the status, and the text or the error code."""
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": max_tokens}
        body |= {"temperature": 0}
        answer = await self.http.post("/v1/chat/completions", json=body)
        response = answer.json()
        if answer.status_code != 200:
            return answer.status_code, response["error"]["code"]
        return 200, response["choices"][0]["message"]["content"]

    async def places(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.http.get("/v1/cluster")).json()["places"]
        return found

    async def num_ready(self) -> int:
        try:
            return sum(place["state"] == "ready" and not place["reason"] for place in await self.places())
        except httpx2.HTTPError:
            return 0


async def until(is_so: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await is_so():
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise SystemExit(f"{what}: not reached within {LIMIT_S:g} s") from None


class Cost:
    """One of two servers of the same manifest, with its measurements."""

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
    """Load both servers alternately: first without a rate limit, then at half of the resulting rate."""
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


def made(
    folder: Path, nodes: Nodes | None, source: str, num_gateways: int = 2, replicas: str = SEVERAL
) -> list[Gateway]:
    """Gateways of one manifest that are not started yet, and their secret."""
    secret = folder / "secret"
    secret.write_text("a secret of more than sixteen bytes\n")
    secret.chmod(0o600)
    hosts = "" if nodes is None else HOSTS.format(address=nodes.address, secret=secret) + replicas
    gateways = [Gateway(folder, f"gateway{number}", nodes) for number in range(num_gateways)]
    for gateway in gateways:
        gateway.manifest.write_text(MANIFEST.format(hosts=hosts, source=source))
    return gateways


@contextlib.asynccontextmanager
async def cluster(
    folder: Path, nodes: Nodes | None, source: str, num_gateways: int = 2, replicas: str = SEVERAL
) -> AsyncIterator[list[Gateway]]:
    """Gateways of one manifest; without nodes, on this machine only."""
    gateways = made(folder, nodes, source, num_gateways, replicas)
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
    breaking.add_argument("--only", default="", help="comma-separated faults (default: all)")
    costing = commands.add_parser("cost")
    costing.add_argument("--rounds", type=int, default=5)
    costing.add_argument("--num", type=int, default=1000)
    costing.add_argument(
        "--share", type=float, default=0.5, help="share of the slower server's throughput (default: 0.5)"
    )
    arguments = parser.parse_args()
    if arguments.command == "cost":
        asyncio.run(cost(arguments.rounds, arguments.num, arguments.share))
    else:
        from benchmarks.host_faults import faults

        asyncio.run(faults(arguments.times, [name for name in arguments.only.split(",") if name]))


if __name__ == "__main__":
    main()
