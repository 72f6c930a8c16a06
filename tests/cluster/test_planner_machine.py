"""Any order of events, as Hypothesis finds them: the fake shell checks every plan; here, that nobody waits forever."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lockstep.cluster.planner import Phase, PlanPolicy, Replica, look_again_s
from tests.cluster.fake_shell import FakeShell

T = TypeVar("T", str, int)
KEYS = "abcde"
MAX_MODELS = len(KEYS)
MAX_ROUNDS = 200

replicas = st.builds(
    Replica,
    key=st.just(""),
    phase=st.just(Phase.ABSENT),
    bytes=st.integers(0, 6),
    reload_s=st.sampled_from([0.0, 0.5, 0.6, 3.0]),
    priority=st.integers(-1, 1),
    is_pinned=st.sampled_from([False, False, False, True]),
    idle_limit_s=st.sampled_from([None, None, 0.0, 4.0]),
)
policies = st.builds(
    PlanPolicy,
    max_wait_s=st.sampled_from([0.0, 1.0, 2.0]),
    min_stay=st.sampled_from([0.0, 2.0]),
    linger_s=st.sampled_from([0.0, 0.5]),
    max_parallel_loads=st.integers(1, 3),
)
chosen = st.integers(0, 10_000)


class Machine(RuleBasedStateMachine):
    """Arrivals, cancels, ends, loads that succeed, fail or overshoot, a lost worker, another budget, and the clock."""

    @initialize(
        kinds=st.lists(replicas, min_size=1, max_size=MAX_MODELS),
        max_busy=st.integers(1, 3),
        budget=st.one_of(st.none(), st.integers(0, 12)),
        policy=policies,
    )
    def start(self, kinds: list[Replica], max_busy: int, budget: int | None, policy: PlanPolicy) -> None:
        named = [_named(kind, key) for kind, key in zip(kinds, KEYS, strict=False)]
        self.shell = FakeShell(*named, budget=budget, policy=policy)
        for model in self.shell.models.values():
            model.max_busy = max_busy
        self.shell.settle()

    @rule(which=chosen)
    def arrive(self, which: int) -> None:
        self.shell.arrive(_pick(list(self.shell.models), which))

    @precondition(lambda self: bool(_calls(self.shell)))
    @rule(which=chosen)
    def leave(self, which: int) -> None:
        self.shell.leave(_pick(_calls(self.shell), which))

    @precondition(lambda self: bool(_busy(self.shell)))
    @rule(which=chosen)
    def finish(self, which: int) -> None:
        self.shell.finish(_pick(_busy(self.shell), which))

    @precondition(lambda self: bool(_in(self.shell, Phase.LOADING)))
    @rule(which=chosen, more=st.integers(-3, 4), fails=st.sampled_from([False, False, True]))
    def end_load(self, which: int, more: int, fails: bool) -> None:
        key = _pick(_in(self.shell, Phase.LOADING), which)
        if fails:
            self.shell.load_failed(key)
        else:
            self.shell.loaded(key, max(0, self.shell.models[key].seen.bytes + more))

    @precondition(lambda self: bool(_in(self.shell, Phase.UNLOADING)))
    @rule(which=chosen)
    def end_unload(self, which: int) -> None:
        self.shell.unloaded(_pick(_in(self.shell, Phase.UNLOADING), which))

    @precondition(lambda self: bool(_in(self.shell, Phase.RESIDENT)))
    @rule(which=chosen)
    def unload(self, which: int) -> None:
        self.shell.unload(_pick(_in(self.shell, Phase.RESIDENT), which))

    @rule(which=chosen)
    def warm(self, which: int) -> None:
        self.shell.warm(_pick(list(self.shell.models), which))

    @rule(budget=st.one_of(st.none(), st.integers(0, 12)))
    def set_budget(self, budget: int | None) -> None:
        self.shell.set_budget(budget)

    @rule()
    def lose_worker(self) -> None:
        self.shell.lose_worker()

    @rule(duration_s=st.sampled_from([0.1, 0.5, 1.0, 5.0]))
    def advance(self, duration_s: float) -> None:
        self.shell.advance(duration_s)

    @invariant()
    def who_is_resident_and_open_serves(self) -> None:
        for model in self.shell.models.values() if hasattr(self, "shell") else ():
            is_open = model.seen.phase is Phase.RESIDENT and model.seen.makes_room_for is None
            assert not (is_open and model.waiting and len(model.busy) < model.max_busy)

    def teardown(self) -> None:
        """When loads, unloads and calls come to their ends, every call is answered or was told why not."""
        if not hasattr(self, "shell"):
            return
        shell = self.shell
        before = set(_calls(shell))
        for _ in range(MAX_ROUNDS):
            if not _calls(shell):
                break
            _end_everything_once(shell)
        assert not _calls(shell), f"still waiting: {shell.observed()}"
        assert before <= set(shell.served) | set(shell.refused)


def _end_everything_once(shell: FakeShell) -> None:
    for key in _in(shell, Phase.UNLOADING):
        shell.unloaded(key)
    for key in _in(shell, Phase.LOADING):
        shell.loaded(key)
    for call in _busy(shell):
        shell.finish(call)
    again_s = look_again_s(shell.observed(), shell.now_s, shell.policy)
    if again_s is not None:
        shell.now_s = again_s
        shell.settle()


def _named(kind: Replica, key: str) -> Replica:
    fields = {name: getattr(kind, name) for name in kind.__slots__}
    return Replica(**(fields | {"key": key}))


def _pick(items: list[T], which: int) -> T:
    return items[which % len(items)]


def _calls(shell: FakeShell) -> list[int]:
    return sorted(_busy(shell) + [call for model in shell.models.values() for call, _ in model.waiting])


def _busy(shell: FakeShell) -> list[int]:
    return sorted(call for model in shell.models.values() for call in model.busy)


def _in(shell: FakeShell, phase: Phase) -> list[str]:
    return [key for key, model in shell.models.items() if model.seen.phase is phase]


TestPlannerMachine = Machine.TestCase
TestPlannerMachine.settings = settings(max_examples=80, stateful_step_count=40)
