"""Controlled group: tracks a group's replicas, and moves them off drained hosts, replacing each replica before it
leaves.

Pure. A replacement is an additional replica of the group with a free number, so for a while the group has more replicas
than demanded and never fewer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from lockstep.cluster.controller_state import ABSENT, GatewayReport, GroupPhase, is_linked
from lockstep.hosts.values import (
    SLOTS_PER_REPLICA,
    Demand,
    Host,
    ReplicaName,
    ReplicaPhase,
    ReplicaStatus,
    choose_host,
    hosts_with_room,
    why_waiting,
)

MAX_SILENT = 5
"""Number of consecutive status requests that an actor may leave unanswered; gateways detect lost workers themselves."""
MAX_SILENT_READY = 60
"""The same limit for a replica that was ready: about two minutes."""
LINK_LIMIT_S = 10.0
"""Time in seconds for all gateways to connect to a ready replica."""
START_LIMIT_S = 60.0
"""Time in seconds for a replica's process to start on a host with room; it may be slow on a new Ray cluster."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Replica that leaves its host as soon as its requests have ended."""

    until_s: float
    """Time at which it is ended even if requests are still open."""
    version: int
    """Version of the first state that shows it as leaving: a gateway with an earlier state may still send it
    requests."""


@dataclass(slots=True, eq=False)
class ControlledGroup:
    """Replicas of one artifact: their demand, and the state of each."""

    demand: Demand
    state: GroupPhase = ABSENT
    numbers: list[int] = field(default_factory=list)
    """Numbers of its replicas: the demanded ones, those that leave a drained host, and their replacements."""
    places: dict[int, ReplicaStatus] = field(default_factory=dict)
    """Last status of each replica, by number; replicas whose actor has not reported yet are absent."""
    ending: set[int] = field(default_factory=set)
    """Numbers whose actors are being removed."""
    silent: dict[int, int] = field(default_factory=dict)
    """Number of consecutive unanswered status requests, by number."""
    waiting_s: dict[int, float] = field(default_factory=dict)
    """When replicas were last placed, by number."""
    ready_s: dict[int, float] = field(default_factory=dict)
    """When ready replicas became ready, by number."""
    leaving: dict[int, Leaving] = field(default_factory=dict)
    """Replicas that leave their host, by number."""
    began_s: float = 0.0
    """When the group started to load."""
    removing: asyncio.Task[None] | None = None

    @property
    def num_ready(self) -> int:
        return sum(place.state is ReplicaPhase.READY for place in self.places.values())

    def adopt(self, found: Sequence[int]) -> list[int]:
        """Take over replicas that an earlier controller placed; returns the numbers of those still to be placed."""
        known = [number for number in found if number < self.demand.num * SLOTS_PER_REPLICA]
        missing = [number for number in range(self.demand.num) if number not in known]
        self.numbers = [*known, *missing[: max(0, self.demand.num - len(known))]]
        return self.numbers[len(known) :]

    def mark_waiting(self, number: int, now_s: float) -> None:
        """Record that a replica was placed and waits for room or for its process."""
        self.places[number] = ReplicaStatus(self.demand.key, number, ReplicaPhase.WAITING)
        self.waiting_s[number] = now_s

    def relocation(self, drained: Collection[str], reports: Sequence[GatewayReport], now_s: float) -> Relocation:
        """Next steps away from drained hosts. A replacement counts when all gateways are connected to it, or after
        `LINK_LIMIT_S`."""
        ready = [number for number, place in self.places.items() if place.state is ReplicaPhase.READY]
        self.ready_s = {number: self.ready_s.get(number, now_s) for number in ready}
        places = dict(self.places)
        for number, ready_s in self.ready_s.items():
            is_new = now_s - ready_s < LINK_LIMIT_S and places[number].node_id not in drained
            if is_new and not is_linked(self.demand.key, number, reports):
                places[number] = msgspec.structs.replace(places[number], state=ReplicaPhase.STARTING)
        return relocation(self.demand.num, places, drained, self.leaving, self.ending)

    def is_lost(self, number: int, hosts: Sequence[Host]) -> bool:
        """True if a replica has to be placed again, because its host is lost or its actor has not answered for too
        long. A replica that waits for room never answers. A ready replica gets a higher limit, because its worker may
        still serve requests."""
        place, num_silent = self.places[number], self.silent.get(number, 0)
        if place.state is ReplicaPhase.WAITING:
            return False
        is_host_there = any(host.node_id == place.node_id and host.is_there for host in hosts)
        most = MAX_SILENT_READY if place.state in (ReplicaPhase.READY, ReplicaPhase.LEAVING) else MAX_SILENT
        return (bool(place.node_id) and not is_host_there) or num_silent > most

    def published(self, number: int, hosts: Sequence[Host], now_s: float) -> ReplicaStatus:
        """Status of a replica as published to gateways: including whether it leaves, and why it waits.

        Args:
            hosts: all hosts with their drain status.
        """
        place = self.places.get(number) or ReplicaStatus(self.demand.key, number, ReplicaPhase.WAITING)
        if place.state is ReplicaPhase.READY and number in self.leaving:
            is_drained = any(host.is_drained and host.node_id == place.node_id for host in hosts)
            why = f"{place.host} is being drained" if is_drained else "the group has more replicas than demanded"
            return msgspec.structs.replace(place, state=ReplicaPhase.LEAVING, reason=why)
        if place.state is ReplicaPhase.WAITING:
            is_recent = now_s - self.waiting_s.get(number, now_s) < START_LIMIT_S
            is_starting = is_recent and hosts_with_room(self.demand, hosts)
            state = ReplicaPhase.STARTING if is_starting else ReplicaPhase.WAITING
            return msgspec.structs.replace(place, state=state, reason=why_waiting(self.demand, hosts))
        return place


