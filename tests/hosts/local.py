"""A runtime for tests: two pretended hosts on this machine, whose replicas run as tasks with real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence

from lockstep.hosts.replica_actor import LocalHost, ReplicaHost
from lockstep.hosts.values import Demand, Host, LinkOptions, ReplicaName, ReplicaStatus
from lockstep.worker.link import WorkerOptions


class LocalRuntime:
    """Places replicas by the CPUs that hosts have, and again where there is room when their host is lost.

    Args:
        hosts: CPUs of each, by name.
    """

    def __init__(self, secret: str, hosts: Mapping[str, float], worker: WorkerOptions | None = None) -> None:
        self.tell: Callable[[ReplicaStatus], Awaitable[None]]
        self._link = LinkOptions(secret)
        self._worker = worker or WorkerOptions("process")
        self._cpus = dict(hosts)
        self._lost: list[str] = []
        self._wanted: dict[ReplicaName, tuple[Demand, tuple[str, ...]]] = {}
        self._running: dict[ReplicaName, ReplicaHost] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def use(self, link: LinkOptions) -> bool:
        is_other, self._link = link != self._link, link
        return is_other

    async def hosts(self) -> Sequence[Host]:
        free = dict(self._cpus)
        for name, replica in self._running.items():
            free[replica.place.host] -= self._wanted[name][0].resources.get("CPU", 0.0)
        return [
            Host(name, f"id-{name}", "127.0.0.1", name not in self._lost, {"CPU": cpus}, {"CPU": free[name]})
            for name, cpus in self._cpus.items()
        ]

    async def found(self) -> Sequence[ReplicaName]:
        return list(self._wanted)

    async def place(self, demand: Demand, number: int, avoid: Sequence[str] = ()) -> None:
        self._wanted[ReplicaName(demand.key, number)] = (demand, tuple(avoid))
        await self._fill()

    async def remove(self, name: ReplicaName) -> None:
        self._wanted.pop(name, None)
        replica = self._running.pop(name, None)
        if replica is not None:
            closing = asyncio.get_running_loop().create_task(replica.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            await asyncio.shield(closing)  # also where whoever asked for it ends first
        await self._fill()

    async def ask(self, name: ReplicaName) -> ReplicaStatus | None:
        replica = self._running.get(name)
        return None if replica is None else replica.place

    async def close(self) -> None:
        running, self._running, self._wanted = self._running, {}, {}
        await asyncio.gather(*(replica.close() for replica in running.values()), *self._closing)

    # -- faults ---------------------------------------------------------------------------------------------------

    def kill(self, name: ReplicaName) -> None:
        """SIGKILL a replica's worker."""
        os.kill(self._running[name].place.pid, signal.SIGKILL)

    async def lose(self, host: str) -> None:
        """A host is gone, with all that was on it."""
        self._lost.append(host)
        for name in [name for name, replica in self._running.items() if replica.place.host == host]:
            replica = self._running.pop(name)
            os.kill(replica.place.pid, signal.SIGKILL)
            await replica.close()
        await self._fill()

    async def _fill(self) -> None:
        for name, (demand, avoid) in self._wanted.items():
            if name in self._running:
                continue
            for host in sorted(await self.hosts(), key=lambda each: -each.free["CPU"] if demand.spread else 0):
                if host.is_there and host.node_id not in avoid and host.free["CPU"] >= demand.resources.get("CPU", 0.0):
                    here = LocalHost(host.name, host.node_id, host.address)
                    replica = ReplicaHost(demand, name.number, self._worker, self._link, here, self.tell)
                    self._running[name] = replica
                    await replica.start()
                    break
