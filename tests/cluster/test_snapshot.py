"""Snapshots of hosts and placed replicas, made of what their owner tells."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from lockstep.cluster.snapshot import ClusterCounters, ClusterSnapshot, HostSnapshot, PlaceSnapshot, host_named
from lockstep.core.balancer import Why
from lockstep.errors import HostNotFoundError, PromptTooLongError
from lockstep.hosts.values import Host, ReplicaPhase, ReplicaStatus, ReplicaUse
from tests.cluster.clusters import clustered, say
from tests.engine.hybrid_engines import write_hybrid


def host(name: str, **changes: object) -> Host:
    amounts = {"CPU": 4.0, "memory": 2e9}
    known = Host(name, f"id-{name}", "10.0.0.1", True, amounts, {"CPU": 1.0, "memory": 1e9})
    return msgspec.structs.replace(known, **changes)


def test_host_counts_its_replicas_in_any_state() -> None:
    """By its id: two hosts may have one address, and a name may have been another host's."""
    places = [
        ReplicaStatus("k", 0, ReplicaPhase.READY, host="a", node_id="id-a"),
        ReplicaStatus("k", 1, ReplicaPhase.LEAVING, host="a", node_id="id-a"),
        ReplicaStatus("k", 2, ReplicaPhase.READY, host="a", node_id="id-of-an-earlier-a"),
        ReplicaStatus("k", 3, ReplicaPhase.WAITING),
    ]
    assert [HostSnapshot.of(host(name), places).num_replicas for name in "ab"] == [2, 0]
    drained = HostSnapshot.of(host("a", is_drained=True, is_there=False), ())
    assert (drained.is_drained, drained.is_there) == (True, False)
    assert drained.free == {"CPU": 1.0, "memory": 1e9}


def test_replica_snapshot_has_placement_and_gateway_counts() -> None:
    use = ReplicaUse(num_retried=1)
    use.routed[Why.SESSION] = 3
    use.mark_available(0.0)
    use.mark_unavailable(10.0)
    place = ReplicaStatus(
        "router-q8", 1, ReplicaPhase.STARTING, "its worker was lost", "a", "id-a", "10.0.0.1", 5077, 99, 98, 2
    )
    shown = PlaceSnapshot.of(place, ["router"], use, now_s=12.5, num_running=4, num_cached_blocks=7)
    assert json.loads(msgspec.json.encode(shown)) == {
        "models": ["router"],
        "key": "router-q8",
        "number": 1,
        "state": "starting",
        "reason": "its worker was lost",
        "host": "a",
        "address": "10.0.0.1:5077",
        "pid": 99,
        "num_starts": 2,
        "num_running": 4,
        "num_cached_blocks": 7,
        "routed": {"session": 3, "prefix": 0, "load": 0, "turn": 0},
        "num_retried": 1,
        "num_away": 1,
        "away_s": 2.5,
    }
    assert (shown.name, shown.num_routed) == ("router#1", 3)
    assert shown.sentence == "router#1 is starting: its worker was lost"
    assert PlaceSnapshot.of(place).name == "router-q8#1", "a group whose models are gone has its key"


def test_a_ready_replica_that_cannot_be_reached_reports_the_reason() -> None:
    ready = PlaceSnapshot.of(ReplicaStatus("k", 0, ReplicaPhase.READY))
    assert ready.sentence == ""
    cut = msgspec.structs.replace(ready, reason="the link was cut")
    assert cut.sentence == "k#0 gets no requests: the link was cut"


@pytest.mark.parametrize(
    ("address", "port", "shown"), [("10.0.0.1", 1, "10.0.0.1:1"), ("fe80::1", 1, "[fe80::1]:1"), ("10.0.0.1", 0, "")]
)
def test_an_address_is_shown_where_a_worker_listens(address: str, port: int, shown: str) -> None:
    place = ReplicaStatus("k", 0, ReplicaPhase.LOADING, address=address, port=port)
    assert PlaceSnapshot.of(place).address == shown


def test_snapshot_of_an_earlier_server_reads_as_a_cluster_without_hosts() -> None:
    before = msgspec.to_builtins(
        ClusterSnapshot("c", "stub", None, None, False, (), (), (), (), 0, ClusterCounters(), ())
    )
    del before["hosts"], before["places"]
    read = msgspec.convert(before, ClusterSnapshot)
    assert (read.hosts, read.places) == ((), ())


HOSTS = tuple(
    HostSnapshot.of(host(name, address=address), ())
    for name, address in (("rack-1", "10.0.0.1"), ("rack-2", "10.0.0.1"), ("10.0.0.9", "10.0.0.9"), ("x", "10.0.0.5"))
)


@pytest.mark.parametrize(("text", "name"), [("rack-1", "rack-1"), ("10.0.0.9", "10.0.0.9"), ("10.0.0.5", "x")])
def test_a_host_is_found_by_its_name_or_by_an_address_that_is_its_own(text: str, name: str) -> None:
    assert host_named(HOSTS, text) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rack1", "no host is called 'rack1'; did you mean 'rack-1'?"),
        ("zzz", "no host is called 'zzz'; there are rack-1, rack-2, 10.0.0.9 and x"),
        ("10.0.0.1", "10.0.0.1 is the address of rack-1 and rack-2; name one of them"),
    ],
)
def test_an_unknown_host_is_rejected_with_the_known_ones(text: str, message: str) -> None:
    with pytest.raises(HostNotFoundError) as refused:
        host_named(HOSTS, text)
    assert (str(refused.value), refused.value.param) == (message, "name")


def test_before_any_host_is_seen_none_is_found() -> None:
    with pytest.raises(HostNotFoundError, match="no host has been seen yet"):
        host_named((), "a")


async def test_the_kv_of_a_replica_is_counted_in_tokens_of_a_sequence_in_all_groups(tmp_path: Path) -> None:
    source = write_hybrid(tmp_path, "tiny-gemma3")
    engine = "{num_blocks: 80, num_host_blocks: 80, max_num_seqs: 4, max_num_batched_tokens: 32}"
    async with clustered(f"cluster: c\nmodels:\n  a: {{source: '{source}', engine: {engine}}}\n") as cluster:
        [replica] = cluster.snapshot().replicas
        assert replica.engine is not None
        most = replica.engine.kv_tokens
        assert most == replica.engine.host_kv_tokens
        assert 32 < most < 80 * 32
        with pytest.raises(PromptTooLongError, match=f"holds {most + 1}"):  # the last token needs no KV
            await say(cluster, "word " * 1000, "a")
