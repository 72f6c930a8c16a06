"""Ray runtime: places replicas as Ray actors, and runs actors of any class that are found by their names.

Each replica is a detached actor, found by its name in the cluster's namespace. Ray chooses a host for it and restarts
it when its process or host is lost; requests do not pass through Ray. Ray calls that may block run on threads, each
with a time limit. Ray's errors are raised as `PlacingError`; a LockstepError raised by an actor's method is raised
unchanged.
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
from lockstep.hosts.replica_actor import LocalHost, ReplicaHost
from lockstep.hosts.values import Demand, Host, LinkOptions, ReplicaName, ReplicaStatus, choose_host
from lockstep.worker.link import WorkerOptions
from lockstep.worker.logs import log_to_stderr

log = logging.getLogger(__name__)

T = TypeVar("T")

CONTROLLER = "controller"
"""Name of the actor to which replicas report; its method is `placed`."""
ASK_LIMIT_S = 1.0
"""Time in seconds for an actor to report its status; an actor that is not placed yet does not answer."""
END_LIMIT_S = 10.0
"""Time in seconds for the worker of a removed replica to end; after it the actor is killed together with the worker."""
GONE_LIMIT_S = 10.0
"""Time in seconds for the name of a killed actor to become free."""
HEAD = "node:__internal_head__"
"""Ray resource of the head host. Actors other than replicas are placed there: without the head no actor can be placed
anyway, and the loss of another host then does not affect them."""
START_LIMIT_S = 60.0
"""Time in seconds for an actor to be created and its process started, possibly by several gateways at once."""
START_AGAIN_S = 0.5
STARTED = ""
"""Pseudo-method that an actor answers once it has started."""
LOOK_S = 0.05
MAX_CONCURRENCY = 1000
"""Number of calls that an actor processes at once; most of them wait for updates."""
RESTART_PAUSE_S = 1.0
"""Pause in seconds before an actor that failed to start exits; Ray restarts it at once."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options that all replicas of a cluster share; paths refer to each host's own file system."""

    link: LinkOptions
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    store: KVStoreOptions | None = None


async def connect(ray: str, cluster: str, replicas: ReplicaOptions) -> RayRuntime:
    """Join a Ray cluster, or start a private one that ends with this process.

    Args:
        ray: ``HOST:PORT`` or ``auto``. ``auto`` uses RAY_ADDRESS, else the cluster that this machine belongs to, else
            starts a private one that listens on loopback only.
        cluster: name of the Lockstep cluster; one Ray cluster may run several.

    Raises:
        PlacingError: the Ray cluster cannot be reached, rejects the connection, or Ray is not installed.
    """
    address = await choose_address(ray)
    prepare_environment(address)
    connection = Connection(address)
    await connection.open()
    return RayRuntime(cluster, replicas, connection)


