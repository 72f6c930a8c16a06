"""Controller state: defines the reports of gateways, the state published to them, and the actions that follow from it.

Pure. As the clocks of hosts differ, reports contain ages, and each side converts them to its own clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.cluster.planner import (
    Action,
    Drain,
    Load,
    LoadReason,
    Observed,
    Phase,
    PlanPolicy,
    Refuse,
    Replica,
    Unload,
    UnloadReason,
)
from lockstep.cluster.sessions import SessionUpdate
from lockstep.hosts.values import Demand, Host, ReplicaStatus


@dataclass(frozen=True, slots=True)
class GatewayDemand:
    """Demand of one gateway for a group of replicas, and its use of it."""

    demand: Demand
    seen: Replica
    """Replica as observed by the gateway, with times on the gateway's clock."""


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """Report of one gateway at one moment."""

    now_s: float
    """Time of the report on the gateway's clock."""
    demands: tuple[GatewayDemand, ...]
    """Demands in order of definition."""
    budget_bytes: int | None
    policy: PlanPolicy
    num_open: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Number of open requests at each replica that this gateway uses or has used, by group key and number."""
    sessions: tuple[SessionUpdate, ...] = ()
    """Session updates since the previous report."""
    seen: int = -1
    """Version of the last state that the gateway has applied."""

    def demand_for(self, key: str) -> GatewayDemand | None:
        """Demand for a group; None: there is none."""
        return next((wanted for wanted in self.demands if wanted.demand.key == key), None)


@dataclass(frozen=True, slots=True)
class ControllerState:
    """State published to all gateways: statuses of replicas, phases of groups, and the manifest that applies."""

    version: int
    manifest: str = ""
    manifest_version: int = 0
    phases: Mapping[str, Phase] = field(default_factory=dict)
    """Phases of groups, by key; a missing group is absent."""
    drains: Mapping[str, str] = field(default_factory=dict)
    """Draining groups, each with the key of the replica that it makes room for."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Groups that cannot be loaded now, each with the reason in one sentence."""
    places: tuple[ReplicaStatus, ...] = ()
    hosts: tuple[Host, ...] = ()
    num_gateways: int = 1
    fault: str = ""
    """Reason why hosts and statuses are outdated, in one sentence; empty: they are current."""


@dataclass(frozen=True, slots=True)
class GroupPhase:
    """Phase of a group at the controller, with times on the controller's clock."""

    phase: Phase
    since_s: float
    load_s: float | None = None
    retry_at_s: float = 0.0
    makes_room_for: str | None = None


ABSENT = GroupPhase(Phase.ABSENT, 0.0)


def merged_view(groups: Mapping[str, GroupPhase], reports: Sequence[GatewayReport], now_s: float) -> Observed:
    """Merge the reports of all gateways into the planner's input. Groups are in the order of the first report that
    contains them.

    Args:
        groups: phases of the controller's groups, by key; any other group is absent.
        reports: reports of the current gateways, in the order in which the gateways joined.
        now_s: current time on the controller's clock.
    """
    demands: dict[str, list[tuple[GatewayReport, GatewayDemand]]] = {}
    for report in reports:
        for wanted in report.demands:
            demands.setdefault(wanted.demand.key, []).append((report, wanted))
    bounds = [report.budget_bytes for report in reports]
    budget = None if None in bounds or not bounds else min(bound for bound in bounds if bound is not None)
    return Observed(tuple(_replica(key, groups.get(key, ABSENT), each, now_s) for key, each in demands.items()), budget)


def _replica(
    key: str, group: GroupPhase, demands: Sequence[tuple[GatewayReport, GatewayDemand]], now_s: float
) -> Replica:
    seen = [wanted.seen for _, wanted in demands]
    waiting = [report.now_s - w.seen.waiting_since_s for report, w in demands if w.seen.waiting_since_s is not None]
    unused_s = min(report.now_s - wanted.seen.last_used_s for report, wanted in demands)
    limits = [each.idle_limit_s for each in seen]
    is_resident = group.phase is Phase.RESIDENT
    return Replica(
        key=key,
        phase=group.phase,
        bytes=max(each.bytes for each in seen),
        num_busy=sum(each.num_busy for each in seen),
        num_waiting=sum(each.num_waiting for each in seen),
        waiting_since_s=now_s - max(waiting) if waiting else None,
        last_used_s=max(now_s - unused_s, group.since_s if is_resident else 0.0),
        resident_since_s=group.since_s if is_resident else 0.0,
        reload_s=max(each.reload_s for each in seen) if group.load_s is None else group.load_s,
        priority=min(each.priority for each in seen),
        is_pinned=any(each.is_pinned for each in seen),
        retry_at_s=group.retry_at_s,
        wants_warm=any(each.wants_warm for each in seen),
        idle_limit_s=None if None in limits else max(limit for limit in limits if limit is not None),
        makes_room_for=group.makes_room_for,
    )


def unwanted(groups: Iterable[str], reports: Sequence[GatewayReport]) -> list[str]:
    """Groups that no gateway demands any more; none if there are no gateways."""
    wanted = {wanted.demand.key for report in reports for wanted in report.demands}
    return [key for key in groups if key not in wanted] if reports else []


def is_held(key: str, reports: Iterable[GatewayReport]) -> bool:
    """True while a gateway still uses a group, or may have sent it requests."""
    return any(
        (wanted := report.demand_for(key)) is not None and wanted.seen.phase is not Phase.ABSENT for report in reports
    )


def is_linked(key: str, number: int, reports: Iterable[GatewayReport]) -> bool:
    """True if each gateway that uses a group sends requests to this replica, or has done so."""
    using = [
        each for each in reports if (wanted := each.demand_for(key)) is not None and wanted.seen.phase is Phase.RESIDENT
    ]
    return all((key, number) in report.num_open for report in using)


def actions_for(state: ControllerState, observed: Observed) -> tuple[Action, ...]:
    """Actions by which a gateway follows the controller's state instead of its own plan.

    Args:
        observed: groups as the gateway observes them; to load a group means to connect to its replicas.
    """
    actions: list[Action] = []
    for replica in observed.replicas:
        key, phase = replica.key, state.phases.get(replica.key, Phase.ABSENT)
        makes_room_for = state.drains.get(key)
        if phase is Phase.RESIDENT:
            is_wanted = replica.num_waiting > 0 or replica.is_pinned or replica.wants_warm
            if replica.phase is Phase.ABSENT and is_wanted:
                actions.append(Load(key, LoadReason.REQUEST if replica.num_waiting else LoadReason.RESIDENT))
            elif replica.phase is Phase.RESIDENT and makes_room_for is not None:
                actions.append(Drain(key, makes_room_for))
        elif replica.phase is Phase.RESIDENT and phase in (Phase.UNLOADING, Phase.ABSENT):
            busy = replica.num_busy > 0
            actions.append(Drain(key, makes_room_for or "") if busy else Unload(key, UnloadReason.ROOM, makes_room_for))
        if replica.phase is Phase.ABSENT and replica.num_waiting and key in state.refusals:
            actions.append(Refuse(key, state.refusals[key]))
    return tuple(actions)