@dataclass(frozen=True, slots=True)
class Relocation:
    """Next steps of one group."""

    placed: tuple[int, ...] = ()
    """Numbers of replicas to place now."""
    leaving: tuple[int, ...] = ()
    """Numbers of replicas that get no new requests and end when their open requests have ended."""


def relocation(
    num: int,
    places: Mapping[int, ReplicaStatus],
    drained: Collection[str],
    leaving: Collection[int] = (),
    taken: Collection[int] = (),
) -> Relocation:
    """Next steps that move a group of `num` replicas to hosts that are not drained.

    Args:
        places: statuses of all its replicas, by number.
        drained: node ids of drained hosts.
        leaving: replicas that are leaving already; they keep leaving as long as others can replace them.
        taken: further numbers that cannot be used now.
    """

    def is_ready(number: int) -> bool:
        return places[number].state is ReplicaPhase.READY

    going = [number for number, place in places.items() if place.node_id and place.node_id in drained]
    staying = [number for number in places if number not in going]
    free = [number for number in range(num * SLOTS_PER_REPLICA) if number not in places and number not in taken]
    order = sorted(staying, key=lambda number: (is_ready(number), number not in leaving, -number))
    surplus = order[: max(0, len(staying) - num)]
    num_needed = max(0, num - sum(map(is_ready, staying)))
    answering = sorted(filter(is_ready, going), key=lambda number: (number not in leaving, number))
    away = [number for number in going if not is_ready(number)] + answering[: max(0, len(answering) - num_needed)]
    return Relocation(tuple(free[: max(0, num - len(staying))]), (*sorted(away), *sorted(surplus)))


def why_not_drained(
    node_id: str,
    hosts: Sequence[Host],
    drained: Collection[str],
    groups: Sequence[tuple[Demand, Sequence[ReplicaStatus]]],
) -> str:
    """Reason why a replica of a host could not move to another host, in one sentence; empty: all can move.

    Args:
        drained: node ids of the hosts drained already.
        groups: demand and replica statuses of each group.
    """
    avoid = [*drained, node_id]
    left = [host for host in hosts if host.is_there and host.node_id not in avoid]
    placed = {place.name: place.node_id for _, places in groups for place in places if place.node_id}
    for demand, places in groups:
        for place in places:
            if place.node_id != node_id:
                continue
            host = choose_host(demand, left, avoid, placed)
            if host is None:
                return f"{demand.label(place.number)} would have no other host: {why_waiting(demand, left)}"
            free = {name: amount - demand.resources.get(name, 0.0) for name, amount in host.free.items()}
            left[left.index(host)] = msgspec.structs.replace(host, free=free)
            placed[ReplicaName(demand.key, place.number)] = host.node_id
    return ""


def is_older(place: ReplicaStatus, known: ReplicaStatus | None) -> bool:
    """True if the same actor has sent a newer report."""
    is_same = known is not None and (place.node_id, place.actor_pid) == (known.node_id, known.actor_pid)
    return known is not None and is_same and place.version < known.version
