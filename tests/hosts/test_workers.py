"""Workers on several hosts as one: the same answers, and no fault for whom it need not concern."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from lockstep.artifacts.model import TokenizerParts
from lockstep.core.balancer import RoutingChoice, RoutingPolicy, Why
from lockstep.engine.input_processing import tokenised
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import ReplicaGoneError, WorkerLostError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.hosts.values import GatewayLimits, GroupOptions, LinkOptions, ReplicaPhase, ReplicaStatus
from lockstep.hosts.workers import GroupLost, HostedWorkers
from lockstep.worker.lifecycle import WorkerLost
from lockstep.worker.link import WorkerOptions
from lockstep.worker.messages import ContentsChanged, Loaded, Unloaded
from lockstep.worker.remote_clients import ListenOptions
from lockstep.worker.supervised import Notice, SupervisedWorker
from tests.hosts.support import write_secret
from tests.waiting import ENDLESS_MS, HANG_S, eventually

SMALL = LoadOptions(EngineOptions(num_blocks=256))
KEY = "m"


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return write_secret(tmp_path)


class Routes:
    """Choices, in order."""

    def __init__(self) -> None:
        self.choices: list[RoutingChoice] = []

    def opened(self, group: str, num_replicas: int, policy: RoutingPolicy, max_imbalance: int) -> None: ...
    def admitted(self, group: str, replica: int) -> None: ...
    def withdrawn(self, group: str, replica: int, is_lost: bool) -> None: ...
    def learned(self, group: str, replica: int, news: object) -> None: ...
    def ended(self, group: str, replica: int) -> None: ...

    def chosen(self, group: str, hashes: object, session: str | None, choice: RoutingChoice | None) -> None:
        if choice is not None:
            self.choices.append(choice)

    @property
    def replicas(self) -> list[int]:
        return [choice.replica for choice in self.choices]


class Gateway:
    """Workers of one gateway, and what it noticed."""

    def __init__(self, secret: str, num: int, policy: RoutingPolicy, **limits: float) -> None:
        self.routes = Routes()
        self.notices: list[Notice | GroupLost] = []
        self.workers = HostedWorkers(
            LinkOptions(secret),
            lambda key: GroupOptions(num, policy=policy),
            self.notices.append,
            self.routes,
            limits=GatewayLimits(**limits),
        )
        self.loaded: Loaded | None = None
        self.num_outputs = 0

    async def load(self) -> None:
        self.loaded = await asyncio.wait_for(self.workers.load(KEY, "", SMALL), HANG_S)

    @property
    def num_there(self) -> int:
        group = self.workers.groups[KEY]
        return sum(group.balancer.is_there(member.number) for member in group.members)

    async def ask(self, words: str, session: str | None = None, max_tokens: int = 24) -> RequestOutput:
        assert self.loaded is not None
        parts: TokenizerParts = self.loaded.text.parts()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        call = GenerationRequest(Conversation([{"role": "user", "content": words}]), params, session_id=session)
        request = tokenised(Tokenizer(parts), self.loaded.config.max_model_len, call)
        outputs: list[TokenOutput] = []
        async with asyncio.timeout(HANG_S):
            with self.workers.open_mailbox(KEY, request) as mailbox:
                while not outputs or outputs[-1].request is None:
                    outputs += await mailbox.take()
                    self.num_outputs += 1
        answer = outputs[-1].request
        assert answer is not None
        return answer


class Hosts:
    """Worker processes with one replica each, as a runtime would have placed them."""

    def __init__(self, secret: str, stack: AsyncExitStack) -> None:
        self.running: list[SupervisedWorker] = []
        self._secret = secret
        self._stack = stack

    async def add(self, source: str) -> None:
        worker = SupervisedWorker(WorkerOptions("process", listen=ListenOptions("127.0.0.1", 0, self._secret)))
        await worker.start()
        self._stack.push_async_callback(worker.close)
        await worker.load(KEY, source, SMALL)
        await eventually(lambda: worker.listening is not None)
        self.running.append(worker)

    def places(self) -> list[ReplicaStatus]:
        listening = [(number, worker.listening) for number, worker in enumerate(self.running)]
        return [
            ReplicaStatus(KEY, n, ReplicaPhase.READY, address=x.host, port=x.port)
            for n, x in listening
            if x is not None
        ]

    async def gateway(self, policy: RoutingPolicy = RoutingPolicy.PREFIX, num_there: int | None = None) -> Gateway:
        """One that has reached all replicas, except those that cannot be."""
        gateway = Gateway(self._secret, len(self.running), policy)
        self._stack.push_async_callback(gateway.workers.close)
        gateway.workers.apply(self.places())
        await gateway.load()
        await eventually(lambda: gateway.num_there == (len(self.running) if num_there is None else num_there))
        return gateway

    def kill(self, number: int) -> None:
        pid = self.running[number].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


class Proxy:
    """A link's way over a network that may stall, or be cut."""

    def __init__(self, place: ReplicaStatus) -> None:
        self._place = place
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._writers: list[asyncio.StreamWriter] = []
        self.num_links = 0
        self.refuses = False

    async def start(self, stack: AsyncExitStack) -> ReplicaStatus:
        """The place as gateways are told it."""
        server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        stack.callback(self.cut)
        stack.callback(server.close)
        return replace(self._place, port=server.sockets[0].getsockname()[1])

    def stall(self) -> None:
        self._is_open.clear()

    def flow(self) -> None:
        """What was held back arrives, if anybody is there."""
        self._is_open.set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_links += 1
        if self.refuses:
            writer.transport.abort()
            return
        self._writers.append(writer)
        other_reader, other_writer = await asyncio.open_connection(self._place.address, self._place.port)
        self._writers.append(other_writer)
        await asyncio.gather(self._pump(reader, other_writer), self._pump(other_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._is_open.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()


@asynccontextmanager
async def hosts(secret: str, *sources: str) -> AsyncIterator[Hosts]:
    async with AsyncExitStack() as stack:
        found = Hosts(secret, stack)
        for source in sources:
            await found.add(source)
        yield found


@pytest.mark.parametrize("source", ["stub://alpha", "pocket://"])
async def test_every_replica_gives_the_bytes_of_one(secret: str, source: str) -> None:
    questions = [f"A question about order {number}" for number in range(9)]
    async with hosts(secret, source) as one:
        alone = await one.gateway()
        expected = [(await alone.ask(each)).completions for each in questions]
    async with hosts(secret, source, source, source) as several:
        spread = await several.gateway(RoutingPolicy.ROUND_ROBIN)
        answers = await asyncio.gather(*(spread.ask(each) for each in questions))
        assert [answer.completions for answer in answers] == expected
        assert spread.routes.replicas == [0, 1, 2] * 3
        balancer = spread.workers.groups[KEY].balancer
        assert [balancer.load(number) for number in range(3)] == [0, 0, 0]
        report = await spread.workers.metrics()
        assert report[KEY].finished == {"length": 9} or sum(report[KEY].finished.values()) == 9
        assert (await spread.workers.check()).fault == ""  # type: ignore[union-attr]  # everybody answers


async def test_conversation_is_routed_to_the_replica_with_its_kv(secret: str) -> None:
    """By its session, and without one by its beginning; another gateway too, which knows from the workers alone."""
    beginning = "a long beginning of a conversation " * 4
    async with hosts(secret, "stub://alpha", "stub://alpha", "stub://alpha") as several:
        first, second = await several.gateway(), await several.gateway()
        await asyncio.gather(*(first.ask(f"{number} {beginning}", f"s{number}") for number in range(3)))
        where = first.routes.replicas
        assert sorted(where) == [0, 1, 2]
        for number in (2, 0, 1):
            again = await first.ask(f"{number} {beginning} and on", f"s{number}")
            assert again.num_cached_tokens >= 96
            assert first.routes.choices[-1][:2] == (where[number], Why.SESSION)
            elsewhere = await second.ask(f"{number} {beginning} and off")
            assert elsewhere.num_cached_tokens >= 96
            assert second.routes.choices[-1][:2] == (where[number], Why.PREFIX)


async def test_without_a_token_yet_a_request_is_answered_by_another_replica(secret: str) -> None:
    """Also where several wait."""
    async with hosts(secret, f"stub://alpha?step_ms={ENDLESS_MS}", "stub://alpha") as several:
        gateway = await several.gateway(RoutingPolicy.LEAST_LOADED)
        asked = [asyncio.create_task(gateway.ask(f"question {number}")) for number in range(4)]
        await eventually(lambda: len(gateway.routes.choices) == 4 and sum(task.done() for task in asked) == 2)
        several.kill(0)
        answers = await asyncio.gather(*asked)
        assert all(answer.text.startswith("[stub:alpha]") for answer in answers)
        assert gateway.routes.replicas.count(1) == 4
        group = gateway.workers.groups[KEY]
        assert gateway.num_there == 1
        assert group.balancer.load(0) == 0
        assert (group.members[0].use.num_retried, group.members[0].use.num_away) == (2, 1)
        assert group.trouble(group.members[0]).startswith("not connected to its worker")


async def test_after_the_first_token_a_lost_worker_is_an_error(secret: str) -> None:
    async with hosts(secret, "stub://alpha?step_ms=20") as several:
        gateway = await several.gateway()
        asked = asyncio.create_task(gateway.ask("a question", max_tokens=400))
        await eventually(lambda: gateway.num_outputs > 0)
        several.kill(0)
        with pytest.raises(WorkerLostError, match="send the request again"):
            await asked
        await eventually(lambda: GroupLost(KEY) in gateway.notices)
        with pytest.raises(WorkerLostError, match="no replica of m is available"):
            await gateway.ask("another")


async def test_a_group_is_reached_again_where_its_replica_went(secret: str) -> None:
    """The next worker listens elsewhere; whoever is told so uses it, while the old place is forgotten."""
    async with hosts(secret, "stub://alpha", "stub://alpha") as several:
        gateway = await several.gateway()
        worker = several.running[1]
        before = worker.listening
        several.kill(1)
        await eventually(lambda: gateway.num_there == 1)
        await eventually(lambda: worker.listening not in (None, before))
        await worker.load(KEY, "stub://alpha", SMALL)
        gateway.workers.apply(several.places())
        await eventually(lambda: gateway.num_there == 2)
        for number in range(4):
            await gateway.ask(f"question {number}")
        assert set(gateway.routes.replicas) == {0, 1}


async def test_a_request_without_a_token_is_answered_elsewhere_when_its_replica_moves(secret: str) -> None:
    """Its host is lost, which the controller reports before the link shows it."""
    async with hosts(secret, f"stub://alpha?step_ms={ENDLESS_MS}", "stub://alpha") as several:
        gateway = await several.gateway(RoutingPolicy.ROUND_ROBIN)
        asked = asyncio.create_task(gateway.ask("a question"))
        await eventually(lambda: gateway.workers.groups[KEY].num_open(0) == 1)
        gateway.workers.apply(
            [ReplicaStatus(KEY, 0, ReplicaPhase.STARTING, "it was lost on host_b"), several.places()[1]]
        )
        assert (await asked).text.startswith("[stub:alpha]")
        assert gateway.routes.replicas == [0, 1]


async def test_after_the_first_token_a_replica_that_moves_is_a_lost_worker(secret: str) -> None:
    async with hosts(secret, "stub://alpha?step_ms=20") as several:
        gateway = await several.gateway()
        asked = asyncio.create_task(gateway.ask("a question", max_tokens=400))
        await eventually(lambda: gateway.num_outputs > 0)
        gateway.workers.apply([ReplicaStatus(KEY, 0, ReplicaPhase.STARTING, "it was lost on host_b")])
        with pytest.raises(ReplicaGoneError, match="it was lost on host_b"):
            await asked


async def test_late_notices_of_a_worker_that_was_left_change_nothing(secret: str) -> None:
    async with hosts(secret, "stub://alpha", "stub://alpha") as several:
        gateway = await several.gateway(num_there=2)
        group = gateway.workers.groups[KEY]
        first, second = several.places()
        left = group.members[0].worker
        assert left is not None
        assert left.loaded(KEY) is not None
        late: tuple[Notice, ...] = (
            WorkerLost("a link that was cut"),
            Unloaded(KEY),
            ContentsChanged(KEY, [(b"content", True)]),
        )
        gateway.workers.apply([replace(first, address=second.address, port=second.port), second])
        await eventually(lambda: gateway.num_there == 2, "it is reached where it is now")
        assert group.members[0].worker is not left
        for notice in late:
            left._notify(notice)
            assert gateway.num_there == 2
        assert not group.balancer.is_held(b"content")


async def test_lost_replica_logs_two_lines_regardless_of_retries(secret: str, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack, hosts(secret, "stub://alpha", "stub://alpha") as several:
        one, other = several.places()
        proxy = Proxy(one)
        gateway = Gateway(secret, 2, RoutingPolicy.ROUND_ROBIN)
        stack.push_async_callback(gateway.workers.close)
        gateway.workers.apply([replace(await proxy.start(stack), host="host_a"), other])
        await gateway.load()
        await eventually(lambda: gateway.num_there == 2)
        caplog.clear()
        proxy.refuses = True
        proxy.cut()
        num_before = proxy.num_links
        await eventually(lambda: proxy.num_links >= num_before + 3, "it is tried again and again")
        proxy.refuses = False
        await eventually(lambda: gateway.num_there == 2)
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
        assert [line.partition(":")[0].partition(" after")[0] for line in lines] == [
            "m#0 on host_a is lost",
            "m#0 on host_a is available again",
        ]


async def test_a_silent_replica_gets_no_new_requests(secret: str) -> None:
    async with AsyncExitStack() as stack, hosts(secret, "stub://alpha", "stub://alpha") as several:
        one, other = several.places()
        proxy = Proxy(one)
        gateway = Gateway(secret, 2, RoutingPolicy.ROUND_ROBIN, answer_s=2.5)  # it reports once a second
        stack.push_async_callback(gateway.workers.close)
        await gateway.workers.start()
        gateway.workers.apply([await proxy.start(stack), other])
        await gateway.load()
        await eventually(lambda: gateway.num_there == 2)
        group = gateway.workers.groups[KEY]
        proxy.stall()
        await eventually(
            lambda: [group.balancer.is_there(number) for number in range(2)] == [False, True], "it is silent"
        )
        assert not group.is_linked(group.members[0])
        assert [(await gateway.ask(f"question {n}")).num_output_tokens > 0 for n in range(3)] == [True] * 3
        assert group.members[0].use.num_retried == 0
        proxy.flow()
        await eventually(lambda: gateway.num_there == 2, "it answers again")


async def test_leaving_replica_finishes_open_requests_and_gets_no_new_ones(secret: str) -> None:
    async with hosts(secret, "stub://alpha?step_ms=20", "stub://alpha?step_ms=20") as several:
        gateway = await several.gateway(RoutingPolicy.ROUND_ROBIN)
        group = gateway.workers.groups[KEY]
        asked = asyncio.create_task(gateway.ask("a question"))
        await eventually(lambda: group.num_open(0) == 1)
        leaving, other = several.places()
        gateway.workers.apply(
            [ReplicaStatus(KEY, 0, ReplicaPhase.LEAVING, "", "", "", leaving.address, leaving.port), other]
        )
        for number in range(3):
            await gateway.ask(f"question {number}")
        assert (await asked).num_output_tokens > 0
        assert gateway.routes.replicas == [0, 1, 1, 1]


async def test_a_replica_of_another_artifact_gets_no_requests_and_reports_the_reason(secret: str) -> None:
    async with hosts(secret, "stub://alpha", "stub://beta") as several:
        gateway = await several.gateway(RoutingPolicy.ROUND_ROBIN, num_there=1)
        answers = [await gateway.ask(f"question {number}") for number in range(4)]
        assert len({answer.text[:12] for answer in answers}) == 1
        group = gateway.workers.groups[KEY]
        await eventually(lambda: any(member.fault for member in group.members))
        faults = [group.trouble(member) for member in group.members if member.fault]
        assert len(faults) == 1
        assert "artifact differs from the first replica's" in faults[0]


async def test_a_link_that_is_cut_again_and_again_loses_nothing_before_its_first_token(secret: str) -> None:
    async with (
        AsyncExitStack() as stack,
        hosts(secret, "stub://alpha?step_ms=30", "stub://alpha?step_ms=30") as several,
    ):
        expected = [(await (await several.gateway()).ask(f"question {n}")).completions for n in range(4)]
        one, other = several.places()
        proxy = Proxy(one)
        gateway = Gateway(secret, 2, RoutingPolicy.ROUND_ROBIN)
        stack.push_async_callback(gateway.workers.close)
        gateway.workers.apply([await proxy.start(stack), other])
        await gateway.load()
        for turn in range(10):
            await eventually(lambda: gateway.num_there == 2)
            asked = [asyncio.create_task(gateway.ask(f"question {n}")) for n in range(4)]
            await asyncio.sleep(0)  # sent, and not answered
            proxy.cut()
            answers = [each.completions for each in await asyncio.gather(*asked)]
            assert answers == expected, f"turn {turn}: nothing is crossed, and nothing lost"
        assert proxy.num_links >= 10


async def test_stalled_link_counts_as_lost_and_late_events_are_dropped(secret: str) -> None:
    async with AsyncExitStack() as stack, hosts(secret, "stub://alpha", "stub://alpha") as several:
        one, other = several.places()
        proxy = Proxy(one)
        gateway = Gateway(secret, 2, RoutingPolicy.ROUND_ROBIN, silence_s=2.0)
        stack.push_async_callback(gateway.workers.close)
        gateway.workers.apply([await proxy.start(stack), other])
        await gateway.load()
        await eventually(lambda: gateway.num_there == 2)
        proxy.stall()
        answers = await asyncio.gather(*(gateway.ask(f"question {number}") for number in range(6)))
        assert len({answer.text[:12] for answer in answers}) == 1
        group = gateway.workers.groups[KEY]
        assert group.members[0].use.num_retried == 3
        await eventually(lambda: gateway.num_there == 1)
        proxy.flow()
        await eventually(lambda: gateway.num_there == 2, "it is reached again, by another link")
        assert [group.balancer.load(number) for number in range(2)] == [0, 0]
        assert (await gateway.ask("one more")).num_output_tokens > 0


async def test_a_gateway_with_another_secret_is_rejected_and_reports_the_reason(secret: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another secret of more than sixteen bytes\n")
    async with hosts(secret, "stub://alpha") as several:
        gateway = Gateway(str(other), 1, RoutingPolicy.PREFIX)
        gateway.workers.apply(several.places())
        loading = asyncio.create_task(gateway.workers.load(KEY, "", SMALL))
        await eventually(lambda: KEY in gateway.workers.groups and bool(gateway.workers.groups[KEY].members[0].fault))
        group = gateway.workers.groups[KEY]
        assert "secret" in group.trouble(group.members[0])
        gateway.workers.cancel_load(KEY)
        with pytest.raises(WorkerLostError, match="the model was removed"):
            await loading
        await gateway.workers.close()
