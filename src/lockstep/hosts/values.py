"""Placement values: describes demanded replicas, their location and use, and the hosts of a cluster. No Ray, no
clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec

from lockstep.core.balancer import RoutingPolicy, Why
from lockstep.core.request import Priority
from lockstep.engine.options import LoadOptions
from lockstep.spelling import listed

MAX_REPLICAS = 1024
"""Maximum number of replicas in one model's group."""
SLOTS_PER_REPLICA = 2
"""Replica numbers of a group for each of its replicas, because a replica that moves coexists with its successor for a
while."""


class LinkOptions(msgspec.Struct, frozen=True):
    """Options of the connections between gateways and workers; the same on every host."""

    secret_file: str
    """Path of the shared secret on each host; only the path is sent over the network."""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    """Path of a PEM file on each host, as for the two fields above; empty: no TLS."""
    allows_plain: bool = False
    """Whether prompts may be sent unencrypted between machines."""


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Times in seconds after which a gateway gives up on workers of other hosts, and on the controller."""

    answer_s: float = 4.0
    """A worker that is silent for this time gets no new requests."""
    silence_s: float = 10.0
    """A worker that is silent for this time counts as lost. Its health is checked every second, and it loads no model
    while it serves."""
    no_replica_s: float = 15.0
    """Calls wait for this time for a model without a replica. It runs while no replica can take a request and none is
    starting or loading. After it, waiting calls fail, and new calls are rejected at once until a replica is available.
    If the connections to all replicas are rejected, e.g. because of another secret, no call waits."""
    max_report_age_s: float = 5.0
    """A report of the controller that is older is not considered current; a new one arrives every second."""


class GroupOptions(msgspec.Struct, frozen=True):
    """Replicas of one artifact, and a manifest's options for their placement and routing."""

    num: int = 1
    resources: Mapping[str, float] = {}
    """Resources of each replica: ``CPU``, ``memory`` in bytes, and named resources of hosts."""
    spread: bool = False
    """Whether replicas are spread over as many hosts as possible; otherwise over as few."""
    policy: RoutingPolicy = RoutingPolicy.PREFIX
    max_imbalance: int = 4


class Demand(msgspec.Struct, frozen=True):
    """Demand for the replicas of one artifact."""

    key: str
    """Key of the replica in the planner and at each worker."""
    source: str
    options: LoadOptions
    priority: int = Priority.NORMAL
    num: int = 1
    resources: Mapping[str, float] = {}
    """Resources of each replica: ``CPU``, ``memory`` in bytes, and named resources of hosts."""
    spread: bool = False
    """Whether replicas are spread over as many hosts as possible; otherwise over as few."""
    name: str = ""
    """Name of the model, or of the first of several, for messages."""

    def label(self, number: int) -> str:
        """Model and number of a replica, for messages."""
        return f"{self.name or self.key}#{number}"


class ReplicaName(NamedTuple):
    """Name of one replica of a group."""

    key: str
    number: int
    """Number within the group, from 0."""

    def __str__(self) -> str:
        return f"{self.key}#{self.number}"


class ReplicaPhase(StrEnum):
    """State of one placed replica."""

    WAITING = "waiting"
    """No host has room for it."""
    STARTING = "starting"
    """Its worker is starting, for the first time or again."""
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    """It could not be loaded, and will be tried again."""
    LEAVING = "leaving"
    """It gets no new requests, and ends when its open requests have ended."""
    UNREACHABLE = "unreachable"
    """It is placed, but the server that shows it is not connected to it. Only a server's own view has this state."""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """Location and state of one replica."""

    key: str
    number: int
    state: ReplicaPhase
    reason: str = ""
    """Reason why it is not ready, in one sentence."""
    host: str = ""
    """Name of the host; empty: it is on no host."""
    node_id: str = ""
    """Ray's id of the host."""
    address: str = ""
    port: int = 0
    """Port on which its worker listens; 0: none."""
    pid: int = 0
    """Process id of the worker."""
    actor_pid: int = 0
    num_starts: int = 0
    """Number of workers started for it so far."""
    version: int = 0
    """Version of the actor's reports, which may arrive out of order."""

    @property
    def name(self) -> ReplicaName:
        return ReplicaName(self.key, self.number)


