"""Step loop of a device: chooses the replica of each step, executes commands between steps, and reports each step.

Only this loop calls schedulers and executors. Other threads queue commands and the keys of replicas that have new work,
then wake the loop.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lockstep.core.step import StepPlan
from lockstep.engine.deadlines import Clock
from lockstep.engine.kv_store import KVStore
from lockstep.engine.sessions import SessionChange
from lockstep.errors import RequestFailedError
from lockstep.worker.device_scheduler import DeviceScheduler
from lockstep.worker.messages import (
    Answer,
    Answered,
    AnswerShown,
    Ask,
    AskSessions,
    Check,
    Checked,
    ContentsChanged,
    DispatchDecided,
    EndSession,
    Event,
    Observation,
    Outputs,
    PrefixCacheReset,
    Question,
    ResetPrefixCache,
    SessionsChanged,
    SessionsReport,
    StepReport,
    Sweep,
    SweepReport,
    Unload,
    Unloaded,
)
from lockstep.worker.replica import Replica, ReplicaRegistry

if TYPE_CHECKING:
    from lockstep.worker.flight.recorder import Recorder

log = logging.getLogger(__name__)

Emit = Callable[[Event], None]
"""Function that receives the events. Several threads call it, so it must not block."""
Order = Unload | Ask | Observation
"""Commands that the step thread executes between two steps."""
IDLE_WAIT_S = 1.0
MAX_STEP_REPORTS_PER_S = 50.0
"""Limit for each replica, even if more reports are requested."""


class StepLoop:
    """Loop that runs the steps of all replicas.

    Args:
        emit: receives the events.
        registry: the loaded replicas.
        scheduler: chooses the replica of each step.
        clock: measures steps.
        recorder: recorder of the device; None: nothing is recorded.
        num_preparing: returns the number of requests that are not in an engine yet.
        reports_contents: whether events report the contents of each prefix cache.
    """

    def __init__(
        self,
        emit: Emit,
        registry: ReplicaRegistry,
        scheduler: DeviceScheduler,
        clock: Clock,
        recorder: Recorder | None,
        num_preparing: Callable[[], int],
        reports_contents: bool = False,
    ) -> None:
        self._emit = emit
        self._registry = registry
        self._scheduler = scheduler
        self._now_s = clock.now_s
        self._recorder = recorder
        self._num_preparing = num_preparing
        self._reports_contents = reports_contents
        self._orders: deque[Order] = deque()
        """Commands in order of arrival. Each query is answered once."""
        self._woken: deque[str] = deque()
        """Keys of replicas that got new work since the last step."""
        self._with_work: frozenset[str] = frozenset()
        """Replicas that had work at the last check. The set is replaced and never modified."""
        self._changes: list[SessionChange] = []
        """Session changes of the replica whose step or command runs now."""
        self.store: KVStore | None = None
        self.sampler = StepSampler()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._is_idle = True
        self._progress_s = 0.0

    # -- any thread -----------------------------------------------------------------------------------------------

    def wake(self, key: str) -> None:
        """Record that a replica has new work, and wake the loop."""
        self._woken.append(key)
        self._wake_up()

    def order(self, order: Order) -> None:
        """Queue a command for execution before the next step."""
        self._orders.append(order)
        self._wake_up()

    def stop(self) -> None:
        """End the loop after the current step."""
        self._stopping.set()
        self._wake_up()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def on_session(self, change: SessionChange) -> None:
        """Record a session change of the replica whose step or command runs now. Step thread only."""
        self._changes.append(change)

    def waiting_s(self) -> float:
        """Seconds for which work has waited without a completed step; 0: no work waits."""
        is_waiting = not self._is_idle and any(r.engine.has_work for r in self._registry.present.replicas.values())
        return max(0.0, self._now_s() - self._progress_s) if is_waiting else 0.0

    def _wake_up(self) -> None:
        """Wake the step thread. Callers queue their work first, and the loop checks for it after waking."""
        if not self._wake.is_set():
            self._wake.set()

    # -- the step thread ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run steps until `stop`, then free every replica.

        Raises:
            Exception: a bug; every request has ended with an error, and the worker cannot continue.
        """
        try:
            while not self._stopping.is_set():
                self._run_once()
            self._close()
        except Exception as error:
            log.exception("the device worker failed")
            self._stopping.set()
            replicas = self._registry.close()
            for replica in replicas:
                replica.engine.abandon(RequestFailedError(f"the device worker failed: {error!r}"))
                self._publish(replica)
            for replica in replicas:
                replica.close()
            raise

    def _run_once(self) -> None:
        """Execute queued commands, then run one step of one replica, or wait for work."""
        recorder = self._recorder
        if recorder is not None:
            recorder.begin_turn()
        while self._orders:
            self._execute(self._orders.popleft())
        if self._woken:
            self._update_with_work()
        replicas, classes = self._registry.present
        with_work = self._with_work
        chosen = self._scheduler.choose(classes, with_work)
        if chosen is None:
            self._idle(classes)
            return
        replica = replicas[chosen]
        engine = replica.engine
        started_s = self._now_s()
        plan: StepPlan | None = None
        try:
            plan = engine.step().plan
        except Exception:
            raise
        except BaseException:  # the step is over, and no caller of this thread could handle it
            log.exception("interrupted in a step of %s", chosen)
        ended_s = self._now_s()
        started_us, ended_us = int(started_s * 1e6), int(ended_s * 1e6)
        self._scheduler.spend(chosen, ended_us - started_us)
        if recorder is not None:
            recorder.turn(classes, with_work, chosen, started_us, ended_us)
        if not engine.has_work:
            self._with_work = with_work - {chosen}
        self._progress_s = self._now_s()
        self._publish(replica, self._report(chosen, plan, ended_s - started_s, ended_s))

    def _update_with_work(self) -> None:
        """Add the woken replicas that still have work."""
        replicas = self._registry.present.replicas
        woken = [self._woken.popleft() for _ in range(len(self._woken))]
        with_work = [key for key in woken if key in replicas and replicas[key].engine.has_work]
        self._with_work = self._with_work.union(with_work)

    def _idle(self, classes: Mapping[str, int]) -> None:
        self._is_idle = True
        if self._recorder is not None:
            self._recorder.idle(classes)
        self._wake.wait(IDLE_WAIT_S)
        self._wake.clear()
        self._progress_s, self._is_idle = self._now_s(), False

    def _report(self, key: str, plan: StepPlan | None, duration_s: float, now_s: float) -> StepReport | None:
        """Statistics of the step, if steps are watched and this one is due."""
        if plan is None or not self.sampler.is_watched:
            return None
        return self.sampler.report(key, plan, duration_s, now_s)

    def _publish(self, replica: Replica, step: StepReport | None = None) -> None:
        """Emit the changes of the replica's cache, then one event with all outputs of the step, then its session
        changes. The cache changes come first, so that the receiver of an answer's end can already locate its blocks."""
        news = replica.engine.scheduler.drain_contents()
        if news and self._reports_contents:
            self._emit(ContentsChanged(replica.key, list(news)))
        if replica.kv_events is not None:
            replica.kv_events.changed(news)
        accepted, outputs, started, waits = replica.engine.take()
        if accepted or outputs or step is not None or started or waits:
            self._emit(Outputs(accepted, outputs, step, started, waits))
        if self._changes:
            self._emit(SessionsChanged(replica.key, self._changes.copy()))
            self._changes.clear()

    # -- between two steps ----------------------------------------------------------------------------------------

    def _execute(self, order: Order) -> None:
        match order:
            case Unload(key):
                self._unload(key)
            case Ask(ask_id, question):
                self._emit(Answered(ask_id, self._answer(question)))
            case AnswerShown():
                if self._recorder is not None:
                    self._recorder.shown(order)
            case DispatchDecided():
                if self._recorder is not None:
                    self._recorder.dispatched(order)

    def _answer(self, question: Question) -> Answer:
        replicas = self._registry.present.replicas
        match question:
            case Check():
                return self._checked()
            case ResetPrefixCache():
                num_blocks = sum(replica.engine.scheduler.reset_prefix_cache() for replica in replicas.values())
                for replica in replicas.values():
                    self._publish(replica)
                return PrefixCacheReset(num_blocks)
            case AskSessions():
                return SessionsReport({key: replica.engine.session_reports() for key, replica in replicas.items()})
            case Sweep() | EndSession():
                return self._sweep(question)
        raise AssertionError(f"{question} is answered while a step runs")

    def _checked(self) -> Checked:
        replicas = self._registry.present.replicas.values()
        num_open = self._num_preparing() + sum(replica.engine.num_open for replica in replicas)
        try:
            for replica in replicas:
                replica.engine.scheduler.check()
                replica.engine.adapters.check()
        except AssertionError as fault:
            return Checked(repr(fault), num_open)
        return Checked("", num_open)

    def _sweep(self, order: Sweep | EndSession) -> SweepReport:
        replica = self._registry.find(order.replica)
        if isinstance(order, EndSession) and self.store is not None:
            self.store.end(order.session_id, order.owner)
        if replica is None:
            return SweepReport(0, 0)
        sessions = replica.engine.sessions
        do = sessions.sweep if isinstance(order, Sweep) else sessions.end
        result = do(order.session_id, order.owner)
        self._publish(replica)
        return SweepReport(*result)

    def _unload(self, key: str) -> None:
        replica = self._registry.find(key)
        if replica is not None:
            self._registry.remove(key)
            self._with_work -= {key}
            self.sampler.forget(key)
            self._abort_all(replica)
            replica.close()
            self._registry.release(key)
        self._emit(Unloaded(key))

    def _abort_all(self, replica: Replica) -> None:
        replica.engine.abort_all()
        replica.engine.sessions.end(reason="unloaded")
        self._publish(replica)
        if replica.kv_events is not None:
            replica.kv_events.closed()
        if self._recorder is not None:
            self._recorder.closed(replica.key)

    def _close(self) -> None:
        replicas = self._registry.close()
        for replica in replicas:
            self._abort_all(replica)
        for replica in replicas:
            replica.close()
        if self._recorder is not None:
            self._recorder.close()


