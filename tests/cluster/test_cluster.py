"""A manifest's models behind the server's interface: booting, routing, sharing, and what can be seen of them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from lockstep.cluster.base import Accepted
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.state import ClusterOptions
from lockstep.engine.request import GenerationRequest
from lockstep.errors import (
    ArtifactNotFoundError,
    ConfigError,
    InvalidParameterError,
    ModelNotFoundError,
    PromptTooLongError,
    UnavailableError,
)
from lockstep.executors.sampling_params import SamplingParams
from lockstep.pocket import DEMO_MESSAGES
from tests.cluster.clusters import SUPPORT, Answer, ask, asking, clustered, model_of, say
from tests.waiting import ENDLESS_MS, Gate, eventually

TEN_OF_ONE = "cluster: ten\nmodels:\n" + "".join(
    f"  m{number}: {{source: 'pocket://', system_prompt: 'You are number {number}.', persona: suffix}}\n"
    for number in range(10)
)


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_the_manifest_of_its_users_boots_on_stubs_and_routes(kind: str) -> None:
    async with clustered(SUPPORT, "stub", kind) as cluster:  # type: ignore[arg-type]  # one of the two
        assert cluster.health().ready
        booted = cluster.snapshot()
        assert [(model.id, model.tier, model.state) for model in booted.models] == [
            ("router", "resident", "resident"),
            ("billing", "resident", "resident"),
            ("technical", "resident", "resident"),
            ("legal", "standby", "standby"),
            ("fallback", "remote", "standby"),
        ]
        assert booted.budgets[0].used_bytes == 2_400_000_000
        for words, intent in DEMO_MESSAGES.items():
            said = await say(cluster, words)
            hop = said.hops[0]
            target = "fallback" if intent == "none" else f"specialists.{intent}"
            assert (hop.model, hop.completion, hop.intent, hop.target) == ("router", f"intent={intent}", intent, target)
            assert said.model == target.removeprefix("specialists.")
            assert said.text.startswith(f"[stub:{said.model}] ok len={len(words)} max=40")
        counters = cluster.snapshot().counters
        assert (counters.requests_total, counters.router_hits) == (4, 4)
        assert (counters.dispatch_hits, counters.dispatch_fallbacks) == (3, 1)
        assert counters.promotions == 2
        assert {model.state for model in cluster.snapshot().models} == {"resident"}


async def test_the_same_manifest_routes_real_text_on_the_embedded_model() -> None:
    async with clustered(SUPPORT, "pocket") as cluster:
        for words, intent in DEMO_MESSAGES.items():
            said = await say(cluster, words, max_tokens=24)
            assert said.hops[0].intent == intent
            assert said.model == ("fallback" if intent == "none" else intent)
        replicas = cluster.snapshot().replicas
        assert len(replicas) == 1, "one artifact, one replica"
        assert replicas[0].models == ("router", "billing", "technical", "legal", "fallback")
        assert list(await cluster.metrics()) == ["router"]


async def test_the_second_hop_finds_the_conversation_in_the_cache_when_personas_follow_it() -> None:
    story = " ".join(["I was charged twice for my subscription last week and would like to have my money back."] * 8)
    async with clustered(SUPPORT, "pocket") as cluster:
        said = await say(cluster, story)
        assert said.model == "billing"
        assert said.hops[0].num_cached_tokens == 0
        assert said.output.num_cached_tokens > len(said.output.prompt_token_ids) // 2


async def test_models_of_one_artifact_are_loaded_once_and_batch_together() -> None:
    async with clustered(TEN_OF_ONE) as cluster:
        assert len(cluster.snapshot().replicas) == 1
        calls = [asking("Tell me of your day", f"m{number}", max_tokens=30) for number in range(10)]
        answers = await asyncio.gather(*(ask(cluster, call) for call in calls))
        assert [said.model for said in answers] == [f"m{number}" for number in range(10)]
        metrics = (await cluster.metrics())["m0"]
        steps = metrics.histograms["iteration_tokens_total"]
        num_tokens = sum(len(said.output.prompt_token_ids) + said.output.num_output_tokens for said in answers)
        assert steps.count < num_tokens / 4, "a step holds several of them"
        assert {card.parent for card in cluster.cards()} == {None, "m0"}


NAMES = [(None, True), ("customer-support-agent", True), ("router", True), ("billing", False), ("legal", False)]


@pytest.mark.parametrize(("name", "is_routed"), NAMES)
async def test_the_model_name_decides_whether_a_request_is_routed(name: str | None, is_routed: bool) -> None:
    async with clustered(SUPPORT, "stub") as cluster:
        said = await say(cluster, "my login fails", name)
        assert bool(said.hops) == is_routed
        assert said.model == ("technical" if is_routed else name)


async def test_unknown_models_and_token_ids_without_a_model_are_rejected() -> None:
    async with clustered(SUPPORT, "stub") as cluster:
        with pytest.raises(ModelNotFoundError, match="`nobody`"):
            await say(cluster, "hello", "nobody")
        with pytest.raises(InvalidParameterError, match="token ids"):
            await ask(cluster, GenerationRequest((1, 2, 3), SamplingParams(max_tokens=4)))
        direct = await ask(cluster, GenerationRequest((65, 66), SamplingParams(max_tokens=40), model="billing"))
        assert direct.text.startswith("[stub:billing] ok len=2")


async def test_without_a_fallback_the_routers_own_answer_stands() -> None:
    text = SUPPORT[: SUPPORT.index("fallback:")] + SUPPORT[SUPPORT.index("routing:") :]
    async with clustered(text, "stub") as cluster:
        said = await say(cluster, "What is the capital of France")
        assert (said.model, said.text) == ("router", "intent=none")
        assert (said.hops[0].target, said.hops[0].intent) == (None, "none")
        assert cluster.snapshot().counters.dispatch_fallbacks == 0


async def test_a_client_that_leaves_ends_every_hop(gate: Gate) -> None:
    slow = SUPPORT.replace("hf://neurometric/billing-phi3", f"stub://billing?step_ms={ENDLESS_MS}")
    async with clustered(slow, "stub") as cluster:
        waiting = asyncio.create_task(say(cluster, "a refund, please"))
        await eventually(lambda: gate.num_held == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert cluster.num_open == 0
        gate.open()

        async def is_idle() -> bool:
            return not any((await cluster.metrics())["billing"].gauges.values())

        await eventually(is_idle)
        async with aclosing(cluster.stream(asking("a refund, please", max_tokens=400))) as stream:
            (first,) = await anext(stream)
            assert isinstance(first, Accepted)


async def test_startup_over_budget_fails_before_any_load() -> None:
    with pytest.raises(ConfigError, match="gpu_budget"):
        async with clustered(SUPPORT.replace("18GB", "2GB"), "stub"):
            pass


async def test_a_source_that_is_not_there_ends_the_boot_with_its_reason() -> None:
    cluster = Cluster(parse("cluster: c\nmodels:\n  m: {source: /nowhere/model.gguf}\n"), ClusterOptions())
    with pytest.raises(ArtifactNotFoundError, match="nowhere"):
        await cluster.start()


async def test_a_remote_model_without_a_place_is_refused_by_name() -> None:
    text = "cluster: c\nmodels:\n  m: {source: 'stub://m'}\nfallback: {source: hf://a/b, tier: remote}\n"
    with pytest.raises(ConfigError, match="fallback"):
        async with clustered(text):
            pass


async def test_events_report_hops_and_tier_changes() -> None:
    async with clustered(SUPPORT, "stub") as cluster:
        begin = cluster.events.last_id
        await say(cluster, "a contract with a strange clause")
        async with aclosing(cluster.events.subscribe(begin)) as events:
            seen: list[tuple[str, object]] = []
            while ("tier_changed", "resident") not in seen or not any(type_ == "hop" for type_, _ in seen):
                event = await anext(events)
                seen.append((event.type, event.fields.get("to") or event.fields.get("target")))
        assert ("hop", "specialists.legal") in seen
        assert ("tier_changed", "loading") in seen
        changes = [(change.model, change.before, change.after) for change in cluster.snapshot().transitions[-2:]]
        assert changes == [("legal", "standby", "loading"), ("legal", "loading", "resident")]


async def test_aborting_all_ends_every_call_with_the_error(gate: Gate) -> None:
    slow = SUPPORT.replace("hf://neurometric/legal-phi3", f"stub://legal?load_ms={ENDLESS_MS}")
    async with clustered(slow, "stub") as cluster:
        tasks: list[asyncio.Task[Answer]] = [asyncio.create_task(say(cluster, "hello", "legal")) for _ in range(3)]
        await eventually(lambda: model_of(cluster, "legal").num_waiting == 3)
        cluster.abort_all(UnavailableError("enough"))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(result) for result in results] == ["enough"] * 3
        gate.open()


async def test_a_prompt_too_long_for_the_router_is_rejected_unless_it_names_a_model() -> None:
    text = """
cluster: c
models:
  router: {source: 'stub://router?field=intent&ids=billing&max_model_len=64'}
  specialists: [{id: billing, source: 'stub://billing'}]
routing: {entry: router, dispatch_rule: 'router.output.intent -> specialists.{intent}'}
"""
    async with clustered(text) as cluster:
        with pytest.raises(PromptTooLongError, match=r"too long for routing by router: .* holds 64"):
            await say(cluster, "hello " * 20)
        assert (await say(cluster, "hello " * 20, "billing")).model == "billing"
