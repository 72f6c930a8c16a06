"""Whose step is next: shares by weight, bounded waits, nothing saved, nothing forgotten, the same every time."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.request import Priority, weight_of
from lockstep.worker.device_scheduler import QUANTUM_US, DeviceScheduler

MS = 1_000
ALL = {"a": 0, "b": 0, "c": 0}


def serve(turns: DeviceScheduler, priorities: Mapping[str, int], with_work: str, cost_us: Mapping[str, int]) -> str:
    """One step of whoever is next."""
    chosen = turns.choose(priorities, with_work)
    assert chosen is not None
    turns.spend(chosen, cost_us[chosen])
    return chosen


def shares(priorities: Mapping[str, int], cost_us: Mapping[str, int], num_steps: int) -> dict[str, float]:
    """Which part of the device's time each got while all had work."""
    turns, got = DeviceScheduler(), dict.fromkeys(priorities, 0)
    for _ in range(num_steps):
        chosen = serve(turns, priorities, "".join(priorities), cost_us)
        got[chosen] += cost_us[chosen]
    return {key: round(time / sum(got.values()), 2) for key, time in got.items()}


def test_replicas_of_equal_priority_alternate() -> None:
    turns = DeviceScheduler()
    cost = dict.fromkeys(ALL, MS)
    assert [serve(turns, ALL, "abc", cost) for _ in range(7)] == ["a", "b", "c", "a", "b", "c", "a"]


def test_replica_without_work_is_passed_over() -> None:
    turns = DeviceScheduler()
    assert serve(turns, ALL, "b", {"b": MS}) == "b"
    assert turns.choose(ALL, "") is None
    assert turns.choose(ALL, "abc") == "a"


def test_unloaded_replica_loses_its_debt() -> None:
    turns = DeviceScheduler()
    assert serve(turns, ALL, "abc", {"a": 1000 * MS}) == "a"
    assert turns.choose({"b": 0, "c": 0}, "bc") == "b"
    assert turns.choose(ALL, "a") == "a"


def test_debts_are_cleared_when_no_replica_has_work() -> None:
    turns = DeviceScheduler()
    assert serve(turns, ALL, "abc", {"a": 1000 * MS}) == "a"
    assert turns.choose(ALL, "") is None
    cost = dict.fromkeys(ALL, MS)
    assert [serve(turns, ALL, "abc", cost) for _ in range(6)] == ["b", "c", "a", "b", "c", "a"]


def test_replica_that_spent_exactly_its_credit_has_none() -> None:
    """Neither in the round in which it is spent, nor in one that only pays off a debt."""
    priorities = {"a": Priority.HIGH, "b": Priority.NORMAL}
    grants = {key: QUANTUM_US * weight_of(priority) for key, priority in priorities.items()}
    turns = DeviceScheduler()
    assert serve(turns, priorities, "ab", {"a": 2 * grants["a"]}) == "a"
    assert serve(turns, priorities, "ab", {"b": grants["b"]}) == "b"
    assert serve(turns, priorities, "ab", {"b": grants["b"]}) == "b", "a owed what the round gave it"
    assert serve(turns, priorities, "ab", {"a": grants["a"]}) == "a"
    assert serve(turns, priorities, "ab", {"b": MS}) == "b", "a has spent this round's"


def test_debt_is_reduced_by_rounds_without_work() -> None:
    turns, grant_us = DeviceScheduler(), QUANTUM_US * weight_of(0)
    assert serve(turns, ALL, "abc", {"a": 4 * grant_us}) == "a"
    for _ in range(4):
        assert serve(turns, ALL, "b", {"b": grant_us}) == "b"
    assert turns.choose(ALL, "ab") == "a"


def test_replaced_replica_loses_its_debt() -> None:
    turns = DeviceScheduler()
    assert serve(turns, ALL, "abc", {"a": 1000 * MS}) == "a"
    assert serve(turns, {"b": 0, "c": 0, "d": 0}, "b", {"b": MS}) == "b"
    assert turns.choose(ALL, "ab") == "a"


def test_lowered_priority_does_not_keep_earlier_credit() -> None:
    turns, cost = DeviceScheduler(), {"a": MS, "b": MS}
    assert serve(turns, {"a": Priority.CRITICAL, "b": 0}, "ab", cost) == "a"
    served = [serve(turns, {"a": 0, "b": 0}, "ab", cost) for _ in range(40)]
    assert served.count("a") == served.count("b")


def test_changed_priority_applies_from_the_next_turn() -> None:
    turns = DeviceScheduler()
    cost = dict.fromkeys(ALL, MS)
    assert [serve(turns, ALL, "abc", cost) for _ in range(2)] == ["a", "b"]
    assert serve(turns, {**ALL, "b": Priority.CRITICAL}, "abc", cost) == "b"
    assert serve(turns, ALL, "abc", cost) == "c"


def test_device_time_is_shared_instead_of_steps() -> None:
    assert shares({"a": 0, "b": 0}, {"a": 40 * MS, "b": MS}, 5000) == {"a": 0.5, "b": 0.5}


def test_time_is_shared_by_the_weights_of_the_classes() -> None:
    priorities = {"l": Priority.LOW, "n": Priority.NORMAL, "h": Priority.HIGH, "c": Priority.CRITICAL}
    cost = {"l": 30 * MS, "n": 7 * MS, "h": 2 * MS, "c": 11 * MS}
    assert shares(priorities, cost, 20_000) == {"l": 0.07, "n": 0.13, "h": 0.27, "c": 0.53}


