"""State of one replica in a cluster: its phase, what it loads, who uses it, who waits for it, and why it is absent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.cluster.manifest import Entry, Tier
from lockstep.cluster.planner import MOVES, Phase, Replica
from lockstep.cluster.snapshot import EngineSnapshot, ReplicaSnapshot
from lockstep.engine.options import LoadOptions
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import LockstepError, UnavailableError, WorkerLostError
from lockstep.hosts.values import GroupOptions
from lockstep.worker.health import backoff_s
from lockstep.worker.messages import Loaded

FIRST_BACKOFF_S = 1.0
"""After a load failed; doubled by each that fails in a row."""
MAX_BACKOFF_S = 60.0
MAX_LOST_LOADS = 5
"""Workers may end over a model's load so often in a row before that counts as the model's own failure."""
SUSPECT_LOADS = 2
"""After so many of them it is tried in a throw-away process first."""
WARM_TIME_S = 30.0
"""For how long after it became probable that a model will be needed, room that becomes free is taken for it."""
EXPECTED_LOAD_S = 1.0
"""Of what was never loaded."""
FAILED = "failed"
"""State of models, and reason of moves, where a load failed."""
STANDBY = "standby"
"""State of models whose replica is absent and may be loaded."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Specification of a load. Models whose specs have the same key share a replica."""

    key: str
    source: str
    options: LoadOptions
    predicted_bytes: int
    """Weights and KV pool."""
    tokenizer: Callable[[], Tokenizer]
    """Its text side, readable before it is loaded; takes a moment."""
    measure: Callable[[Loaded], int]
    """Weights and KV pool, if loading measured them."""
    group: GroupOptions = field(default_factory=GroupOptions)
    """Placing on several hosts, and choice among them; one replica where there are none. Part of the key."""


class Waiter(NamedTuple):
    """A call that waits to be admitted."""

    admitted: asyncio.Future[None]
    since_s: float
    is_patient: bool = True
    """Goes on waiting when the load is lost with its worker."""


