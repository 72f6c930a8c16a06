"""Planner: which replicas are loaded and which have to go, as one pure function from what is seen to what is done.

Closed: no clock, no worker, no manifest. A shell observes its replicas, asks for a plan after every event and whenever
`look_again_s` says so, and carries out all of it. What the shell owes to the planner:

- Calls of a resident replica are admitted at once, unless the last plan names it in a `Drain`: then they wait.
- The waiting calls of a replica are admitted in the moment in which it becomes resident, before the next plan.
- Waiting calls are admitted in the order of their arrival.
- A load that fails fails its waiters, and sets `retry_at_s`; so does one that `overshoot` finds too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto

from lockstep.cluster.budget import GPU_BUDGET, Ledger
from lockstep.shown import size

OVER_BUDGET = ""
"""In the place of a replica's key, if room is made because more is loaded than the budget allows."""


class Phase(StrEnum):
    """Phase in the life of a replica."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    UNLOADING = "unloading"


MOVES = {
    Phase.ABSENT: (Phase.LOADING,),
    Phase.LOADING: (Phase.RESIDENT, Phase.ABSENT, Phase.UNLOADING),
    Phase.RESIDENT: (Phase.UNLOADING, Phase.ABSENT),
    Phase.UNLOADING: (Phase.ABSENT,),
}
"""From loading to unloading: an overshoot, or an order; from resident to absent: the worker was lost."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as the planner sees it."""

    key: str
    phase: Phase
    bytes: int
    """As measured, when it was loaded once; predicted until then."""
    num_busy: int = 0
    """Calls that are being answered."""
    num_waiting: int = 0
    """Calls that wait to be admitted; a request to load it counts as one."""
    waiting_since_s: float | None = None
    """Of the oldest of them; None exactly when no one waits."""
    last_used_s: float = 0.0
    """When it became resident, or a call of it was admitted or ended, whichever was last."""
    resident_since_s: float = 0.0
    """When it became resident, if it is."""
    reload_s: float = 1.0
    """As measured, or as expected."""
    priority: int = 0
    """The most urgent class of its models; lower is more urgent."""
    is_pinned: bool = False
    """Declared resident: always wanted, never evicted."""
    retry_at_s: float = 0.0
    """Not loaded before, because the last load failed."""
    wants_warm: bool = False
    """It will probably be needed soon."""
    idle_limit_s: float | None = None
    """Unused for so long it is unloaded; None: only to make room."""
    makes_room_for: str | None = None
    """Of a draining or unloading replica: the replica that the last `Drain` or the `Unload` named."""
    num_lost: int = 0
    """Loads in a row over which the worker ended: what may end it again is loaded after all others."""

    def __post_init__(self) -> None:
        assert (self.num_waiting > 0) == (self.waiting_since_s is not None), f"who waits for {self.key}, since when?"


@dataclass(frozen=True, slots=True)
class Observed:
    """All replicas and the budget that they share."""

    replicas: tuple[Replica, ...]
    """In order of definition, which breaks ties."""
    budget_bytes: int | None
    """For all that is loading, resident or unloading; None: there is no bound."""


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """Patience of the planner."""

    max_wait_s: float = 2.0
    """A resident model is served while its own requests come, until others have waited so long for its room."""
    min_stay: float = 1.0
    """... and it stayed so many times what its load took, so that loading never takes most of the time."""
    linger_s: float = 0.1
    """Used so recently, a replica counts as in use: the next request is probably on its way."""
    max_parallel_loads: int = 2


class LoadReason(StrEnum):
    """Reason of a load."""

    REQUEST = "request"
    RESIDENT = "resident"
    """Declared so."""
    WARM = "warm"


class UnloadReason(StrEnum):
    """Reason of an unload."""

    ROOM = "room"
    IDLE = "idle"
    BUDGET = "budget"
    """More is loaded than the budget allows."""


@dataclass(frozen=True, slots=True)
class Load:
    """Start to load; the room is there."""

    key: str
    reason: LoadReason


