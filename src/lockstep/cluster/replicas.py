"""Replicas of a cluster: carries out the planner's plans on a device worker. Event loop only.

A call holds a replica between `acquire` and `release`. While its replica is not loaded, or drains for another one, the
call waits; the waiting calls of a replica share one load. Loads and unloads run in tasks of this class, so a client
that disconnects only cancels its own wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from lockstep.cluster.planner import (
    Action,
    Drain,
    Load,
    Observed,
    Phase,
    PlanPolicy,
    Refuse,
    Unload,
    look_again_s,
    overshoot,
    plan,
)
from lockstep.cluster.replica_state import FAILED, WARM_TIME_S, ReplicaSpec, ReplicaState, Waiter
from lockstep.engine.options import AdapterSource
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import LockstepError, NotLoadableError, QueueFullError, UnavailableError, WorkerLostError
from lockstep.hosts.workers import HostedWorkers
from lockstep.system import SYSTEM, System
from lockstep.worker.supervised import SupervisedWorker

log = logging.getLogger(__name__)

MAX_WAITING_CALLS = 1024
"""Maximum number of calls that wait for replicas, all together; further calls are rejected."""
MIN_LOOK_S = 0.005
"""Minimum interval in seconds between two plans that are triggered by time alone."""
LOOK_S = 0.5
"""Interval in seconds at which a waiting call checks whether its replica may still become available."""
LOST = "worker lost"
"""Reason of a replica's absence after the worker was lost while it was resident or loading."""
CUT = "the model was taken out of service before this answer was complete; send the request again"
"""Error message of calls that were aborted because they did not end within the drain time."""
Watcher = Callable[[ReplicaState, Phase, str, float], None]
"""Callback after a change of phase: the replica, its previous phase, the reason, and how long that phase lasted in
seconds."""
Decide = Callable[[Observed, float, PlanPolicy], tuple[Action, ...]]
"""Function with the signature of `lockstep.cluster.planner.plan`."""
PlanWatcher = Callable[[Observed, float, PlanPolicy, tuple[Action, ...]], None]
"""Callback with the planner's input and its decision."""


