"""Ray as the runtime that places replicas, and has actors of any class, found by their names.

Each replica is a detached actor of its own, found by its name in the cluster's namespace. Ray finds it a host, starts
it again when its process or its host is lost, and takes no part in requests. Calls of Ray that may block run on
threads; every one is bounded, and what Ray raises comes as `PlacingError`. An error of ours that an actor's method
raises comes as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from lockstep.engine.kv_tiers import KVStoreOptions
from lockstep.errors import LockstepError, PlacingError
from lockstep.hosts.ray_connection import (
    CALL_LIMIT_S,
    Calls,
    Connection,
    choose_address,
    imported,
    prepare_environment,
    sentence,
)
from lockstep.hosts.replica_actor import Here, ReplicaHost
from lockstep.hosts.values import Demand, Host, LinkOptions, ReplicaName, ReplicaStatus, choose_host
from lockstep.worker.link import WorkerOptions
from lockstep.worker.logs import log_to_stderr

log = logging.getLogger(__name__)

T = TypeVar("T")

CONTROLLER = "controller"
"""Name of the actor that replicas report to; its method is `placed`."""
ASK_LIMIT_S = 1.0
"""Limit of an actor's report of its state; one that is not placed yet does not answer."""
END_LIMIT_S = 10.0
"""For the worker of a replica that is removed; then its actor is killed, and the worker with it."""
GONE_LIMIT_S = 10.0
"""For the name of a killed actor to be free again."""
HEAD = "node:__internal_head__"
"""Ray's resource of the host with its head, without which no actor is placed: others than replicas live there, since
they would be of no use without it, and are lost with no other host."""
START_LIMIT_S = 60.0
"""For an actor to be made, and its process to be started, perhaps by another one at the same time."""
START_AGAIN_S = 0.5
STARTED = ""
"""Call that an actor answers as soon as it has started."""
LOOK_S = 0.05
MAX_CONCURRENCY = 1000
"""Calls that an actor works on at once; most of them wait for news."""
RESTART_PAUSE_S = 1.0
"""Before an actor gives up that cannot start; Ray starts the next at once."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options that all replicas of a cluster are placed with; paths are those of each host."""

    link: LinkOptions
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    store: KVStoreOptions | None = None


async def connect(ray: str, cluster: str, replicas: ReplicaOptions) -> RayRuntime:
    """Join a Ray cluster, or start one of our own that ends with this process.

    Args:
        ray: ``HOST:PORT``; or ``auto``: RAY_ADDRESS, the cluster that this machine belongs to, or else one of our own
            that listens on loopback only.
        cluster: name of the Lockstep cluster, of which there may be several on one Ray cluster.

    Raises:
        PlacingError: it cannot be reached, does not let us in, or Ray is not installed.
    """
    address = await choose_address(ray)
    prepare_environment(address)
    connection = Connection(address)
    await connection.open()
    return RayRuntime(cluster, replicas, connection)


