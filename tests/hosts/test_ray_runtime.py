"""Ray places replicas on two nodes of this machine, brings back what is lost, and opens nothing beyond it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.state import ClusterOptions
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import PlacingError, UnavailableError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.hosts.ray_runtime import CONTROLLER, NamedActor, RayRuntime
from lockstep.hosts.values import Demand, ReplicaName, ReplicaPhase, ReplicaStatus, why_waiting
from tests.hosts.support import answer, demand, write_secret
from tests.hosts.two_nodes import MEMORY_BYTES, Nodes, joined
from tests.processes import ROOT
from tests.waiting import HANG_S, eventually


class Listener:
    """An owner that only listens."""

    def __init__(self, greeting: str, runtime: RayRuntime) -> None:
        self.greeting = greeting
        self.runtime = runtime
        self.places: list[ReplicaStatus] = []
        self.has_started = False

    async def start(self) -> None:
        await asyncio.sleep(0)
        self.has_started = True

    async def placed(self, place: ReplicaStatus) -> None:
        self.places.append(place)

    async def heard(self) -> list[ReplicaStatus]:
        return self.places

    async def greet(self, name: str) -> tuple[str, bool, int]:
        return f"{self.greeting} {name}", self.has_started, os.getpid()

    async def found(self) -> list[ReplicaName]:
        return list(await self.runtime.found())

    async def refuse(self) -> None:
        raise UnavailableError("come back later", retry_after_s=7.0)

    async def sleep(self) -> None:
        await asyncio.sleep(HANG_S)


@pytest.fixture
async def runtime(nodes: Nodes, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[RayRuntime]:
    async with joined(nodes, request.node.name, write_secret(tmp_path)) as runtime:
        yield runtime


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return str(tmp_path / "secret")


async def ready(
    runtime: RayRuntime, demand: Demand, number: int = 0, is_so: Callable[[ReplicaStatus], bool] = lambda place: True
) -> ReplicaStatus:
    """Wait until a replica says that it is ready."""
    found: list[ReplicaStatus] = []

    async def is_ready() -> bool:
        place = await runtime.ask(ReplicaName(demand.key, number))
        if place is not None and place.state is ReplicaPhase.READY and is_so(place):
            found.append(place)
        return bool(found)

    await eventually(is_ready)
    return found[0]


async def place_all(runtime: RayRuntime, demand: Demand) -> list[ReplicaStatus]:
    for number in range(demand.num):
        await runtime.place(demand, number)
    return [await ready(runtime, demand, number) for number in range(demand.num)]


async def test_replicas_go_where_their_resources_are_or_on_as_many_hosts_as_there_are(
    runtime: RayRuntime, secret: str
) -> None:
    bound = demand("bound", resources={"host_b": 0.5, "CPU": 1, "memory": 1e8})
    spread = demand("spread", "stub://beta", num=2, spread=True)
    packed = demand("packed", num=2)
    there = await place_all(runtime, bound)
    assert [place.host for place in there] == ["host_b"]
    free = {host.name: host.free for host in await runtime.hosts()}
    assert free["host_b"]["host_b"] == 0.5
    assert free["host_b"]["CPU"] == 3
    assert free["host_b"]["memory"] == MEMORY_BYTES - 1e8
    assert free["host_a"]["CPU"] == 4
    places = await place_all(runtime, spread)
    assert {place.host for place in places} == {"host_a", "host_b"}
    assert len({place.host for place in await place_all(runtime, packed)}) == 1
    for place in there:
        assert await answer(place, secret, "abc") == "[stub:alpha] ok len=3 max=40"
    for place in places:
        assert await answer(place, secret, "abcd") == "[stub:beta] ok len=4 max=40"
    names = [("bound", 0), ("packed", 0), ("packed", 1), ("spread", 0), ("spread", 1)]
    assert await runtime.found() == [ReplicaName(*name) for name in names]


async def test_the_controller_receives_every_replica_and_is_found_by_name(runtime: RayRuntime) -> None:
    owner = await runtime.named(CONTROLLER, Listener, "hello", runtime)
    again = await runtime.named(CONTROLLER, Listener, "goodbye", runtime)
    assert await owner.greet("you") == await again.greet("you")
    text, has_started, pid = await owner.greet("you")
    assert (text, has_started) == ("hello you", True)
    assert pid != os.getpid()
    (place,) = await place_all(runtime, demand())
    await until_heard(owner, place)
    assert await owner.found() == [ReplicaName("a", 0)]
    with pytest.raises(UnavailableError, match="come back later") as caught:
        await owner.refuse()
    assert caught.value.retry_after_s == 7.0
    with pytest.raises(PlacingError, match=r"controller does not answer within 0\.2 s"):
        await owner.call("sleep", limit_s=0.2)
    os.kill(pid, signal.SIGKILL)
    next_pid = pid
    async with asyncio.timeout(HANG_S):
        while next_pid == pid:
            with contextlib.suppress(PlacingError):  # nothing but this, while the next one is on its way
                _, _, next_pid = await owner.greet("you")
    with pytest.raises(PlacingError, match="nobody cannot be found"):
        await runtime.find("nobody").greet("you")


async def until_heard(owner: NamedActor, place: ReplicaStatus) -> None:
    async def is_heard() -> bool:
        return place in await owner.heard()

    await eventually(is_heard)


async def test_a_killed_worker_or_actor_is_back_on_its_host_without_a_hand(runtime: RayRuntime, secret: str) -> None:
    wanted = demand(num=1, spread=True)
    (first,) = await place_all(runtime, wanted)
    os.kill(first.pid, signal.SIGKILL)
    second = await ready(runtime, wanted, is_so=lambda place: place.num_starts == 2)
    assert second.actor_pid == first.actor_pid
    assert await answer(second, secret, "abc") == "[stub:alpha] ok len=3 max=40"
    os.kill(second.actor_pid, signal.SIGKILL)
    third = await ready(runtime, wanted, is_so=lambda place: place.actor_pid != second.actor_pid)
    assert await answer(third, secret, "abc") == "[stub:alpha] ok len=3 max=40"
    assert first.host == second.host == third.host
    await eventually(lambda: has_ended(second.pid), "a worker ends with its actor")


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_replica_that_finds_no_resources_waits_and_reports_what_is_missing(runtime: RayRuntime) -> None:
    wanted = demand(resources={"CPU": 64, "host_c": 1})
    await runtime.place(wanted, 0)
    assert await runtime.ask(ReplicaName("a", 0)) is None
    why = why_waiting(wanted, await runtime.hosts())
    assert why == ("no host has 64 CPU, 1 host_c free: host_a has 4 CPU, 0 host_c; host_b has 4 CPU, 0 host_c")
    await runtime.remove(ReplicaName("a", 0))
    assert await runtime.found() == []


async def test_removed_replica_leaves_no_process_and_hosts_can_be_avoided(runtime: RayRuntime) -> None:
    before = await runtime.hosts()
    wanted = demand(resources={"CPU": 2})
    (place,) = await place_all(runtime, wanted)
    await runtime.remove(ReplicaName("a", 0))
    await eventually(lambda: has_ended(place.pid) and has_ended(place.actor_pid))

    async def are_as_before() -> bool:
        return await runtime.hosts() == before

    await eventually(are_as_before)
    await runtime.remove(ReplicaName("a", 0))  # it is gone already
    await runtime.place(wanted, 0, [place.node_id])
    assert (await ready(runtime, wanted)).host != place.host


async def test_nothing_listens_beyond_this_machine(nodes: Nodes, runtime: RayRuntime) -> None:
    await place_all(runtime, demand(num=2, spread=True))
    listening = [
        (process.name(), each.laddr.ip)
        for process in [psutil.Process(), *nodes.processes]
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    assert {"raylet", "gcs_server"} <= {name for name, _ in listening}
    beyond = [each for each in listening if each[1] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")]
    assert beyond == []
    variables = [process.environ() for process in nodes.processes if process.name() in ("raylet", "gcs_server")]
    assert {each["RAY_USAGE_STATS_ENABLED"] for each in variables} == {"0"}
    assert {each["RAY_AUTH_MODE"] for each in variables} == {"token"}


async def test_ray_starts_no_thread_that_prints_its_errors(runtime: RayRuntime) -> None:
    assert await runtime.hosts()
    assert not [thread.name for thread in threading.enumerate() if "error_messages" in thread.name]


JOIN = """
import asyncio, sys
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.state import ClusterOptions
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import PlacingError
from lockstep.hosts.ray_runtime import ReplicaOptions, connect
from lockstep.hosts.values import LinkOptions

