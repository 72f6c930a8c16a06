"""Replicas of a cluster: the shell that carries out the planner's plans on a device worker. Event loop only.

A call takes part in a replica between `acquire` and `release`. While its replica is not there, or is held back for
others, it waits; waiters of one replica share its load. What the worker does, it does in tasks of this shell, so that a
client that leaves ends its own wait and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
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
from lockstep.cluster.replica_state import FAILED, WARM_WISH_S, ReplicaSpec, ReplicaState, Waiter
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import LockstepError, NotLoadableError, QueueFullError, UnavailableError, WorkerLostError
from lockstep.hosts.workers import HostedWorkers
from lockstep.worker.supervised import SupervisedWorker

log = logging.getLogger(__name__)

MAX_WAITING_CALLS = 1024
"""That wait for replicas, all together; more are refused."""
MIN_LOOK_S = 0.005
"""Plans that only time could change are no closer together."""
LOOK_S = 0.5
"""Between two looks at whether a waiting call still has a replica to wait for."""
LOST = "worker lost"
"""Why one is absent that was there, or was being loaded."""
CUT = "the model was taken out of service before this answer was complete; send the request again"
"""Error of calls that did not end in the time that draining had."""
Watcher = Callable[[ReplicaState, Phase, str, float], None]
"""Called when a replica has come to another phase: the replica, its phase before, why, and how long that lasted."""
Decide = Callable[[Observed, float, PlanPolicy], tuple[Action, ...]]
"""As `lockstep.cluster.planner.plan`."""
PlanWatcher = Callable[[Observed, float, PlanPolicy, tuple[Action, ...]], None]
"""Called with what the planner saw, and what it decided."""


class Replicas:
    """All replicas of a cluster, moved from phase to phase here and nowhere else.

    Args:
        worker: does the loading and unloading.
        policy: the planner's patience.
        on_moved: called with every change of phase, after it.
        on_planned: called with every plan, before it is carried out.
        clock: monotonic seconds.
        decide: plans; on several hosts the owner's word stands for it.
    """

    def __init__(
        self,
        worker: SupervisedWorker | HostedWorkers,
        policy: PlanPolicy,
        on_moved: Watcher,
        on_planned: PlanWatcher | None = None,
        clock: Callable[[], float] = time.monotonic,
        decide: Decide = plan,
    ) -> None:
        self._worker = worker
        self._policy = policy
        self._on_moved = on_moved
        self._on_planned = on_planned
        self._clock = clock
        self._decide = decide
        self._replicas: dict[str, ReplicaState] = {}
        """In order of definition."""
        self.budget_bytes: int | None = None
        self.progress: Callable[[ReplicaState, str, float], None] | None = None
        """Called with the progress of loads: which replica, the stage and how much of it is done."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._look: asyncio.TimerHandle | None = None
        self._changed: asyncio.Future[None] | None = None
        """Done at the next change, for callers that wait in `until`; None: there are none."""
        self._is_quiet = True
        """No call waits, so that the end of a call changes no plan."""
        self._closing: LockstepError | None = None

    # -- what there is --------------------------------------------------------------------------------------------

    def all(self) -> tuple[ReplicaState, ...]:
        return tuple(self._replicas.values())

    @property
    def held_bytes(self) -> int:
        """Bytes that the replicas which are not absent take of the machine."""
        return sum(replica.bytes for replica in self._replicas.values() if replica.phase is not Phase.ABSENT)

    def of(self, spec: ReplicaSpec) -> ReplicaState:
        """The replica of a spec; a new one is absent until it is needed."""
        return self._replicas.setdefault(spec.key, ReplicaState(spec))

    def take_over(self, spec: ReplicaSpec) -> None:
        """Apply a manifest to a replica that is there already; what is loaded stays as it is."""
        replica = self._replicas[spec.key]
        replica.spec = spec
        if replica.loaded is not None:
            replica.measured_bytes = spec.measure(replica.loaded)

    def order(self, keys: Iterable[str]) -> None:
        """Put these first, in this order: it breaks ties."""
        first = {key: self._replicas[key] for key in keys}
        self._replicas = first | self._replicas

    def forget(self, key: str) -> None:
        """Drop a replica that is absent."""
        assert self._replicas[key].phase is Phase.ABSENT
        del self._replicas[key]

    async def read_text(self, replica: ReplicaState) -> None:
        """Read its tokenizer, so that requests to it can be planned before it was ever loaded."""
        if replica.tokenizer is None:
            replica.tokenizer = await asyncio.to_thread(replica.spec.tokenizer)

    # -- calls ----------------------------------------------------------------------------------------------------

    async def acquire(self, replica: ReplicaState, *, is_patient: bool = True) -> None:
        """Wait until a call may be sent to a replica, which then stays until `release`.

        Args:
            is_patient: whether to go on waiting when its load is lost with its worker.

        Raises:
            NotLoadableError: there will be no room for it as the manifest stands.
            UnavailableError: it cannot be loaded now, or is on its way out.
            QueueFullError: too many wait already.
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
                self.release(replica)  # admitted in the moment in which it left
            raise
        finally:
            if waiter in replica.waiting:
                replica.waiting.remove(waiter)
                self.pump()

    def refusal(self, replica: ReplicaState) -> LockstepError | None:
        """The error for calls of a replica that come now; None: they are admitted, or may wait."""
        return self._closing or replica.refusal(self._clock()) or self._absence(replica)

    def _absence(self, replica: ReplicaState, since_s: float | None = None) -> UnavailableError | None:
        """The error where waiting for a replica is of no use; None: it is there, or may come.

        Args:
            since_s: when the call began to wait, by the same clock; None: it has not yet.
        """
        return None if replica.phase is Phase.RESIDENT else self._worker.absence(replica.key, since_s)

    async def _wait(self, replica: ReplicaState, waiter: Waiter) -> None:
        """Wait until a call is admitted or refused. Every call that waits for a replica waits here, so that one place
        bounds the wait for a replica that does not come."""
        since_s = self._clock()
        while not waiter.admitted.done():
            await asyncio.wait([waiter.admitted], timeout=LOOK_S)
            if not waiter.admitted.done() and (error := self._absence(replica, since_s)) is not None:
                raise error
        waiter.admitted.result()

    def release(self, replica: ReplicaState) -> None:
        """Note that a call of a replica has ended."""
        replica.num_busy -= 1
        replica.last_used_s = self._clock()
        assert replica.num_busy >= 0
        if not replica.num_busy and not (self._is_quiet and replica.idle_limit_s is None):
            self.pump()

    # -- wishes and orders ----------------------------------------------------------------------------------------

    def warm(self, replica: ReplicaState) -> bool:
        """Load it when there is free room, now or soon; whether it was not wanted already."""
        now_s = self._clock()
        if replica.phase is not Phase.ABSENT or replica.waiting or replica.is_retired:
            return False
        if replica.failure is not None and now_s < replica.retry_at_s:
            return False
        is_new = now_s >= replica.warm_until_s
        replica.warm_until_s = now_s + WARM_WISH_S
        if is_new:
            self.pump()
        return is_new

    def retire(self, replica: ReplicaState) -> None:
        """Take no more calls, and tell those that wait."""
        replica.is_retired, replica.is_missed, replica.warm_until_s = True, False, 0.0
        replica.fail_waiting(replica.retirement())
        self.pump()

    def worker_lost(self) -> None:
        """Note that the worker is gone, with all that was resident; calls go on waiting, if the next one comes soon."""
        for replica in self._replicas.values():
            if replica.phase is Phase.RESIDENT:
                replica.miss()
                self._move(replica, Phase.ABSENT, LOST)
        for replica in self._replicas.values():
            if (error := self._absence(replica)) is not None:
                replica.fail_waiting(error)
        self.pump()

    def lost(self, key: str) -> None:
        """Note that one replica is gone, and the others are not; calls wait until it has come back."""
        replica = self._replicas.get(key)
        if replica is not None and replica.phase is Phase.RESIDENT:
            replica.miss()
            self._move(replica, Phase.ABSENT, LOST)
        self.pump()

    async def unload(self, replica: ReplicaState, limit_s: float, reason: str) -> None:
        """Take a replica off the device when its calls have ended, or when the time is up. Calls that come meanwhile
        wait, and bring it back."""
        replica.is_missed, replica.warm_until_s = False, 0.0
        replica.num_leaving += 1
        try:
            await self.drain(replica, limit_s, reason)
        finally:
            replica.num_leaving -= 1
            self.pump()

    async def drain(self, replica: ReplicaState, limit_s: float, reason: str) -> int:
        """Unload a replica that admits no calls when its own have ended, or when the time is up; how many that cut."""
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
        await self.until(lambda: replica.phase is not Phase.UNLOADING)  # who waits for it has it loaded again at once
        return num_cut

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that depends on replicas alone; UnavailableError when all is closed before."""
        while not is_so():
            if self._closing is not None:
                raise self._closing
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            self._is_quiet = False
            await asyncio.shield(self._changed)

    def pump(self) -> None:
        """Plan, and carry it out."""
        if self._closing is not None:
            return
        now_s = self._clock()
        observed = self._carry_out(now_s) if self._worker.is_up else None  # else there is nobody to do anything
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)
        self._look_again(observed or self._observed(now_s), now_s)

    def _carry_out(self, now_s: float) -> Observed | None:
        """Plan and act; what was observed, where it still is so."""
        for replica in self._replicas.values():
            replica.recall(now_s)
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
        """See to it that there is another plan when time alone may change it."""
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
                replica.tokenizer = await asyncio.to_thread(lambda: Tokenizer(loaded.text.parts()))
            measured = spec.measure(loaded)
            excess = overshoot(self._observed(self._clock()), spec.key, measured)
            replica.measured_bytes = measured
            if excess:
                self._move(replica, Phase.UNLOADING, "budget")
                raise NotLoadableError(f"{spec.source}: {excess}")
            if self._worker.loaded(spec.key) is not loaded:
                raise WorkerLostError("the device worker ended when it had just loaded the model")
        except WorkerLostError as lost:
            self._load_lost(replica, lost)
        except Exception as error:  # whatever it is, nobody may wait for a load that has ended
            if not isinstance(error, LockstepError):
                log.error("a defect over the loading of %s", spec.source, exc_info=error)
                error = NotLoadableError(f"{spec.source}: {error!r}")
            await self._worker.unload(spec.key)  # what was loaded when something else failed is not kept
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
        """Load it again as soon as there is a worker, unless its loads are what ends them."""
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
        except Exception:  # whatever it is, nobody may wait for room that is never told to be free
            log.exception("a defect over the unloading of %s", replica.spec.source)
        replica.makes_room_for = None
        self._move(replica, Phase.ABSENT, reason)
        self.pump()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that no one waits for; ended by `close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fail_all(self, error: LockstepError) -> None:
        """End the wait of all calls with an error."""
        for replica in self._replicas.values():
            replica.fail_waiting(error)

    async def close(self) -> None:
        """End what is under way; the worker is the caller's to close."""
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
