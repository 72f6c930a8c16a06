"""Values of placement: which host is chosen, and how the use of a replica is counted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lockstep.core.balancer import Why
from lockstep.engine.options import LoadOptions
from lockstep.hosts.values import Demand, Host, ReplicaName, ReplicaUse, choose_host, why_waiting


def test_every_reason_is_counted_from_the_start() -> None:
    use = ReplicaUse()
    assert use.routed == {Why.SESSION: 0, Why.PREFIX: 0, Why.LOAD: 0, Why.TURN: 0}
    use.routed[Why.PREFIX] += 2
    use.routed[Why.TURN] += 1
    assert use.num_routed == 3


def test_unavailable_time_is_the_time_between_loss_and_return() -> None:
    use = ReplicaUse()
    use.mark_available(5.0)
    assert use.away_s(9.0) == 0.0
    use.mark_unavailable(10.0)
    assert use.away_s(12.0) == 2.0
    use.mark_unavailable(12.0)  # told again
    use.mark_available(13.0)
    use.mark_available(14.0)
    assert use.away_s(20.0) == 3.0
    use.mark_unavailable(20.0)
    assert use.away_s(20.5) == 3.5
    assert use.num_away == 2


def host(name: str, **more: object) -> Host:
    at: dict[str, object] = {"is_there": True, "resources": {"CPU": 4.0}, "free": {"CPU": 4.0}, **more}
    return Host(name, f"id_{name}", "127.0.0.1", **at)  # type: ignore[arg-type]  # fields by name


def chosen(demand: Demand, hosts: Sequence[Host], avoid: Sequence[str] = ()) -> list[str]:
    """Names of the hosts of all replicas, one after the other."""
    placed: dict[ReplicaName, str] = {ReplicaName("other", 0): "id_a"}
    for number in range(demand.num):
        found = choose_host(demand, hosts, avoid, placed)
        placed[ReplicaName(demand.key, number)] = "" if found is None else found.node_id
    return [node_id.removeprefix("id_") for name, node_id in placed.items() if name.key == demand.key]


def test_a_group_lies_on_many_hosts_or_on_few_and_beside_others_last() -> None:
    hosts = [host(name) for name in "abc"]
    assert chosen(Demand("k", "s", LoadOptions(), num=5, spread=True), hosts) == ["b", "c", "a", "b", "c"]
    assert chosen(Demand("k", "s", LoadOptions(), num=3), hosts) == ["b", "b", "b"]


def test_no_replica_goes_where_it_has_no_room_or_may_not_be() -> None:
    wanted = Demand("k", "s", LoadOptions(), num=2, resources={"CPU": 2.0}, spread=True)
    hosts = [host("a", free={"CPU": 1.0}), host("b", is_there=False), host("c", is_drained=True), host("d"), host("e")]
    assert chosen(wanted, hosts) == ["d", "e"]
    assert chosen(wanted, hosts, ["id_e"]) == ["d", "d"]
    assert chosen(wanted, hosts, ["id_d", "id_e"]) == ["", ""]


def test_wait_reason_lists_resources_of_each_host_or_the_hosts_with_room() -> None:
    demand = Demand("k", "stub://a", LoadOptions(), resources={"CPU": 2.0, "memory": 1e9})

    def host(name: str, cpus: float, memory: float, **changes: bool) -> Host:
        known = Host(name, f"id-{name}", "10.0.0.1", True, {"CPU": 8.0, "memory": 8e9}, {"CPU": cpus, "memory": memory})
        return msgspec.structs.replace(known, **changes)

    full = [host("a", 1.0, 4e9), host("b", 4.0, 5e8)]
    gone = [host("c", 8.0, 8e9, is_drained=True), host("d", 8.0, 8e9, is_there=False)]
    why = why_waiting(demand, [*full, *gone])
    assert why == ("no host has 2 CPU, 1 GB of memory free: a has 1 CPU, 4 GB of memory; b has 4 CPU, 0.5 GB of memory")
    why = why_waiting(demand, [*full, host("e", 2.0, 1e9), *gone])
    assert why == "its process has not started yet, although e has room"
    assert why_waiting(demand, gone) == "no available host accepts replicas"