@dataclass(slots=True, eq=False)
class ReplicaState:
    """State of one replica; `Replicas` moves it from phase to phase, its models `pin` it."""

    spec: ReplicaSpec
    priority: int = 0
    """The most urgent class of its models."""
    is_pinned: bool = False
    """Declared resident by one of them."""
    idle_limit_s: float | None = None
    """Unused for so long it is unloaded; None: only to make room."""
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
    """When it entered its phase."""
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
    """Key of the replica for which it drains or is unloaded; None: for none."""
    is_dismissed: bool = False
    """Unloaded by hand: requests bring it back, its declared tier does not."""
    num_leaving: int = 0
    """Who unloads it by hand: it answers what it has begun, and new calls wait until it has come back."""
    is_retired: bool = False
    """On its way out of the manifest: it takes no calls."""

    @property
    def bytes(self) -> int:
        """Bytes that it takes, as well as that is known."""
        return self.spec.predicted_bytes if self.measured_bytes is None else self.measured_bytes

    @property
    def key(self) -> str:
        return self.spec.key

    @property
    def is_open(self) -> bool:
        """True where calls are admitted at once: it is there, and is not held back for others."""
        return self.phase is Phase.RESIDENT and self.makes_room_for is None and not self.num_leaving

    def pin(self, entries: Sequence[Entry]) -> None:
        """Take over what its models ask of it: whether it is kept, how urgent it is, how long it may idle."""
        limits = [entry.keep_alive_s for entry in entries]
        self.is_pinned = not self.is_dismissed and any(entry.tier is Tier.RESIDENT for entry in entries)
        self.priority = min((entry.priority for entry in entries), default=0)
        self.idle_limit_s = max((limit for limit in limits if limit is not None), default=None)
        if None in limits:
            self.idle_limit_s = None

    # -- phases and loads -----------------------------------------------------------------------------------------

    def move_to(self, phase: Phase, now_s: float) -> None:
        """Enter a phase; a move that the planner's table does not have is a programming error."""
        assert phase in MOVES[self.phase], f"a replica does not go from {self.phase} to {phase}"
        self.phase, self.since_s = phase, now_s

    def failed(self, error: LockstepError, now_s: float) -> float:
        """Note a failed load; returns the seconds until the next is tried."""
        self.num_failures += 1
        delay_s = backoff_s(self.num_failures, FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self.failure, self.retry_at_s = error, now_s + delay_s
        self.warm_until_s = 0.0
        return delay_s

    @property
    def is_suspect(self) -> bool:
        """True where it is tried in a throw-away process before it is loaded again."""
        return self.num_lost >= SUSPECT_LOADS

    def succeeded(self, loaded: Loaded, now_s: float) -> None:
        """Note a load that came to its end."""
        self.loaded, self.load_s, self.last_used_s = loaded, loaded.load_s, now_s
        self.failure, self.num_failures, self.num_lost, self.retry_at_s = None, 0, 0, 0.0
        self.warm_until_s = 0.0

    def lost(self, error: WorkerLostError) -> bool:
        """Note a load that was lost with its worker, not by a fault of the model; True if it happened too often."""
        self.num_lost += error.is_suspect
        is_to_blame = error.is_suspect and self.num_lost > MAX_LOST_LOADS
        if is_to_blame:
            self.num_failures = max(self.num_failures, self.num_lost)  # each further try takes all others down, too
        self.miss()
        self.is_missed = self.is_missed and not is_to_blame
        return is_to_blame

    def miss(self) -> None:
        """Note that the worker was lost that had it, or was to; the next one loads it, unless it was about to go."""
        self.makes_room_for = None
        self.is_missed = not (self.num_leaving or self.is_retired)

    def recall(self, now_s: float) -> None:
        """Request what the last worker had loaded, now that there is one again."""
        if self.is_missed:
            self.is_missed = False
            self.warm_until_s = now_s + WARM_TIME_S
            self.retry_at_s = max(self.retry_at_s, now_s)  # since when it waits, where it is declared resident

    # -- calls ----------------------------------------------------------------------------------------------------

    def refusal(self, now_s: float) -> UnavailableError | None:
        """The error for calls that come now; None: they may at least wait."""
        if self.is_retired:
            return self.retirement()
        if self.failure is None or now_s >= self.retry_at_s:
            return None
        return UnavailableError(self.absence, retry_after_s=self.retry_at_s - now_s)

    @property
    def absence(self) -> str:
        """Reason why it could not be loaded, in one sentence; empty: nothing speaks against it."""
        again = "" if self.loaded is None else " again"
        return "" if self.failure is None else f"the model could not be loaded{again}: {self.failure}"

    def trouble(self) -> str:
        """Reason why calls would not be answered at once, in one sentence; empty: they would, if the worker is well."""
        return "" if self.phase is Phase.RESIDENT else self.absence or "the model is loading"

    def status(self, now_s: float) -> str:
        """The state that its models are shown in: declared tiers say only where they are intended to be."""
        if self.phase is not Phase.ABSENT:
            return self.phase.value
        if self.failure is not None:
            return FAILED if now_s < self.retry_at_s else STANDBY
        return Phase.LOADING.value if self.is_missed or self.is_pinned else STANDBY

    def retirement(self) -> UnavailableError:
        """The error for calls while it is taken out of the manifest."""
        return UnavailableError("the model is being taken out of service; try again in a moment")

    def admit(self, now_s: float) -> None:
        """Count a call that begins."""
        self.num_busy += 1
        self.last_used_s = now_s

    def admit_waiting(self, now_s: float) -> None:
        """Admit all that wait, in the order in which they came."""
        while self.waiting:
            admitted = self.waiting.popleft().admitted
            if not admitted.done():
                self.admit(now_s)
                admitted.set_result(None)

    def fail_waiting(self, error: LockstepError, *, only_impatient: bool = False) -> None:
        """End the wait of all, or of those that do not go on waiting when their load is lost."""
        waiting, self.waiting = self.waiting, deque()
        for waiter in waiting:
            if only_impatient and waiter.is_patient:
                self.waiting.append(waiter)
            elif not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    # -- what is seen of it ---------------------------------------------------------------------------------------

    def observed(self, now_s: float) -> Replica:
        """The replica as the planner sees it."""
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

    def snapshot(self, models: tuple[str, ...]) -> ReplicaSnapshot:
        """The replica as it is shown outside.

        Args:
            models: ids of those that share it.
        """
        loaded = self.loaded
        return ReplicaSnapshot(
            key=self.key,
            source=self.spec.source,
            phase=self.phase,
            models=models,
            bytes=self.bytes,
            predicted_bytes=self.spec.predicted_bytes,
            measured_bytes=self.measured_bytes,
            load_s=self.load_s,
            num_busy=self.num_busy,
            num_waiting=len(self.waiting),
            fingerprint=None if loaded is None else loaded.fingerprint,
            failure=None if self.failure is None else str(self.failure),
            engine=None if loaded is None or self.phase is not Phase.RESIDENT else _engine(loaded),
        )


def _engine(loaded: Loaded) -> EngineSnapshot:
    config, geometry = loaded.config, loaded.geometry
    environment, machine = loaded.environment, loaded.machine
    return EngineSnapshot(
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_tokens=config.num_blocks * geometry.block_size,
        kv_bytes=config.num_blocks * geometry.bytes_per_block,
        host_kv_tokens=config.num_host_blocks * geometry.block_size,
        host_kv_bytes=config.num_host_blocks * geometry.bytes_per_block,
        weights_bytes=geometry.weights_bytes,
        isa=machine.get("isa", ""),
        threads=int(machine["threads"]) if machine else None,
        kv_precision=environment.get("kv_cache_precision", ""),
        quantize=environment.get("quantize", ""),
    )
