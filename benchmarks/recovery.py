"""Recovery of a placed replica: seconds until it is ready again after its worker, actor or host's raylet is killed.

    python -m benchmarks.recovery             # ten times each, on two Ray nodes of this machine
    python -m benchmarks.recovery --times 3 --quick

Seconds count from the signal until the replica reports ready, with its stub model loaded. With default settings Ray's
head needs about fifteen seconds to detect a lost node; --quick uses the settings of the tests. Meanwhile a replica of
the same group answers on the other node.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from lockstep.hosts.ray_runtime import RayRuntime
from lockstep.hosts.values import ReplicaName, ReplicaPhase, ReplicaStatus
from tests.hosts.support import demand, write_secret
from tests.hosts.two_nodes import QUICK, Nodes, joined, started

DEMAND = demand("stub", num=2, spread=True)
LIMIT_S = 120.0
LOOK_S = 0.02


async def ready(runtime: RayRuntime, number: int, before: ReplicaStatus | None = None) -> ReplicaStatus:
    """Wait until a replica is ready on another worker than before."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            place = await runtime.ask(ReplicaName(DEMAND.key, number))
            if place is not None and place.state is ReplicaPhase.READY and (before is None or place.pid != before.pid):
                return place
            await asyncio.sleep(LOOK_S)


async def place_both(runtime: RayRuntime) -> list[ReplicaStatus]:
    for number in range(DEMAND.num):
        await runtime.place(DEMAND, number)
    return [await ready(runtime, number) for number in range(DEMAND.num)]


async def timed(runtime: RayRuntime, place: ReplicaStatus, pid: int) -> float:
    """Kill a process; returns the seconds until the lost replica is ready again."""
    began_s = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    await ready(runtime, place.number, place)
    return time.perf_counter() - began_s


async def worker(nodes: Nodes, runtime: RayRuntime) -> float:
    place = (await place_both(runtime))[1]
    return await timed(runtime, place, place.pid)


async def actor(nodes: Nodes, runtime: RayRuntime) -> float:
    place = (await place_both(runtime))[1]
    return await timed(runtime, place, place.actor_pid)


async def raylet(nodes: Nodes, runtime: RayRuntime) -> float:
    place = next(place for place in await place_both(runtime) if place.host == "host_b")
    seconds = await timed(runtime, place, nodes.raylets["host_b"])
    nodes.add("host_b")
    return seconds


KILLS: tuple[Callable[[Nodes, RayRuntime], Awaitable[float]], ...] = (worker, actor, raylet)


async def measure(nodes: Nodes, num_times: int, secret: str) -> None:
    """Repeatedly kill, wait and print."""
    print(f"load average at the beginning {os.getloadavg()[0]:.1f}")
    for kill in KILLS:
        seconds = []
        for number in range(num_times):
            async with joined(nodes, f"{kill.__name__}{number}", secret) as runtime:
                seconds.append(await kill(nodes, runtime))
        print(
            f"{kill.__name__:7} p50 {statistics.median(seconds):5.2f} s, least {min(seconds):.2f} s, "
            f"most {max(seconds):.2f} s; {' '.join(f'{each:.2f}' for each in seconds)}",
            flush=True,
        )
    print(f"load average at the end {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="make Ray's head check for lost nodes more often")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, started(QUICK if options.quick else {}) as nodes:
        asyncio.run(measure(nodes, options.times, write_secret(Path(folder))))


if __name__ == "__main__":
    main()
