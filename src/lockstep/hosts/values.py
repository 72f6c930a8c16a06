"""Placement as values: replicas that are wanted, where each is, how each is used, and the hosts that there are. No Ray,
no clock."""

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
"""In one model's group."""
SLOTS_PER_REPLICA = 2
"""Numbers of a group for each of its replicas: one that moves is beside its successor for a while."""


class LinkOptions(msgspec.Struct, frozen=True):
    """Links between gateways and workers: whom each believes; the same on every host."""

    secret_file: str
    """Path of the shared secret on each host; only the path travels."""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    """PEM files on each host; empty: no TLS."""
    allows_plain: bool = False
    """Whether prompts may travel in clear beyond a machine."""


class GroupOptions(msgspec.Struct, frozen=True):
    """Replicas of one artifact, and how a manifest has them placed and chosen."""

    num: int = 1
    resources: Mapping[str, float] = {}
    """Of each: ``CPU``, ``memory`` in bytes, and resources that hosts were given by name."""
    spread: bool = False
    """Whether on as many hosts as there are; else on as few."""
    policy: RoutingPolicy = RoutingPolicy.PREFIX
    max_imbalance: int = 4


class Demand(msgspec.Struct, frozen=True):
    """The replicas of one artifact, as they are wanted."""

    key: str
    """Of the planner's replica, and of each replica at its worker."""
    source: str
    options: LoadOptions
    priority: int = Priority.NORMAL
    num: int = 1
    resources: Mapping[str, float] = {}
    """Of each: ``CPU``, ``memory`` in bytes, and resources that hosts were given by name."""
    spread: bool = False
    """Whether on as many hosts as there are; else as few."""
    name: str = ""
    """Of the model, or the first of several, for messages."""

    def label(self, number: int) -> str:
        """A replica by its model and number, for messages."""
        return f"{self.name or self.key}#{number}"


class ReplicaName(NamedTuple):
    """One replica of a group."""

    key: str
    number: int
    """From 0."""

    def __str__(self) -> str:
        return f"{self.key}#{self.number}"


class ReplicaPhase(StrEnum):
    """State of one placed replica."""

    WAITING = "waiting"
    """No host has room for it."""
    STARTING = "starting"
    """Its worker is on its way, for the first time or again."""
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    """It could not be loaded, and is tried again."""
    LEAVING = "leaving"
    """It gets no new requests, and goes when those that it has have ended."""
    UNREACHABLE = "unreachable"
    """Placed, and without a link to the server that shows it; only a server's own view has this state."""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica: where it is, and how it is."""

    key: str
    number: int
    state: ReplicaPhase
    reason: str = ""
    """Why it is not ready, in one sentence."""
    host: str = ""
    """Name of the host; empty: it is on none."""
    node_id: str = ""
    """Ray's id of the host."""
    address: str = ""
    port: int = 0
    """Where its worker listens; 0: nowhere."""
    pid: int = 0
    """Of the worker's process."""
    actor_pid: int = 0
    num_starts: int = 0
    """Workers that were started for it."""
    version: int = 0
    """Counts its actor's words, which may come in another order."""

    @property
    def name(self) -> ReplicaName:
        return ReplicaName(self.key, self.number)


@dataclass(slots=True, eq=False)
class ReplicaUse:
    """Use that one gateway makes of a replica, counted through all workers that were started for it.

    The router counts `routed` and `num_retried`, and reports when the replica comes and goes; seconds are of one
    monotonic clock.
    """

    routed: dict[Why, int] = field(default_factory=lambda: dict.fromkeys(Why, 0))
    """Requests that it was given, by the reason of the choice."""
    num_retried: int = 0
    """Of these, those that went to another replica since its worker was lost before their first token."""
    num_away: int = 0
    """Times that it went after it had been there."""
    _away_s: float = 0.0
    _went_s: float | None = None
    """When it went; None: it is there, or was never."""

    @property
    def num_routed(self) -> int:
        return sum(self.routed.values())

    def went(self, now_s: float) -> None:
        """It was there, and gets no requests from now on; a second call changes nothing."""
        if self._went_s is None:
            self._went_s = now_s
            self.num_away += 1

    def came(self, now_s: float) -> None:
        """It gets requests from now on."""
        self._away_s = self.away_s(now_s)
        self._went_s = None

    def away_s(self, now_s: float) -> float:
        """Seconds without it, after it had been there first, up to now."""
        return self._away_s + (0.0 if self._went_s is None else now_s - self._went_s)


