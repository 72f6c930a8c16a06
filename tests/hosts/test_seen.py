"""Several hosts as a user sees and drains them, over HTTP: real workers, owner and gateway on two pretended hosts."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import msgspec
import pytest
import uvicorn

from lockstep.cli.main import invoke
from lockstep.cli.ps import EXIT_LEFT
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.controller_state import ControllerState
from lockstep.cluster.snapshot import ClusterSnapshot
from lockstep.hosts.values import ReplicaName
from lockstep.server.app import create_app
from tests.cluster.test_multi_host import MANIFEST, ask, deployed, num_ready, places
from tests.hosts.support import write_secret
from tests.hosts.two_nodes import Nodes, joined
from tests.server.process import ServerProcess
from tests.waiting import eventually

ON_RAY = """
cluster: seen
hosts:
  ray: {address}
  secret: {secret}
  replicas:
    billing: {{num: 3, resources: {{CPU: 1}}, spread: true}}
models:
  billing: {{source: "stub://beta"}}
"""
LONG = "I was charged twice for my subscription last week, and nobody answers. " * 4


@asynccontextmanager
async def listening(cluster: Cluster) -> AsyncIterator[str]:
    """The address of a server of a cluster that runs already."""
    server = uvicorn.Server(uvicorn.Config(create_app(cluster), log_level="critical", access_log=False, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as bound:
        serving = asyncio.create_task(server.serve([bound]))
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def word_of(cluster: Cluster) -> ControllerState:
    assert cluster.state.hosts is not None
    return cluster.state.hosts.state


async def ps(url: str, *flags: str) -> int:
    return await asyncio.to_thread(invoke, ["ps", "--base-url", url, *flags])


async def metrics(url: str) -> dict[str, float]:
    """Samples of hosts and replicas."""
    async with httpx2.AsyncClient() as client:
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
    prefix = "lockstep:cluster_"
    told = (line.removeprefix(prefix).rsplit(" ", 1) for line in lines if line.startswith(prefix))
    return {name: float(value) for name, value in told if name.startswith(("host_", "replica_", "report_"))}


async def test_everything_is_shown_where_it_is_and_a_drained_host_is_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with deployed(tmp_path, a=5.0, b=5.0) as deployment:
        cluster = await deployment.gateway()
        await eventually(lambda: num_ready(cluster, "billing") == 3 and num_ready(cluster, "router") == 2)
        await eventually(lambda: sum(host.free["CPU"] for host in cluster.snapshot().hosts) == 5.0, "it is looked at")
        async with listening(cluster) as url:
            assert await ps(url) == 0
            shown = [line.split() for line in capsys.readouterr().out.splitlines()]
            there = cluster.snapshot().places
            for name, num in Counter(place.host for place in there).items():
                assert [name, "127.0.0.1", "there", str(num), f"{5 - num}", "of", "5", "CPU"] in shown
            of_replicas = {row[0]: (row[1], row[2], row[-1]) for row in shown if row and "#" in row[0]}
            assert of_replicas == {place.name: ("ready", place.host, str(place.pid)) for place in there}

            assert await ps(url, "--drain", "b") == 0
            assert capsys.readouterr().out.startswith("b is drained: it has no replicas")
            assert {place.host for place in cluster.snapshot().places} <= {"a", ""}
            await eventually(lambda: num_ready(cluster, "billing") == 3 and num_ready(cluster, "router") == 2)
            told = await metrics(url)
            assert (told['host_drained{host="b"}'], told['host_replicas{host="b"}']) == (1, 0)
            moved = [place for place in cluster.snapshot().places if place.host == "a"]
            labels = [f'host="a",model_name="{place.group}",replica="{place.number}"' for place in moved]
            assert [told[f'replica_state{{{each},state="ready"}}'] for each in labels] == [1] * 5
            assert told["report_age_seconds"] < 5
            before = word_of(cluster)
            await deployment.restart_owner()
            await eventually(lambda: word_of(cluster) is not before, "the next owner's word")
            assert [host.is_drained for host in cluster.snapshot().hosts] == [False, True], "it has heard of it"
            assert await ps(url, "--undrain", "b", "--json") == 0
            assert json.loads(capsys.readouterr().out)["is_drained"] is False
            await eventually(lambda: not cluster.snapshot().hosts[1].is_drained)


async def test_a_drain_is_refused_where_replicas_have_no_other_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with deployed(tmp_path, a=4.0, b=4.0) as deployment:
        cluster = await deployment.gateway()
        await eventually(lambda: num_ready(cluster, "billing") == 3 and num_ready(cluster, "router") == 2)
        async with listening(cluster) as url:
            await eventually(
                lambda: sum(host.free["CPU"] for host in cluster.snapshot().hosts) == 3.0, "it is looked at"
            )
            before = [(place.name, place.pid) for place in cluster.snapshot().places]
            assert await ps(url, "--drain", "b") == 2
            assert "would have no other host: no host has 1 CPU free" in capsys.readouterr().err
            assert [(place.name, place.pid) for place in cluster.snapshot().places] == before
            assert not any(host.is_drained for host in cluster.snapshot().hosts)
            assert num_ready(cluster, "billing") + num_ready(cluster, "router") == 5


async def test_a_host_that_still_answers_is_not_empty_in_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request that has begun is answered to its end."""
    text = MANIFEST.replace("stub://beta", "stub://beta?step_ms=300")
    async with deployed(tmp_path, text, a=5.0, b=5.0) as deployment:
        cluster = await deployment.gateway()
        await eventually(lambda: num_ready(cluster, "billing") == 3 and num_ready(cluster, "router") == 2)
        asking = [asyncio.create_task(ask(cluster, "billing", f"{number} {LONG}")) for number in range(3)]
        await eventually(lambda: all(each.num_running for each in places(cluster, "billing")), "each has one")
        (on_b, *_) = (each.name for each in places(cluster, "billing") if each.host == "b")
        async with listening(cluster) as url:
            assert await ps(url, "--drain", "b", "--wait", "0.3") == EXIT_LEFT
            await eventually(
                lambda: (on_b, "leaving") in [(each.name, each.state) for each in places(cluster, "billing")]
            )
            assert await ps(url, "--drain", "b", "--wait", "0") == 0
            assert f"{on_b} is leaving: b is being drained" in capsys.readouterr().out
            assert all(answer.completions for answer in await asyncio.gather(*asking))
            assert await ps(url, "--drain", "b") == 0


