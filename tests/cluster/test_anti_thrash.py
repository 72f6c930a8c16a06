"""Models that do not fit together, under load, in simulated time: who waits, how long, and how often it is loaded."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lockstep.cluster.planner import Load, Phase, PlanPolicy, Replica, look_again_s
from tests.cluster.fake_shell import FakeShell

LOAD_S = 1.0
UNLOAD_S = 0.05
SERVICE_S = 0.2
MAX_EVENTS = 20_000


@dataclass
class Outcome:
    """What a simulated run came to."""

    num_loads: int
    waits_s: list[float]
    end_s: float
    order: list[str]
    """Models in the order of their loads."""


class Simulation:
    """The fake shell with effects that take their time."""

    def __init__(self, keys: str, budget: int, policy: PlanPolicy | None = None) -> None:
        replicas = [Replica(key, Phase.ABSENT, 4, reload_s=LOAD_S) for key in keys]
        self.shell = FakeShell(*replicas, budget=budget, policy=policy)
        self._start_s = self.shell.now_s
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._num_events = 0
        self._seen: set[tuple[str, object]] = set()
        self._arrived: dict[int, float] = {}
        self._waits_s: list[float] = []
        self.on_finish: Callable[[int], None] = lambda call: None

    def at(self, after_s: float, action: Callable[[], object]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.shell.now_s + after_s, self._num_events, action))

    def arrive(self, key: str) -> int:
        call = self.shell.arrive(key)
        self._arrived[call] = self.shell.now_s
        return call

    def run(self) -> Outcome:
        for _ in range(MAX_EVENTS):
            self._start_effects()
            again_s = look_again_s(self.shell.observed(), self.shell.now_s, self.shell.policy)
            if again_s is not None and (not self._events or again_s < self._events[0][0]):
                self.shell.now_s = again_s
            elif not self._events:
                break
            else:
                self.shell.now_s, _, action = heapq.heappop(self._events)
                action()
            self.shell.settle()
        assert not any(model.waiting or model.busy for model in self.shell.models.values()), self.shell.observed()
        order = [action.key for action in self.shell.actions if isinstance(action, Load)]
        return Outcome(len(order), self._waits_s, self.shell.now_s - self._start_s, order)

    def _start_effects(self) -> None:
        """Every load, unload and call that has begun gets its end."""
        for key, model in self.shell.models.items():
            if model.seen.phase is Phase.LOADING and self._is_new("load", (key, model.num_loads)):
                self.at(LOAD_S, lambda key=key: self.shell.loaded(key))  # type: ignore[misc]  # bound per turn
            elif model.seen.phase is Phase.UNLOADING and self._is_new("unload", (key, model.num_loads)):
                self.at(UNLOAD_S, lambda key=key: self.shell.unloaded(key))  # type: ignore[misc]  # bound per turn
            for call in sorted(model.busy):
                if self._is_new("call", call):
                    self._waits_s.append(self.shell.now_s - self._arrived[call])
                    self.at(SERVICE_S, lambda call=call: self._finish(call))  # type: ignore[misc]  # bound per turn

    def _finish(self, call: int) -> None:
        self.shell.finish(call)
        self.on_finish(call)

    def _is_new(self, kind: str, what: object) -> bool:
        is_new = (kind, what) not in self._seen
        self._seen.add((kind, what))
        return is_new


@pytest.mark.parametrize(
    ("arrivals", "order"),
    [("ABABABAB", "AB"), ("ABAACABC", "ABC"), ("AAABBC", "ABC"), ("CBACBA", "CBA")],
)
def test_waiting_calls_are_served_model_by_model_with_one_load_each(arrivals: str, order: str) -> None:
    simulation = Simulation("ABC", budget=4)
    for i, key in enumerate(arrivals):
        simulation.at(i / 1000, lambda key=key: simulation.arrive(key))  # type: ignore[misc]  # bound per turn
    outcome = simulation.run()
    assert "".join(outcome.order) == order
    assert len(outcome.waits_s) == len(arrivals)


@pytest.mark.parametrize("gap_s", [0.02, 0.05, 0.14, 0.5])
def test_an_alternating_stream_is_grouped_and_no_request_waits_longer_than_two_turns(gap_s: float) -> None:
    """Loads are bounded by time, not by requests: a turn lasts at least a load and the wait that ends it."""
    policy = PlanPolicy(max_wait_s=2.0)
    simulation = Simulation("AB", budget=4, policy=policy)
    num_calls = round(20 / gap_s)
    for i in range(num_calls):
        simulation.at(i * gap_s, lambda key="AB"[i % 2]: simulation.arrive(key))  # type: ignore[misc]  # bound per turn
    outcome = simulation.run()
    assert len(outcome.waits_s) == num_calls
    turn_s = policy.max_wait_s + SERVICE_S + UNLOAD_S + LOAD_S
    assert max(outcome.waits_s) <= 2 * turn_s
    if gap_s * 2 < SERVICE_S + policy.linger_s:  # otherwise there are moments in which nobody uses the room
        assert outcome.num_loads <= 2 + outcome.end_s / (turn_s - LOAD_S)
        assert outcome.num_loads * 4 < num_calls


def test_single_alternating_client_is_served_without_the_maximum_wait() -> None:
    """One client that asks A, B, A, B in turn lets nobody else wait: every change costs a load, a linger, no more."""
    simulation = Simulation("AB", budget=4)
    left = list("BABABA")

    def ask_next(_: int) -> None:
        if left:
            simulation.arrive(left.pop(0))

    simulation.on_finish = ask_next
    simulation.arrive("A")
    outcome = simulation.run()
    assert "".join(outcome.order) == "ABABABA"
    assert max(outcome.waits_s) == pytest.approx(LOAD_S + UNLOAD_S + simulation.shell.policy.linger_s)


def test_five_models_in_turn_in_room_for_two_are_all_served() -> None:
    """Closed loops of clients, each with its own model, never pausing: none starves, and loads stay few."""
    simulation = Simulation("ABCDE", budget=8)
    end_s = simulation.shell.now_s + 60.0
    owner: dict[int, str] = {}
    served = dict.fromkeys("ABCDE", 0)

    def ask(key: str) -> None:
        owner[simulation.arrive(key)] = key

    def ask_again(call: int) -> None:
        served[owner[call]] += 1
        if simulation.shell.now_s < end_s:
            ask(owner[call])

    simulation.on_finish = ask_again
    for key in "ABCDE" * 3:
        ask(key)
    outcome = simulation.run()
    assert min(served.values()) >= 0.5 * max(served.values()) > 0, served
    assert max(outcome.waits_s) < 15.0
    assert outcome.num_loads <= 60
