"""Relocation from drained hosts: a group never has fewer replicas than before, and what cannot end is refused."""

from __future__ import annotations

import pytest

from lockstep.cluster.controlled_group import START_LIMIT_S, ControlledGroup, Relocation, relocation, why_not_drained
from lockstep.engine.options import LoadOptions
from lockstep.hosts.values import Demand, Host, ReplicaPhase, ReplicaStatus

READY, STARTING = ReplicaPhase.READY, ReplicaPhase.STARTING


def places(**states: tuple[str, ReplicaPhase]) -> dict[int, ReplicaStatus]:
    """Places by number, e.g. ``n0=("b", READY)``: on host b."""
    found = {int(name[1:]): each for name, each in states.items()}
    return {n: ReplicaStatus("k", n, state, host=host, node_id=host) for n, (host, state) in found.items()}


@pytest.mark.parametrize(
    ("num", "before", "drained", "wanted"),
    [
        pytest.param(1, {"n0": ("b", READY)}, "", Relocation(), id="nothing is drained"),
        pytest.param(1, {"n0": ("b", READY)}, "b", Relocation((1,)), id="a successor is placed first"),
        pytest.param(1, {"n0": ("b", READY), "n1": ("a", STARTING)}, "b", Relocation(), id="both stay"),
        pytest.param(1, {"n0": ("b", READY), "n1": ("a", READY)}, "b", Relocation((), (0,)), id="the old one leaves"),
        pytest.param(
            2,
            {"n0": ("a", READY), "n1": ("b", READY), "n2": ("a", STARTING)},
            "b",
            Relocation(),
            id="one that stays is no successor of one that goes",
        ),
        pytest.param(
            2,
            {"n0": ("b", READY), "n1": ("b", READY), "n2": ("a", READY), "n3": ("a", STARTING)},
            "b",
            Relocation((), (0,)),
            id="each successor replaces one",
        ),
        pytest.param(1, {"n0": ("b", STARTING)}, "b", Relocation((1,), (0,)), id="not ready goes at once"),
        pytest.param(
            1,
            {"n0": ("b", READY), "n1": ("a", STARTING)},
            "",
            Relocation((), (1,)),
            id="after undrain",
        ),
    ],
)
def test_successors_are_ready_before_replicas_leave(
    num: int, before: dict[str, tuple[str, ReplicaPhase]], drained: str, wanted: Relocation
) -> None:
    assert relocation(num, places(**before), drained) == wanted


def test_relocation_moves_every_replica_without_reducing_the_ready_ones() -> None:
    """Step by step, each successor ready one step after it was placed."""
    known = places(n0=("b", READY), n1=("b", READY), n2=("a", READY))
    for _ in range(8):
        steps = relocation(3, known, ("b",))
        known = {number: place for number, place in known.items() if number not in steps.leaving}
        known |= {n: ReplicaStatus("k", n, READY, host="a", node_id="a") for n in steps.placed}
        assert sum(place.state is READY for place in known.values()) >= 3
    assert {place.host for place in known.values()} == {"a"}
    assert len(known) == 3


def test_a_replica_that_leaves_goes_on_leaving() -> None:
    known = places(n0=("b", READY), n1=("b", READY), n2=("a", READY), n3=("a", STARTING))
    assert relocation(2, known, ("b",), leaving=(1,)).leaving == (1,)
    assert relocation(2, known, (), leaving=(1,)).leaving == (1, 3), "also when its host may have replicas again"


def test_a_replica_that_a_host_has_room_for_is_starting_for_a_while() -> None:
    """On a Ray cluster that was just started a process takes its time; that is no lack of room."""
    group = ControlledGroup(Demand("k", "stub://a", LoadOptions(), resources={"CPU": 1.0}), numbers=[0])
    group.mark_waiting(0, 100.0)
    roomy, full = [host("a", 1.0)], [host("a", 0.5)]
    assert group.published(0, roomy, 100.0).state is STARTING
    assert group.published(0, roomy, 100.0 + START_LIMIT_S).state is ReplicaPhase.WAITING
    assert group.published(0, full, 100.0).state is ReplicaPhase.WAITING


def host(name: str, cpus: float) -> Host:
    return Host(name, name, name, True, {"CPU": 4.0}, {"CPU": cpus})


def test_a_drain_is_refused_where_a_replica_has_no_other_host() -> None:
    demand = Demand("k", "stub://a", LoadOptions(), num=2, resources={"CPU": 1.0}, name="billing")
    groups = [(demand, tuple(places(n0=("b", READY), n1=("b", READY)).values()))]
    assert why_not_drained("b", [host("a", 2.0), host("b", 0.0)], (), groups) == ""
    assert "billing#1 would have no other host" in why_not_drained("b", [host("a", 1.0), host("b", 0.0)], (), groups)
    assert "no available host accepts replicas" in why_not_drained("b", [host("b", 0.0)], (), groups)
    assert why_not_drained("b", [host("a", 2.0), host("b", 0.0)], ("a",), groups), "a is drained itself"
