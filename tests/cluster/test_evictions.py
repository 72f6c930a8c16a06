"""Whose room the planner gives to another: who is in use, who is cheapest, and no more than is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.cluster.planner import Phase, Replica, Unload, UnloadReason
from tests.cluster.fake_shell import NOW_S, planned, resident, wanted


@pytest.mark.parametrize(
    "busy",
    [
        resident("b", num_busy=1),
        resident("b", is_pinned=True),
        Replica("b", Phase.LOADING, 4),
        resident("b", last_used_s=NOW_S - 0.05),
        resident("b", num_waiting=1, waiting_since_s=NOW_S),
    ],
    ids=["serves", "declared resident", "loads", "used a moment ago", "is about to serve"],
)
def test_replica_in_use_is_not_evicted(busy: Replica) -> None:
    assert not any(isinstance(action, Unload) for action in planned(wanted("a"), busy, budget=6))


def test_recently_used_replica_is_evicted_for_an_overdue_claim_after_its_minimum_stay() -> None:
    used = resident("b", last_used_s=NOW_S - 0.05, reload_s=8.0)
    late, in_time = wanted("a", since_s=NOW_S - 2.0), wanted("a", since_s=NOW_S - 1.9)
    assert planned(late, replace(used, resident_since_s=NOW_S - 7.9), budget=4) == ()
    assert planned(in_time, replace(used, resident_since_s=NOW_S - 8.0), budget=4) == ()
    stayed = replace(used, resident_since_s=NOW_S - 8.0)
    assert planned(late, stayed, budget=4) == (Unload("b", UnloadReason.ROOM, "a"),)


def test_replica_with_waiting_calls_is_evicted_only_if_drained_for_the_claim() -> None:
    late = wanted("a", since_s=NOW_S - 5.0)
    full = resident("b", num_waiting=1, waiting_since_s=NOW_S - 1.0)
    assert planned(late, full, budget=4) == ()
    drained = replace(full, makes_room_for="a")
    assert planned(late, drained, budget=4) == (Unload("b", UnloadReason.ROOM, "a"),)


@pytest.mark.parametrize(
    ("first", "second", "victim"),
    [
        (resident("b", reload_s=9.0), resident("c", reload_s=1.0), "c"),
        (resident("b", 4, reload_s=1.0), resident("c", 40, reload_s=1.0), "c"),
        (resident("b", priority=-2), resident("c", priority=1), "c"),
        (resident("b", reload_s=1.0, priority=1), resident("c", reload_s=0.99, priority=0), "b"),
        (resident("b", last_used_s=2.0), resident("c", last_used_s=1.0), "c"),
        (resident("b"), resident("c"), "b"),
    ],
    ids=["reloads faster", "frees more", "less urgent", "about as cheap, less urgent", "unused for longer", "tie"],
)
def test_the_cheapest_goes(first: Replica, second: Replica, victim: str) -> None:
    budget = first.bytes + second.bytes
    assert planned(wanted("a"), first, second, budget=budget) == (Unload(victim, UnloadReason.ROOM, "a"),)


def test_no_more_goes_than_the_room_needs() -> None:
    cheap, large = resident("b", 1, reload_s=0.01), resident("c", 8, reload_s=1.0)
    assert planned(wanted("a", 8), cheap, large, budget=9) == (Unload("c", UnloadReason.ROOM, "a"),)


def test_no_model_is_evicted_when_that_would_not_suffice() -> None:
    assert planned(wanted("a", 8), resident("b"), resident("c", num_busy=1), budget=8) == ()


def test_no_eviction_while_an_unload_for_the_claim_is_in_progress() -> None:
    going = Replica("b", Phase.UNLOADING, 4, makes_room_for="a")
    assert planned(wanted("a"), going, resident("c"), budget=8) == ()


def test_memory_freed_for_a_claim_is_not_given_to_a_later_one() -> None:
    going = Replica("b", Phase.UNLOADING, 4, makes_room_for="a")
    second = wanted("c", since_s=NOW_S - 0.1)
    assert planned(wanted("a"), second, going, resident("d"), budget=8) == (Unload("d", UnloadReason.ROOM, "c"),)


def test_each_eviction_makes_room_for_one_model_only() -> None:
    both = wanted("a"), wanted("c", since_s=NOW_S - 0.1)
    assert planned(*both, resident("b"), resident("d"), budget=8) == (
        Unload("b", UnloadReason.ROOM, "c"),
        Unload("d", UnloadReason.ROOM, "a"),
    )
