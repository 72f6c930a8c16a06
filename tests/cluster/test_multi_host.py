"""A manifest on two pretended hosts, with real workers, owner and gateways: one cluster for all gateways."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.controller import Controller
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.state import ClusterOptions
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import (
    HostNotFoundError,
    InvalidParameterError,
    LockstepError,
    NotLoadableError,
    PlacingError,
    UnavailableError,
    UsageError,
)
from lockstep.executors.sampling_params import SamplingParams
from lockstep.hosts.values import GatewayLimits, LinkOptions, ReplicaName
from lockstep.version import __version__
from tests.hosts.local import LocalRuntime
from tests.hosts.support import write_secret
from tests.waiting import HANG_S, eventually

MANIFEST = """
cluster: support
hosts:
  secret: {secret}
  replicas:
    router: {{num: 2, resources: {{CPU: 1}}, spread: true}}
    billing: {{num: 3, resources: {{CPU: 1}}, spread: true}}
models:
  router: {{source: "stub://alpha"}}
  billing: {{source: "stub://beta"}}
  orders: {{source: "stub://gamma", tier: standby}}
"""


class Deployment:
    """An owner, and gateways that follow it."""

    def __init__(self, secret: str, stack: AsyncExitStack, text: str, hosts: Mapping[str, float]) -> None:
        self.text = text.format(secret=secret)
        self.runtime = LocalRuntime(secret, hosts)
        self._stack = stack
        self.owner = Controller(self.runtime)
        self.runtime.tell = self._placed
        self.is_away = False
        """Whether nobody reaches the owner."""

    async def _placed(self, place: object) -> None:
        if not self.is_away:
            await self.owner.placed(place)  # type: ignore[arg-type]  # a place

    async def lose_all(self) -> None:
        """The owner is not reached any more, and every host is lost."""
        self.is_away = True
        await self.owner.close()
        for host in await self.runtime.hosts():
            await self.runtime.lose(host.name)

    async def restart_owner(self) -> None:
        """Another owner, which knows nothing."""
        await self.owner.close()
        self.owner = Controller(self.runtime)
        await self.owner.start()

    async def open_controller(self, *options: object) -> tuple[Deployment, Callable[[], Awaitable[None]]]:
        return self, self._left

    async def _left(self) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        return self._unanswered if self.is_away else getattr(self.owner, name)

    async def _unanswered(self, *args: object) -> None:
        raise PlacingError("controller does not answer: its process ended")

    async def gateway(self, text: str | None = None, **limits: float) -> Cluster:
        manifest = parse(self.text if text is None else text)
        options = ClusterOptions(open_controller=self.open_controller, gateway=GatewayLimits(**limits))  # type: ignore[arg-type]  # the owner's methods
        cluster = Cluster(manifest, options)
        self._stack.push_async_callback(cluster.close)
        await asyncio.wait_for(cluster.start(), HANG_S)
        return cluster

    @asynccontextmanager
    async def for_one_test(self) -> AsyncIterator[None]:
        """Close the gateways of the block at its end."""
        before = self._stack
        async with AsyncExitStack() as self._stack:
            yield
        self._stack = before


@asynccontextmanager
async def deployed(tmp_path: Path, text: str = MANIFEST, **hosts: float) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        found = Deployment(write_secret(tmp_path), stack, text, hosts or {"a": 4.0, "b": 4.0})
        stack.push_async_callback(found.runtime.close)
        await found.owner.start()
        stack.push_async_callback(lambda: found.owner.close())
        yield found


shares_a_deployment = pytest.mark.asyncio(loop_scope="module")
"""On the loop of a deployment that its tests share; each closes its gateways, and leaves what the manifest demands."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    async with deployed(tmp_path_factory.mktemp("shared")) as deployment:
        yield deployment


@pytest_asyncio.fixture(loop_scope="module")
async def shared(whole: Deployment) -> AsyncIterator[Deployment]:
    async with whole.for_one_test():
        yield whole


