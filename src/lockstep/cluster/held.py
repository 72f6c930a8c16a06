"""One replica as the cluster holds it: what is loaded or could be, who uses it and who waits for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.cluster.planner import MOVES, Phase, Replica
from lockstep.engine.options import LoadOptions
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import LockstepError, UnavailableError, WorkerLostError
from lockstep.worker.messages import Loaded

FIRST_BACKOFF_S = 1.0
"""After a load failed; doubled by each that fails in a row."""
MAX_BACKOFF_S = 60.0
MAX_LOST_LOADS = 5
"""Workers may end over a model's load so often in a row before that counts as the model's own failure."""
SUSPECT_LOADS = 2
"""After so many of them it is tried in a throw-away process first."""
WARM_WISH_S = 30.0
"""For how long after it became probable that a model will be needed, room that becomes free is taken for it."""
EXPECTED_LOAD_S = 1.0
"""Of what was never loaded."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What there is to load. Models whose specs have the same key share a replica."""

    key: str
    source: str
    options: LoadOptions
    predicted_bytes: int
    """Weights and KV pool."""
    tokenizer: Callable[[], Tokenizer]
    """Its text side, readable before it is loaded; takes a moment."""
    measure: Callable[[Loaded], int]
    """Weights and KV pool, as far as loading knows better."""


class Waiter(NamedTuple):
    """A call that waits to be admitted."""

    admitted: asyncio.Future[None]
    since_s: float
    is_patient: bool = True
    """Goes on waiting when the load is lost with its worker."""


