"""Replica state: one replica's phase, load, back-off after a failed load, and open and waiting calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.cluster.manifest import ModelEntry, Tier
from lockstep.cluster.planner import MOVES, Phase, Replica
from lockstep.cluster.snapshot import EngineSnapshot, ReplicaSnapshot
from lockstep.engine.options import LoadOptions
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import LockstepError, UnavailableError, WorkerLostError
from lockstep.hosts.values import GroupOptions
from lockstep.worker.health import backoff_s
from lockstep.worker.messages import Loaded

FIRST_BACKOFF_S = 1.0
"""Delay in seconds before a failed load is retried; doubled with each consecutive failure."""
MAX_BACKOFF_S = 60.0
MAX_LOST_LOADS = 5
"""Number of consecutive loads of a model during which the worker ended, after which they count as the model's own
failure."""
SUSPECT_LOADS = 2
"""Number of such loads after which the model is first tried in a throw-away process."""
WARM_TIME_S = 30.0
"""Time in seconds during which free memory is used to load a model that will probably be needed."""
EXPECTED_LOAD_S = 1.0
"""Expected load time in seconds of a model that was never loaded."""
FAILED = "failed"
"""State of models, and reason of transitions, after a failed load."""
STANDBY = "standby"
"""State of models whose replica is absent and may be loaded."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Specification of a load. Models whose specs have the same key share a replica."""

    key: str
    source: str
    options: LoadOptions
    predicted_bytes: int
    """Predicted size of weights and KV pool."""
    tokenizer: Callable[[], Tokenizer]
    """Reads the tokenizer, which takes a moment and is possible before the load."""
    measure: Callable[[Loaded], int]
    """Returns the size of weights and KV pool from the measurements of a load."""
    group: GroupOptions = field(default_factory=GroupOptions)
    """Placement and routing with several hosts; one replica otherwise. Part of the key."""


class Waiter(NamedTuple):
    """Call that waits to be admitted."""

    admitted: asyncio.Future[None]
    since_s: float
    is_patient: bool = True
    """True if the call keeps waiting when the load is lost with its worker."""


