"""What the planner sees and what it says, as values; a shell imports them from `lockstep.cluster.planner`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

OVER_BUDGET = ""
"""Stands for the key of a replica where room is made for nobody, because more is loaded than the budget allows."""


class Phase(StrEnum):
    """Where a replica is in its life."""

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
    """What the planner sees of one replica."""

    key: str
    phase: Phase
    bytes: int
    """As measured, when it was loaded once; predicted until then."""
    num_busy: int = 0
    """Calls that are being answered."""
    num_waiting: int = 0
    """Calls that wait to be admitted; whoever asked for it to be loaded counts as one."""
    waiting_since_s: float | None = None
    """Of the oldest of them; None exactly when nobody waits."""
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
    """Somebody will probably need it soon."""
    idle_limit_s: float | None = None
    """Unused for so long it is unloaded; None: only to make room."""
    makes_room_for: str | None = None
    """Of a draining or unloading replica: what the last `Drain` or the `Unload` said."""
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
    """How patient the planner is."""

    max_wait_s: float = 2.0
    """A resident model is served while its own requests come, until others have waited so long for its room."""
    min_stay: float = 1.0
    """... and it stayed so many times what its load took, so that loading never takes most of the time."""
    linger_s: float = 0.1
    """Used so recently, a replica counts as in use: the next request is probably on its way."""
    max_parallel_loads: int = 2


class LoadReason(StrEnum):
    """Why a replica is loaded."""

    REQUEST = "request"
    RESIDENT = "resident"
    """Declared so."""
    WARM = "warm"


class UnloadReason(StrEnum):
    """Why a replica is unloaded."""

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
    """Nobody uses it: free it."""

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