@dataclass(slots=True, eq=False)
class Held:
    """Changed by `Replicas`, and appointed by `Stage`."""

    spec: ReplicaSpec
    priority: int
    """The most urgent class of its models."""
    is_pinned: bool
    idle_limit_s: float | None
    phase: Phase = Phase.ABSENT
    measured_bytes: int | None = None
    """Weights and KV pool, as its last load found them, also where that was too much; None: it was never loaded."""
    loaded: Loaded | None = None
    """What its last load measured."""
    tokenizer: Tokenizer | None = None
    num_busy: int = 0
    waiting: deque[Waiter] = field(default_factory=deque)
    last_used_s: float = 0.0
    load_s: float | None = None
    since_s: float = 0.0
    """When it came to its phase."""
    retry_at_s: float = 0.0
    num_failures: int = 0
    """In a row."""
    failure: LockstepError | None = None
    """Why its last load failed; None: it did not."""
    num_lost: int = 0
    """Loads in a row over which the worker ended."""
    is_missed: bool = False
    """It was there, or about to be, when the worker was lost; the next one is to load it."""
    warm_until_s: float = 0.0
    """Until then free room is taken for it, as it will probably be needed."""
    makes_room_for: str | None = None
    """For whom it drains or is unloaded; None: for nobody."""
    is_dismissed: bool = False
    """Unloaded by hand: requests bring it back, its declared tier does not."""
    num_leaving: int = 0
    """Who unloads it by hand: it answers what it has begun, and new calls wait until it has come back."""
    is_retired: bool = False
    """On its way out of the manifest: it takes no calls."""

    @property
    def bytes(self) -> int:
        """What it takes, as well as that is known."""
        return self.spec.predicted_bytes if self.measured_bytes is None else self.measured_bytes

    @property
    def key(self) -> str:
        return self.spec.key

    @property
    def is_open(self) -> bool:
        """Whether calls are admitted at once: it is there, and is not held back for others."""
        return self.phase is Phase.RESIDENT and self.makes_room_for is None and not self.num_leaving

    def move_to(self, phase: Phase, now_s: float) -> None:
        """A move that the planner's table does not have is a programming error."""
        assert phase in MOVES[self.phase], f"a replica does not go from {self.phase} to {phase}"
        self.phase, self.since_s = phase, now_s

    def failed(self, error: LockstepError, now_s: float) -> float:
        """A load failed; seconds until the next is tried."""
        delay_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self.num_failures, 16))
        self.num_failures += 1
        self.failure, self.retry_at_s = error, now_s + delay_s
        self.warm_until_s = 0.0
        return delay_s

    @property
    def is_suspect(self) -> bool:
        """Whether it is tried in a throw-away process before it is loaded again."""
        return self.num_lost >= SUSPECT_LOADS

    def succeeded(self, loaded: Loaded, now_s: float) -> None:
        self.loaded, self.load_s, self.last_used_s = loaded, loaded.load_s, now_s
        self.failure, self.num_failures, self.num_lost, self.retry_at_s = None, 0, 0, 0.0
        self.warm_until_s = 0.0

    def lost(self, error: WorkerLostError) -> bool:
        """A load was lost with its worker, which says nothing of the model; whether it did too often for that."""
        self.num_lost += error.is_suspect
        is_to_blame = error.is_suspect and self.num_lost > MAX_LOST_LOADS
        if is_to_blame:
            self.num_failures = max(self.num_failures, self.num_lost)  # each further try takes all others down, too
        self.miss()
        self.is_missed = self.is_missed and not is_to_blame
        return is_to_blame

    def miss(self) -> None:
        """The worker was lost that had it, or was to; the next one is to load it, unless it was about to go."""
        self.makes_room_for = None
        self.is_missed = not (self.num_leaving or self.is_retired)

    def recall(self, now_s: float) -> None:
        """There is a worker again; what the last one had is wished for."""
        if self.is_missed:
            self.is_missed = False
            self.warm_until_s = now_s + WARM_WISH_S
            self.retry_at_s = max(self.retry_at_s, now_s)  # since when it waits, where it is declared resident

    # -- calls ----------------------------------------------------------------------------------------------------

    def refusal(self, now_s: float) -> UnavailableError | None:
        """Why no call is taken now; None: it may at least wait."""
        if self.is_retired:
            return self.retirement()
        if self.failure is None or now_s >= self.retry_at_s:
            return None
        return UnavailableError(self.absence, retry_after_s=self.retry_at_s - now_s)

    @property
    def absence(self) -> str:
        """Why it could not be loaded, in one sentence; empty: nothing speaks against it."""
        again = "" if self.loaded is None else " again"
        return "" if self.failure is None else f"the model could not be loaded{again}: {self.failure}"

    @staticmethod
    def retirement() -> UnavailableError:
        """What calls are told while it goes."""
        return UnavailableError("the model is being taken out of service; try again in a moment")

    def admit(self, now_s: float) -> None:
        self.num_busy += 1
        self.last_used_s = now_s

    def admit_waiting(self, now_s: float) -> None:
        """In the order in which they came."""
        while self.waiting:
            admitted = self.waiting.popleft().admitted
            if not admitted.done():
                self.admit(now_s)
                admitted.set_result(None)

    def fail_waiting(self, error: LockstepError, *, only_impatient: bool = False) -> None:
        waiting, self.waiting = self.waiting, deque()
        for waiter in waiting:
            if only_impatient and waiter.is_patient:
                self.waiting.append(waiter)
            elif not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    # -- the planner ----------------------------------------------------------------------------------------------

    def observed(self, now_s: float) -> Replica:
        """As the planner sees it."""
        return Replica(
            key=self.key,
            phase=self.phase,
            bytes=self.bytes,
            num_busy=self.num_busy,
            num_waiting=len(self.waiting),
            waiting_since_s=self.waiting[0].since_s if self.waiting else None,
            last_used_s=self.last_used_s,
            resident_since_s=self.since_s if self.phase is Phase.RESIDENT else 0.0,
            reload_s=EXPECTED_LOAD_S if self.load_s is None else self.load_s,
            priority=self.priority,
            is_pinned=self.is_pinned and not self.is_retired,
            retry_at_s=self.retry_at_s,
            wants_warm=now_s < self.warm_until_s,
            idle_limit_s=self.idle_limit_s,
            makes_room_for=self.makes_room_for,
            num_lost=self.num_lost,
        )