async def main():
    try:
        runtime = await connect(sys.argv[1], sys.argv[2], ReplicaOptions(LinkOptions("none")))
    except PlacingError as error:
        print(error)
    else:
        print(*map(str, await runtime.found()))
        await runtime.close()

asyncio.run(main())
"""


def join(nodes: Nodes, cluster: str, **variables: str) -> subprocess.Popen[str]:
    """Another process that joins, and prints what it finds or why it may not."""
    environment = {**nodes.environment, **variables}
    command = [sys.executable, "-c", JOIN, nodes.address, cluster]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


async def test_another_process_finds_placed_replicas_unless_its_token_differs(
    nodes: Nodes, runtime: RayRuntime, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("f" * 64)
    stranger = join(nodes, runtime.cluster, RAY_AUTH_TOKEN_PATH=str(token))
    await place_all(runtime, demand("with#mark", num=2))
    found, errors = await asyncio.to_thread(join(nodes, runtime.cluster).communicate, timeout=HANG_S)
    assert (found, errors) == ("with#mark#0 with#mark#1\n", "")
    refused, _ = await asyncio.to_thread(stranger.communicate, timeout=HANG_S)
    assert refused.startswith(f"Ray at {nodes.address} rejects the connection; each host needs the same token")
    assert str(token) in refused


MANIFEST = """
cluster: {name}
hosts:
  ray: {address}
  secret: {secret}
  replicas:
    router: {{num: 2, spread: true}}
    billing: {{num: 3, spread: true, resources: {{CPU: 1, memory: 100MB}}}}