async def ask(cluster: Cluster, model: str, words: str, session: str | None = None) -> RequestOutput:
    conversation = Conversation([{"role": "user", "content": words}])
    params = SamplingParams(max_tokens=24, temperature=0.0)
    call = GenerationRequest(conversation, params, model=model, session_id=session)
    last: TokenOutput | None = None
    async with asyncio.timeout(HANG_S):
        async for events in cluster.stream(call):
            for event in events:
                last = event if isinstance(event, TokenOutput) else last
    assert last is not None
    assert last.request is not None
    return last.request


def num_ready(cluster: Cluster, model: str) -> int:
    return sum(place.state == "ready" and not place.reason for place in places(cluster, model))


def places(cluster: Cluster, model: str) -> list:  # type: ignore[type-arg]  # of PlaceSnapshot
    return [place for place in cluster.snapshot().places if model in place.models]


@shares_a_deployment
async def test_two_gateways_share_one_cluster_and_give_the_bytes_of_one_machine(shared: Deployment) -> None:
    questions = [f"Where is order {number}?" for number in range(6)]
    alone = Cluster(replace(parse(shared.text), hosts=None), ClusterOptions())
    await alone.start()
    expected = [(await ask(alone, "billing", each)).completions for each in questions]
    await alone.close()
    first, second = await shared.gateway(), await shared.gateway()
    await eventually(lambda: num_ready(first, "billing") == 3 and num_ready(second, "billing") == 3)
    both = [*zip([first, second] * 3, questions, strict=True)]
    answers = await asyncio.gather(*(ask(gateway, "billing", each) for gateway, each in both))
    assert [answer.completions for answer in answers] == expected
    assert {place.host for place in places(first, "billing")} == {"a", "b"}
    assert first.cards() == tuple(replace(card, created_s=first.cards()[0].created_s) for card in second.cards())
    assert [host.num_replicas for host in second.snapshot().hosts] == [3, 2]
    assert first.health().ready
    await eventually(lambda: not first.snapshot().warnings, "the router's replicas are there as well")


@shares_a_deployment
async def test_a_standby_model_is_placed_once_for_all_gateways(shared: Deployment) -> None:
    first, second = await shared.gateway(), await shared.gateway()
    assert not places(first, "orders")
    answers = await asyncio.gather(ask(first, "orders", "hello"), ask(second, "orders", "hello"))
    assert answers[0].completions == answers[1].completions
    (place,) = places(second, "orders")
    assert place.num_starts == 1
    await first.unload_model("orders")
    await eventually(lambda: not places(second, "orders"), "it is gone for all")
    assert (await ask(second, "orders", "hello")).completions == answers[0].completions


async def test_lost_workers_and_hosts_are_replaced_without_a_hand(tmp_path: Path) -> None:
    async with deployed(tmp_path, a=5.0, b=3.0) as deployment:
        cluster = await deployment.gateway()
        await eventually(lambda: num_ready(cluster, "billing") == 3 and num_ready(cluster, "router") == 2)
        key = places(cluster, "billing")[0].key
        deployment.runtime.kill(ReplicaName(key, 1))
        await eventually(lambda: num_ready(cluster, "billing") == 2, "it is lost")
        assert (await ask(cluster, "billing", "hello")).completions
        await eventually(lambda: num_ready(cluster, "billing") == 3, "it is back")
        assert places(cluster, "billing")[1].num_starts == 2
        await deployment.runtime.lose("b")
        await eventually(lambda: num_ready(cluster, "billing") < 3, "a host is lost")
        assert (await ask(cluster, "billing", "hello")).completions
        await eventually(lambda: num_ready(cluster, "billing") == 3, "all are on the other host")
        assert {place.host for place in places(cluster, "billing")} == {"a"}
        await eventually(lambda: [host.is_there for host in cluster.snapshot().hosts] == [True, False])


