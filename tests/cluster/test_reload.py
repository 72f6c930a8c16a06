"""Replacing a manifest under load: nothing fails where both fit, and what cannot come changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.manifest_permissions import ALL
from lockstep.errors import ConfigError, LockstepError, ManifestError, OverBudgetError, UnavailableError
from tests.cluster.clusters import Answer, clustered, model_of, say
from tests.waiting import ENDLESS_MS, HANG_S, Gate, eventually

OLD = """
cluster: old
resources: {gpu_budget: 10GB}
models:
  router: {source: 'stub://router?field=intent&ids=legal,billing'}
  specialists:
    - {id: legal, source: 'stub://legal?step_ms=2'}
    - {id: billing, source: 'stub://billing?step_ms=2'}
routing:
  entry: router
  dispatch_rule: router.output.intent -> specialists.{intent}
"""
NEW = OLD.replace("cluster: old", "cluster: new").replace(
    "stub://billing?step_ms=2", "stub://billing2?step_ms=1&load_ms=100"
)


def states(cluster: Cluster) -> list[tuple[str, str, str]]:
    return [(model.id, model.source, model.state) for model in cluster.snapshot().models]


async def test_no_request_fails_while_a_manifest_is_replaced_under_sixteen_streams() -> None:
    async with clustered(OLD) as cluster:
        is_over, answers = False, list[Answer]()

        async def client(number: int) -> None:
            while not is_over:
                answers.append(await say(cluster, f"a {('legal', 'billing')[number % 2]} question", max_tokens=20))

        def is_answered_by(name: str) -> bool:
            return any(said.text.startswith(f"[stub:{name}] ") for said in answers)

        clients = [asyncio.create_task(client(number)) for number in range(16)]
        await eventually(lambda: is_answered_by("billing") and cluster.num_open == 16)
        legal = model_of(cluster, "legal").num_requests
        replaced = await cluster.replace(NEW)
        assert (replaced.changed, replaced.unchanged) == (("billing",), ("router", "legal"))
        assert (replaced.added, replaced.removed, replaced.num_cut) == ((), (), 0)
        await eventually(lambda: is_answered_by("billing2"))
        is_over = True
        await asyncio.gather(*clients)
        assert {said.model for said in answers} == {"legal", "billing"}
        assert len(cluster.snapshot().replicas) == 3, "what is gone is unloaded"
        assert model_of(cluster, "legal").num_requests > legal
        loads = [change.model for change in cluster.snapshot().transitions if change.after == "loading"]
        assert sorted(loads) == ["billing", "billing", "legal", "router"], "what is unchanged is not touched"
        assert cluster.manifest_text().startswith("cluster: new")


FAULTS = {
    "no manifest": ("cluster: x\nmodels: {}\n", ManifestError),
    "over budget": (OLD.replace("10GB", "1GB"), ConfigError),
    "no such file": (OLD.replace("stub://billing?step_ms=2", "/nowhere.gguf"), LockstepError),
    "cannot be loaded": (
        OLD.replace("stub://billing?step_ms=2'", "stub://other', engine: {block_size: 7}"),
        LockstepError,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_manifest_that_cannot_come_changes_nothing(fault: str) -> None:
    text, kind = FAULTS[fault]
    async with clustered(OLD) as cluster:
        before, manifest = states(cluster), cluster.manifest_text()
        with pytest.raises(kind):
            await cluster.replace(text)
        assert (states(cluster), cluster.manifest_text()) == (before, manifest)
        assert len(cluster.snapshot().replicas) == 3
        assert cluster.health().ready
        assert (await say(cluster, "a billing question")).text.startswith("[stub:billing]")
        assert not cluster.snapshot().is_replacing


async def test_new_requests_are_rejected_while_old_ones_end_if_both_do_not_fit(gate: Gate) -> None:
    text = (
        f"cluster: c\nresources: {{gpu_budget: 1GB}}\nmodels:\n  m: {{source: 'stub://first?step_ms={ENDLESS_MS}'}}\n"
    )
    async with clustered(text) as cluster:
        running = asyncio.create_task(say(cluster, "hello"))
        await eventually(lambda: model_of(cluster, "m").num_running == 1)
        replacing = asyncio.create_task(cluster.replace(text.replace("first", "second")))
        await eventually(lambda: cluster.snapshot().is_replacing)
        await eventually(lambda: cluster.state.replicas.all()[0].is_retired)
        with pytest.raises(UnavailableError) as refused:
            await say(cluster, "hello")
        assert refused.value.retry_after_s > 0
        with pytest.raises(UnavailableError, match="another manifest"):
            await cluster.replace(text)
        gate.open()
        await replacing
        assert (await running).text.startswith("[stub:first] ok")
        assert (await say(cluster, "hello")).text.startswith("[stub:second]")


async def test_failed_load_restores_the_old_model_if_both_do_not_fit() -> None:
    text = "cluster: c\nresources: {gpu_budget: 1GB}\nmodels:\n  m: {source: 'stub://first'}\n"
    async with clustered(text) as cluster:
        with pytest.raises(LockstepError, match="block_size"):
            await cluster.replace(text.replace("stub://first'", "stub://second', engine: {block_size: 7}"))
        assert (await say(cluster, "hello")).text.startswith("[stub:first]")
        assert cluster.health().ready


async def test_model_that_exceeds_the_new_budget_when_loaded_fails_the_replacement() -> None:
    """The old manifest has no budget, so that nothing bounds the load but what the new one will hold."""
    new = "cluster: new\nresources: {gpu_budget: 100MB}\nmodels:\n  m: {source: 'pocket://', size: 10MB}\n"
    async with clustered("cluster: old\nmodels:\n  m: {source: 'stub://first'}\n") as cluster:
        with pytest.raises(OverBudgetError, match=r"more than gpu_budget \([0-9.,]+ MB of 100 MB\)") as refused:
            await cluster.replace(new)
        assert "m      resident" in refused.value.table
        assert "over budget" in refused.value.table
        assert (await say(cluster, "hello")).text.startswith("[stub:first]")
        assert [replica.source for replica in cluster.snapshot().replicas] == ["stub://first"]


async def test_calls_that_do_not_end_are_cut_when_the_time_is_up() -> None:
    text = "cluster: c\nmodels:\n  m: {source: 'stub://first?step_ms=300'}\n"
    async with clustered(text, drain_s=0.1) as cluster:
        running = asyncio.create_task(say(cluster, "hello"))
        await eventually(lambda: model_of(cluster, "m").num_running == 1)
        replaced = await cluster.replace(text.replace("first", "second"))
        assert (replaced.num_drained, replaced.num_cut) == (0, 1)
        with pytest.raises(UnavailableError, match="taken out of service before this answer was complete"):
            await running


async def test_session_of_a_removed_model_is_evicted() -> None:
    limits = "sessions: {idle_threshold: 20ms, min_lifetime: 1ms, sweep_interval: 10ms}\n"
    async with clustered(OLD) as cluster:
        await say(cluster, "hello", "billing", session="s")
        await cluster.replace(NEW + limits)
        await eventually(lambda: cluster.sessions()[0].state == "dropped")


async def test_a_manifest_over_http_cannot_name_another_key_variable_or_send_it_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = OLD + "fallback: {remote: {base_url: 'http://127.0.0.1:9/v1', api_key_env: CLOUD_KEY}}\n"
    async with clustered(text) as cluster:
        assert "fallback: CLOUD_KEY, which api_key_env names, is not set" in caplog.text
        assert (await cluster.replace(cluster.manifest_text())).changed == ()
        for stolen in (text.replace("CLOUD_KEY", "HOME"), text.replace("127.0.0.1:9", "127.0.0.2:9")):
            with pytest.raises(ManifestError, match="does not name for this base_url") as refused:
                await cluster.replace(stolen, permissions=ALL)
            [problem] = refused.value.problems
            assert (problem.line, problem.where) == (12, "fallback.remote.api_key_env")
            assert (await cluster.replace(stolen, environment={})).changed == ("fallback",), (
                "as the server's file it may"
            )
            await cluster.replace(stolen)
            await cluster.replace(text)


async def test_a_session_stays_with_a_model_whose_replica_stays() -> None:
    """Another persona is another entry, and the KV is where it was; so it is also given up when nobody comes back."""
    limits = "sessions: {idle_threshold: 300ms, min_lifetime: 1ms, sweep_interval: 10ms}\n"
    text = OLD + limits
    async with clustered(text) as cluster:
        await say(cluster, "hello" * 20, "billing", session="s")
        await eventually(lambda: cluster.sessions()[0].num_tokens > 0)
        await cluster.replace(text.replace("id: billing,", "id: billing, system_prompt: Briefly.,"))
        assert model_of(cluster, "billing").num_sessions == 1
        await eventually(lambda: model_of(cluster, "billing").num_sessions == 0)


async def test_a_model_added_by_a_replacement_is_usable_before_its_first_load() -> None:
    async with clustered(OLD) as cluster:
        added = "    - {id: late, source: stub://late, tier: standby}\nrouting:"
        assert (await cluster.replace(OLD.replace("routing:", added))).added == ("late",)
        assert cluster.card("late").tokenizer.encode("a") == [97]
        assert (await say(cluster, "hello", "late")).text.startswith("[stub:late]")


async def test_another_size_of_the_same_artifact_is_taken_over_and_nothing_is_loaded() -> None:
    async with clustered(OLD) as cluster:
        resized = OLD.replace("id: legal,", "id: legal, size: 1200MB,")
        assert (await cluster.replace(resized)).changed == ("legal",)
        assert model_of(cluster, "legal").size_bytes == 1_200_000_000
        assert cluster.snapshot().budgets[0].used_bytes == 2_800_000_000
        with pytest.raises(ConfigError, match="gpu_budget"):
            await cluster.replace(OLD.replace("id: legal,", "id: legal, size: 9GB,"))
        assert model_of(cluster, "legal").size_bytes == 1_200_000_000
        assert _loads(cluster) == 3


async def test_model_unloaded_by_request_stays_unloaded_until_its_entry_changes() -> None:
    async with clustered(OLD) as cluster:
        for name in ("legal", "billing"):
            await cluster.unload_model(name)
        await cluster.replace(OLD.replace("cluster: old", "cluster: new"))
        await cluster.replace(OLD.replace("id: legal,", "id: legal, priority: high,"))
        assert [state for _, _, state in states(cluster)] == ["resident", "resident", "standby"]
        assert cluster.health().ready
        await cluster.load_model("billing")
        await cluster.replace(OLD)
        assert model_of(cluster, "billing").state == "resident"


async def test_a_replacement_goes_on_when_its_caller_leaves() -> None:
    async with clustered(OLD) as cluster:
        caller = asyncio.create_task(cluster.replace(NEW))
        await eventually(lambda: cluster.snapshot().is_replacing)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        await eventually(lambda: not cluster.snapshot().is_replacing)
        assert cluster.manifest_text().startswith("cluster: new")


async def test_closing_does_not_wait_for_a_replacement(gate: Gate) -> None:
    cluster = Cluster(parse(OLD))
    await cluster.start()
    caller = asyncio.create_task(cluster.replace(NEW.replace("load_ms=100", f"load_ms={ENDLESS_MS}")))
    await eventually(lambda: _loads(cluster) == 4)
    await asyncio.wait_for(cluster.close(), HANG_S)
    with pytest.raises((UnavailableError, asyncio.CancelledError)):
        await caller


async def test_a_worker_that_dies_in_the_middle_leaves_the_old_manifest_or_the_new_one() -> None:
    async with clustered(OLD, kind="process") as cluster:
        replacing = asyncio.create_task(cluster.replace(NEW.replace("load_ms=100", f"load_ms={ENDLESS_MS}")))
        await eventually(lambda: model_of(cluster, "billing").state == "loading" or _loads(cluster) == 4)
        pid = cluster.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LockstepError):
            await replacing
        assert cluster.manifest_text().startswith("cluster: old")
        assert [source for _, source, _ in states(cluster)][2] == "stub://billing?step_ms=2"
        await eventually(lambda: cluster.health().ready)
        assert (await say(cluster, "a billing question")).text.startswith("[stub:billing]")
        assert (await cluster.replace(NEW)).changed == ("billing",)
        assert (await say(cluster, "a billing question")).text.startswith("[stub:billing2]")


def _loads(cluster: Cluster) -> int:
    return sum(change.after == "loading" for change in cluster.snapshot().transitions)


async def test_a_budget_for_kv_that_was_nothing_holds_from_the_manifest_on_that_has_one() -> None:
    """Also of models that have been there all the while."""
    text = (
        "cluster: kept\nresources: {host_kv_budget: BUDGET}\nmodels:\n  router: {source: 'stub://r', engine: ENGINE}\n"
    )
    text = text.replace("ENGINE", "{num_blocks: 64, num_host_blocks: 0}")

    async def come_again(cluster: Cluster) -> tuple[int | None, int | None]:
        """Tokens that a session finds, and then after its model's demotion."""
        first = await say(cluster, "a question " * 30, session="s")
        await cluster.unload_model("router")
        await cluster.load_model("router")
        again = await say(cluster, "a question " * 30, session="s")
        return first.output.num_cached_tokens, again.output.num_cached_tokens

    async def host_has(cluster: Cluster, budget_bytes: int, is_so: Callable[[int], bool]) -> None:
        """Wait until the store, which writes and removes at its own pace, has taken over a budget."""

        async def has_taken_over() -> bool:
            await cluster.metrics()
            host = cluster.kv_tiers.get("host")
            return host is not None and host.budget_bytes == budget_bytes and is_so(host.num_blocks)

        await eventually(has_taken_over)

    async with clustered(text.replace("BUDGET", "0MB")) as cluster:
        assert await come_again(cluster) == (0, 0)
        replaced = await cluster.replace(text.replace("BUDGET", "64MB"))
        assert replaced.unchanged == ("router",)
        await host_has(cluster, 32_000_000, lambda num_blocks: True)  # what ends before it is kept when it is idle
        found = (await say(cluster, "a question " * 30, session="s")).output.num_cached_tokens
        assert found
        await host_has(cluster, 32_000_000, lambda num_blocks: num_blocks * 16 >= found)
        assert await come_again(cluster) == (found, found)
        await cluster.replace(text.replace("BUDGET", "0MB"))
        await host_has(cluster, 0, lambda num_blocks: not num_blocks)
        assert await come_again(cluster) == (found, 0), "what is on the device stays there"
