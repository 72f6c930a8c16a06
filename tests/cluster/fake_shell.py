"""A shell around the planner whose effects are fake: it does what a plan says, and checks what every plan promises."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from lockstep.cluster.planner import (
    MOVES,
    Action,
    Drain,
    Load,
    Observed,
    Phase,
    PlanPolicy,
    Refuse,
    Replica,
    Unload,
    look_again_s,
    overshoot,
    plan,
)

MAX_PLANS = 50
"""Plans in one moment, until nothing is left to do."""


@dataclass
class Model:
    """What is fake about one replica."""

    seen: Replica
    max_busy: int = 1000
    waiting: list[tuple[int, float]] = field(default_factory=list)
    """Calls and their arrivals."""
    busy: set[int] = field(default_factory=set)
    num_loads: int = 0


class FakeShell:
    """Calls come, are admitted in their order and end; loads and unloads end when the test says so."""

    def __init__(self, *replicas: Replica, budget: int | None, policy: PlanPolicy | None = None) -> None:
        self.models = {replica.key: Model(replica) for replica in replicas}
        self.budget = budget
        self.policy = policy or PlanPolicy()
        self.now_s = 100.0
        self.served: list[int] = []
        self.refused: dict[int, str] = {}
        self.actions: list[Action] = []
        """Everything that was done, in order."""
        self._num_calls = 0

    # -- what the planner sees ------------------------------------------------------------------------------------

    def observed(self) -> Observed:
        seen = []
        for model in self.models.values():
            since_s = min((arrival_s for _, arrival_s in model.waiting), default=None)
            seen.append(
                replace(
                    model.seen,
                    num_busy=len(model.busy),
                    num_waiting=len(model.waiting),
                    waiting_since_s=since_s,
                )
            )
        return Observed(tuple(seen), self.budget)

    def phases(self) -> dict[str, str]:
        return {key: model.seen.phase.value for key, model in self.models.items()}

    def drained(self) -> set[str]:
        return {
            key
            for key, m in self.models.items()
            if m.seen.phase is Phase.RESIDENT and m.seen.makes_room_for is not None
        }

    def used(self) -> int:
        return sum(m.seen.bytes for m in self.models.values() if m.seen.phase is not Phase.ABSENT)

    # -- what happens ---------------------------------------------------------------------------------------------

    def arrive(self, key: str) -> int:
        self._num_calls += 1
        self.models[key].waiting.append((self._num_calls, self.now_s))
        self.settle()
        return self._num_calls

    def leave(self, call: int) -> None:
        """The client has gone, wherever its call is."""
        for model in self.models.values():
            model.waiting = [each for each in model.waiting if each[0] != call]
            if call in model.busy:
                self._end(model, call)
        self.settle()

    def finish(self, call: int) -> None:
        model = next(model for model in self.models.values() if call in model.busy)
        self._end(model, call)
        self.served.append(call)
        self.settle()

    def loaded(self, key: str, measured: int | None = None) -> None:
        model = self.models[key]
        measured = model.seen.bytes if measured is None else measured
        times = {"last_used_s": self.now_s, "resident_since_s": self.now_s}
        fault = overshoot(self.observed(), key, measured)
        if fault:
            self._fail(model, fault, Phase.UNLOADING, bytes=measured)
        else:
            self._move(model, Phase.RESIDENT, bytes=measured, wants_warm=False, **times)
            self._admit(model)
        self.settle()

    def load_failed(self, key: str, backoff_s: float = 1.0) -> None:
        self._fail(self.models[key], "the load failed", Phase.ABSENT, backoff_s)
        self.settle()

    def unloaded(self, key: str) -> None:
        self._move(self.models[key], Phase.ABSENT, makes_room_for=None)
        self.settle()

    def unload(self, key: str) -> None:
        """Because somebody said so: what waits and what runs ends with an error."""
        model = self.models[key]
        self.refused |= {call: "unloaded" for call, _ in model.waiting} | dict.fromkeys(model.busy, "unloaded")
        model.waiting, model.busy = [], set()
        self._move(model, Phase.UNLOADING, makes_room_for=None)
        self.settle()

    def lose_worker(self) -> None:
        """All that was loaded is gone, and its calls with it; who waits goes on waiting."""
        for model in self.models.values():
            self.refused |= dict.fromkeys(model.busy, "lost")
            model.busy = set()
            if model.seen.phase is not Phase.ABSENT:
                self._move(model, Phase.ABSENT, makes_room_for=None)
        self.settle()

    def warm(self, key: str) -> None:
        model = self.models[key]
        if model.seen.phase is Phase.ABSENT:
            model.seen = replace(model.seen, wants_warm=True)
        self.settle()

    def set_budget(self, budget: int | None) -> None:
        self.budget = budget
        self.settle()

    def advance(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.settle()

    # -- what is done ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Plan and act until a plan says nothing new."""
        for _ in range(MAX_PLANS):
            for model in self.models.values():
                self._admit(model)
            actions = self._plan()
            drained = {action.key: action.makes_room_for for action in actions if isinstance(action, Drain)}
            is_done = len(drained) == len(actions) and all(
                model.seen.makes_room_for == drained.get(key)
                for key, model in self.models.items()
                if model.seen.phase is Phase.RESIDENT
            )
            if is_done:
                return
            self._carry_out(actions)
            self._check_again(drained)
        raise AssertionError(f"{MAX_PLANS} plans in one moment, and still not done")

    def _plan(self) -> tuple[Action, ...]:
        observed = self.observed()
        actions = plan(observed, self.now_s, self.policy)
        again_s = look_again_s(observed, self.now_s, self.policy)
        assert again_s is None or again_s > self.now_s
        last_s = self.now_s + 1e6 if again_s is None else math.nextafter(again_s, 0.0)
        assert plan(observed, last_s, self.policy) == actions, "time alone changed the plan, unannounced"
        return actions

    def _check_again(self, drained: dict[str, str]) -> None:
        """Carried out, and asked again in the same moment, at most the same drains remain."""
        again = plan(self.observed(), self.now_s, self.policy)
        assert set(again) <= {Drain(key, whom) for key, whom in drained.items()}, again

    def _carry_out(self, actions: tuple[Action, ...]) -> None:
        assert len({action.key for action in actions}) == len(actions), "two actions for one replica"
        drained = {action.key: action.makes_room_for for action in actions if isinstance(action, Drain)}
        for action in actions:
            self._act(action)
        for key, model in self.models.items():
            if model.seen.phase is Phase.RESIDENT:
                model.seen = replace(model.seen, makes_room_for=drained.get(key))
        if self.budget is not None and any(isinstance(action, Load) for action in actions):
            assert self.used() <= self.budget, f"{self.used()} bytes of {self.budget}"
        num_loading = sum(model.seen.phase is Phase.LOADING for model in self.models.values())
        assert num_loading <= self.policy.max_parallel_loads
        self.actions += actions

    def _act(self, action: Action) -> None:
        model = self.models[action.key]
        seen = model.seen
        match action:
            case Load():
                assert seen.phase is Phase.ABSENT, f"{action} of {seen}"
                assert self.now_s >= seen.retry_at_s, f"{action} of {seen}"
                assert model.waiting or seen.is_pinned or seen.wants_warm, "a load that nobody waits for"
                self._move(model, Phase.LOADING)
                model.num_loads += 1
            case Unload():
                assert seen.phase is Phase.RESIDENT, f"{action} of {model}"
                assert not model.busy, f"{action} of {model}"
                assert not seen.is_pinned, f"{action} of {model}"
                assert not model.waiting or seen.makes_room_for is not None, "evicted before it served"
                self._move(model, Phase.UNLOADING, makes_room_for=action.makes_room_for)
            case Drain():
                assert seen.phase is Phase.RESIDENT, f"{action} of {seen}"
                assert not seen.is_pinned, f"{action} of {seen}"
            case Refuse():
                assert seen.phase is Phase.ABSENT
                assert model.waiting
                self._refuse(model, action.reason)

    def _admit(self, model: Model) -> None:
        if model.seen.phase is not Phase.RESIDENT or model.seen.makes_room_for is not None:
            return
        while model.waiting and len(model.busy) < model.max_busy:
            call, _ = model.waiting.pop(0)
            model.busy.add(call)
            model.seen = replace(model.seen, last_used_s=self.now_s)

    def _end(self, model: Model, call: int) -> None:
        model.busy.remove(call)
        model.seen = replace(model.seen, last_used_s=self.now_s)

    def _fail(self, model: Model, reason: str, phase: Phase, backoff_s: float = 1.0, **changes: int) -> None:
        self._refuse(model, reason)
        self._move(model, phase, retry_at_s=self.now_s + backoff_s, wants_warm=False, **changes)

    def _refuse(self, model: Model, reason: str) -> None:
        self.refused |= {call: reason for call, _ in model.waiting}
        model.waiting = []

    @staticmethod
    def _move(model: Model, phase: Phase, **changes: object) -> None:
        assert phase in MOVES[model.seen.phase], f"{model.seen.key}: {model.seen.phase} to {phase}"
        model.seen = replace(model.seen, phase=phase, **changes)  # type: ignore[arg-type]  # fields of Replica


POLICY = PlanPolicy(max_wait_s=2.0, min_stay=1.0, linger_s=0.1, max_parallel_loads=2)
NOW_S = 100.0


def absent(key: str, num_bytes: int = 4, **fields: object) -> Replica:
    return Replica(key, Phase.ABSENT, num_bytes, **fields)  # type: ignore[arg-type]  # fields of Replica


def resident(key: str, num_bytes: int = 4, **fields: object) -> Replica:
    return Replica(key, Phase.RESIDENT, num_bytes, **fields)  # type: ignore[arg-type]  # fields of Replica


def wanted(key: str, num_bytes: int = 4, since_s: float = NOW_S, **fields: object) -> Replica:
    return absent(key, num_bytes, num_waiting=1, waiting_since_s=since_s, **fields)


def planned(*replicas: Replica, budget: int | None) -> tuple[object, ...]:
    return plan(Observed(replicas, budget), NOW_S, POLICY)