async def test_requests_are_counted_by_replica_and_reason_and_losses_by_replica(tmp_path: Path) -> None:
    async with deployed(tmp_path, a=5.0, b=5.0) as deployment:
        cluster = await deployment.gateway()
        await eventually(lambda: num_ready(cluster, "billing") == 3)
        async with listening(cluster) as url:
            for session in ("s", "t", "s", None):
                await ask(cluster, "billing", LONG, session)
            await eventually(
                lambda: sum(each.num_cached_blocks for each in places(cluster, "billing")) > 0,
                "cached blocks are reported",
            )
            assert sum(each.num_routed for each in places(cluster, "billing")) == 4
            told = await metrics(url)
            by_why = {
                why: sum(
                    told[f'replica_routed_total{{model_name="billing",replica="{n}",why="{why}"}}'] for n in range(3)
                )
                for why in ("session", "prefix", "load", "turn")
            }
            assert by_why["session"] == 1
            assert by_why["prefix"] >= 1
            assert sum(by_why.values()) == 4
            key = places(cluster, "billing")[0].key
            deployment.runtime.kill(ReplicaName(key, 1))
            await eventually(lambda: num_ready(cluster, "billing") == 2, "it is lost")
            await eventually(lambda: num_ready(cluster, "billing") == 3, "it is back")
            told = await metrics(url)
            labels = '{model_name="billing",replica="1"}'
            assert told[f"replica_losses_total{labels}"] == 1
            assert told[f"replica_starts_total{labels}"] == 2
            assert told[f"replica_away_seconds_total{labels}"] > 0


async def test_one_of_two_servers_on_two_nodes_of_ray_drains_a_node_for_both(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = write_secret(tmp_path)
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(ON_RAY.format(address=nodes.address, secret=secret))

    def shown(server: ServerProcess) -> ClusterSnapshot:
        with server.client() as client:
            return msgspec.json.decode(client.get("/v1/cluster").content, type=ClusterSnapshot)

    def all_ready(server: ServerProcess) -> bool:
        return all(place.state == "ready" and not place.reason for place in shown(server).places)

    try:
        with (
            ServerProcess("--manifest", str(manifest), environment=nodes.environment) as one,
            ServerProcess("--manifest", str(manifest), environment=nodes.environment) as two,
        ):
            one.wait_ready()
            two.wait_ready()
            await eventually(lambda: all_ready(one) and all_ready(two), "all replicas are there")
            assert {place.host for place in shown(one).places} == {"host_a", "host_b"}
            assert await ps(one.base_url, "--drain", "127.0.0.1") == 2
            assert "127.0.0.1 is the address of host_a and host_b; name one of them" in capsys.readouterr().err
            assert await ps(one.base_url, "--drain", "host_b") == 0
            await eventually(lambda: all_ready(two), "all replicas are there again")
            assert {place.host for place in shown(two).places} == {"host_a"}
            assert (await metrics(two.base_url))['host_drained{host="host_b"}'] == 1
            assert await ps(two.base_url, "--undrain", "host_b") == 0
    finally:
        async with joined(nodes, "seen", secret):
            pass  # whose replicas are ended