class RayRuntime:
    """Implementation of `lockstep.hosts.values.Runtime` with Ray actors. Event loop only.

    It can be passed to an actor, where it uses that actor's own connection.
    """

    def __init__(self, cluster: str, replicas: ReplicaOptions, connection: Connection | None = None) -> None:
        self.cluster = cluster
        self.namespace = f"lockstep.{cluster}"
        self._replicas = replicas
        self._connection = connection
        """Connection to the Ray cluster; None: this process is a Ray worker."""
        self._calls: Calls | None = None
        self._placing = asyncio.Lock()
        self._node_ids: dict[ReplicaName, str] = {}
        """Node ids of replicas: the chosen ones, until each replica reports its own."""

    def __reduce__(self) -> tuple[Any, ...]:
        return RayRuntime, (self.cluster, self._replicas)

    async def close(self) -> None:
        """Leave Ray. Placed replicas stay, unless the Ray cluster is private."""
        if self._connection is not None:
            await self._connection.close()

    # -- actors of any class ------------------------------------------------------------------------------------------

    async def named(self, name: str, kind: Callable[..., object], *args: object) -> NamedActor:
        """Find a detached actor by name, or create it from a plain asyncio class. The actor's `start` has finished on
        return.

        The processes of a new Ray cluster start slowly, even more so when several clients connect at once.

        Raises:
            PlacingError: the actor does not answer within `START_LIMIT_S`.
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
        """Return the detached actor of a name, whether it exists or not."""
        return NamedActor(self, name)

    async def end(self, name: str) -> None:
        """Kill a named actor for good; does nothing if it does not exist."""
        await self.do(f"{name} cannot be ended", partial(_kill, self.namespace, name), GONE_LIMIT_S)

    async def do(self, what: str, work: Callable[[], T], limit_s: float = CALL_LIMIT_S) -> T:
        """Run a Ray call that may block on a thread; PlacingError: it timed out, or Ray raised an error."""
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
        async with self._placing:  # each placement sees the hosts chosen before it
            host = choose_host(demand, await self.hosts(), avoid, self._node_ids)
            if host is not None:
                self._node_ids[name] = host.node_id
            label, options = demand.label(number), _options(demand, avoid)
            make = partial(_actor, self.namespace, str(name), PlacedReplica, args, options, host, label)
            await self.do(f"{label} cannot be placed", make)

    async def remove(self, name: ReplicaName) -> None:
        actor = self.find(str(name))
        with contextlib.suppress(PlacingError):
            await actor.call("place", limit_s=ASK_LIMIT_S)  # an actor that waits for room has nothing to end
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
    """Proxy of a detached actor: calls its methods by name.

    Args:
        kind: class from which the actor is created if it does not exist; None: it is not created.
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
        """Return Ray's handle of the actor.

        Raises:
            PlacingError: the actor does not exist.
        """
        if self._handle is None:
            options = {"resources": {HEAD: 0.001}}
            make = partial(_actor, self._runtime.namespace, self._name, self._kind, self._args, options)
            self._handle = await self._runtime.do(f"{self._name} cannot be found", make)
        return self._handle

    async def call(self, method: str, *args: object, limit_s: float = CALL_LIMIT_S) -> Any:
        """Call a method, and return its value or raise its error.

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
            self._handle = None  # a successor may have taken the name
            raise PlacingError(f"{what}: {sentence(error)}") from error
        if not is_value:
            raise answer
        return answer


# -- in an actor's process --------------------------------------------------------------------------------------------


class ActorProcess:
    """Wrapper in an actor's process: holds an object of a plain asyncio class and dispatches calls to it."""

    def __init__(self, name: str, kind: Callable[..., object], args: tuple[object, ...]) -> None:
        log_to_stderr("text", "info", name)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it from its CPU count; our own default is better
        with contextlib.suppress(OSError):  # needs root; otherwise set the priority of `ray start`
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._object = kind(*args)
        self._starting = asyncio.get_running_loop().create_task(self._start())

    async def _start(self) -> None:
        start = getattr(self._object, "start", None)
        try:
            if start is not None:
                await start()
        except Exception as error:
            defect = None if isinstance(error, LockstepError) else error
            log.error("the actor failed to start and will be restarted: %s", error, exc_info=defect)
            await asyncio.sleep(RESTART_PAUSE_S)
            os._exit(1)

    async def call(self, method: str, args: tuple[object, ...]) -> tuple[bool, object]:
        """Call a method. Returns True and its value, or False and its error, as Ray would wrap a raised error."""
        await asyncio.shield(self._starting)
        if method == STARTED:
            return True, None
        try:
            return True, await getattr(self._object, method)(*args)
        except LockstepError as error:
            return False, error


class PlacedReplica:
    """Actor class of a replica: runs a `ReplicaHost` on the host that Ray chose, and reports to the current
    controller."""

    def __init__(self, runtime: RayRuntime, demand: Demand, number: int, options: ReplicaOptions) -> None:
        self._runtime = runtime
        self._demand = demand
        self._number = number
        self._options = options
        self._host: ReplicaHost | None = None

    async def start(self) -> None:
        """Start the replica's worker."""
        here = await self._runtime.do("cannot find this host in the Ray cluster", _local_host)
        controller, options = self._runtime.find(CONTROLLER), self._options
        self._host = ReplicaHost(
            self._demand,
            self._number,
            options.worker,
            options.link,
            here,
            partial(controller.call, "placed"),
            options.store,
        )
        await self._host.start()

    async def place(self) -> ReplicaStatus:
        """Return the replica's current status."""
        assert self._host is not None, "it has started"
        return self._host.place

    async def close(self) -> None:
        """End the replica's worker."""
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
    """Get the handle of a named actor, creating it if a class is given. Returns at once, even if no host has room.

    Args:
        host: preferred host, at first and after each restart, as long as it has room.
        label: name in its log; empty: the actor's name.
    """
    ray = imported()
    if kind is None:
        return ray.get_actor(name, namespace)
    if host is not None:
        at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        options = {**options, "scheduling_strategy": at(host.node_id, soft=True, _spill_on_unavailable=True)}
    made = ray.remote(ActorProcess).options(
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
    """Build Ray's options for a replica: resources, excluded hosts, and the spreading strategy if no host is chosen."""
    named = dict(demand.resources)
    strategy = "SPREAD" if demand.spread else "DEFAULT"
    options: dict[str, Any] = {"num_cpus": named.pop("CPU", 0), "scheduling_strategy": strategy}
    if named_memory := int(named.pop("memory", 0)):
        options["memory"] = named_memory
    elif not any(demand.resources.values()):
        options["memory"] = 1  # Ray ignores the chosen host for an actor without resource requests
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
    with contextlib.suppress(ValueError):  # it does not exist any more
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
    """List all hosts by name. A lost host that came back under the same name is listed once."""
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
    """Resources that can be requested, without those that Ray counts for itself."""
    return {
        name: amount
        for name, amount in sorted(resources.items())
        if name != "object_store_memory" and not name.startswith("node:")
    }


def _local_host() -> LocalHost:
    node_id = imported().get_runtime_context().get_node_id()
    host = next(host for host in _hosts() if host.node_id == node_id)
    return LocalHost(host.name, node_id, host.address)