class Host(msgspec.Struct, frozen=True):
    """One machine, or one part of it, that replicas may be placed on."""

    name: str
    """As its Ray node was named, else its address."""
    node_id: str
    address: str
    is_there: bool
    resources: Mapping[str, float]
    """All of it: ``CPU``, ``memory`` in bytes, and those by name."""
    free: Mapping[str, float]
    is_drained: bool = False
    """It gets no replicas."""


class Runtime(Protocol):
    """Places replicas; `lockstep.hosts.ray_runtime` does it by Ray's actors. Used from one event loop."""

    def use(self, link: LinkOptions) -> bool:
        """Have replicas that are placed from now on linked in this way; whether it is another one than before."""
        ...

    async def hosts(self) -> Sequence[Host]:
        """All hosts, those that were lost included, by name."""
        ...

    async def found(self) -> Sequence[ReplicaName]:
        """Replicas that are placed already, by an earlier controller."""
        ...

    async def place(self, demand: Demand, number: int, avoid: Sequence[str] = ()) -> None:
        """Have a replica placed, and placed again whenever it is lost; returns at once. Its actor tells how it is.

        Args:
            avoid: node ids of hosts that it is not to be on.
        """
        ...

    async def remove(self, name: ReplicaName) -> None:
        """End a replica's worker and its actor; one that is not there is gone already."""
        ...

    async def ask(self, name: ReplicaName) -> ReplicaStatus | None:
        """A replica's state, as it reports it; None: it does not answer now."""
        ...


def choose_host(
    demand: Demand, hosts: Sequence[Host], avoid: Sequence[str], placed: Mapping[ReplicaName, str]
) -> Host | None:
    """The host for one more replica; None: none has room now, or none has been heard of.

    Replicas of a group that is spread go where fewest of it are, others where most are; among equals it is the host
    with the fewest replicas of all groups, then the first by name.

    Args:
        avoid: node ids of hosts that it is not to be on.
        placed: node ids of the replicas that are placed, or about to be.
    """

    def rank(host: Host) -> tuple[int, int, str]:
        num_all = sum(node_id == host.node_id for node_id in placed.values())
        num_own = sum(node_id == host.node_id for name, node_id in placed.items() if name.key == demand.key)
        return (num_own if demand.spread else -num_own), num_all, host.name

    able = [host for host in hosts if host.is_there and not host.is_drained and host.node_id not in avoid]
    roomy = [host for host in able if all(host.free.get(name, 0.0) >= each for name, each in demand.resources.items())]
    return min(roomy, key=rank, default=None)


def hosts_with_room(demand: Demand, hosts: Sequence[Host]) -> list[str]:
    """Names of the hosts that could take one more replica now."""
    there = [host for host in hosts if host.is_there and not host.is_drained]
    return [host.name for host in there if all(host.free.get(name, 0.0) >= n for name, n in demand.resources.items())]


def why_waiting(demand: Demand, hosts: Sequence[Host]) -> str:
    """The reason why a replica is on no host, in one sentence."""
    wanted = ", ".join(_amount(name, amount) for name, amount in demand.resources.items()) or "room for a worker"
    there = [host for host in hosts if host.is_there and not host.is_drained]
    if not there:
        return "no host is there that takes replicas"
    fitting = hosts_with_room(demand, hosts)
    if fitting:
        return f"its process is not started yet, though {listed(fitting)} can take it"
    free = (", ".join(_amount(name, host.free.get(name, 0.0)) for name in demand.resources) for host in there)
    each = (f"{host.name} has {amounts}" for host, amounts in zip(there, free, strict=True))
    return f"no host has {wanted} free: {'; '.join(each)}"


def _amount(name: str, amount: float) -> str:
    return f"{amount / 1e9:.3g} GB of memory" if name == "memory" else f"{amount:g} {name}"
