"""One plan for several gateways: the wishes that each reports, the word that all get, and what follows from it.

Pure: clocks differ between hosts, so that reports hold ages, and each end counts them on its own clock.
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
from lockstep.cluster.sessions import SessionNews
from lockstep.hosts.values import Demand, Host, Place


@dataclass(frozen=True, slots=True)
class Wish:
    """A group of replicas as one gateway wants and uses it."""

    demand: Demand
    seen: Replica
    """As its own shell sees it; times on the reporter's clock."""


@dataclass(frozen=True, slots=True)
class Report:
    """One gateway's word at one moment."""

    now_s: float
    """On its own clock."""
    wishes: tuple[Wish, ...]
    """In order of definition."""
    budget_bytes: int | None
    policy: PlanPolicy
    num_open: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Requests that are open at each replica to which this gateway sends requests, or has sent some, by its group and
    number."""
    sessions: tuple[SessionNews, ...] = ()
    """Changes since the report before."""
    seen: int = -1
    """Version of the last word that it had heard."""

    def wish(self, key: str) -> Wish | None:
        """Its wish for a group; None: it has none."""
        return next((wish for wish in self.wishes if wish.demand.key == key), None)


@dataclass(frozen=True, slots=True)
class Word:
    """The owner's word: what is where, what shall be, and which manifest holds."""

    version: int
    manifest: str = ""
    manifest_version: int = 0
    phases: Mapping[str, Phase] = field(default_factory=dict)
    """Of groups, by key; those that are not named are absent."""
    drains: Mapping[str, str] = field(default_factory=dict)
    """Groups that take no new calls, and for whose room."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Groups that cannot be had now, and why, in one sentence."""
    places: tuple[Place, ...] = ()
    hosts: tuple[Host, ...] = ()
    num_gateways: int = 1
    fault: str = ""
    """Why hosts and places are those of an earlier moment, in one sentence; empty: they are those of now."""


@dataclass(frozen=True, slots=True)
class GroupPhase:
    """A group as the owner has it; times on the owner's clock."""

    phase: Phase
    since_s: float
    load_s: float | None = None
    retry_at_s: float = 0.0
    makes_room_for: str | None = None


ABSENT = GroupPhase(Phase.ABSENT, 0.0)


def observed_by_all(groups: Mapping[str, GroupPhase], reports: Sequence[Report], now_s: float) -> Observed:
    """All that the planner sees: groups in the order of the first report that names them, used as by all gateways.

    Args:
        groups: the owner's own knowledge, by key; what is not there is absent.
        reports: of gateways that are there, in the order in which they came.
        now_s: on the owner's clock.
    """
    wishes: dict[str, list[tuple[Report, Wish]]] = {}
    for report in reports:
        for wish in report.wishes:
            wishes.setdefault(wish.demand.key, []).append((report, wish))
    bounds = [report.budget_bytes for report in reports]
    budget = None if None in bounds or not bounds else min(bound for bound in bounds if bound is not None)
    return Observed(tuple(_replica(key, groups.get(key, ABSENT), each, now_s) for key, each in wishes.items()), budget)


def _replica(key: str, group: GroupPhase, wishes: Sequence[tuple[Report, Wish]], now_s: float) -> Replica:
    seen = [wish.seen for _, wish in wishes]
    waiting = [report.now_s - w.seen.waiting_since_s for report, w in wishes if w.seen.waiting_since_s is not None]
    unused_s = min(report.now_s - wish.seen.last_used_s for report, wish in wishes)
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


def unwanted(groups: Iterable[str], reports: Sequence[Report]) -> list[str]:
    """Groups that no gateway has in its manifest any more; without a gateway, everything stays as it is."""
    wanted = {wish.demand.key for report in reports for wish in report.wishes}
    return [key for key in groups if key not in wanted] if reports else []


def is_held(key: str, reports: Iterable[Report]) -> bool:
    """True while a gateway has not left a group, or may have sent it requests."""
    return any((wish := report.wish(key)) is not None and wish.seen.phase is not Phase.ABSENT for report in reports)


def is_linked(key: str, number: int, reports: Iterable[Report]) -> bool:
    """True if each gateway that uses a group sends requests to this replica of it, or has sent some."""
    using = [each for each in reports if (wish := each.wish(key)) is not None and wish.seen.phase is Phase.RESIDENT]
    return all((key, number) in report.num_open for report in using)


def following(word: Word, observed: Observed) -> tuple[Action, ...]:
    """Actions by which a gateway's shell follows the owner's word, in place of a plan of its own.

    Args:
        observed: as the gateway's own shell sees its groups; loading them is reaching them.
    """
    actions: list[Action] = []
    for replica in observed.replicas:
        key, phase = replica.key, word.phases.get(replica.key, Phase.ABSENT)
        makes_room_for = word.drains.get(key)
        if phase is Phase.RESIDENT:
            is_wanted = replica.num_waiting > 0 or replica.is_pinned or replica.wants_warm
            if replica.phase is Phase.ABSENT and is_wanted:
                actions.append(Load(key, LoadReason.REQUEST if replica.num_waiting else LoadReason.RESIDENT))
            elif replica.phase is Phase.RESIDENT and makes_room_for is not None:
                actions.append(Drain(key, makes_room_for))
        elif replica.phase is Phase.RESIDENT and phase in (Phase.UNLOADING, Phase.ABSENT):
            busy = replica.num_busy > 0
            actions.append(Drain(key, makes_room_for or "") if busy else Unload(key, UnloadReason.ROOM, makes_room_for))
        if replica.phase is Phase.ABSENT and replica.num_waiting and key in word.refusals:
            actions.append(Refuse(key, word.refusals[key]))
    return tuple(actions)
