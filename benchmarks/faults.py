"""Recovery from faults: time until all models answer again, and the effects on clients.

    python -m benchmarks.faults                  # killed worker, hanging worker, unloaded models
    python -m benchmarks.faults --kills 5 --worker-timeout 5

A real server has five stub models that load in 0.3 s, one of them only on demand, under load by clients with one
request at a time. The worker is killed repeatedly, each time as soon as its first model is loaded, so that the loads of
the others are lost with it. Then the worker is stopped by SIGSTOP. Then each model is unloaded by hand repeatedly.
Times count from the start of the worker process, which needs about one second on a quiet machine before it can load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx2
import psutil

LOAD_MS = 300
MANIFEST = f"""\
cluster: faults
models:
  router: {{source: 'stub://router?load_ms={LOAD_MS}&field=intent&ids=billing,legal', priority: critical}}
  specialists:
    - {{id: billing, source: 'stub://billing?load_ms={LOAD_MS}&step_ms=5'}}
    - {{id: technical, source: 'stub://technical?load_ms={LOAD_MS}&step_ms=5', co_activation: router}}
    - {{id: legal, source: 'stub://legal?load_ms={LOAD_MS}&step_ms=5', tier: standby}}
fallback: {{source: 'stub://fallback?load_ms={LOAD_MS}'}}
routing:
  entry: router
  dispatch_rule: router.output.intent -> specialists.{{intent}}
"""
MODELS = ("router", "billing", "technical", "legal", "fallback")
CLIENTS_PER_MODEL = 3
LOOK_S = 0.02
LIMIT_S = 120.0
"""Time limit of each wait in seconds; after it the run is aborted."""
UNLOADS_S = 10.0
"""Duration of repeated unloading in seconds."""
WORKER = "lockstep.worker.child"


class Bench:
    """A server under load, with the observations of its clients."""

    def __init__(self, process: Process, http: httpx2.AsyncClient) -> None:
        self.http = http
        self._server = psutil.Process(process.pid)
        self.seen: Counter[str] = Counter()
        """Number of answers by status and error code."""
        self.slowest_s = 0.0
        """Durations of the answers."""

    def worker(self) -> psutil.Process | None:
        """Device worker; None: none is running."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in self._server.children():
                with contextlib.suppress(psutil.Error):
                    if WORKER in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                        return child
        return None

    async def another(self, pid: int) -> psutil.Process:
        """Wait for a worker with another process id."""
        found: list[psutil.Process] = []

        async def look() -> bool:
            worker = self.worker()
            if worker is not None and worker.pid != pid:
                found.append(worker)
            return bool(found)

        await until(look)
        return found[0]

    async def resident(self) -> set[str]:
        models = (await self.http.get("/v1/cluster")).json()["models"]
        return {model["id"] for model in models if model["state"] == "resident"}

    async def back(self) -> dict[str, float]:
        """Wait until all models are ready; returns the wall time at which each became ready."""
        back: dict[str, float] = {}

        async def look() -> bool:
            for name in await self.resident():
                back.setdefault(name, time.time())
            return len(back) == len(MODELS)

        await until(look)
        return back

    async def client(self, name: str) -> None:
        """Send one request after the other, forever."""
        body = {"model": name, "messages": [{"role": "user", "content": "I was charged twice"}], "max_tokens": 12}
        while True:
            began_s = time.monotonic()
            try:
                answer = await self.http.post("/v1/chat/completions", json=body)
                code = "" if answer.status_code == 200 else f" {answer.json()['error']['code']}"
                self.seen[f"{answer.status_code}{code}"] += 1
                if answer.status_code == 200:
                    self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                else:
                    await asyncio.sleep(LOOK_S)
            except httpx2.HTTPError as error:
                self.seen[type(error).__name__] += 1

    def client_summary(self) -> str:
        """Observations of the clients since the last call."""
        seen, slowest_s = dict(sorted(self.seen.items())), self.slowest_s
        self.seen.clear()
        self.slowest_s = 0.0
        return f"clients saw {seen}; the slowest answer took {slowest_s:.1f} s"


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await is_so():
            await asyncio.sleep(LOOK_S)