@dataclass(slots=True, eq=False)
class ReplicaState:
    """State of one replica. `Replicas` changes its phase; its models set its pinning and priority through `pin`."""

    spec: ReplicaSpec
    priority: int = 0
    """Most urgent priority of its models."""
    is_pinned: bool = False
    """True if one of its models is declared resident."""
    idle_limit_s: float | None = None
    """Idle time in seconds after which it is unloaded; None: it is only unloaded to make room."""
    phase: Phase = Phase.ABSENT
    measured_bytes: int | None = None
    """Size of weights and KV pool measured by the last load, even if that exceeded the budget; None: it was never
    loaded."""
    loaded: Loaded | None = None
    """Measurements of its last load."""
    tokenizer: Tokenizer | None = None
    num_busy: int = 0
    waiting: deque[Waiter] = field(default_factory=deque)
    last_used_s: float = 0.0
    load_s: float | None = None
    since_s: float = 0.0
    """When it entered its current phase."""
    retry_at_s: float = 0.0
    num_failures: int = 0
    """Number of consecutive failed loads."""
    failure: LockstepError | None = None
    """Reason why its last load failed; None: it did not fail."""
    num_lost: int = 0
    """Number of consecutive loads during which the worker ended."""
    must_reload: bool = False
    """True if it was resident or loading when the worker was lost, so that the next worker has to load it."""
    warm_until_s: float = 0.0
    """Time until which free memory is used to load it, because it will probably be needed."""
    makes_room_for: str | None = None
    """Key of the replica for which it drains or is unloaded; None: none."""
    is_dismissed: bool = False
    """True if an operator unloaded it: a request loads it again, its declared tier does not."""
    num_leaving: int = 0
    """Number of management requests that are unloading it. Open calls finish; new calls wait until it is loaded
    again."""
    is_retired: bool = False
    """True if it is being removed from the manifest, so that it admits no calls."""

    @property
    def bytes(self) -> int:
        """Size of weights and KV pool in bytes: measured if known, otherwise predicted."""
        return self.spec.predicted_bytes if self.measured_bytes is None else self.measured_bytes

    @property
    def key(self) -> str:
        return self.spec.key

    @property
    def is_open(self) -> bool:
        """True if calls are admitted at once: it is resident and not draining."""
        return self.phase is Phase.RESIDENT and self.makes_room_for is None and not self.num_leaving

    def pin(self, entries: Sequence[ModelEntry]) -> None:
        """Set pinning, priority and idle limit from its models."""
        limits = [entry.keep_alive_s for entry in entries]
        self.is_pinned = not self.is_dismissed and any(entry.tier is Tier.RESIDENT for entry in entries)
        self.priority = min((entry.priority for entry in entries), default=0)
        self.idle_limit_s = max((limit for limit in limits if limit is not None), default=None)
        if None in limits:
            self.idle_limit_s = None

    # -- phases and loads -----------------------------------------------------------------------------------------

    def move_to(self, phase: Phase, now_s: float) -> None:
        """Enter a phase. A transition that is not in the planner's table is a programming error."""
        assert phase in MOVES[self.phase], f"invalid transition of a replica from {self.phase} to {phase}"
        self.phase, self.since_s = phase, now_s

    def failed(self, error: LockstepError, now_s: float) -> float:
        """Record a failed load; returns the seconds until the next attempt."""
        self.num_failures += 1
        delay_s = backoff_s(self.num_failures, FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self.failure, self.retry_at_s = error, now_s + delay_s
        self.warm_until_s = 0.0
        return delay_s

    @property
    def is_suspect(self) -> bool:
        """True if it is tried in a throw-away process before it is loaded again."""
        return self.num_lost >= SUSPECT_LOADS

    def succeeded(self, loaded: Loaded, now_s: float) -> None:
        """Record a successful load."""
        self.loaded, self.load_s, self.last_used_s = loaded, loaded.load_s, now_s
        self.failure, self.num_failures, self.num_lost, self.retry_at_s = None, 0, 0, 0.0
        self.warm_until_s = 0.0

    def lost(self, error: WorkerLostError) -> bool:
        """Record a load that was lost with its worker, without the model's fault. Returns True if this happened too
        often."""
        self.num_lost += error.is_suspect
        is_to_blame = error.is_suspect and self.num_lost > MAX_LOST_LOADS
        if is_to_blame:
            self.num_failures = max(self.num_failures, self.num_lost)  # each attempt ends all other replicas too
        self.mark_lost()
        self.must_reload = self.must_reload and not is_to_blame
        return is_to_blame

    def mark_lost(self) -> None:
        """Record that the worker was lost while it had the replica, or was to load it. The next worker loads it again
        unless it was about to be unloaded."""
        self.makes_room_for = None
        self.must_reload = not (self.num_leaving or self.is_retired)

    def request_reload(self, now_s: float) -> None:
        """Request the reload of a replica that the last worker had, now that there is a new one."""
        if self.must_reload:
            self.must_reload = False
            self.warm_until_s = now_s + WARM_TIME_S
            self.retry_at_s = max(self.retry_at_s, now_s)  # start of its wait if it is declared resident

    # -- calls ----------------------------------------------------------------------------------------------------

    def refusal(self, now_s: float) -> UnavailableError | None:
        """Error for calls that arrive now; None: they may at least wait."""
        if self.is_retired:
            return self.retirement()
        if self.failure is None or now_s >= self.retry_at_s:
            return None
        return UnavailableError(self.absence, retry_after_s=self.retry_at_s - now_s)

    @property
    def absence(self) -> str:
        """Reason why it could not be loaded, in one sentence; empty: it did not fail."""
        again = "" if self.loaded is None else " again"
        return "" if self.failure is None else f"the model could not be loaded{again}: {self.failure}"

    def trouble(self) -> str:
        """Reason why calls would not be served at once, in one sentence; empty: they would be, if the worker is up."""
        return "" if self.phase is Phase.RESIDENT else self.absence or "the model is loading"

    def status(self, now_s: float) -> str:
        """State shown for its models. It is the actual state, not the declared tier."""
        if self.phase is not Phase.ABSENT:
            return self.phase.value
        if self.failure is not None:
            return FAILED if now_s < self.retry_at_s else STANDBY
        return Phase.LOADING.value if self.must_reload or self.is_pinned else STANDBY

    def retirement(self) -> UnavailableError:
        """Error for calls while it is being removed from the manifest."""
        return UnavailableError("the model is being removed; try again in a moment")

    def admit(self, now_s: float) -> None:
        """Count the start of a call."""
        self.num_busy += 1
        self.last_used_s = now_s

    def admit_waiting(self, now_s: float) -> None:
        """Admit all waiting calls, in order of arrival."""
        while self.waiting:
            admitted = self.waiting.popleft().admitted
            if not admitted.done():
                self.admit(now_s)
                admitted.set_result(None)

    def fail_waiting(self, error: LockstepError, *, only_impatient: bool = False) -> None:
        """Fail all waiting calls, or only those that do not wait through a lost load."""
        waiting, self.waiting = self.waiting, deque()
        for waiter in waiting:
            if only_impatient and waiter.is_patient:
                self.waiting.append(waiter)
            elif not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def observed(self, now_s: float) -> Replica:
        """Replica in the form that the planner uses."""
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
        """Snapshot of the replica for management requests.

        Args:
            models: ids of the models that share it.
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
        max_model_len=loaded.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_tokens=config.most_positions() // geometry.num_stages,
        kv_bytes=config.num_blocks * geometry.bytes_per_block,
        host_kv_tokens=config.positions_in(config.num_host_blocks) // geometry.num_stages,
        host_kv_bytes=config.num_host_blocks * geometry.bytes_per_block,
        weights_bytes=geometry.weights_bytes,
        isa=machine.get("isa", ""),
        threads=int(machine["threads"]) if machine else None,
        kv_precision=environment.get("kv_cache_precision", ""),
        quantize=environment.get("quantize", ""),
        is_encoder=geometry.num_stages > 1,
    )