class RayRuntime:
    """`lockstep.hosts.values.Runtime` by Ray's actors. Event loop only.

    It can be given to an actor, and is there by that actor's own connection.
    """

    def __init__(self, cluster: str, replicas: ReplicaOptions, connection: Connection | None = None) -> None:
        self.cluster = cluster
        self.namespace = f"lockstep.{cluster}"
        self._replicas = replicas
        self._connection = connection
        """None: this process belongs to Ray."""
        self._calls: Calls | None = None
        self._placing = asyncio.Lock()
        self._node_ids: dict[ReplicaName, str] = {}
        """Hosts of replicas, by their own word, and before that by our choice."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RayRuntime, (self.cluster, self._replicas)

    async def close(self) -> None:
        """Leave Ray; what is placed stays, unless the cluster is our own."""
        if self._connection is not None:
            await self._connection.close()

    # -- actors of any class ------------------------------------------------------------------------------------------

    async def named(self, name: str, kind: Callable[..., object], *args: object) -> NamedActor:
        """Find the detached actor of a name, or have one made of a plain asyncio class; its `start` is awaited first.

        Processes of a Ray cluster that has just been started take their time, more so where several ask at once.

        Raises:
            PlacingError: it does not answer within `START_LIMIT_S`.
        """
        actor = NamedActor(self, name, kind, args)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + START_LIMIT_S
        while True:
            try:
                await actor.call(STARTED, limit_s=max(LOOK_S, until_s - loop.time()))
                return actor
            except PlacingError:
                if loop.time() >= until_s:
                    raise
                await asyncio.sleep(START_AGAIN_S)

    def find(self, name: str) -> NamedActor:
        """The detached actor of a name, whether it is there or not."""
        return NamedActor(self, name)

    async def end(self, name: str) -> None:
        """Kill the actor of a name for good; one that is not there is gone already."""
        await self.do(f"{name} cannot be ended", partial(_kill, self.namespace, name), GONE_LIMIT_S)

    async def do(self, what: str, work: Callable[[], T], limit_s: float = CALL_LIMIT_S) -> T:
        """Do work of Ray's that may block; PlacingError: it takes too long, or Ray raised an error over it."""
        if self._calls is None:
            self._calls = Calls()
        return await self._calls.do(what, work, limit_s)

    # -- Runtime ------------------------------------------------------------------------------------------------------

    def use(self, link: LinkOptions) -> bool:
        is_other = link != self._replicas.link
        self._replicas = replace(self._replicas, link=link)
        return is_other

    async def hosts(self) -> Sequence[Host]:
        return await self.do("hosts cannot be listed", _hosts)

    async def found(self) -> Sequence[ReplicaName]:
        names = await self.do("replicas cannot be listed", partial(_names, self.namespace))
        return sorted(found for name in names if (found := _replica_name(name)) is not None)

    async def place(self, demand: Demand, number: int, avoid: Sequence[str] = ()) -> None:
        name = ReplicaName(demand.key, number)
        args = (self, demand, number, self._replicas)
        async with self._placing:  # each sees where those before it go
            host = choose_host(demand, await self.hosts(), avoid, self._node_ids)
            if host is not None:
                self._node_ids[name] = host.node_id
            label, options = demand.label(number), _options(demand, avoid)
            make = partial(_actor, self.namespace, str(name), PlacedReplica, args, options, host, label)
            await self.do(f"{label} cannot be placed", make)

    async def remove(self, name: ReplicaName) -> None:
        actor = self.find(str(name))
        with contextlib.suppress(PlacingError):
            await actor.call("place", limit_s=ASK_LIMIT_S)  # one that waits for room has nothing to end
            await actor.call("close", limit_s=END_LIMIT_S)
        await self.end(str(name))
        self._node_ids.pop(name, None)

    async def ask(self, name: ReplicaName) -> ReplicaStatus | None:
        try:
            place = await self.find(str(name)).call("place", limit_s=ASK_LIMIT_S)
        except LockstepError:
            return None
        if not isinstance(place, ReplicaStatus):
            return None
        self._node_ids[name] = place.node_id
        return place


class NamedActor:
    """A detached actor, by its name: its methods are called as if it were here.

    Args:
        kind: the class that it is made of where it is not there; None: it is not made.
    """

    def __init__(
        self, runtime: RayRuntime, name: str, kind: Callable[..., object] | None = None, args: tuple[object, ...] = ()
    ) -> None:
        self._runtime = runtime
        self._name = name
        self._kind = kind
        self._args = args
        self._handle: Any = None

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self.call, method)

    async def handle(self) -> Any:
        """Ray's handle of it.

        Raises:
            PlacingError: it is not there.
        """
        if self._handle is None:
            options = {"resources": {HEAD: 0.001}}
            make = partial(_actor, self._runtime.namespace, self._name, self._kind, self._args, options)
            self._handle = await self._runtime.do(f"{self._name} cannot be found", make)
        return self._handle

    async def call(self, method: str, *args: object, limit_s: float = CALL_LIMIT_S) -> Any:
        """Call a method, and return or raise what it does.

        Raises:
            PlacingError: the actor does not answer within the limit.
        """
        what = f"{self._name} does not answer"
        handle = await self.handle()
        try:
            async with asyncio.timeout(limit_s):
                submitted = await self._runtime.do(what, lambda: handle.call.remote(method, args).future(), limit_s)
                is_value, answer = await asyncio.wrap_future(submitted)
        except TimeoutError:
            raise PlacingError(f"{what} within {limit_s:g} s") from None
        except PlacingError:
            raise
        except Exception as error:
            self._handle = None  # a successor of its name may have come
            raise PlacingError(f"{what}: {sentence(error)}") from error
        if not is_value:
            raise answer
        return answer


# -- in an actor's process --------------------------------------------------------------------------------------------


class Resident:
    """Inhabitant of an actor's process: an object of a plain asyncio class, and the calls that come for it."""

    def __init__(self, name: str, kind: Callable[..., object], args: tuple[object, ...]) -> None:
        log_to_stderr("text", "info", name)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, by its count of processors; ours know better
        with contextlib.suppress(OSError):  # only a superuser may; others say so to `ray start`
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._resident = kind(*args)
        self._starting = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        start = getattr(self._resident, "start", None)
        try:
            if start is not None:
                await start()
        except Exception as error:
            defect = None if isinstance(error, LockstepError) else error
            log.error("it cannot start, and is started again: %s", error, exc_info=defect)
            await asyncio.sleep(RESTART_PAUSE_S)
            os._exit(1)

    async def call(self, method: str, args: tuple[object, ...]) -> tuple[bool, object]:
        """Call a method: True and its value, or False and its error, which Ray would wrap in one of its own."""
        await asyncio.shield(self._starting)
        if method == STARTED:
            return True, None
        try:
            return True, await getattr(self._resident, method)(*args)
        except LockstepError as error:
            return False, error