def test_any_integer_is_a_priority() -> None:
    assert [weight_of(priority) for priority in (-9, -2, -1, 0, 1, 9)] == [8, 8, 4, 2, 1, 1]


def test_replica_that_gets_work_steps_before_lower_priorities_of_the_round() -> None:
    priorities = {"router": Priority.CRITICAL, "a": 0, "b": 0}
    turns = DeviceScheduler()
    cost = dict.fromkeys(priorities, MS)
    assert [serve(turns, priorities, "ab", cost) for _ in range(3)] == ["a", "b", "a"]
    assert serve(turns, priorities, ("router", "a", "b"), cost) == "router"  # type: ignore[arg-type]  # a collection


def test_idle_replica_saves_no_credit() -> None:
    """After a long time of its own, one that comes back does not keep the device for longer than its round."""
    turns = DeviceScheduler()
    for _ in range(1000):
        serve(turns, {"a": 0, "b": 0}, "a", {"a": 10 * MS})
    cost = {"a": MS, "b": MS}
    served = [serve(turns, {"a": 0, "b": 0}, "ab", cost) for _ in range(60)]
    longest = max(len(run) for run in "".join(served).split("a"))
    assert longest * MS <= 2 * QUANTUM_US * weight_of(0)
    assert abs(served.count("a") - served.count("b")) * MS <= 2 * QUANTUM_US * weight_of(0)


def test_replica_with_bursts_of_work_gets_no_more_than_its_share() -> None:
    """One whose work comes in bursts of one step gets no more than its share from one that always has work."""
    turns = DeviceScheduler()
    got = {"a": 0, "b": 0}
    cost = {"a": 50 * MS, "b": MS}
    is_back = True
    for _ in range(5000):
        chosen = serve(turns, {"a": 0, "b": 0}, "ab" if is_back else "b", cost)
        got[chosen] += cost[chosen]
        is_back = not is_back
    assert got["a"] <= got["b"] + 100 * MS


def test_changed_priority_applies_from_the_next_choice() -> None:
    turns = DeviceScheduler()
    cost = {"a": MS, "b": MS}
    for _ in range(10):
        serve(turns, {"a": 0, "b": 0}, "ab", cost)
    served = [serve(turns, {"a": 0, "b": Priority.CRITICAL}, "ab", cost) for _ in range(500)]
    assert 3.5 <= served.count("b") / served.count("a") <= 4.5


REPLICAS = st.lists(st.tuples(st.integers(-3, 2), st.integers(1, 80)), min_size=2, max_size=5)


@given(REPLICAS, st.data())
@settings(max_examples=40)
def test_no_replica_with_work_waits_longer_than_the_bound(replicas: list[tuple[int, int]], data: st.DataObject) -> None:
    """The bound in the module's docstring, whatever the others do and however long steps take."""
    priorities = {str(number): priority for number, (priority, _) in enumerate(replicas)}
    longest = {str(number): most * MS for number, (_, most) in enumerate(replicas)}
    weights = {key: QUANTUM_US * weight_of(priority) for key, priority in priorities.items()}
    bounds = {
        key: (-(-longest[key] // weights[key]) + 1) * sum(weights[o] + longest[o] for o in priorities if o != key)
        for key in priorities
    }
    turns = DeviceScheduler()
    waited = dict.fromkeys(priorities, 0)
    for _ in range(data.draw(st.integers(1, 80))):
        busy = data.draw(st.sets(st.sampled_from(sorted(priorities)), min_size=1))
        chosen = turns.choose(priorities, busy)
        assert chosen in busy
        duration_us = data.draw(st.integers(0, longest[chosen]))
        turns.spend(chosen, duration_us)
        for key in priorities:
            waited[key] = waited[key] + duration_us if key in busy and key != chosen else 0
            assert waited[key] <= bounds[key], f"{key} waited {waited[key]} ns, its bound is {bounds[key]} ns"


@given(REPLICAS, st.lists(st.integers(0, 80), min_size=50, max_size=200))
def test_device_time_shares_stay_within_a_bound(replicas: list[tuple[int, int]], durations: list[int]) -> None:
    """What two got, each divided by its weight, differs by the bound in the module's docstring at most."""
    priorities = {str(number): priority for number, (priority, _) in enumerate(replicas)}
    weights = {key: weight_of(priority) for key, priority in priorities.items()}
    turns, got = DeviceScheduler(), dict.fromkeys(priorities, 0)
    longest = dict.fromkeys(priorities, 0)
    for duration in durations:
        chosen = turns.choose(priorities, priorities)
        assert chosen is not None
        turns.spend(chosen, duration * MS)
        got[chosen] += duration * MS
        longest[chosen] = max(longest[chosen], duration * MS)
        even = [got[key] / weights[key] for key in priorities]
        assert max(even) - min(even) <= QUANTUM_US + max(longest[key] / weights[key] for key in priorities) + 1


@given(REPLICAS, st.lists(st.tuples(st.sets(st.integers(0, 4)), st.integers(0, 80)), max_size=60))
def test_equal_inputs_give_equal_choices(replicas: list[tuple[int, int]], steps: list[tuple[set[int], int]]) -> None:
    priorities = {str(number): priority for number, (priority, _) in enumerate(replicas)}

    def play() -> list[str | None]:
        turns, chosen = DeviceScheduler(), []
        for busy, duration in steps:
            chosen.append(turns.choose(priorities, {str(number) for number in busy}))
            if chosen[-1] is not None:
                turns.spend(chosen[-1], duration * MS)
        return chosen

    assert play() == play()
