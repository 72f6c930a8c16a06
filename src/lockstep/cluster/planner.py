"""Planner: decides which replicas are loaded and which are unloaded, as one pure function.

It has no clock, no worker and no manifest. The caller observes its replicas, requests a plan after every event and at
the time that `look_again_s` returns, and carries out every action of the plan. The planner relies on this behaviour of
its caller:

- Calls of a resident replica are admitted at once, unless the last plan names the replica in a `Drain`; then they wait.
- When a replica becomes resident, its waiting calls are admitted at once, before the next plan.
- Waiting calls are admitted in order of arrival.
- A failed load fails the waiting calls and sets `retry_at_s`. So does a load that `overshoot` reports as too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto

from lockstep.cluster.budget import GPU_BUDGET, Ledger
from lockstep.shown import size

OVER_BUDGET = ""
"""Stands in for a replica's key when room is made because the loaded replicas exceed the budget."""


class Phase(StrEnum):
    """Phase in the lifecycle of a replica."""

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
"""Allowed transitions. Loading to unloading: the load exceeded the budget, or an unload was requested. Resident to
absent: the worker was lost."""


@dataclass(frozen=True, slots=True)
class Replica:
    """Observed state of one replica."""

    key: str
    phase: Phase
    bytes: int
    """Measured size if the replica was ever loaded, otherwise the predicted size."""
    num_busy: int = 0
    """Number of calls in progress."""
    num_waiting: int = 0
    """Number of calls that wait to be admitted; a management request to load the model counts as one."""
    waiting_since_s: float | None = None
    """Arrival time of the oldest waiting call; None exactly if no call waits."""
    last_used_s: float = 0.0
    """Time of the last event among: it became resident, a call was admitted, a call ended."""
    resident_since_s: float = 0.0
    """When it became resident, if it is resident."""
    reload_s: float = 1.0
    """Time of its load, measured or expected."""
    priority: int = 0
    """Most urgent priority of its models; lower is more urgent."""
    is_pinned: bool = False
    """True if declared resident: always wanted and never evicted."""
    retry_at_s: float = 0.0
    """Time before which it is not loaded again, set when a load failed."""
    wants_warm: bool = False
    """True if requests for it are expected soon."""
    idle_limit_s: float | None = None
    """Idle time after which it is unloaded; None: it is only unloaded to make room."""
    makes_room_for: str | None = None
    """Key of the replica that the last `Drain` or `Unload` of this one makes room for; None: there is none."""
    num_lost: int = 0
    """Number of consecutive loads during which the worker ended. Such replicas are loaded after all others, as they may
    end the worker again."""

    def __post_init__(self) -> None:
        assert (self.num_waiting > 0) == (self.waiting_since_s is not None), (
            f"{self.key}: num_waiting and waiting_since_s disagree"
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """All replicas and the budget that they share."""

    replicas: tuple[Replica, ...]
    """Replicas in order of definition, which breaks ties."""
    budget_bytes: int | None
    """Limit on the bytes of all loading, resident and unloading replicas together; None: no limit."""


@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """Time limits of the planner."""

    max_wait_s: float = 2.0
    """Time that a call may wait before the planner drains busy replicas to make room for it."""
    min_stay: float = 1.0
    """Minimum residence before a replica may be drained, as a multiple of its load time, so that loading never takes
    most of the time."""
    linger_s: float = 0.1
    """A replica used this recently counts as in use, because the next request is probably on its way."""
    max_parallel_loads: int = 2


class LoadReason(StrEnum):
    """Reason of a load."""

    REQUEST = "request"
    RESIDENT = "resident"
    """The model is declared resident."""
    WARM = "warm"


class UnloadReason(StrEnum):
    """Reason of an unload."""

    ROOM = "room"
    IDLE = "idle"
    BUDGET = "budget"
    """The loaded replicas exceed the budget."""


@dataclass(frozen=True, slots=True)
class Load:
    """Start loading a replica; there is room for it."""

    key: str
    reason: LoadReason


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload an idle replica."""

    key: str
    reason: UnloadReason
    makes_room_for: str | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    """Admit no new calls until a plan no longer names the replica; calls in progress continue."""

    key: str
    makes_room_for: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Fail all waiting calls, because no eviction could make enough room."""

    key: str
    reason: str


Action = Load | Unload | Drain | Refuse


MIN_RELOAD_S = 1e-3
"""Minimum of reload times in seconds; shorter ones are treated as this one."""


def plan(observed: Observed, now_s: float, policy: PlanPolicy) -> tuple[Action, ...]:
    """Decide which actions to take now. Planning again right after carrying them out yields at most the same drains.

    - Room is given first to replicas whose calls waited too long, oldest first, then by priority and age. A replica
      that is declared resident but is not loaded counts as waiting since it could be loaded. Replicas whose loads ended
      fewer workers come before all others.
    - Only idle replicas are evicted, and no more than needed: first the cheapest, by bytes freed per second of
      reloading (within a factor of two), then the least urgent, the least recently used, the first defined.
    - Calls of other replicas are held back only for a replica whose calls waited too long, and only on replicas that
      have been resident long enough to be worth their load. All replicas whose room is needed drain, and they are
      unloaded together when the last of them is idle.
    - Warming only uses free room, and does not happen while any call waits for room.
    """
    planned: dict[str, Action] = {}
    while True:  # freed bytes may allow more: an eviction may leave bytes for an older claim
        actions = () if _is_settled(observed) else _PlanBuilder(observed, now_s, policy).actions()
        drained = {action.key for action in actions if isinstance(action, Drain)}
        planned |= {action.key: action for action in actions}
        if len(drained) == len(actions):
            return tuple(each for each in planned.values() if not isinstance(each, Drain) or each.key in drained)
        observed = _after(observed, actions)


def look_again_s(observed: Observed, now_s: float, policy: PlanPolicy) -> float | None:
    """Next time at which the plan may differ although no event happened; None: never."""
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
    """Observed state once these actions have started."""
    by_key = {action.key: action for action in actions}
    return replace(observed, replicas=tuple(_begun(replica, by_key.get(replica.key)) for replica in observed.replicas))


def _begun(replica: Replica, action: Action | None) -> Replica:
    match action:
        case Load():
            return replace(replica, phase=Phase.LOADING)
        case Unload(makes_room_for=beneficiary):
            return replace(replica, phase=Phase.UNLOADING, makes_room_for=beneficiary)
        case Refuse():
            return replace(replica, num_waiting=0, waiting_since_s=None)
        case Drain(makes_room_for=beneficiary):
            return replace(replica, makes_room_for=beneficiary)
    return replace(replica, makes_room_for=None) if replica.phase is Phase.RESIDENT else replica


def _is_settled(observed: Observed) -> bool:
    """True if there is nothing to decide: no absent replica is wanted, no replica has an idle limit, and the budget is
    kept."""
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
    """Loading, or waiting for replicas that are being unloaded."""
    DRAINING = auto()
    BLOCKED = auto()
    """The replicas whose room it needs are in use."""
    HOLDS = auto()
    """Blocked and overdue: no younger claim may take room."""


class _PlanBuilder:
    """Builder of one plan."""

    def __init__(self, observed: Observed, now_s: float, policy: PlanPolicy) -> None:
        self._replicas = observed.replicas
        self._now_s = now_s
        self._policy = policy
        self._actions: list[Action] = []
        self._leaving: set[str] = set()
        """Keys of the replicas that this plan drains or unloads."""
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

    # -- claims --------------------------------------------------------------------------------------------------

    def _refuse(self) -> set[str]:
        """Refuse replicas that wait for room but can never be loaded; returns their keys."""
        refused = set()
        pinned = sum(r.bytes for r in self._replicas if r.is_pinned)
        for index, replica in enumerate(self._replicas):
            if replica.phase is not Phase.ABSENT or not _is_wanted(replica):
                continue
            if pinned + (0 if replica.is_pinned else replica.bytes) <= self._budget:  # fits beside all pinned replicas
                continue
            kept = sum(r.bytes for i, r in enumerate(self._replicas) if _outranks(i, r, index, replica))
            if replica.bytes <= self._budget - kept:
                continue
            refused.add(replica.key)
            if replica.num_waiting:
                what = f"it needs {size(replica.bytes)}; of the budget of {size(self._budget)}, the models"
                self._actions.append(Refuse(replica.key, f"{what} declared resident take {size(kept)}"))
        return refused

    def _rank(self) -> list[_Claim]:
        """Claims of the replicas that are needed and may be loaded now, in the order in which they get room."""
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

    # -- allocation ----------------------------------------------------------------------------------------------

    def _demote(self) -> None:
        for replica in self._replicas:
            is_unused = replica.phase is Phase.RESIDENT and not (replica.num_busy or replica.num_waiting)
            if not is_unused or replica.is_pinned or replica.wants_warm or replica.idle_limit_s is None:
                continue
            if self._now_s >= replica.last_used_s + replica.idle_limit_s:
                self._unload([replica], UnloadReason.IDLE, None)

    def _satisfy(self) -> int:
        """Give room to claims in order. Returns how many more loads may start if every claim is being met, else 0."""
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
        """Reserve bytes that are free or becoming free, and evict or drain replicas for the rest."""
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
            is_warmable = replica.wants_warm and not _is_needed(replica) and self._may_load(replica)
            if is_warmable and replica.bytes <= self._ledger.room and num_free > 0:
                num_free -= 1
                self._ledger.spend(replica.key, replica.bytes)
                self._actions.append(Load(replica.key, LoadReason.WARM))

    # -- victims --------------------------------------------------------------------------------------------------

    def _is_evictable(self, replica: Replica, claim: _Claim) -> bool:
        """True if the replica may be unloaded at once."""
        if replica.num_busy or not self._is_replaceable(replica, claim):
            return False
        if replica.num_waiting and replica.makes_room_for is None:
            return False  # it is about to serve them
        is_unused = self._now_s >= replica.last_used_s + self._policy.linger_s
        return is_unused or (claim.is_overdue and self._has_stayed(replica))

    def _is_drainable(self, replica: Replica, claim: _Claim) -> bool:
        return replica.num_busy > 0 and self._has_stayed(replica) and self._is_replaceable(replica, claim)

    def _has_stayed(self, replica: Replica) -> bool:
        return self._now_s >= _stays_until_s(replica, self._policy)

    def _is_replaceable(self, replica: Replica, claim: _Claim) -> bool:
        """True if its room may go to the claim. If calls wait for the replica, the claim must be overdue and older than
        they are."""
        if replica.phase is not Phase.RESIDENT or replica.is_pinned or replica.key in self._leaving:
            return False
        return not replica.num_waiting or (claim.is_overdue and claim.since_s < _since_s(replica))

    def _cheapest(self, candidates: Sequence[Replica], lacking: int, claim: _Claim) -> list[Replica]:
        """Cheapest replicas that together free this many bytes, and no more of them than needed; empty: all together
        are not enough."""
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
    """True if another replica's room can never be freed: it is declared resident, and it is loaded or defined first."""
    is_settled = other.phase is not Phase.ABSENT or not replica.is_pinned or i < index
    return other.is_pinned and i != index and is_settled


def _is_needed(replica: Replica) -> bool:
    return replica.num_waiting > 0 or replica.is_pinned


def _is_wanted(replica: Replica) -> bool:
    return _is_needed(replica) or replica.wants_warm


def _since_s(replica: Replica) -> float:
    """Time since which the replica is needed."""
    since = [] if replica.waiting_since_s is None else [replica.waiting_since_s]
    return min(since + ([replica.retry_at_s] if replica.is_pinned else []), default=math.inf)


def _overdue_at_s(replica: Replica, policy: PlanPolicy) -> float:
    """Time from which other replicas are drained for it."""
    return _since_s(replica) + policy.max_wait_s


def _stays_until_s(replica: Replica, policy: PlanPolicy) -> float:
    """Time until which it is not drained."""
    return replica.resident_since_s + policy.min_stay * replica.reload_s
