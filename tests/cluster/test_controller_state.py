"""One plan for several gateways: what the planner sees of all, and what each does by the owner's word."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cluster.controller_state import (
    ABSENT,
    ControllerState,
    GatewayDemand,
    GatewayReport,
    GroupPhase,
    actions_for,
    is_held,
    merged_view,
    unwanted,
)
from lockstep.cluster.planner import (
    Drain,
    Load,
    LoadReason,
    Observed,
    Phase,
    PlanPolicy,
    Refuse,
    Replica,
    Unload,
    UnloadReason,
    plan,
)
from lockstep.engine.options import LoadOptions
from lockstep.hosts.values import Demand


def seen(key: str, phase: Phase = Phase.ABSENT, **fields: object) -> Replica:
    return Replica(key, phase, 100, **fields)  # type: ignore[arg-type]  # fields of a replica


def report(now_s: float, *replicas: Replica, budget: int | None = None) -> GatewayReport:
    demands = tuple(GatewayDemand(Demand(each.key, f"stub://{each.key}", LoadOptions()), each) for each in replicas)
    return GatewayReport(now_s, demands, budget, PlanPolicy())


def test_uses_of_all_gateways_are_added_and_clocks_are_not_compared() -> None:
    """One gateway's clock says 1,000 where another's says 10 and the owner's 500."""
    one = report(1000.0, seen("a", num_busy=2, last_used_s=990.0), seen("b", num_waiting=1, waiting_since_s=996.0))
    other = report(10.0, seen("a", num_busy=1, num_waiting=3, waiting_since_s=9.0, last_used_s=7.0, is_pinned=True))
    groups = {"a": GroupPhase(Phase.RESIDENT, 490.0, 2.5)}
    a, b = merged_view(groups, [one, other], 500.0).replicas
    assert (a.num_busy, a.num_waiting, a.waiting_since_s, a.last_used_s) == (3, 3, 499.0, 497.0)
    assert (a.phase, a.resident_since_s, a.reload_s, a.is_pinned) == (Phase.RESIDENT, 490.0, 2.5, True)
    assert (b.phase, b.num_waiting, b.waiting_since_s) == (Phase.ABSENT, 1, 496.0)


def test_the_smallest_budget_holds_and_none_bounds_nothing() -> None:
    budgets = [(None, None), (100, 100), (100, 70), (None, 70)]
    found = [merged_view({}, [report(0, budget=x), report(0, budget=y)], 0).budget_bytes for x, y in budgets]
    assert found == [None, 100, 70, None]


def test_a_group_idles_for_the_longest_limit_of_its_gateways() -> None:
    limits = [(1.0, 2.0), (None, 2.0)]
    reports = [[report(0, seen("a", idle_limit_s=x)), report(0, seen("a", idle_limit_s=y))] for x, y in limits]
    assert [merged_view({}, each, 0).replicas[0].idle_limit_s for each in reports] == [2.0, None]


def test_groups_without_a_gateway_are_removed_unless_there_are_no_gateways() -> None:
    assert unwanted(["a", "b"], [report(0, seen("b")), report(0, seen("c"))]) == ["a"]
    assert unwanted(["a", "b"], []) == []


def test_a_group_is_held_while_any_gateway_has_reached_it() -> None:
    assert is_held("a", [report(0, seen("a")), report(0, seen("a", Phase.RESIDENT))])
    assert is_held("a", [report(0, seen("a", Phase.LOADING))])
    assert not is_held("a", [report(0, seen("a")), report(0, seen("b", Phase.RESIDENT))])


def test_gateway_loads_a_placed_group_when_it_needs_it() -> None:
    word = ControllerState(1, phases={"a": Phase.RESIDENT, "b": Phase.RESIDENT, "c": Phase.LOADING})
    here = (seen("a", is_pinned=True), seen("b"), seen("c", is_pinned=True))
    assert actions_for(word, Observed(here, None)) == (Load("a", LoadReason.RESIDENT),)
    asked = (seen("b", num_waiting=1, waiting_since_s=0.0),)
    assert actions_for(word, Observed(asked, None)) == (Load("b", LoadReason.REQUEST),)


def test_gateway_unloads_a_removed_group_after_its_open_calls() -> None:
    word = ControllerState(1, phases={"a": Phase.UNLOADING}, drains={"b": "c"})
    idle, busy = seen("a", Phase.RESIDENT), seen("a", Phase.RESIDENT, num_busy=1)
    assert actions_for(word, Observed((idle,), None)) == (Unload("a", UnloadReason.ROOM, None),)
    assert actions_for(word, Observed((busy,), None)) == (Drain("a", ""),)
    word = ControllerState(1, phases={"b": Phase.RESIDENT}, drains={"b": "c"})
    assert actions_for(word, Observed((seen("b", Phase.RESIDENT, num_busy=1),), None)) == (Drain("b", "c"),)


def test_while_replicas_are_lost_a_gateway_keeps_its_links() -> None:
    """The owner may be wrong: who is reached is asked."""
    word = ControllerState(1, phases={"a": Phase.LOADING})
    assert actions_for(word, Observed((seen("a", Phase.RESIDENT),), None)) == ()


def test_requests_for_a_group_that_cannot_be_placed_are_refused_with_the_reason() -> None:
    word = ControllerState(1, refusals={"a": "no host has 2 CPU free"})
    asked = (seen("a", num_waiting=1, waiting_since_s=0.0), seen("b"))
    assert actions_for(word, Observed(asked, None)) == (Refuse("a", "no host has 2 CPU free"),)


REPLICAS = st.builds(
    lambda key, busy, waits, pinned, warm: seen(
        key,
        num_busy=busy,
        num_waiting=int(waits is not None),
        waiting_since_s=waits,
        is_pinned=pinned,
        wants_warm=warm,
    ),
    st.sampled_from("abc"),
    st.integers(0, 3),
    st.none() | st.integers(0, 10).map(float),
    st.booleans(),
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(st.lists(REPLICAS, max_size=3, unique_by=lambda each: each.key), min_size=1, max_size=4), st.data())
def test_planner_accepts_any_reports_of_gateways(several: list[list[Replica]], data: st.DataObject) -> None:
    """A single gateway's report is seen as its own planner would see it, and no action names what nobody reported."""
    reports = [report(10.0, *each) for each in several]
    phases = {key: GroupPhase(data.draw(st.sampled_from(Phase)), 1.0) for key in "abc"}
    observed = merged_view(phases, reports, 10.0)
    assert {each.key for each in observed.replicas} == {each.key for those in several for each in those}
    for action in plan(observed, 10.0, PlanPolicy()):
        assert action.key in {each.key for each in observed.replicas}
    if len(several) == 1:
        alone = merged_view({}, reports, 10.0)
        assert plan(alone, 10.0, PlanPolicy()) == plan(Observed(tuple(several[0]), None), 10.0, PlanPolicy())
    assert ABSENT.phase is Phase.ABSENT