@dataclass(frozen=True, slots=True)
class Unload:
    """Free a replica that no one uses."""

    key: str
    reason: UnloadReason
    makes_room_for: str | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """Admit no call until a plan comes that does not say so again; what is being answered goes on."""

    key: str
    makes_room_for: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Fail all that wait: no eviction could ever make room."""

    key: str
    reason: str


Action = Load | Unload | Drain | Refuse


MIN_RELOAD_S = 1e-3
"""Shorter reloads are all equally cheap."""


def plan(observed: Observed, now_s: float, policy: PlanPolicy) -> tuple[Action, ...]:
    """Decide what to do now. Carried out, and asked again in the same moment, at most the same drains remain.

    - Room is given to those who waited too long, oldest first, then by priority and age. Who declared to be resident
      and is not waits since it could be loaded. Before all that, those over whose loads fewer workers ended.
    - What is evicted is idle: cheapest first, by bytes freed per second of reloading (within a factor of two), the
      least urgent, the least recently used, the first defined; and nothing that the room does not need.
    - Only for one who waited too long are calls of others held back, and of those only that stayed long enough to be
      worth their load: all whose room is needed drain, and when the last of them is idle they go together.
    - Warming takes free room and nothing else, and none while somebody waits for room.
    """
    planned: dict[str, Action] = {}
    while True:  # what is freed may allow more: an eviction leaves bytes over for an older claim
        actions = () if _is_settled(observed) else _PlanBuilder(observed, now_s, policy).actions()
        drained = {action.key for action in actions if isinstance(action, Drain)}
        planned |= {action.key: action for action in actions}
        if len(drained) == len(actions):
            return tuple(each for each in planned.values() if not isinstance(each, Drain) or each.key in drained)
        observed = _after(observed, actions)


def look_again_s(observed: Observed, now_s: float, policy: PlanPolicy) -> float | None:
    """The next moment at which another plan could come out although nothing happened; None: never."""
    times: list[float] = []
    for replica in observed.replicas:
        if replica.phase is Phase.ABSENT and _is_wanted(replica):
            times += [replica.retry_at_s, _overdue_at_s(replica, policy)]
        elif replica.phase is Phase.RESIDENT:
            times += [replica.last_used_s + policy.linger_s, replica.last_used_s + (replica.idle_limit_s or 0.0)]
            times.append(_stays_until_s(replica, policy))
    return min((time_s for time_s in times if time_s > now_s), default=None)


def overshoot(observed: Observed, key: str, measured_bytes: int) -> str:
    """Reason why a replica that was just loaded has to be unloaded again, in one sentence; empty: it may stay."""
    before = next(r.bytes for r in observed.replicas if r.key == key)
    others = sum(r.bytes for r in observed.replicas if r.phase is not Phase.ABSENT and r.key != key)
    if observed.budget_bytes is None or others + measured_bytes <= observed.budget_bytes:
        return ""
    left = size(max(0, observed.budget_bytes - others))
    return (
        f"loaded, it takes {size(measured_bytes)}, where {size(before)} were expected; of {GPU_BUDGET}'s "
        f"{size(observed.budget_bytes)} only {left} are free, so it was unloaded again; raise it, or declare "
        "fewer or smaller models"
    )


def _after(observed: Observed, actions: Sequence[Action]) -> Observed:
    """Observed state as soon as these actions have begun."""
    by_key = {action.key: action for action in actions}
    return replace(observed, replicas=tuple(_begun(replica, by_key.get(replica.key)) for replica in observed.replicas))


def _begun(replica: Replica, action: Action | None) -> Replica:
    match action:
        case Load():
            return replace(replica, phase=Phase.LOADING)
        case Unload(makes_room_for=whom):
            return replace(replica, phase=Phase.UNLOADING, makes_room_for=whom)
        case Refuse():
            return replace(replica, num_waiting=0, waiting_since_s=None)
        case Drain(makes_room_for=whom):
            return replace(replica, makes_room_for=whom)
    return replace(replica, makes_room_for=None) if replica.phase is Phase.RESIDENT else replica


def _is_settled(observed: Observed) -> bool:
    """True where nothing is to be decided: no absent replica is wanted, none may be too idle, the budget is kept."""
    absent, used = Phase.ABSENT, 0
    for replica in observed.replicas:
        if replica.phase is absent:
            if replica.num_waiting or replica.is_pinned or replica.wants_warm:
                return False
        elif replica.idle_limit_s is not None:
            return False
        else:
            used += replica.bytes
    return observed.budget_bytes is None or used <= observed.budget_bytes


@dataclass(frozen=True, slots=True)
class _Claim:
    """Claim of a replica that needs room."""

    key: str
    bytes: int
    since_s: float
    is_overdue: bool
    reason: LoadReason = LoadReason.REQUEST


class _Outcome(Enum):
    """Outcome of a claim."""

    ON_ITS_WAY = auto()
    """Loading, or waiting for what is being unloaded."""
    DRAINING = auto()
    BLOCKED = auto()
    """Those whose room it needs are in use."""
    HOLDS = auto()
    """The same, for too long: no younger one may take room."""


class _PlanBuilder:
    """Builder of one plan."""

    def __init__(self, observed: Observed, now_s: float, policy: PlanPolicy) -> None:
        self._replicas = observed.replicas
        self._now_s = now_s
        self._policy = policy
        self._actions: list[Action] = []
        self._leaving: set[str] = set()
        """Whose room this plan disposes of."""
        used = sum(r.bytes for r in observed.replicas if r.phase is not Phase.ABSENT)
        total = sum(r.bytes for r in observed.replicas)
        self._budget = total if observed.budget_bytes is None else observed.budget_bytes
        self._refused = self._refuse()
        self._claims = self._rank()
        coming = [(r.makes_room_for, r.bytes) for r in observed.replicas if r.phase is Phase.UNLOADING]
        claimed = {OVER_BUDGET: max(0, used - self._budget)} | {claim.key: claim.bytes for claim in self._claims}
        self._ledger = Ledger(self._budget - used, coming, claimed)

    def actions(self) -> tuple[Action, ...]:
        self._demote()
        if self._ledger.missing:
            self._make_room(_Claim(OVER_BUDGET, self._ledger.missing, -math.inf, True), UnloadReason.BUDGET)
        else:
            self._warm(self._satisfy())
        return tuple(self._actions)

    # -- who wants what -------------------------------------------------------------------------------------------

    def _refuse(self) -> set[str]:
        """Refuse those who wait for what can never be loaded; returns the keys."""
        refused = set()
        pinned = sum(r.bytes for r in self._replicas if r.is_pinned)
        for index, replica in enumerate(self._replicas):
            if replica.phase is not Phase.ABSENT or not _is_wanted(replica):
                continue
            if pinned + (0 if replica.is_pinned else replica.bytes) <= self._budget:  # whoever is kept beside it
                continue
            kept = sum(r.bytes for i, r in enumerate(self._replicas) if _outranks(i, r, index, replica))
            if replica.bytes <= self._budget - kept:
                continue
            refused.add(replica.key)
            if replica.num_waiting:
                what = f"it needs {size(replica.bytes)}; of the budget of {size(self._budget)}, models that"
                self._actions.append(Refuse(replica.key, f"{what} are declared resident keep {size(kept)}"))
        return refused

    def _rank(self) -> list[_Claim]:
        """Claims of what may be loaded now because it is needed, in the order in which they get room."""
        ranked = []
        for index, replica in enumerate(self._replicas):
            if not self._may_load(replica) or not _is_needed(replica):
                continue
            since_s, is_overdue = _since_s(replica), self._now_s >= _overdue_at_s(replica, self._policy)
            urgency = (0, 0) if is_overdue else (1, replica.priority)
            rank = (replica.num_lost, *urgency, since_s, index)
            reason = LoadReason.REQUEST if replica.num_waiting else LoadReason.RESIDENT
            ranked.append((rank, _Claim(replica.key, replica.bytes, since_s, is_overdue, reason)))
        return [claim for _, claim in sorted(ranked, key=lambda pair: pair[0])]

    def _may_load(self, replica: Replica) -> bool:
        is_free = replica.phase is Phase.ABSENT and replica.key not in self._refused
        return is_free and self._now_s >= replica.retry_at_s

    # -- giving room ----------------------------------------------------------------------------------------------

    def _demote(self) -> None:
        for replica in self._replicas:
            is_unused = replica.phase is Phase.RESIDENT and not (replica.num_busy or replica.num_waiting)
            if not is_unused or replica.is_pinned or replica.wants_warm or replica.idle_limit_s is None:
                continue
            if self._now_s >= replica.last_used_s + replica.idle_limit_s:
                self._unload([replica], UnloadReason.IDLE, None)

    def _satisfy(self) -> int:
        """Give room to claims in their order; how many more loads may start when all are on their way, else 0."""
        num_free = self._policy.max_parallel_loads - sum(r.phase is Phase.LOADING for r in self._replicas)
        is_satisfied = True
        for claim in self._claims:
            if num_free <= 0:
                return 0
            if claim.bytes <= self._ledger.room:
                self._ledger.spend(claim.key, claim.bytes)
                self._actions.append(Load(claim.key, claim.reason))
                outcome = _Outcome.ON_ITS_WAY
            else:
                outcome = self._make_room(claim, UnloadReason.ROOM)
            if outcome is _Outcome.HOLDS:
                return 0
            num_free -= outcome is not _Outcome.BLOCKED
            is_satisfied = is_satisfied and outcome is _Outcome.ON_ITS_WAY
        return num_free if is_satisfied else 0

    def _make_room(self, claim: _Claim, reason: UnloadReason) -> _Outcome:
        """Claim what is free and becomes free, and evict or drain for the rest."""
        lacking = self._ledger.lacking(claim.key, claim.bytes)
        if lacking <= 0:
            self._ledger.reserve(claim.key, claim.bytes)
            return _Outcome.ON_ITS_WAY
        idle = [r for r in self._replicas if self._is_evictable(r, claim)]
        victims = self._cheapest(idle, lacking, claim)
        if victims:
            self._unload(victims, reason, claim.key)
            self._ledger.reserve(claim.key, claim.bytes)
            return _Outcome.ON_ITS_WAY
        if not claim.is_overdue:
            return _Outcome.BLOCKED
        victims = self._cheapest(idle + [r for r in self._replicas if self._is_drainable(r, claim)], lacking, claim)
        if not victims:
            return _Outcome.HOLDS
        self._leaving.update(r.key for r in victims)
        self._actions += [Drain(r.key, claim.key) for r in victims]
        self._ledger.reserve(claim.key, claim.bytes, expected=sum(r.bytes for r in victims))
        return _Outcome.DRAINING

    def _unload(self, replicas: Iterable[Replica], reason: UnloadReason, makes_room_for: str | None) -> None:
        for replica in replicas:
            self._leaving.add(replica.key)
            self._actions.append(Unload(replica.key, reason, makes_room_for))
            self._ledger.add_coming(makes_room_for, replica.bytes)

    def _warm(self, num_free: int) -> None:
        for replica in self._replicas:
            is_meant = replica.wants_warm and not _is_needed(replica) and self._may_load(replica)
            if is_meant and replica.bytes <= self._ledger.room and num_free > 0:
                num_free -= 1
                self._ledger.spend(replica.key, replica.bytes)
                self._actions.append(Load(replica.key, LoadReason.WARM))

    # -- whose room -----------------------------------------------------------------------------------------------

    def _is_evictable(self, replica: Replica, claim: _Claim) -> bool:
        """True where it may be unloaded at once."""
        if replica.num_busy or not self._is_replaceable(replica, claim):
            return False
        if replica.num_waiting and replica.makes_room_for is None:
            return False  # about to serve them
        is_unused = self._now_s >= replica.last_used_s + self._policy.linger_s
        return is_unused or (claim.is_overdue and self._has_stayed(replica))

    def _is_drainable(self, replica: Replica, claim: _Claim) -> bool:
        return replica.num_busy > 0 and self._has_stayed(replica) and self._is_replaceable(replica, claim)

    def _has_stayed(self, replica: Replica) -> bool:
        return self._now_s >= _stays_until_s(replica, self._policy)

    def _is_replaceable(self, replica: Replica, claim: _Claim) -> bool:
        """True where its room may become another's: who waits for it must be younger, and the other overdue."""
        if replica.phase is not Phase.RESIDENT or replica.is_pinned or replica.key in self._leaving:
            return False
        return not replica.num_waiting or (claim.is_overdue and claim.since_s < _since_s(replica))

    def _cheapest(self, candidates: Sequence[Replica], lacking: int, claim: _Claim) -> list[Replica]:
        """The cheapest that free so many bytes, and no more of them than needed; empty: all together do not."""
        order = {r.key: i for i, r in enumerate(self._replicas)}

        def cost(replica: Replica) -> tuple[bool, bool, int, int, float, int]:
            is_new = replica.makes_room_for != claim.key
            worth = math.frexp(replica.bytes / max(replica.reload_s, MIN_RELOAD_S))[1]
            return is_new, replica.num_busy > 0, -worth, -replica.priority, replica.last_used_s, order[replica.key]

        chosen: list[Replica] = []
        for replica in sorted(candidates, key=cost):
            if lacking > 0 and replica.bytes > 0:
                chosen.append(replica)
                lacking -= replica.bytes
        if lacking > 0:
            return []
        for replica in reversed(tuple(chosen)):
            if lacking + replica.bytes <= 0:
                chosen.remove(replica)
                lacking += replica.bytes
        return [r for r in self._replicas if r in chosen]


def _outranks(i: int, other: Replica, index: int, replica: Replica) -> bool:
    """True where another's room is never to be had: it is declared resident, and there or defined first."""
    is_settled = other.phase is not Phase.ABSENT or not replica.is_pinned or i < index
    return other.is_pinned and i != index and is_settled


def _is_needed(replica: Replica) -> bool:
    return replica.num_waiting > 0 or replica.is_pinned


def _is_wanted(replica: Replica) -> bool:
    return _is_needed(replica) or replica.wants_warm


def _since_s(replica: Replica) -> float:
    """Time since which it is needed."""
    since = [] if replica.waiting_since_s is None else [replica.waiting_since_s]
    return min(since + ([replica.retry_at_s] if replica.is_pinned else []), default=math.inf)


def _overdue_at_s(replica: Replica, policy: PlanPolicy) -> float:
    """Time from which others are drained for it."""
    return _since_s(replica) + policy.max_wait_s


def _stays_until_s(replica: Replica, policy: PlanPolicy) -> float:
    """Time from which it may be drained."""
    return replica.resident_since_s + policy.min_stay * replica.reload_s