@dataclass(slots=True, eq=False)
class ReplicaUse:
    """Use of a replica by one gateway, counted over all workers that were started for it.

    The group counts `routed` and `num_retried`, and reports when the replica becomes available or is lost. Times are
    seconds of one monotonic clock.
    """

    routed: dict[Why, int] = field(default_factory=lambda: dict.fromkeys(Why, 0))
    """Number of requests sent to it, by the reason of the choice."""
    num_retried: int = 0
    """Number of these requests that were sent to another replica, because its worker was lost before their first
    token."""
    num_away: int = 0
    """Number of times that it was lost after it had been available."""
    _away_s: float = 0.0
    _lost_s: float | None = None
    """When it was lost; None: it is available, or never was."""

    @property
    def num_routed(self) -> int:
        return sum(self.routed.values())

    def mark_unavailable(self, now_s: float) -> None:
        """Record that it gets no more requests; a second call changes nothing."""
        if self._lost_s is None:
            self._lost_s = now_s
            self.num_away += 1

    def mark_available(self, now_s: float) -> None:
        """Record that it gets requests again."""
        self._away_s = self.away_s(now_s)
        self._lost_s = None

    def away_s(self, now_s: float) -> float:
        """Total time without it in seconds, since it was first available."""
        return self._away_s + (0.0 if self._lost_s is None else now_s - self._lost_s)


class Host(msgspec.Struct, frozen=True):
    """Machine, or part of a machine, on which replicas may be placed."""

    name: str
    """Name of its Ray node, or else its address."""
    node_id: str
    address: str
    is_there: bool
    resources: Mapping[str, float]
    """Total resources: ``CPU``, ``memory`` in bytes, and named ones."""
    free: Mapping[str, float]
    is_drained: bool = False
    """Whether the host is drained, so that it gets no replicas."""


class Runtime(Protocol):
    """Interface that places replicas; `lockstep.hosts.ray_runtime` implements it with Ray actors. Used from one event
    loop."""

    def use(self, link: LinkOptions) -> bool:
        """Use these link options for replicas placed from now on; returns whether they differ from the previous
        ones."""
        ...

    async def hosts(self) -> Sequence[Host]:
        """All hosts by name, including lost ones."""
        ...

    async def found(self) -> Sequence[ReplicaName]:
        """Replicas that an earlier controller has placed."""
        ...

    async def place(self, demand: Demand, number: int, avoid: Sequence[str] = ()) -> None:
        """Place a replica, and place it again whenever it is lost. Returns at once; the replica's actor reports its
        status.

        Args:
            avoid: node ids of hosts on which it must not be placed.
        """
        ...

    async def remove(self, name: ReplicaName) -> None:
        """End a replica's worker and its actor; does nothing if they do not exist."""
        ...

    async def ask(self, name: ReplicaName) -> ReplicaStatus | None:
        """Request a replica's status; None: it does not answer now."""
        ...


def choose_host(
    demand: Demand, hosts: Sequence[Host], avoid: Sequence[str], placed: Mapping[ReplicaName, str]
) -> Host | None:
    """Choose the host for one more replica; None: no host has room now, or no host is known.

    A replica of a spread group goes to the host with the fewest replicas of the group, any other to the host with the
    most. Among equal hosts, the one with the fewest replicas of all groups is chosen, then the first by name.

    Args:
        avoid: node ids of hosts on which it must not be placed.
        placed: node ids of all replicas that are placed or being placed.
    """

    def rank(host: Host) -> tuple[int, int, str]:
        num_all = sum(node_id == host.node_id for node_id in placed.values())
        num_own = sum(node_id == host.node_id for name, node_id in placed.items() if name.key == demand.key)
        return (num_own if demand.spread else -num_own), num_all, host.name

    able = [host for host in hosts if host.is_there and not host.is_drained and host.node_id not in avoid]
    roomy = [host for host in able if all(host.free.get(name, 0.0) >= each for name, each in demand.resources.items())]
    return min(roomy, key=rank, default=None)


def hosts_with_room(demand: Demand, hosts: Sequence[Host]) -> list[str]:
    """Names of the hosts that have room for one more replica now."""
    there = [host for host in hosts if host.is_there and not host.is_drained]
    return [host.name for host in there if all(host.free.get(name, 0.0) >= n for name, n in demand.resources.items())]


def why_waiting(demand: Demand, hosts: Sequence[Host]) -> str:
    """Reason why a replica is on no host, in one sentence."""
    wanted = ", ".join(_amount(name, amount) for name, amount in demand.resources.items()) or "room for a worker"
    there = [host for host in hosts if host.is_there and not host.is_drained]
    if not there:
        return "no available host accepts replicas"
    fitting = hosts_with_room(demand, hosts)
    if fitting:
        return f"its process has not started yet, although {listed(fitting)} has room"
    free = (", ".join(_amount(name, host.free.get(name, 0.0)) for name in demand.resources) for host in there)
    each = (f"{host.name} has {amounts}" for host, amounts in zip(there, free, strict=True))
    return f"no host has {wanted} free: {'; '.join(each)}"


def _amount(name: str, amount: float) -> str:
    return f"{amount / 1e9:.3g} GB of memory" if name == "memory" else f"{amount:g} {name}"