models:
  router: {{source: "stub://alpha"}}
  billing: {{source: "pocket://"}}
  orders: {{source: "stub://gamma", tier: standby}}
"""


async def ask(cluster: Cluster, model: str, words: str) -> tuple[object, ...]:
    params = SamplingParams(max_tokens=16, temperature=0.0)
    call = GenerationRequest(Conversation([{"role": "user", "content": words}]), params, model=model)
    async with asyncio.timeout(HANG_S):
        async for events in cluster.stream(call):
            for event in events:
                if isinstance(event, TokenOutput) and event.request is not None:
                    return event.request.completions
    raise AssertionError("it ends with a whole answer")


async def test_two_gateways_share_the_replicas_of_one_owner_and_give_the_bytes_of_one_machine(
    nodes: Nodes, runtime: RayRuntime, secret: str
) -> None:
    text = MANIFEST.format(name=runtime.cluster, address=nodes.address, secret=secret)
    questions = [(model, f"Where is order {number}?") for number in range(4) for model in ("router", "billing")]
    manifest = parse(text)
    async with AsyncExitStack() as stack:
        alone, first, second = (
            Cluster(each, ClusterOptions()) for each in (replace(manifest, hosts=None), manifest, manifest)
        )
        for cluster in (alone, first, second):
            stack.push_async_callback(cluster.close)
            await asyncio.wait_for(cluster.start(), HANG_S)
        await eventually(lambda: [place.state for place in second.snapshot().places] == ["ready"] * 5)
        expected = [await ask(alone, *each) for each in questions]
        both = zip([first, second] * 4, questions, strict=True)
        assert await asyncio.gather(*(ask(gateway, *each) for gateway, each in both)) == expected
        for model, most in (("router", 1), ("billing", 2)):
            hosts = [place.host for place in second.snapshot().places if model in place.models]
            assert sorted({hosts.count(name) for name in ("host_a", "host_b")})[-1] == most
        assert len(await runtime.found()) == 5
        pids = [place.pid for place in second.snapshot().places]
        await kill(runtime, CONTROLLER)
        assert await asyncio.gather(*(ask(first, *each) for each in questions)) == expected, "nobody owns it now"
        assert await ask(second, "orders", "hello") == await ask(alone, "orders", "hello"), "the next one places it"
        assert [place.pid for place in second.snapshot().places][: len(pids)] == pids


async def kill(runtime: RayRuntime, name: str) -> None:
    """Kill an actor as a crash does: another of its name comes."""
    import ray

    handle = await runtime.find(name).handle()
    await runtime.do("it cannot be killed", lambda: ray.kill(handle, no_restart=False))


async def test_a_lost_hosts_replicas_are_placed_elsewhere(nodes: Nodes, runtime: RayRuntime, secret: str) -> None:
    wanted = demand(num=2, spread=True)
    places = {place.host: place for place in await place_all(runtime, wanted)}
    lost, kept = places["host_b"], places["host_a"]
    nodes.kill("host_b")
    back = await ready(runtime, wanted, lost.number, is_so=lambda place: place.node_id != lost.node_id)
    assert back.host == "host_a"
    assert await answer(back, secret, "abc") == "[stub:alpha] ok len=3 max=40"
    assert await ready(runtime, wanted, kept.number) == kept
    assert [(host.name, host.is_there) for host in await runtime.hosts()] == [("host_a", True), ("host_b", False)]
    await eventually(lambda: has_ended(lost.pid) and has_ended(lost.actor_pid), "what was on it ends")
    nodes.add("host_b")
    assert [(host.name, host.is_there) for host in await runtime.hosts()] == [("host_a", True), ("host_b", True)]
