"""Models that come and go: loads that are shared, room that is made, warming, and loads that fail."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import aclosing
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest

from lockstep.cluster.base import Accepted, Routed
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.replica_state import MAX_BACKOFF_S
from lockstep.cluster.state import ClusterOptions
from lockstep.errors import (
    DeadlineError,
    InvalidParameterError,
    QueueDeadlineError,
    RemoteFailedError,
    UnavailableError,
)
from lockstep.pocket import pocket_path
from lockstep.worker.link import WorkerOptions
from tests.cluster.clusters import QUICK, Answer, asking, clustered, model_of, say
from tests.cluster.remotes import HEAD, crooked, says
from tests.systems import ClockedSystem
from tests.waiting import ENDLESS_MS, HANG_S, Gate, eventually

TWO_THAT_DO_NOT_FIT = """
cluster: two
resources: {gpu_budget: 1GB}
models:
  extra:
    - {id: a, source: 'stub://a?load_ms=20', tier: standby}
    - {id: b, source: 'stub://b?load_ms=20', tier: standby}
"""
WARMING = "cluster: warm\nmodels:\n  router: {source: 'stub://router'}\n  extra:\n" + "".join(
    f"    - {{id: s{number}, source: 'stub://s{number}?load_ms=10', tier: standby, co_activation: router}}\n"
    for number in range(8)
)
ROUTED = """
cluster: hinted
models:
  router: {source: 'stub://router?field=intent&ids=legal,billing&step_ms=5'}
  specialists:
    - {id: legal, source: stub://legal, tier: standby, promotion_hint: on_router_classification}
    - {id: billing, source: stub://billing, tier: standby}
routing:
  entry: router
  dispatch_rule: router.output.intent -> specialists.{intent}
"""


def num_loads(cluster: Cluster) -> int:
    return sum(change.after == "loading" for change in cluster.snapshot().transitions)


async def test_requests_to_a_cold_model_share_one_load() -> None:
    async with clustered(TWO_THAT_DO_NOT_FIT) as cluster:
        answers = await asyncio.gather(*(say(cluster, "hello", "a") for _ in range(8)))
        assert {said.model for said in answers} == {"a"}
        assert num_loads(cluster) == 1


async def test_two_models_that_do_not_fit_take_turns_without_thrashing() -> None:
    """How soon one gives way to the other is another question, and would depend on the machine."""
    async with clustered(TWO_THAT_DO_NOT_FIT, policy=replace(QUICK, max_wait_s=HANG_S)) as cluster:
        answers = await asyncio.gather(*(say(cluster, "hello", name) for name in islice(cycle("ab"), 40)))
        assert [said.model for said in answers] == list(islice(cycle("ab"), 40))
        assert num_loads(cluster) == 2, "those who wait for one model are served together"
        counters = cluster.snapshot().counters
        assert (counters.promotions, counters.demotions, counters.model_evictions) == (2, 1, 1)
        assert counters.lru_evictions == 0, "no session was named"
        assert cluster.snapshot().budgets[0].used_bytes <= 1_000_000_000


async def test_a_steady_stream_to_one_model_does_not_starve_the_other() -> None:
    async with clustered(TWO_THAT_DO_NOT_FIT.replace("stub://a?load_ms=20", "stub://a?step_ms=2")) as cluster:
        is_over = False

        async def client() -> int:
            count = 0
            while not is_over:
                assert (await say(cluster, "hello", "a", max_tokens=20)).model == "a"
                count += 1
            return count

        clients = [asyncio.create_task(client()) for _ in range(4)]
        await eventually(lambda: model_of(cluster, "a").num_running == 4)
        assert (await say(cluster, "hello", "b")).model == "b"
        is_over = True
        assert all(await asyncio.gather(*clients))
        assert num_loads(cluster) <= 3


async def test_cancelled_waiter_is_not_counted_and_its_load_finishes(gate: Gate) -> None:
    async with clustered(TWO_THAT_DO_NOT_FIT.replace("load_ms=20", f"load_ms={ENDLESS_MS}")) as cluster:
        waiter = asyncio.create_task(say(cluster, "hello", "a"))
        await eventually(lambda: model_of(cluster, "a").num_waiting == 1)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        replica = cluster.snapshot().replicas[0]
        assert (replica.num_busy, replica.num_waiting, model_of(cluster, "a").num_sessions) == (0, 0, 0)
        gate.open()
        await eventually(lambda: model_of(cluster, "a").state == "resident")


async def test_deadlines_count_while_a_model_is_loaded(gate: Gate) -> None:
    async with clustered(TWO_THAT_DO_NOT_FIT.replace("load_ms=20", f"load_ms={ENDLESS_MS}")) as cluster:
        with pytest.raises(DeadlineError):
            await say(cluster, "hello", "a", deadline_s=0.05)
        with pytest.raises(QueueDeadlineError):
            await say(cluster, "hello", "a", queue_deadline_s=0.05)
        gate.open()


FAILING = """
cluster: f
models:
  good: {source: 'stub://good'}
  bad: {source: 'stub://bad', tier: standby, engine: {block_size: 7}}
"""


async def test_failed_load_fails_all_waiting_calls_and_backs_off() -> None:
    async with clustered(FAILING, system=ClockedSystem(lambda: 1.0)) as cluster:
        results = await asyncio.gather(*(say(cluster, "hello", "bad") for _ in range(4)), return_exceptions=True)
        assert all(isinstance(result, UnavailableError) for result in results)
        assert {"block_size is 7" in str(result) for result in results} == {True}
        with pytest.raises(UnavailableError, match="block_size") as refused:
            await say(cluster, "hello", "bad")
        assert 0 < refused.value.retry_after_s <= MAX_BACKOFF_S
        assert num_loads(cluster) == 2, "the good one's at boot, and one that failed"
        assert (model_of(cluster, "bad").state, cluster.health().ready) == ("failed", True)
        assert "block_size" in model_of(cluster, "bad").reason


async def test_several_requests_warm_each_model_once() -> None:
    async with clustered(WARMING) as cluster:
        assert cluster.snapshot().budgets[0].used_bytes == 800_000_000
        await asyncio.gather(*(say(cluster, "hello", "router") for _ in range(20)))
        await eventually(lambda: all(model.state == "resident" for model in cluster.snapshot().models))
        counters = cluster.snapshot().counters
        assert (counters.co_activation_warms, counters.promotions, num_loads(cluster)) == (8, 8, 9)


async def test_a_hint_promotes_before_the_routers_hop_has_ended() -> None:
    async with clustered(ROUTED) as cluster:
        begin = cluster.events.last_id
        assert (await say(cluster, "a legal question")).model == "legal"
        assert (await say(cluster, "a billing question")).model == "billing"
        order: list[str] = []
        async with aclosing(cluster.events.subscribe(begin)) as events:
            while len(order) < 4:
                event = await anext(events)
                if event.type == "hop" or event.fields.get("to") == "loading":
                    order.append(str(event.fields.get("target") or event.fields["model"]))
        assert order == ["legal", "specialists.legal", "specialists.billing", "billing"]


async def test_a_routed_call_reports_its_model_before_that_model_is_loaded() -> None:
    """Only where it must wait: one that is there accepts the call itself."""
    async with clustered(ROUTED) as cluster:
        async with aclosing(cluster.stream(asking("a billing question"))) as cold:
            (first,) = await anext(cold)
            assert isinstance(first, Routed)
            assert (first.model, first.hops[0].target) == ("billing", "specialists.billing")
            assert model_of(cluster, "billing").state == "standby"
            (accepted,) = await anext(cold)
        async with aclosing(cluster.stream(asking("a billing question"))) as warm:
            (again,) = await anext(warm)
        assert isinstance(accepted, Accepted)
        assert isinstance(again, Accepted)
        assert accepted.hops == first.hops


async def test_session_limit_does_not_limit_calls_of_remote_models() -> None:
    async with crooked(says(HEAD, HANG_S)) as far:
        text = (
            f"cluster: c\nmodels:\n  far: {{remote: {{base_url: '{far.url}'}}}}\nsessions: {{max_active_sessions: 1}}\n"
        )
        async with clustered(text) as cluster:
            calls = [asyncio.create_task(say(cluster, "hello", "far")) for _ in range(20)]
            await eventually(lambda: len(far.requests) == 20)
            assert model_of(cluster, "far").num_running == 20
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


async def test_a_routed_call_reports_a_remote_model_before_it_answers() -> None:
    """That server never answers."""
    async with crooked(says(HANG_S)) as far:
        fallback = f"fallback: {{remote: {{base_url: '{far.url}'}}}}\n"
        async with clustered(ROUTED + fallback) as cluster, aclosing(cluster.stream(asking("hello"))) as events:
            (first,) = await anext(events)
            assert isinstance(first, Routed)
            assert (first.model, first.hops[0].target) == ("fallback", "fallback")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(events), 0.1)


async def test_a_model_is_demoted_after_its_keep_alive_without_requests() -> None:
    text = TWO_THAT_DO_NOT_FIT.replace("id: a,", "id: a, keep_alive: 50ms,")
    async with clustered(text) as cluster:
        await say(cluster, "hello", "a")
        await eventually(lambda: model_of(cluster, "a").state == "standby")
        moves = [(change.after, change.reason) for change in cluster.snapshot().transitions]
        assert [after for after, _ in moves] == ["loading", "resident", "unloading", "standby"]
        assert moves[-1] == ("standby", "idle")
        assert (await say(cluster, "again", "a")).text.startswith("[stub:a]")


async def test_models_are_loaded_and_unloaded_by_hand() -> None:
    async with clustered(ROUTED) as cluster:
        await cluster.load_model("billing")
        assert model_of(cluster, "billing").state == "resident"
        await cluster.unload_model("billing")
        await cluster.unload_model("router")
        assert [model.state for model in cluster.snapshot().models] == ["standby"] * 3
        assert cluster.health().ready, "who unloads a model by hand knows that it is not there"
        assert (await say(cluster, "a billing question")).model == "billing"
        assert cluster.card("legal").tokenizer.encode("a") == [97], "known before it is loaded"


async def test_unloading_by_hand_lets_calls_end_and_new_ones_wait_until_the_model_is_back(gate: Gate) -> None:
    text = f"cluster: c\nmodels:\n  m: {{source: 'stub://m?step_ms={ENDLESS_MS}'}}\n"
    async with clustered(text) as cluster:
        running = asyncio.create_task(say(cluster, "hello"))
        await eventually(lambda: model_of(cluster, "m").num_running == 1)
        unloading = [asyncio.create_task(cluster.unload_model("m")) for _ in range(2)]
        await asyncio.sleep(0)
        waiting = asyncio.create_task(say(cluster, "hello"))
        await eventually(lambda: model_of(cluster, "m").num_waiting == 1)
        gate.open()
        await asyncio.wait_for(asyncio.gather(*unloading), HANG_S)
        assert (await running).text.startswith("[stub:m] ok")
        assert (await waiting).text.startswith("[stub:m] ok")
        moves = [(change.after, change.reason) for change in cluster.snapshot().transitions]
        assert moves[2:] == [
            ("unloading", "by hand"),
            ("standby", "by hand"),
            ("loading", "request"),
            ("resident", "request"),
        ]


async def test_nothing_is_changed_by_hand_while_the_first_models_are_loaded(gate: Gate) -> None:
    text = f"cluster: c\nmodels:\n  m: {{source: 'stub://m?load_ms={ENDLESS_MS}'}}\n"
    cluster = Cluster(parse(text), ClusterOptions(worker=WorkerOptions("thread")))
    starting = asyncio.create_task(cluster.start())
    try:
        await eventually(lambda: gate.num_held == 1)
        assert model_of(cluster, "m").state == "loading"
        for change in (cluster.unload_model("m"), cluster.load_model("m"), cluster.replace(text.replace("m:", "n:"))):
            with pytest.raises(UnavailableError, match="for the first time"):
                await change
        gate.open()
        await starting
        assert (await say(cluster, "hello", "m")).text.startswith("[stub:m]")
    finally:
        await cluster.close()


async def test_remote_model_cannot_be_loaded() -> None:
    text = "cluster: c\nmodels:\n  m: {source: stub://m}\nfallback: {remote: {base_url: 'http://127.0.0.1:9/v1'}}\n"
    async with clustered(text) as cluster:
        with pytest.raises(InvalidParameterError, match="remote"):
            await cluster.load_model("fallback")
        with pytest.raises(RemoteFailedError):
            await say(cluster, "hello", "fallback")
        assert model_of(cluster, "fallback").state == "remote"


async def test_a_random_crowd_is_served_whole_under_a_small_budget() -> None:
    text = "cluster: many\nresources: {gpu_budget: 2500MB}\nmodels:\n  extra:\n" + "".join(
        f"    - {{id: m{number}, source: 'stub://m{number}?load_ms=5', tier: standby}}\n" for number in range(8)
    )
    async with clustered(text) as cluster:
        most = 0

        async def client(number: int) -> list[Answer]:
            nonlocal most
            answers = []
            for turn in range(6):
                answers.append(await say(cluster, "hello", f"m{(number * 3 + turn * 5) % 8}"))
                most = max(most, cluster.snapshot().budgets[0].used_bytes)
            return answers

        answers = await asyncio.gather(*(client(number) for number in range(12)))
        assert sum(map(len, answers)) == 72
        assert most <= 2_500_000_000


MEASURED = """
cluster: c
resources: {gpu_budget: 1GB}
models:
  m: {source: 'pocket://', tier: standby, engine: {kv_cache_memory_bytes: 4MB}}
"""


async def test_load_replaces_the_predicted_size_by_the_measured_one() -> None:
    """In a process of its own, whose memory nobody else takes."""
    async with clustered(MEASURED, kind="process") as cluster:
        [before] = cluster.snapshot().replicas
        assert (before.bytes, before.measured_bytes) == (before.predicted_bytes, None)
        await cluster.load_model("m")
        [after] = cluster.snapshot().replicas
        assert after.measured_bytes is not None
        assert after.predicted_bytes == before.predicted_bytes
        assert 4 * 10**6 < after.measured_bytes < before.predicted_bytes, "weights as they are packed, and the pool"
        assert after.bytes == after.measured_bytes == cluster.snapshot().budgets[0].used_bytes


async def test_model_above_its_budget_when_loaded_is_unloaded() -> None:
    predicted = 5 * 10**6
    declared = MEASURED.replace("1GB", f"{predicted}B").replace("tier: standby", f"tier: standby, size: {predicted}B")
    async with clustered(declared, kind="process") as cluster:
        with pytest.raises(UnavailableError, match=r"were expected; of gpu_budget's .* only .* are free"):
            await say(cluster, "hello")
        [replica] = cluster.snapshot().replicas
        assert (replica.phase, cluster.snapshot().budgets[0].used_bytes) == ("absent", 0)
        counters = cluster.snapshot().counters
        assert (counters.promotions, counters.demotions) == (0, 0), "what was never there is not demoted"
        assert replica.measured_bytes is not None
        assert replica.measured_bytes > predicted >= replica.predicted_bytes
        assert model_of(cluster, "m").state == "failed"
        with pytest.raises(UnavailableError, match="could not be loaded: pocket://: loaded, it takes"):
            await say(cluster, "hello")


@pytest.mark.slow
async def test_model_that_the_next_worker_cannot_load_is_absent_until_it_can(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copyfile(pocket_path(), model)
    text = f"cluster: c\nmodels:\n  m: {{source: '{model}'}}\n"
    async with clustered(text, kind="process") as cluster:
        await say(cluster, "hello", max_tokens=2)
        model.rename(tmp_path / "away.gguf")
        pid = cluster.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: model_of(cluster, "m").state == "failed")
        assert "no such file or directory" in cluster.health().reason
        (tmp_path / "away.gguf").rename(model)
        await eventually(lambda: cluster.health().ready)
        await say(cluster, "hello", max_tokens=2)
