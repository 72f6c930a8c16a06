"""Who is loaded: the shell that carries out the planner's plans on a device worker. Event loop only.

A call takes part in a replica between `acquire` and `release`. While its replica is not there, or is held back for
others, it waits; waiters of one replica share its load. What the worker does, it does in tasks of this shell, so that
a client that leaves ends its own wait and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from lockstep.cluster.held import WARM_WISH_S, Held, ReplicaSpec, Waiter
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
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import LockstepError, NotLoadableError, QueueFullError, UnavailableError, WorkerLostError
from lockstep.worker.supervised import SupervisedWorker

log = logging.getLogger(__name__)

MAX_WAITING_CALLS = 1024
"""That wait for replicas, all together; more are refused."""
MIN_LOOK_S = 0.005
"""Plans that only time could change are no closer together."""
MAX_AWAY_S = 5.0
"""Calls wait for a worker that is started within this time; where it is later, they are told when to come again."""
FAILED = "failed"
"""Why a replica is absent that could not be loaded."""
LOST = "worker lost"
"""Why one is absent that was there, or was being loaded."""
CUT = "the model was taken out of service before this answer was complete; send the request again"
"""What calls are told that did not end in the time that draining had."""
Watcher = Callable[[Held, Phase, str, float], None]
"""Told that a replica has come to another phase: the replica, its phase before, why, and how long that lasted."""
PlanWatcher = Callable[[Observed, float, PlanPolicy, tuple[Action, ...]], None]
"""Told what the planner saw, and what it said."""


class Replicas:
    """All replicas of a cluster.

    Args:
        worker: does the loading and unloading.
        policy: the planner's patience.
        on_moved: told of every change of phase, after it.
        on_planned: told of every plan, before it is carried out.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        worker: SupervisedWorker,
        policy: PlanPolicy,
        on_moved: Watcher,
        on_planned: PlanWatcher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._policy = policy
        self._on_moved = on_moved
        self._on_planned = on_planned
        self._clock = clock
        self._held: dict[str, Held] = {}
        """In order of definition."""
        self.budget_bytes: int | None = None
        self.progress: Callable[[Held, str, float], None] | None = None
        """Told about loads: whose, the stage and how much of it is done."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._look: asyncio.TimerHandle | None = None
        self._watchers: list[asyncio.Future[None]] = []
        self._is_quiet = True
        """Nobody waits for anything, so that the end of a call changes no plan."""
        self._closing: LockstepError | None = None

    # -- what there is --------------------------------------------------------------------------------------------

    def all(self) -> tuple[Held, ...]:
        return tuple(self._held.values())

    @property
    def held_bytes(self) -> int:
        """What the replicas that are not absent take of the machine."""
        return sum(held.bytes for held in self._held.values() if held.phase is not Phase.ABSENT)

    def hold(self, spec: ReplicaSpec) -> Held:
        """The replica of a spec; a new one is absent until somebody needs it."""
        held = self._held.get(spec.key)
        if held is None:
            held = Held(spec, priority=0, is_pinned=False, idle_limit_s=None)
            self._held[spec.key] = held
        return held

    def take_over(self, spec: ReplicaSpec) -> None:
        """What a manifest says of a replica that is there already; what is loaded stays as it is."""
        held = self._held[spec.key]
        held.spec = spec
        if held.loaded is not None:
            held.measured_bytes = spec.measure(held.loaded)

    def order(self, keys: Iterable[str]) -> None:
        """These come first, in this order: it breaks ties."""
        first = {key: self._held[key] for key in keys}
        self._held = first | self._held

    def forget(self, key: str) -> None:
        """One that is absent is no part of this any more."""
        assert self._held[key].phase is Phase.ABSENT
        del self._held[key]

    async def read_text(self, held: Held) -> None:
        """Know its text side, so that requests to it can be planned before it was ever loaded."""
        if held.tokenizer is None:
            held.tokenizer = await asyncio.to_thread(held.spec.tokenizer)

    # -- calls ----------------------------------------------------------------------------------------------------

    async def acquire(self, held: Held, *, is_patient: bool = True) -> None:
        """Wait until a call may be sent to a replica, which then stays until `release`.

        Args:
            is_patient: whether to go on waiting when its load is lost with its worker.

        Raises:
            NotLoadableError: there will be no room for it as the manifest stands.
            UnavailableError: it cannot be loaded now, or is on its way out.
            QueueFullError: too many wait already.
        """
        now_s = self._clock()
        if (error := self._closing or held.refusal(now_s) or self._away()) is not None:
            raise error
        if held.is_open:
            held.admit(now_s)
            return
        if sum(len(other.waiting) for other in self._held.values()) >= MAX_WAITING_CALLS:
            raise QueueFullError(f"{MAX_WAITING_CALLS} requests already wait for models to be loaded; try again later")
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = Waiter(admitted, now_s, is_patient)
        held.waiting.append(waiter)
        self.pump()
        try:
            await admitted
        except BaseException:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                self.release(held)  # admitted in the moment in which it left
            raise
        finally:
            if waiter in held.waiting:
                held.waiting.remove(waiter)
                self.pump()

    def _away(self) -> UnavailableError | None:
        """Why nobody need wait for the next worker; None: it is there, or comes soon."""
        if self._worker.away_s <= MAX_AWAY_S:
            return None
        return UnavailableError(self._worker.trouble, retry_after_s=self._worker.retry_after_s)

    def release(self, held: Held) -> None:
        """A call of a replica has ended."""
        held.num_busy -= 1
        held.last_used_s = self._clock()
        assert held.num_busy >= 0
        if not held.num_busy and not (self._is_quiet and held.idle_limit_s is None):
            self.pump()

    # -- what is done ---------------------------------------------------------------------------------------------

    def warm(self, held: Held) -> bool:
        """Load it when there is free room, now or soon; whether it was not wanted already."""
        now_s = self._clock()
        if held.phase is not Phase.ABSENT or held.waiting or held.is_retired:
            return False
        if held.failure is not None and now_s < held.retry_at_s:
            return False
        is_new = now_s >= held.warm_until_s
        held.warm_until_s = now_s + WARM_WISH_S
        if is_new:
            self.pump()
        return is_new

    def retire(self, held: Held) -> None:
        """It takes no more calls, and those that wait are told so."""
        held.is_retired, held.is_missed, held.warm_until_s = True, False, 0.0
        held.fail_waiting(held.retirement())
        self.pump()

    def worker_lost(self) -> None:
        """The worker is gone, with all that was resident; who waits goes on waiting, if the next one comes soon."""
        for held in self._held.values():
            if held.phase is Phase.RESIDENT:
                held.miss()
                self._move(held, Phase.ABSENT, LOST)
        if (error := self._away()) is not None:
            self.fail_all(error)
        self.pump()

    async def unload(self, held: Held, limit_s: float, reason: str) -> None:
        """Take a replica off the device when its calls have ended, or when the time is up. Calls that come meanwhile
        wait, and bring it back."""
        held.is_missed, held.warm_until_s = False, 0.0
        held.num_leaving += 1
        try:
            await self.drain(held, limit_s, reason)
        finally:
            held.num_leaving -= 1
            self.pump()

    async def drain(self, held: Held, limit_s: float, reason: str) -> int:
        """Unload a replica that admits no calls when its own have ended, or when the time is up; how many that cut."""
        try:
            async with asyncio.timeout(limit_s):
                await self.until(lambda: held.num_busy == 0 and held.phase is not Phase.LOADING)
        except TimeoutError:
            await self.until(lambda: held.phase is not Phase.LOADING)
        num_cut = held.num_busy
        if num_cut:
            self._worker.abort_all(UnavailableError(CUT), held.key)
        if held.phase is Phase.RESIDENT:
            self._start_unload(held, reason, None)
        await self.until(lambda: held.phase is not Phase.UNLOADING)  # who waits for it has it loaded again at once
        return num_cut

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that depends on replicas alone; UnavailableError when all is closed before."""
        while not is_so():
            if self._closing is not None:
                raise self._closing
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.append(watcher)
            self._is_quiet = False
            await watcher

    def pump(self) -> None:
        """Plan, and carry it out."""
        if self._closing is not None:
            return
        now_s = self._clock()
        observed = self._carry_out(now_s) if self._worker.is_up else None  # else there is nobody to do anything
        waiting, self._watchers = self._watchers, []
        for watcher in waiting:
            if not watcher.done():
                watcher.set_result(None)
        self._look_again(observed or self._observed(now_s), now_s)

    def _carry_out(self, now_s: float) -> Observed | None:
        """Plan and act; what was observed, where it still is so."""
        for held in self._held.values():
            held.recall(now_s)
        observed = self._observed(now_s)
        drains: dict[str, str] = {}
        actions = plan(observed, now_s, self._policy)
        if self._on_planned is not None:
            self._on_planned(observed, now_s, self._policy, actions)
        for action in actions:
            match action:
                case Load(key, reason):
                    self._start_load(self._held[key], reason)
                case Unload(key, reason, makes_room_for):
                    self._start_unload(self._held[key], reason, makes_room_for)
                case Drain(key, makes_room_for):
                    drains[key] = makes_room_for
                case Refuse(key, why):
                    self._held[key].fail_waiting(NotLoadableError(f"the model cannot be loaded: {why}"))
        is_same = not actions
        for held in self._held.values():
            if held.phase is Phase.RESIDENT:
                is_same = is_same and held.makes_room_for is None and not held.waiting
                held.makes_room_for = drains.get(held.key)
                if held.waiting and held.is_open:
                    held.admit_waiting(self._clock())
        return observed if is_same else None

    def _look_again(self, observed: Observed, now_s: float) -> None:
        """See to it that there is another plan when time alone may change it."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        wanted = any(r.phase is not Phase.RESIDENT and (r.num_waiting or r.is_pinned) for r in observed.replicas)
        used_bytes = sum(r.bytes for r in observed.replicas if r.phase is not Phase.ABSENT)
        is_over = observed.budget_bytes is not None and used_bytes > observed.budget_bytes
        self._is_quiet = not (wanted or is_over or self._watchers)
        if self._is_quiet and all(r.idle_limit_s is None for r in observed.replicas):
            return
        at_s = look_again_s(observed, now_s, self._policy)
        if at_s is not None:
            self._look = asyncio.get_running_loop().call_later(max(MIN_LOOK_S, at_s - now_s), self.pump)

    def _observed(self, now_s: float) -> Observed:
        return Observed(tuple(held.observed(now_s) for held in self._held.values()), self.budget_bytes)

    def _move(self, held: Held, phase: Phase, reason: str) -> None:
        before, since_s = held.phase, held.since_s
        held.move_to(phase, self._clock())
        self._on_moved(held, before, reason, held.since_s - since_s)

    def _start_load(self, held: Held, reason: str) -> None:
        self._move(held, Phase.LOADING, reason)
        self.run(self._load(held, reason))

    async def _load(self, held: Held, reason: str) -> None:
        spec = held.spec
        progress = None if self.progress is None else partial(self.progress, held)
        try:
            loaded = await self._worker.load(
                spec.key, spec.source, spec.options, progress, held.priority, is_suspect=held.is_suspect
            )
            if held.loaded is None or held.loaded.text != loaded.text:
                held.tokenizer = await asyncio.to_thread(lambda: Tokenizer(loaded.text.parts()))
            measured = spec.measure(loaded)
            excess = overshoot(self._observed(self._clock()), spec.key, measured)
            held.measured_bytes = measured
            if excess:
                self._move(held, Phase.UNLOADING, "budget")
                await self._worker.unload(spec.key)
                raise NotLoadableError(f"{spec.source}: {excess}")
            if self._worker.loaded(spec.key) is not loaded:
                raise WorkerLostError("the device worker ended when it had just loaded the model")
        except WorkerLostError as lost:
            self._load_lost(held, lost)
        except Exception as defect:  # whatever it is, nobody may wait for a load that has ended
            error = defect if isinstance(defect, LockstepError) else await self._given_up(defect, spec)
            self._load_failed(held, error)
        else:
            held.succeeded(loaded, self._clock())
            self._move(held, Phase.RESIDENT, reason)
            held.admit_waiting(self._clock())
        self.pump()

    def _load_failed(self, held: Held, error: LockstepError) -> None:
        delay_s = held.failed(error, self._clock())
        self._move(held, Phase.ABSENT, FAILED)
        held.fail_waiting(UnavailableError(held.absence, retry_after_s=delay_s))

    def _load_lost(self, held: Held, error: WorkerLostError) -> None:
        """It is loaded again as soon as there is a worker, unless its loads are what ends them."""
        if held.lost(error):
            self._load_failed(held, NotLoadableError(f"{error}, as {held.num_lost - 1} times before"))
            return
        self._move(held, Phase.ABSENT, LOST)
        held.fail_waiting(error, only_impatient=True)

    async def _given_up(self, defect: Exception, spec: ReplicaSpec) -> LockstepError:
        """A defect of ours over a load: it is logged, and what was loaded is freed."""
        log.error("a defect over the loading of %s", spec.source, exc_info=defect)
        await self._worker.unload(spec.key)
        return NotLoadableError(f"{spec.source}: {defect!r}")

    def _start_unload(self, held: Held, reason: str, makes_room_for: str | None) -> None:
        self._move(held, Phase.UNLOADING, reason)
        held.makes_room_for = makes_room_for
        self.run(self._unload(held, reason))

    async def _unload(self, held: Held, reason: str) -> None:
        try:
            await self._worker.unload(held.key)
        except Exception:  # whatever it is, nobody may wait for room that is never told to be free
            log.exception("a defect over the unloading of %s", held.spec.source)
        held.makes_room_for = None
        self._move(held, Phase.ABSENT, reason)
        self.pump()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for; ended by `close`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fail_all(self, error: LockstepError) -> None:
        """Nobody waits any longer."""
        for held in self._held.values():
            held.fail_waiting(error)

    async def close(self) -> None:
        """End what is under way; the worker is the caller's to close."""
        self._closing = UnavailableError("the server is closing")
        self.fail_all(self._closing)
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_exception(self._closing)
        if self._look is not None:
            self._look.cancel()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