@contextlib.asynccontextmanager
async def under_load(worker_timeout_s: float) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory() as directory:
        manifest = Path(directory) / "cluster.yaml"
        manifest.write_text(MANIFEST)
        command = [sys.executable, "-m", "lockstep", "serve", "--manifest", str(manifest), "--port", "0"]
        command += ["--worker-timeout", f"{worker_timeout_s:g}", "--disable-log-requests"]
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        assert process.stdout is not None
        try:
            url = ""
            while not url:
                found = re.search(rb"ready on (http://\S+),", await process.stdout.readline())
                url = found[1].decode() if found else ""
            limits = httpx2.Limits(max_connections=None)
            async with httpx2.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits, trust_env=False) as http:
                bench = Bench(process, http)
                names = [name for name in MODELS for _ in range(CLIENTS_PER_MODEL)]
                clients = [asyncio.create_task(bench.client(name)) for name in names]
                try:
                    await bench.back()
                    yield bench
                finally:
                    for client in clients:
                        client.cancel()
                    await asyncio.gather(*clients, return_exceptions=True)
        finally:
            process.terminate()
            await process.wait()


async def killed(bench: Bench, num_kills: int) -> None:
    bench.client_summary()
    print(f"The worker is killed {num_kills} times, each time when its first model is ready:")
    for number in range(1, num_kills + 1):
        worker = bench.worker()
        assert worker is not None
        killed_s = time.time()
        os.kill(worker.pid, signal.SIGKILL)
        started_s = max(killed_s, (await bench.another(worker.pid)).create_time())
        if number < num_kills:
            await until(lambda: _any(bench.resident()))
            print(f"  {number}: the next worker starts after {started_s - killed_s:.1f} s")
    back = await bench.back()
    times = ", ".join(f"{name} {at_s - started_s:.1f} s" for name, at_s in sorted(back.items(), key=lambda at: at[1]))
    first_s, last_s = min(back.values()), max(back.values())
    print(f"  {num_kills}: the next worker starts after {started_s - killed_s:.1f} s; from then on: {times}")
    print(
        f"  all models are back {last_s - started_s:.1f} s after their worker, {last_s - first_s:.1f} s after the first"
    )
    print(f"  {bench.client_summary()}")


async def hung(bench: Bench, worker_timeout_s: float) -> None:
    bench.client_summary()
    worker = bench.worker()
    assert worker is not None
    stopped_s = time.time()
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        started_s = (await bench.another(worker.pid)).create_time()
        back = await bench.back()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGCONT)
    back_s = max(back.values()) - started_s
    print(f"The worker hangs (SIGSTOP) with a worker timeout of {worker_timeout_s:g} s:")
    print(f"  the next worker starts after {started_s - stopped_s:.1f} s; all models are ready {back_s:.1f} s later")
    print(f"  {bench.client_summary()}")


async def unloaded(bench: Bench) -> None:
    until_s, num_unloads = time.monotonic() + UNLOADS_S, 0
    while time.monotonic() < until_s:
        for name in MODELS:
            answer = await bench.http.post(f"/v1/models/{name}/unload")
            answer.raise_for_status()
            num_unloads += 1
    print(f"Models are unloaded by hand, {num_unloads} times in {UNLOADS_S:g} s:")
    print(f"  {bench.client_summary()}")


async def _any(found: Awaitable[set[str]]) -> bool:
    return bool(await found)


async def run(num_kills: int, worker_timeout_s: float) -> None:
    async with under_load(worker_timeout_s) as bench:
        await killed(bench, num_kills)
    async with under_load(worker_timeout_s) as bench:
        await hung(bench, worker_timeout_s)
    async with under_load(worker_timeout_s) as bench:
        bench.client_summary()
        await unloaded(bench)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--worker-timeout", type=float, default=10.0)
    arguments = parser.parse_args()
    asyncio.run(run(arguments.kills, arguments.worker_timeout))


if __name__ == "__main__":
    main()
