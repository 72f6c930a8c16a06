"""The planner's rules, one by one, against fake effects."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.planner import (
    Drain,
    Load,
    LoadReason,
    Observed,
    Phase,
    Refuse,
    Replica,
    Unload,
    UnloadReason,
    look_again_s,
    overshoot,
    plan,
)
from tests.cluster.fake_shell import NOW_S, POLICY, FakeShell, absent, planned, resident, wanted


def shell(*replicas: Replica, budget: int) -> FakeShell:
    return FakeShell(*replicas, budget=budget, policy=POLICY)


def loads(fake: FakeShell) -> list[str]:
    return [action.key for action in fake.actions if isinstance(action, Load)]


class TestLoading:
    def test_a_resident_model_serves_at_once_and_nothing_is_planned(self) -> None:
        fake = shell(resident("a"), budget=4)
        call = fake.arrive("a")
        assert fake.models["a"].busy == {call}
        assert not fake.actions

    def test_requests_for_one_cold_model_share_one_load(self) -> None:
        fake = shell(absent("a"), budget=4)
        calls = {fake.arrive("a") for _ in range(3)}
        fake.loaded("a")
        assert fake.models["a"].busy == calls
        assert loads(fake) == ["a"]

    def test_replica_that_ended_workers_is_loaded_last(self) -> None:
        replicas = (
            wanted("a", since_s=0.0, num_lost=2),
            absent("b", is_pinned=True, num_lost=1),
            wanted("c", priority=9),
        )
        actions = plan(Observed(replicas, None), NOW_S, replace(POLICY, max_parallel_loads=3))
        assert [action.key for action in actions if isinstance(action, Load)] == ["c", "b", "a"]

    def test_a_failed_load_fails_all_waiters_and_is_not_tried_before_its_time(self) -> None:
        fake = shell(absent("a"), budget=4)
        calls = [fake.arrive("a"), fake.arrive("a")]
        fake.load_failed("a", backoff_s=1.0)
        assert set(fake.refused) == set(calls)
        fake.arrive("a")
        assert loads(fake) == ["a"]
        fake.advance(1.0)
        assert loads(fake) == ["a", "a"]

    def test_load_without_remaining_calls_is_not_started(self) -> None:
        fake = shell(absent("a"), resident("b"), budget=4)
        busy = fake.arrive("b")
        fake.leave(fake.arrive("a"))
        fake.finish(busy)
        fake.advance(10.0)
        assert fake.actions == []

    def test_a_load_under_way_finishes_without_waiting_requests_and_leaves_no_count(self) -> None:
        fake = shell(absent("a"), budget=4)
        fake.leave(fake.arrive("a"))
        fake.loaded("a")
        seen = fake.observed().replicas[0]
        assert (seen.phase, seen.num_busy, seen.num_waiting) == (Phase.RESIDENT, 0, 0)

    def test_a_request_during_the_unload_waits_for_it_and_is_then_loaded_for(self) -> None:
        fake = shell(resident("a"), budget=4)
        fake.unload("a")
        call = fake.arrive("a")
        assert fake.phases() == {"a": "unloading"}
        fake.unloaded("a")
        fake.loaded("a")
        assert fake.models["a"].busy == {call}

    def test_management_unload_drops_waiting_calls(self) -> None:
        fake = shell(resident("a"), budget=4)
        fake.models["a"].max_busy = 1
        calls = {fake.arrive("a"), fake.arrive("a")}
        fake.unload("a")
        assert set(fake.refused) == calls

    def test_a_resident_model_is_loaded_without_waiting_requests(self) -> None:
        assert planned(absent("a", is_pinned=True), budget=4) == (Load("a", LoadReason.RESIDENT),)

    def test_disjoint_loads_run_in_parallel_up_to_the_bound(self) -> None:
        fake = shell(absent("a"), absent("b"), absent("c"), budget=12)
        for key in "abc":
            fake.arrive(key)
        assert fake.phases() == {"a": "loading", "b": "loading", "c": "absent"}
        fake.loaded("a")
        assert fake.phases() == {"a": "resident", "b": "loading", "c": "loading"}

    def test_loads_that_need_the_same_room_do_not_run_in_parallel(self) -> None:
        fake = shell(absent("a"), absent("b"), budget=4)
        fake.arrive("a")
        fake.arrive("b")
        assert fake.phases() == {"a": "loading", "b": "absent"}

    def test_loads_are_ordered_by_priority_then_arrival(self) -> None:
        replicas = (
            wanted("low", since_s=NOW_S - 1.5, priority=1),
            wanted("late", since_s=NOW_S - 0.1),
            wanted("early", since_s=NOW_S - 0.2),
        )
        assert planned(*replicas, budget=8) == (
            Load("early", LoadReason.REQUEST),
            Load("late", LoadReason.REQUEST),
        )

    def test_overdue_claim_is_loaded_before_a_more_urgent_one(self) -> None:
        replicas = (wanted("critical", priority=-2, since_s=NOW_S - 1.9), wanted("low", priority=1, since_s=NOW_S - 2))
        assert planned(*replicas, budget=4) == (Load("low", LoadReason.REQUEST),)

    def test_blocked_claims_do_not_delay_claims_that_fit(self) -> None:
        replicas = wanted("a", 8), wanted("b", 8), wanted("c", 1), resident("d", num_busy=1)
        assert planned(*replicas, budget=10) == (Load("c", LoadReason.REQUEST),)

    def test_without_a_budget_everything_fits(self) -> None:
        assert planned(wanted("a"), resident("b", 10**15), budget=None) == (Load("a", LoadReason.REQUEST),)


class TestNeverFits:
    def test_replica_larger_than_the_budget_is_refused_with_the_reason(self) -> None:
        (action,) = planned(wanted("a", 50_000_000), budget=40_000_000)
        reason = "it needs 50 MB; of the budget of 40 MB, the models declared resident take 0 B"
        assert action == Refuse("a", reason)

    def test_replica_that_does_not_fit_beside_pinned_ones_is_refused(self) -> None:
        (action,) = planned(wanted("a", 3), resident("b", 2, is_pinned=True), budget=4)
        assert isinstance(action, Refuse)

    def test_replica_of_the_size_of_the_budget_evicts_all_others(self) -> None:
        assert planned(wanted("a", 4), resident("b", 2), budget=4) == (Unload("b", UnloadReason.ROOM, "a"),)

    def test_of_two_declared_resident_that_do_not_fit_the_first_is_loaded(self) -> None:
        both = absent("a", 3, is_pinned=True), absent("b", 3, is_pinned=True)
        assert planned(*both, budget=4) == (Load("a", LoadReason.RESIDENT),)

    def test_an_overshoot_is_reported_in_bytes(self) -> None:
        loading = Replica("a", Phase.LOADING, 30_000_000)
        observed = Observed((loading, resident("b", 20_000_000)), 60_000_000)
        assert overshoot(observed, "a", 40_000_000) == ""
        told = "loaded, it takes 50 MB, where 30 MB were expected; of gpu_budget's 60 MB only 40 MB are free"
        assert overshoot(observed, "a", 50_000_000).startswith(told)

    def test_an_overshoot_counts_until_it_is_unloaded_and_is_measured_from_then_on(self) -> None:
        fake = shell(absent("a"), resident("b", 2, last_used_s=0.0), budget=6)
        call = fake.arrive("a")
        fake.loaded("a", 5)
        assert call in fake.refused
        assert fake.phases()["a"] == "unloading"
        assert fake.used() == 7
        fake.unloaded("a")
        fake.arrive("a")
        fake.advance(1.0)
        assert fake.actions[-1] == Unload("b", UnloadReason.ROOM, "a")


class TestDraining:
    def test_a_resident_model_serves_requests_until_another_request_waited_too_long(self) -> None:
        fake = shell(resident("a"), absent("b"), budget=4)
        fake.arrive("a")
        fake.arrive("b")
        fake.advance(1.9)
        second = fake.arrive("a")
        assert second in fake.models["a"].busy
        assert not fake.actions
        fake.advance(0.1)
        third = fake.arrive("a")
        assert third not in fake.models["a"].busy
        assert fake.drained() == {"a"}

    def test_a_model_stays_for_as_long_as_its_load_took(self) -> None:
        busy, waits = resident("a", num_busy=1, reload_s=8.0), wanted("b", since_s=NOW_S - 5.0)
        assert planned(replace(busy, resident_since_s=NOW_S - 7.0), waits, budget=4) == ()
        assert planned(replace(busy, resident_since_s=NOW_S - 8.0), waits, budget=4) == (Drain("a", "b"),)

    def test_a_drained_model_goes_when_its_calls_have_ended_and_comes_back_for_those_that_came_meanwhile(self) -> None:
        fake = shell(resident("a"), absent("b"), budget=4)
        running, other = fake.arrive("a"), fake.arrive("b")
        fake.advance(2.0)
        late = fake.arrive("a")
        fake.finish(running)
        assert fake.phases() == {"a": "unloading", "b": "absent"}
        fake.unloaded("a")
        fake.loaded("b")
        assert fake.models["b"].busy == {other}
        fake.finish(other)
        fake.advance(0.1)
        fake.unloaded("b")
        fake.loaded("a")
        assert fake.models["a"].busy == {late}

    def test_a_drained_model_opens_again_when_no_request_waits_for_its_memory(self) -> None:
        fake = shell(resident("a"), absent("b"), budget=4)
        fake.arrive("a")
        other = fake.arrive("b")
        fake.advance(2.0)
        late = fake.arrive("a")
        fake.leave(other)
        assert late in fake.models["a"].busy
        assert fake.drained() == set()

    def test_all_replicas_whose_room_is_needed_are_unloaded_together(self) -> None:
        fake = shell(resident("a"), resident("b"), absent("c", 8), budget=8)
        calls = [fake.arrive("a"), fake.arrive("b")]
        fake.arrive("c")
        fake.advance(2.0)
        fake.finish(calls[0])
        assert fake.drained() == {"a", "b"}
        assert fake.phases()["a"] == "resident"
        fake.finish(calls[1])
        assert fake.phases() == {"a": "unloading", "b": "unloading", "c": "absent"}

    def test_replica_with_older_waiting_calls_is_not_drained(self) -> None:
        older = resident("a", num_busy=1, num_waiting=1, waiting_since_s=NOW_S - 9)
        assert planned(older, wanted("b", since_s=NOW_S - 5), budget=4) == ()

    def test_a_long_wait_blocks_younger_loads_until_a_model_drains_for_it(self) -> None:
        waits = wanted("b", 8, since_s=NOW_S - 5)
        assert planned(Replica("a", Phase.LOADING, 4), waits, wanted("c", 2), budget=10) == ()
        assert planned(resident("a", num_busy=1), waits, wanted("c", 2), budget=10) == (
            Drain("a", "b"),
            Load("c", LoadReason.REQUEST),
        )
        new = resident("a", num_busy=1, resident_since_s=NOW_S, reload_s=9.0)
        assert planned(new, waits, wanted("c", 2), budget=10) == ()

    def test_draining_replica_keeps_draining_when_another_becomes_cheaper(self) -> None:
        drained = resident("b", num_busy=1, reload_s=9.0, makes_room_for="a")
        cheap = resident("c", num_busy=1, reload_s=0.01)
        assert planned(wanted("a", since_s=NOW_S - 5), drained, cheap, budget=8) == (Drain("b", "a"),)

    def test_idle_replicas_are_unloaded_before_cheaper_busy_ones(self) -> None:
        idle, busy = resident("b", reload_s=9.0), [resident(key, num_busy=1, reload_s=0.01) for key in "cd"]
        drains = planned(wanted("a", 8, since_s=NOW_S - 5), idle, *busy, budget=12)
        assert drains == (Drain("b", "a"), Drain("c", "a"))

    def test_bytes_left_over_by_an_eviction_are_used_in_the_same_plan(self) -> None:
        """`e` waits for one of the two free bytes; `a` frees enough for it, so `c` may have both of them now."""
        goes = Replica("d", Phase.UNLOADING, 2, makes_room_for="e")
        waits = (absent("c", 2, is_pinned=True, retry_at_s=NOW_S - 4), wanted("e", 3, since_s=NOW_S - 5))
        assert planned(resident("a", 5), goes, *waits, budget=9) == (
            Unload("a", UnloadReason.ROOM, "c"),
            Load("c", LoadReason.RESIDENT),
        )


class TestWarming:
    def test_warming_takes_free_room(self) -> None:
        assert planned(absent("a", wants_warm=True), budget=4) == (Load("a", LoadReason.WARM),)

    def test_requested_replica_is_not_warmed_in_addition(self) -> None:
        assert planned(wanted("a", wants_warm=True), budget=8) == (Load("a", LoadReason.REQUEST),)

    def test_warming_evicts_no_model(self) -> None:
        assert planned(absent("a", wants_warm=True), resident("b"), budget=4) == ()

    def test_nothing_is_warmed_while_a_request_waits_for_memory(self) -> None:
        waits, busy = wanted("a", 4), resident("b", 4, num_busy=1)
        assert planned(waits, busy, absent("c", 1, wants_warm=True), budget=6) == ()

    def test_several_warm_requests_load_a_model_once(self) -> None:
        fake = shell(absent("a"), budget=4)
        for _ in range(3):
            fake.warm("a")
        assert loads(fake) == ["a"]

    def test_warmed_replica_is_evicted_for_a_request(self) -> None:
        fake = shell(absent("a"), absent("b"), budget=4)
        fake.warm("a")
        fake.loaded("a")
        fake.arrive("b")
        fake.advance(0.1)
        assert fake.actions[-1] == Unload("a", UnloadReason.ROOM, "b")


class TestIdleLimit:
    def test_a_model_goes_when_it_was_unused_for_so_long_and_every_call_starts_the_time_anew(self) -> None:
        fake = shell(resident("a", idle_limit_s=5.0, last_used_s=NOW_S), budget=4)
        fake.advance(4.0)
        fake.finish(fake.arrive("a"))
        fake.advance(4.0)
        assert not fake.actions
        fake.advance(1.0)
        assert fake.actions == [Unload("a", UnloadReason.IDLE)]

    @pytest.mark.parametrize(
        "needed",
        [
            resident("a", idle_limit_s=5.0, is_pinned=True),
            resident("a", idle_limit_s=5.0, num_busy=1),
            resident("a", idle_limit_s=5.0, wants_warm=True),
        ],
        ids=["declared resident", "serves", "will be needed"],
    )
    def test_needed_replica_is_not_unloaded_when_idle(self, needed: Replica) -> None:
        assert planned(needed, budget=4) == ()


class TestSmallerBudget:
    def test_idle_replicas_are_unloaded_and_busy_ones_drained(self) -> None:
        replicas = resident("a", num_busy=1), resident("b"), resident("c", is_pinned=True)
        assert planned(*replicas, budget=8) == (Unload("b", UnloadReason.BUDGET, ""),)
        assert planned(*replicas, budget=4) == (Drain("a", ""), Drain("b", ""))

    def test_nothing_is_loaded_before_the_budget_is_kept(self) -> None:
        assert planned(resident("a", num_busy=1), wanted("b", 0), budget=3) == (Drain("a", ""),)


def test_next_plan_is_at_the_next_time_that_could_change_it() -> None:
    replicas = (
        wanted("a", since_s=NOW_S - 0.5),
        absent("b", is_pinned=True, retry_at_s=NOW_S + 7.0),
        resident("c", last_used_s=NOW_S - 0.04, idle_limit_s=3.0, resident_since_s=NOW_S + 19),
    )
    observed = Observed(replicas, 4)
    times = [NOW_S]
    while (again_s := look_again_s(observed, times[-1], POLICY)) is not None:
        times.append(again_s)
    assert times[1:] == pytest.approx([100.06, 101.5, 102.96, 107.0, 109.0, 120.0])


seen = st.builds(
    Replica,
    key=st.sampled_from("abcdef"),
    phase=st.sampled_from([Phase.ABSENT, Phase.RESIDENT, Phase.RESIDENT, Phase.LOADING, Phase.UNLOADING]),
    bytes=st.integers(0, 6),
    num_busy=st.integers(0, 1),
    last_used_s=st.sampled_from([0.0, NOW_S]),
    is_pinned=st.booleans(),
    wants_warm=st.sampled_from([False, False, True]),
    idle_limit_s=st.sampled_from([None, None, None, 50.0]),
)


@given(st.lists(seen, max_size=5, unique_by=lambda replica: replica.key), st.one_of(st.none(), st.integers(0, 20)))
def test_replica_that_cannot_be_loaded_does_not_change_the_plan(replicas: list[Replica], budget: int | None) -> None:
    """Where nothing is to be done a plan is made at a glance, which somebody who is wanted rules out."""
    barred = absent("z", 0, wants_warm=True, retry_at_s=NOW_S + 1)
    assert planned(*replicas, budget=budget) == planned(*replicas, barred, budget=budget)