class Replicas:
    """All replicas of a cluster. Only this class changes their phases.

    Args:
        worker: loads and unloads the replicas.
        policy: time limits of the planner.
        on_moved: called after each change of phase.
        on_planned: called with every plan, before it is carried out.
        system: clock, and threads that read tokenizers.
        decide: planning function. With several hosts it takes the actions from the controller's state.
    """

    def __init__(
        self,
        worker: SupervisedWorker | HostedWorkers,
        policy: PlanPolicy,
        on_moved: Watcher,
        on_planned: PlanWatcher | None = None,
        system: System = SYSTEM,
        decide: Decide = plan,
    ) -> None:
        self._worker = worker
        self._policy = policy
        self._on_moved = on_moved
        self._on_planned = on_planned
        self._system, self._clock = system, system.now_s
        self._decide = decide
        self._replicas: dict[str, ReplicaState] = {}
        """Replicas by key, in order of definition."""
        self.budget_bytes: int | None = None
        self.progress: Callable[[ReplicaState, str, float], None] | None = None
        """Called with the progress of loads: the replica, the stage, and the fraction that is done."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._look: asyncio.TimerHandle | None = None
        self._changed: asyncio.Future[None] | None = None
        """Completed at the next change, for callers that wait in `until`; None: no caller waits."""
        self._is_quiet = True
        """True if no call waits, so that the end of a call cannot change the plan."""
        self._closing: LockstepError | None = None

    # -- the replicas ---------------------------------------------------------------------------------------------

    def all(self) -> tuple[ReplicaState, ...]:
        return tuple(self._replicas.values())

    @property
    def held_bytes(self) -> int:
        """Device memory that all replicas other than absent ones take, in bytes."""
        return sum(replica.bytes for replica in self._replicas.values() if replica.phase is not Phase.ABSENT)

    def of(self, spec: ReplicaSpec) -> ReplicaState:
        """Return the replica of a spec; a new one is absent until it is needed."""
        return self._replicas.setdefault(spec.key, ReplicaState(spec))

    def take_over(self, spec: ReplicaSpec) -> None:
        """Apply a new manifest's spec to an existing replica; what is loaded stays loaded."""
        replica = self._replicas[spec.key]
        replica.spec = spec
        if replica.loaded is not None:
            replica.measured_bytes = spec.measure(replica.loaded)

    async def use_adapters(self, replica: ReplicaState, adapters: tuple[AdapterSource, ...]) -> None:
        """Set the adapters of a resident replica; others get those of their spec when they are loaded.

        Raises:
            LockstepError: one of them cannot be used, and nothing was changed.
        """
        if replica.phase is Phase.RESIDENT:
            await self._worker.use_adapters(replica.key, adapters)

    def order(self, keys: Iterable[str]) -> None:
        """Move these replicas to the front, in this order, which breaks ties in plans."""
        first = {key: self._replicas[key] for key in keys}
        self._replicas = first | self._replicas

    def forget(self, key: str) -> None:
        """Remove an absent replica."""
        assert self._replicas[key].phase is Phase.ABSENT
        del self._replicas[key]

    async def read_text(self, replica: ReplicaState) -> None:
        """Read a replica's tokenizer, so that its requests can be prepared before it is first loaded."""
        if replica.tokenizer is None:
            replica.tokenizer = await self._system.run_in_thread(replica.spec.tokenizer)

    # -- calls ----------------------------------------------------------------------------------------------------

    async def acquire(self, replica: ReplicaState, *, is_patient: bool = True) -> None:
        """Wait until a call may be sent to a replica. The replica then stays loaded until `release`.

        Args:
            is_patient: whether the call keeps waiting when the load is lost with its worker.

        Raises:
            NotLoadableError: the current manifest leaves no room for the replica.
            UnavailableError: the replica cannot be loaded now, or is being removed.
            QueueFullError: too many calls wait already.
        """
        now_s = self._clock()
        if (error := self.refusal(replica)) is not None:
            raise error
        if replica.is_open:
            replica.admit(now_s)
            return
        if sum(len(other.waiting) for other in self._replicas.values()) >= MAX_WAITING_CALLS:
            raise QueueFullError(f"{MAX_WAITING_CALLS} requests already wait for models to be loaded; try again later")
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = Waiter(admitted, now_s, is_patient)
        replica.waiting.append(waiter)
        self.pump()
        try:
            await self._wait(replica, waiter)
        except BaseException:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                self.release(replica)  # it was admitted while its client disconnected
            raise
        finally:
            if waiter in replica.waiting:
                replica.waiting.remove(waiter)
                self.pump()

    def refusal(self, replica: ReplicaState) -> LockstepError | None:
        """Error for a new call of a replica; None: the call is admitted or may wait."""
        return self._closing or replica.refusal(self._clock()) or self._absence(replica)

    def _absence(self, replica: ReplicaState, since_s: float | None = None) -> UnavailableError | None:
        """Error for a call that waits for a replica that will not become available; None: the replica is available or
        may become so.

        Args:
            since_s: when the call began to wait, on the same clock; None: it does not wait yet.
        """
        return None if replica.phase is Phase.RESIDENT else self._worker.absence(replica.key, since_s)

    async def _wait(self, replica: ReplicaState, waiter: Waiter) -> None:
        """Wait until a call is admitted or rejected. All calls that wait for a replica wait here, so this one function
        limits the wait."""
        since_s = self._clock()
        while not waiter.admitted.done():
            await asyncio.wait([waiter.admitted], timeout=LOOK_S)
            if not waiter.admitted.done() and (error := self._absence(replica, since_s)) is not None:
                raise error
        waiter.admitted.result()

    def release(self, replica: ReplicaState) -> None:
        """Count the end of a replica's call."""
        replica.num_busy -= 1
        replica.last_used_s = self._clock()
        assert replica.num_busy >= 0
        if not replica.num_busy and not (self._is_quiet and replica.idle_limit_s is None):
            self.pump()

    # -- loading and unloading ------------------------------------------------------------------------------------

    def warm(self, replica: ReplicaState) -> bool:
        """Load a replica if there is free room now or within `WARM_TIME_S`; returns whether it was not warming
        already."""
        now_s = self._clock()
        if replica.phase is not Phase.ABSENT or replica.waiting or replica.is_retired:
            return False
        if replica.failure is not None and now_s < replica.retry_at_s:
            return False
        is_new = now_s >= replica.warm_until_s
        replica.warm_until_s = now_s + WARM_TIME_S
        if is_new:
            self.pump()
        return is_new

    def retire(self, replica: ReplicaState) -> None:
        """Stop admitting calls, and fail the waiting ones."""
        replica.is_retired, replica.must_reload, replica.warm_until_s = True, False, 0.0
        replica.fail_waiting(replica.retirement())
        self.pump()

    def worker_lost(self) -> None:
        """Handle the loss of the worker with all resident replicas. Calls keep waiting if a new worker is expected
        soon."""
        for replica in self._replicas.values():
            if replica.phase is Phase.RESIDENT:
                replica.mark_lost()
                self._move(replica, Phase.ABSENT, LOST)
        for replica in self._replicas.values():
            if (error := self._absence(replica)) is not None:
                replica.fail_waiting(error)
        self.pump()

    def lost(self, key: str) -> None:
        """Handle the loss of one replica; its calls wait until it is back."""
        replica = self._replicas.get(key)
        if replica is not None and replica.phase is Phase.RESIDENT:
            replica.mark_lost()
            self._move(replica, Phase.ABSENT, LOST)
        self.pump()

    async def unload(self, replica: ReplicaState, limit_s: float, reason: str) -> None:
        """Unload a replica when its calls have ended, or when the time is up. Calls that arrive meanwhile wait and
        trigger a new load."""
        replica.must_reload, replica.warm_until_s = False, 0.0
        replica.num_leaving += 1
        try:
            await self.drain(replica, limit_s, reason)
        finally:
            replica.num_leaving -= 1
            self.pump()

    async def drain(self, replica: ReplicaState, limit_s: float, reason: str) -> int:
        """Unload a replica that admits no calls, when its open calls have ended or the time is up. Returns the number
        of aborted calls."""
        try:
            async with asyncio.timeout(limit_s):
                await self.until(lambda: replica.num_busy == 0 and replica.phase is not Phase.LOADING)
        except TimeoutError:
            await self.until(lambda: replica.phase is not Phase.LOADING)
        num_cut = replica.num_busy
        if num_cut:
            self._worker.abort_all(UnavailableError(CUT), replica.key)
        if replica.phase is Phase.RESIDENT:
            self._start_unload(replica, reason, None)
        await self.until(lambda: replica.phase is not Phase.UNLOADING)  # a waiting call reloads it at once
        return num_cut

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition that depends on replicas alone; UnavailableError: the cluster closes first."""
        while not is_so():
            if self._closing is not None:
                raise self._closing
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            self._is_quiet = False
            await asyncio.shield(self._changed)

    def pump(self) -> None:
        """Compute a plan and carry it out."""
        if self._closing is not None:
            return
        now_s = self._clock()
        observed = self._carry_out(now_s) if self._worker.is_up else None  # a plan needs a worker
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)
        self._look_again(observed or self._observed(now_s), now_s)

    def _carry_out(self, now_s: float) -> Observed | None:
        """Plan and act; returns the observed state if it still holds after the actions."""
        for replica in self._replicas.values():
            replica.request_reload(now_s)
        observed = self._observed(now_s)
        drains: dict[str, str] = {}
        actions = self._decide(observed, now_s, self._policy)
        if self._on_planned is not None:
            self._on_planned(observed, now_s, self._policy, actions)
        for action in actions:
            match action:
                case Load(key, reason):
                    self._start_load(self._replicas[key], reason)
                case Unload(key, reason, makes_room_for):
                    self._start_unload(self._replicas[key], reason, makes_room_for)
                case Drain(key, makes_room_for):
                    drains[key] = makes_room_for
                case Refuse(key, why):
                    self._replicas[key].fail_waiting(NotLoadableError(f"the model cannot be loaded: {why}"))
        is_same = not actions
        for replica in self._replicas.values():
            if replica.phase is Phase.RESIDENT:
                is_same = is_same and replica.makes_room_for is None and not replica.waiting
                replica.makes_room_for = drains.get(replica.key)
                if replica.waiting and replica.is_open:
                    replica.admit_waiting(self._clock())
        return observed if is_same else None

    def _look_again(self, observed: Observed, now_s: float) -> None:
        """Schedule another plan for the time at which it may differ."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        wanted = any(r.phase is not Phase.RESIDENT and (r.num_waiting or r.is_pinned) for r in observed.replicas)
        used_bytes = sum(r.bytes for r in observed.replicas if r.phase is not Phase.ABSENT)
        is_over = observed.budget_bytes is not None and used_bytes > observed.budget_bytes
        self._is_quiet = not (wanted or is_over or self._changed)
        if self._is_quiet and all(r.idle_limit_s is None for r in observed.replicas):
            return
        at_s = look_again_s(observed, now_s, self._policy)
        if at_s is not None:
            self._look = asyncio.get_running_loop().call_later(max(MIN_LOOK_S, at_s - now_s), self.pump)

    def _observed(self, now_s: float) -> Observed:
        return Observed(tuple(replica.observed(now_s) for replica in self._replicas.values()), self.budget_bytes)

    def _move(self, replica: ReplicaState, phase: Phase, reason: str) -> None:
        before, since_s = replica.phase, replica.since_s
        replica.move_to(phase, self._clock())
        self._on_moved(replica, before, reason, replica.since_s - since_s)

    def _start_load(self, replica: ReplicaState, reason: str) -> None:
        self._move(replica, Phase.LOADING, reason)
        self.run(self._load(replica, reason))

    async def _load(self, replica: ReplicaState, reason: str) -> None:
        spec = replica.spec
        progress = None if self.progress is None else partial(self.progress, replica)
        try:
            loaded = await self._worker.load(
                spec.key, spec.source, spec.options, progress, replica.priority, is_suspect=replica.is_suspect
            )
            if replica.loaded is None or replica.loaded.text != loaded.text:
                replica.tokenizer = await self._system.run_in_thread(lambda: Tokenizer(loaded.text.parts()))
            measured = spec.measure(loaded)
            excess = overshoot(self._observed(self._clock()), spec.key, measured)
            replica.measured_bytes = measured
            if excess:
                self._move(replica, Phase.UNLOADING, "budget")
                raise NotLoadableError(f"{spec.source}: {excess}")
            while replica.spec.options.adapters != spec.options.adapters:  # another manifest was applied meanwhile
                spec = replica.spec
                await self._worker.use_adapters(spec.key, spec.options.adapters)
            if self._worker.loaded(spec.key) is not loaded:
                raise WorkerLostError("the device worker ended right after it had loaded the model")
        except WorkerLostError as lost:
            self._load_lost(replica, lost)
        except Exception as error:  # whatever the error, no call may wait for a load that has ended
            if not isinstance(error, LockstepError):
                log.error("internal error while loading %s", spec.source, exc_info=error)
                error = NotLoadableError(f"{spec.source}: {error!r}")
            await self._worker.unload(spec.key)  # a model that loaded before a later step failed is unloaded
            self._load_failed(replica, error)
        else:
            replica.succeeded(loaded, self._clock())
            self._move(replica, Phase.RESIDENT, reason)
            replica.admit_waiting(self._clock())
        self.pump()

    def _load_failed(self, replica: ReplicaState, error: LockstepError) -> None:
        delay_s = replica.failed(error, self._clock())
        self._move(replica, Phase.ABSENT, FAILED)
        replica.fail_waiting(UnavailableError(replica.absence, retry_after_s=delay_s))

    def _load_lost(self, replica: ReplicaState, error: WorkerLostError) -> None:
        """Load the replica again as soon as there is a worker, unless its loads have ended too many workers."""
        if replica.lost(error):
            self._load_failed(replica, NotLoadableError(f"{error}, as {replica.num_lost - 1} times before"))
            return
        self._move(replica, Phase.ABSENT, LOST)
        replica.fail_waiting(error, only_impatient=True)

    def _start_unload(self, replica: ReplicaState, reason: str, makes_room_for: str | None) -> None:
        self._move(replica, Phase.UNLOADING, reason)
        replica.makes_room_for = makes_room_for
        self.run(self._unload(replica, reason))

    async def _unload(self, replica: ReplicaState, reason: str) -> None:
        try:
            await self._worker.unload(replica.key)
        except Exception:  # whatever the error, waiting claims must see the room as free
            log.exception("internal error while unloading %s", replica.spec.source)
        replica.makes_room_for = None
        self._move(replica, Phase.ABSENT, reason)
        self.pump()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task in the background; `close` cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fail_all(self, error: LockstepError) -> None:
        """Fail all waiting calls with an error."""
        for replica in self._replicas.values():
            replica.fail_waiting(error)

    async def close(self) -> None:
        """Cancel all tasks. The caller closes the worker."""
        self._closing = UnavailableError("the server is closing")
        self.fail_all(self._closing)
        if self._changed is not None:
            self._changed.set_result(None)
        if self._look is not None:
            self._look.cancel()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