class PlacedReplica:
    """`ReplicaHost` on the host that Ray found for it; it reports to the current controller."""

    def __init__(self, runtime: RayRuntime, demand: Demand, number: int, options: ReplicaOptions) -> None:
        self._runtime = runtime
        self._demand = demand
        self._number = number
        self._options = options
        self._host: ReplicaHost | None = None

    async def start(self) -> None:
        """Start its worker."""
        here = await self._runtime.do("this host is not known", _here)
        owner, options = self._runtime.find(CONTROLLER), self._options
        self._host = ReplicaHost(
            self._demand, self._number, options.worker, options.link, here, partial(owner.call, "placed"), options.store
        )
        await self._host.start()

    async def place(self) -> ReplicaStatus:
        """Its own word of how it is."""
        assert self._host is not None, "it has started"
        return self._host.place

    async def close(self) -> None:
        """End its worker."""
        assert self._host is not None, "it has started"
        await self._host.close()


# -- Ray's side, on threads -------------------------------------------------------------------------------------------


def _actor(
    namespace: str,
    name: str,
    kind: Callable[..., object] | None,
    args: tuple[object, ...],
    options: Mapping[str, Any],
    host: Host | None = None,
    label: str = "",
) -> Any:
    """Handle of a named actor, which is made if there is a class; at once, also where no host has room.

    Args:
        host: where it is to be, now and when it is started again, as long as there is room.
        label: for its log; empty: its name.
    """
    ray = imported()
    if kind is None:
        return ray.get_actor(name, namespace)
    if host is not None:
        at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        options = {**options, "scheduling_strategy": at(host.node_id, soft=True, _spill_on_unavailable=True)}
    made = ray.remote(Resident).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=MAX_CONCURRENCY,
        **{"num_cpus": 0, **options},
    )
    return made.remote(label or name, kind, args)


def _options(demand: Demand, avoid: Sequence[str]) -> dict[str, Any]:
    """Ray's options of a replica: resources, hosts that it may be on, and how several lie where no host is chosen."""
    named = dict(demand.resources)
    strategy = "SPREAD" if demand.spread else "DEFAULT"
    options: dict[str, Any] = {"num_cpus": named.pop("CPU", 0), "scheduling_strategy": strategy}
    if named_memory := int(named.pop("memory", 0)):
        options["memory"] = named_memory
    elif not any(demand.resources.values()):
        options["memory"] = 1  # Ray passes over a host that was chosen for who asks for nothing
    if "GPU" in named:
        options["num_gpus"] = named.pop("GPU")
    if named:
        options["resources"] = named
    if avoid:
        options["label_selector"] = {"ray.io/node-id": f"!in({','.join(avoid)})"}
    return options


def _kill(namespace: str, name: str) -> None:
    """Kill an actor for good, and wait until its name is free."""
    ray = imported()
    with contextlib.suppress(ValueError):  # it is gone already
        ray.kill(ray.get_actor(name, namespace), no_restart=True)
    while name in _names(namespace):
        time.sleep(LOOK_S)


def _names(namespace: str) -> list[str]:
    found = imported().util.list_named_actors(all_namespaces=True)
    return [each["name"] for each in found if each["namespace"] == namespace]


def _replica_name(name: str) -> ReplicaName | None:
    key, mark, number = name.rpartition("#")
    return ReplicaName(key, int(number)) if mark and number.isdecimal() else None


def _hosts() -> list[Host]:
    """All hosts by name; a lost one that has come back under its name is listed once."""
    ray = imported()
    free, nodes = ray._private.state.available_resources_per_node(), ray.nodes()
    names = Counter(node["NodeName"] for node in nodes if node["Alive"])
    hosts: dict[str, Host] = {}
    for node in sorted(nodes, key=lambda node: bool(node["Alive"])):
        name, node_id = node["NodeName"] or node["NodeManagerAddress"], node["NodeID"]
        if node["Alive"] and names[name] > 1:
            name = f"{name}-{node_id[:6]}"
        total, left = _own(node["Resources"]), _own(free.get(node_id, {}))
        hosts[name] = Host(name, node_id, node["NodeManagerAddress"], bool(node["Alive"]), total, left)
    return sorted(hosts.values(), key=lambda host: host.name)


def _own(resources: Mapping[str, float]) -> dict[str, float]:
    """Resources that can be requested: without those that Ray counts for itself."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if name != "object_store_memory" and not name.startswith("node:")
    }


def _here() -> Here:
    node_id = imported().get_runtime_context().get_node_id()
    host = next(host for host in _hosts() if host.node_id == node_id)
    return Here(host.name, node_id, host.address)