class StepSampler:
    """Selects the steps that are reported. `watch` may be called by any thread, the other methods by one."""

    def __init__(self) -> None:
        self._interval_s = math.inf
        self._last: dict[str, tuple[float, int]] = {}
        """Time of the last report and number of steps since then, by replica."""

    def watch(self, max_per_s: float) -> None:
        """Report at most this many steps of each replica per second; 0: none."""
        self._last = {}
        self._interval_s = 1 / min(max_per_s, MAX_STEP_REPORTS_PER_S) if max_per_s > 0 else math.inf

    @property
    def is_watched(self) -> bool:
        """True if any step is reported."""
        return self._interval_s < math.inf

    def report(self, replica: str, plan: StepPlan, duration_s: float, now_s: float) -> StepReport | None:
        """Report a step that has just ended; None: this step is not reported."""
        interval_s = self._interval_s
        last_s, num_unreported = self._last.get(replica, (-math.inf, 0))
        if now_s - last_s < interval_s or interval_s == math.inf:
            self._last[replica] = last_s, num_unreported + 1
            return None
        self._last[replica] = now_s, 0
        return StepReport(
            replica, plan.step, plan.num_sequences, plan.num_tokens, plan.num_samples, duration_s, num_unreported
        )

    def forget(self, replica: str) -> None:
        """Remove a replica that is being unloaded."""
        self._last.pop(replica, None)
