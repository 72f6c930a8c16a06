"""Step loop of a device: whose step is next, what is obeyed between two steps, and what is reported of each.

It alone touches schedulers and executors. Other threads leave orders and the keys of replicas that have got something
to do, and ring.
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
    EndSession,
    Event,
    Outputs,
    PrefixCacheReset,
    Question,
    ResetPrefixCache,
    SessionsChanged,
    SessionsReport,
    SessionsSwept,
    StepReport,
    Sweep,
    Unload,
    Unloaded,
)
from lockstep.worker.replica import Replica, ReplicaRegistry

if TYPE_CHECKING:
    from lockstep.worker.flight.recorder import Recorder

log = logging.getLogger(__name__)

Emit = Callable[[Event], None]
"""Called by several threads; must not block."""
Order = Unload | Ask | AnswerShown
"""Commands that the step thread obeys between two steps."""
IDLE_WAIT_S = 1.0
MAX_STEP_REPORTS_PER_S = 50.0
"""Of each replica, whatever is requested."""


class StepLoop:
    """Loop that runs the steps of all replicas.

    Args:
        emit: where events go.
        registry: the replicas that are there.
        scheduler: weighs them.
        clock: measures steps.
        recorder: of the device, where it has one.
        num_preparing: how many requests no engine has yet.
        tells_contents: whether events say what each prefix cache holds.
    """

    def __init__(
        self,
        emit: Emit,
        registry: ReplicaRegistry,
        scheduler: DeviceScheduler,
        clock: Clock,
        recorder: Recorder | None,
        num_preparing: Callable[[], int],
        tells_contents: bool = False,
    ) -> None:
        self._emit = emit
        self._registry = registry
        self._scheduler = scheduler
        self._now_s = clock.now_s
        self._recorder = recorder
        self._num_preparing = num_preparing
        self._tells_contents = tells_contents
        self._orders: deque[Order] = deque()
        """As many as were requested; each is answered once."""
        self._called: deque[str] = deque()
        """Replicas that have got something to do since the last turn."""
        self._with_work: frozenset[str] = frozenset()
        """Those that had something to do when it was looked at; replaced and never changed."""
        self._changes: list[SessionChange] = []
        """Of the sessions of the replica that steps or obeys."""
        self.store: KVStore | None = None
        self.sampler = StepSampler()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._is_idle = True
        self._progress_s = 0.0

    # -- any thread -----------------------------------------------------------------------------------------------

    def call(self, key: str) -> None:
        """Note that a replica has got something to do."""
        self._called.append(key)
        self._ring()

    def order(self, order: Order) -> None:
        """Have an order obeyed before the next step."""
        self._orders.append(order)
        self._ring()

    def stop(self) -> None:
        """End with the step under way."""
        self._stopping.set()
        self._ring()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def on_session(self, change: SessionChange) -> None:
        """Take note of a change of a session of the replica that steps or obeys; on the step thread."""
        self._changes.append(change)

    def waiting_s(self) -> float:
        """Seconds for which work has waited without a step being completed; 0: nothing waits."""
        is_waiting = not self._is_idle and any(r.engine.has_work for r in self._registry.present.replicas.values())
        return max(0.0, self._now_s() - self._progress_s) if is_waiting else 0.0

    def _ring(self) -> None:
        """Wake the step thread; callers leave their work first, and the loop looks for it after it woke."""
        if not self._wake.is_set():
            self._wake.set()

    # -- the step thread ------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Hand out steps until `stop`; frees every replica at its end.

        Raises:
            Exception: a defect of ours; every request has ended with an error, and the worker cannot go on.
        """
        try:
            while not self._stopping.is_set():
                self._turn()
            self._close()
        except Exception as error:
            log.exception("the device worker broke")
            self._stopping.set()
            replicas = self._registry.close()
            for replica in replicas:
                replica.engine.abandon(RequestFailedError(f"the device worker broke: {error!r}"))
                self._publish(replica)
            for replica in replicas:
                replica.close()
            raise

    def _turn(self) -> None:
        """Obey what was ordered, then run one step of one replica, or wait for work."""
        recorder = self._recorder
        if recorder is not None:
            recorder.begin_turn()
        while self._orders:
            self._execute(self._orders.popleft())
        if self._called:
            self._look_at_called()
        replicas, classes = self._registry.present
        with_work = self._with_work
        chosen = self._scheduler.choose(classes, with_work)
        if chosen is None:
            self._rest(classes)
            return
        replica = replicas[chosen]
        engine = replica.engine
        started_s = self._now_s()
        plan: StepPlan | None = None
        try:
            plan = engine.step().plan
        except Exception:
            raise
        except BaseException:  # the step is over, its requests know, and nobody above this thread can be interrupted
            log.exception("an interrupt in a step of %s", chosen)
        ended_s = self._now_s()
        started_us, ended_us = int(started_s * 1e6), int(ended_s * 1e6)
        self._scheduler.spend(chosen, ended_us - started_us)
        if recorder is not None:
            recorder.turn(classes, with_work, chosen, started_us, ended_us)
        if not engine.has_work:
            self._with_work = with_work - {chosen}
        self._progress_s = self._now_s()
        self._publish(replica, self._report(chosen, plan, ended_s - started_s, ended_s))

    def _look_at_called(self) -> None:
        """Take over which replicas were called and still have work."""
        replicas = self._registry.present.replicas
        called = [self._called.popleft() for _ in range(len(self._called))]
        with_work = [key for key in called if key in replicas and replicas[key].engine.has_work]
        self._with_work = self._with_work.union(with_work)

    def _rest(self, classes: Mapping[str, int]) -> None:
        self._is_idle = True
        if self._recorder is not None:
            self._recorder.idle(classes)
        self._wake.wait(IDLE_WAIT_S)
        self._wake.clear()
        self._progress_s, self._is_idle = self._now_s(), False

    def _report(self, key: str, plan: StepPlan | None, duration_s: float, now_s: float) -> StepReport | None:
        """Stats of the step, if steps are watched and this one is due."""
        if plan is None or not self.sampler.is_watched:
            return None
        return self.sampler.report(key, plan, duration_s, now_s)

    def _publish(self, replica: Replica, step: StepReport | None = None) -> None:
        """Emit one event for all that a step brought, one for what it meant to its replica's sessions, and before them
        one for its cache, so that whoever hears an answer's end knows where its blocks are."""
        news = replica.engine.scheduler.drain_contents()
        if news and self._tells_contents:
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
                return self._swept(question)
        raise AssertionError(f"{question} is answered while a step runs")

    def _checked(self) -> Checked:
        replicas = self._registry.present.replicas.values()
        num_open = self._num_preparing() + sum(replica.engine.num_open for replica in replicas)
        try:
            for replica in replicas:
                replica.engine.scheduler.check()
        except AssertionError as fault:
            return Checked(repr(fault), num_open)
        return Checked("", num_open)

    def _swept(self, order: Sweep | EndSession) -> SessionsSwept:
        replica = self._registry.find(order.replica)
        if isinstance(order, EndSession) and self.store is not None:
            self.store.end(order.session_id, order.owner)
        if replica is None:
            return SessionsSwept(0, 0)
        sessions = replica.engine.sessions
        do = sessions.sweep if isinstance(order, Sweep) else sessions.end
        swept = do(order.session_id, order.owner)
        self._publish(replica)
        return SessionsSwept(*swept)

    def _unload(self, key: str) -> None:
        replica = self._registry.find(key)
        if replica is not None:
            self._registry.remove(key)
            self._with_work -= {key}
            self.sampler.forget(key)
            self._empty(replica)
            replica.close()
            self._registry.release(key)
        self._emit(Unloaded(key))

    def _empty(self, replica: Replica) -> None:
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
            self._empty(replica)
        for replica in replicas:
            replica.close()
        if self._recorder is not None:
            self._recorder.close()


class StepSampler:
    """Choice of the steps that are reported. `watch` is for any thread, the rest for one."""

    def __init__(self) -> None:
        self._interval_s = math.inf
        self._last: dict[str, tuple[float, int]] = {}
        """When each replica was reported last, and how many of its steps were not since."""

    def watch(self, max_per_s: float) -> None:
        """Report at most so many steps of each replica in a second; 0: none."""
        self._last = {}
        self._interval_s = 1 / min(max_per_s, MAX_STEP_REPORTS_PER_S) if max_per_s > 0 else math.inf

    @property
    def is_watched(self) -> bool:
        """True if any step is reported."""
        return self._interval_s < math.inf

    def report(self, replica: str, plan: StepPlan, duration_s: float, now_s: float) -> StepReport | None:
        """Report a step that has ended now; None: it is not reported."""
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
        """Forget a replica that is unloaded."""
        self._last.pop(replica, None)