async def test_a_drained_host_gives_its_replicas_away(tmp_path: Path) -> None:
    async with deployed(tmp_path, a=5.0, b=5.0) as deployment:
        cluster = await deployment.gateway()
        await eventually(lambda: num_ready(cluster, "billing") == 3)
        before = await ask(cluster, "billing", "hello", "session")
        assert await cluster.drain_host("b", True) == "b"
        fewest = [3]

        def all_moved() -> bool:
            fewest.append(num_ready(cluster, "billing"))
            return {place.host for place in cluster.snapshot().places} == {"a"}

        await eventually(all_moved, "all moved")
        assert min(fewest) == 3, "successors come first"
        assert (await ask(cluster, "billing", "hello", "session")).completions == before.completions
        assert cluster.snapshot().hosts[1].is_drained
        await cluster.drain_host("b", False)
        await eventually(lambda: not cluster.snapshot().hosts[1].is_drained)
        with pytest.raises(HostNotFoundError, match="c"):
            await cluster.drain_host("c", True)


async def test_replicas_serve_without_a_controller_and_the_next_controller_finds_them(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment:
        cluster = await deployment.gateway()
        await eventually(lambda: num_ready(cluster, "billing") == 3)
        pids = [place.pid for place in places(cluster, "billing")]
        await deployment.restart_owner()
        assert (await ask(cluster, "billing", "hello")).completions
        await eventually(lambda: cluster.snapshot().hosts != () and num_ready(cluster, "billing") == 3)
        assert [place.pid for place in places(cluster, "billing")] == pids
        assert (await ask(cluster, "orders", "hello")).completions


async def test_every_request_has_an_answer_when_all_hosts_and_the_controller_are_lost(tmp_path: Path) -> None:
    """Those that wait end with the reason at the bound, later ones at once; what is shown is by the gateway's links."""
    async with deployed(tmp_path) as deployment:
        cluster = await deployment.gateway(no_replica_s=2.0, max_report_age_s=1.5)
        await eventually(lambda: num_ready(cluster, "billing") == 3 and num_ready(cluster, "router") == 2)
        await deployment.lose_all()
        await eventually(lambda: not num_ready(cluster, "billing"), "they are lost")
        waiting = [asyncio.create_task(ask(cluster, model, "hello")) for model in ("billing", "router", "orders") * 3]
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(answer, UnavailableError) for answer in answers), answers
        assert "no replica of billing can take requests: not connected" in str(answers[0])
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(ask(cluster, "billing", "hello"), 1.0)
        shown = cluster.snapshot()
        assert {(place.state, place.pid) for place in shown.places} == {("unreachable", 0)}
        assert not any(host.is_there for host in shown.hosts)
        assert shown.report_age_s is not None
        assert shown.report_age_s > 1.5
        assert not cluster.health().ready
        assert "the cluster's controller does not report" in cluster.health().warnings[0]


async def test_gateway_with_rejected_links_fails_with_the_reason(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another secret of more than sixteen bytes\n")
    async with deployed(tmp_path) as deployment:
        first = await deployment.gateway()
        await eventually(lambda: num_ready(first, "billing") == 3 and num_ready(first, "router") == 2)
        with pytest.raises(UnavailableError, match="cannot connect to its worker: the other end has another secret"):
            await deployment.gateway(deployment.text.replace(str(tmp_path / "secret"), str(other)), no_replica_s=2.0)


async def test_hosts_that_cannot_be_used_are_corrected_by_the_next_start(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment:
        tls = "hosts:\n  tls: {ca: /none/ca.pem, cert: /none/cert.pem, key: /none/key.pem}"
        with pytest.raises(LockstepError, match="certificate cannot be used"):
            await deployment.gateway(deployment.text.replace("hosts:", tls))
        cluster = await deployment.gateway()
        assert (await ask(cluster, "billing", "hello")).completions


async def test_a_gateway_that_leaves_as_news_comes_does_leave(tmp_path: Path) -> None:
    """A cancellation in the same turn of the loop as the news that was waited for is not lost."""
    async with deployed(tmp_path) as deployment:
        link = LinkOptions(str(tmp_path / "secret"))
        for num_turns in range(4):  # from the news to the cancellation
            word = await deployment.owner.join("first", __version__, "", link)
            following = asyncio.create_task(deployment.owner.follow("first", word.version))
            await asyncio.sleep(0.01)
            await deployment.owner.end_replace("second", f"manifest {num_turns}")
            for _ in range(num_turns):
                await asyncio.sleep(0)
            is_cancelled = following.cancel()
            await asyncio.wait([following])
            assert following.cancelled() == is_cancelled


@shares_a_deployment
async def test_sessions_are_those_of_all_gateways(shared: Deployment) -> None:
    """Whichever gateway a conversation comes through, it finds its KV, is shown, and can be ended."""
    beginning = "a long beginning of a conversation " * 4
    first, second = await shared.gateway(), await shared.gateway()
    await eventually(lambda: num_ready(first, "billing") == 3 and num_ready(second, "billing") == 3)
    await ask(first, "billing", beginning, "s")
    await eventually(lambda: [each.id for each in second.sessions()] == ["s"], "the other one knows it")
    assert (await ask(second, "billing", f"{beginning} and on", "s")).num_cached_tokens >= 96
    await eventually(lambda: [each.num_requests for each in first.sessions()] == [2], "both are counted")
    await second.end_session("s")
    await eventually(lambda: not first.sessions(), "it is ended for all")


async def test_a_manifest_that_one_gateway_takes_is_taken_by_all(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment:
        first, second = await deployment.gateway(), await deployment.gateway()
        text = deployment.text.replace("orders:", "returns:")
        await first.replace(text, {})
        assert (await ask(first, "returns", "hello")).completions
        await eventually(lambda: "returns" in [card.name for card in second.cards()])
        assert (await ask(second, "returns", "hello")).completions
        third = await deployment.gateway()  # whose file is the old one
        assert "returns" in [card.name for card in third.cards()]


async def test_another_number_of_replicas_is_placed_beside_the_old_ones_which_then_go(tmp_path: Path) -> None:
    async with deployed(tmp_path) as deployment:
        first, second = await deployment.gateway(), await deployment.gateway()
        before = await ask(first, "billing", "hello")
        await first.replace(deployment.text.replace("billing: {num: 3", "billing: {num: 2"), {})
        await eventually(lambda: num_ready(first, "billing") == len(places(first, "billing")) == 2)
        await eventually(lambda: num_ready(second, "billing") == len(places(second, "billing")) == 2)
        await eventually(lambda: len(first.snapshot().places) == 4, "the old ones have gone")
        assert (await ask(second, "billing", "hello")).completions == before.completions
        with pytest.raises(InvalidParameterError, match="restart it"):
            await first.replace(deployment.text.replace("secret: ", "secret: /other"), {})


async def test_a_model_that_no_host_has_room_for_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with deployed(tmp_path, a=1.0) as deployment:
        with pytest.raises(LockstepError, match=r"no host has 1 CPU free: a has 0 CPU"):
            await deployment.gateway(no_replica_s=3.0)


async def test_a_model_that_cannot_be_loaded_anywhere_fails_the_start_with_the_reason(tmp_path: Path) -> None:
    text = MANIFEST.replace('"stub://alpha"', '"stub://alpha", engine: {{block_size: 7}}')
    async with deployed(tmp_path, text) as deployment:
        with pytest.raises(NotLoadableError, match="cannot be loaded"):
            await deployment.gateway()


@shares_a_deployment
async def test_a_gateway_of_another_version_is_not_let_in(shared: Deployment) -> None:
    with pytest.raises(UsageError, match=r"Lockstep 0\.0\.0"):
        await shared.owner.join("g", "0.0.0", shared.text, LinkOptions("secret"))


def test_without_hosts_nothing_of_ray_is_imported() -> None:
    """In a fresh interpreter, as this one may have met it."""
    told = (
        "import sys, lockstep.cluster.cluster; print([name for name in sys.modules if name.partition('.')[0] == 'ray'])"
    )
    found = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert found.stdout == "[]\n"
