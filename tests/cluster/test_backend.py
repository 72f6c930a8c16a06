"""Manifests as a backend serves them: stubs that route by the words of a request, and one model behind every name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.cluster.backend import Backend, OneModel, served_by
from lockstep.cluster.manifest import Tier
from lockstep.cluster.manifest_file import parse
from lockstep.core.request import FinishReason
from tests.cluster.clusters import SUPPORT, clustered, say

SUPPORT_OF_STUBS = """
cluster: customer-support-agent
resources: {gpu_budget: 18GB, ram_budget: 32GB}
models:
  router: {source: stub://r, tier: resident, priority: critical, max_active_sessions: 16}
  specialists:
    - {id: billing, source: stub://b, tier: resident, co_activation: router}
    - {id: technical, source: stub://t, tier: resident, co_activation: router}
    - {id: legal, source: stub://l, tier: standby, promotion_hint: on_router_classification}
fallback: {source: stub://claude-haiku, tier: remote}
routing: {entry: router, dispatch_rule: 'router.output.intent -> specialists.{intent}'}
"""
SUPPORT_MESSAGES = {
    "I was charged twice for my subscription last week": "billing",
    "Where is my invoice?": "billing",
    "I want a REFUND": "billing",
    "Why was I charged a fee": "billing",
    "the invoice of May is wrong": "billing",
    "refund my order, please": "billing",
    "Please connect me to billing": "billing",
    "I get an error 500": "technical",
    "Login does not work": "technical",
    "an error, again and again": "technical",
    "my login expired": "technical",
    "a technical question": "technical",
    "is this clause valid?": "legal",
    "my contract ends in May": "legal",
    "What does clause 7 mean?": "legal",
    "a contract without a date": "legal",
    "I need legal advice": "legal",
    "hello": "fallback",
    "what is the weather like": "fallback",
    "tell me a joke": "fallback",
}
DENSITY = (
    "cluster: density-50\nresources: {gpu_budget: 24GB, ram_budget: 64GB}\n"
    "models:\n  router: {source: stub://router, tier: resident, priority: critical}\n  specialists:\n"
    + "".join(
        f"    - {{id: agent-{number}, source: 'stub://weights-{number}', tier: {tier}}}\n"
        for number, tier in enumerate(["resident"] * 25 + ["standby"] * 25, 1)
    )
    + "routing: {entry: router, dispatch_rule: 'router.output.intent -> specialists.{intent}'}\n"
)
DENSITY_MESSAGES = {
    f"a question for agent-{number}, please": f"agent-{number}" for number in (1, *range(2, 51, 3), 10, 50)
}
DENSITY_MESSAGES |= {"Agent-7: hello": "agent-7"}
KINDS = ("billing", "technical", "legal", "shipping", "returns", "accounts", "security", "sales")
WARMING = (
    "cluster: warming-heavy\nresources: {gpu_budget: 8GB, ram_budget: 16GB}\n"
    "models:\n  router: {source: 'stub://router?step_ms=1', tier: resident, priority: critical}\n  specialists:\n"
    + "".join(f"    - {{id: {kind}, source: stub://{kind}, tier: standby, co_activation: router}}\n" for kind in KINDS)
    + "fallback: technical\n"
    + "routing:\n  entry: router\n  dispatch_rule: router.output.intent -> specialists.{intent}\n"
    + "  literal: money=billing\n"
)
WARMING_MESSAGES = {
    **{f"{kind}, please": kind for kind in KINDS[1:]},
    **{f"I have a question about {kind}": kind for kind in KINDS[1:]},
    "I want my money back": "billing",
    "money, money, money": "billing",
    "an error": "technical",
    "a contract": "legal",
    "hello": "technical",
    "billing is not a word that this rule knows": "technical",
}


@pytest.mark.parametrize("backend", ["stub", "auto"])
@pytest.mark.parametrize(
    ("text", "messages"),
    [(SUPPORT_OF_STUBS, SUPPORT_MESSAGES), (DENSITY, DENSITY_MESSAGES), (WARMING, WARMING_MESSAGES)],
    ids=["customer-support", "density-50", "warming-heavy"],
)
async def test_stubs_of_a_manifest_route_by_the_words_of_a_request(
    text: str, messages: dict[str, str], backend: str
) -> None:
    assert len(messages) == 20
    async with clustered(text, backend) as cluster:
        for words, model in messages.items():
            answer = await say(cluster, words)
            assert (words, answer.model, len(answer.hops)) == (words, model, 1)
            assert answer.hops[0].target is not None
            assert answer.hops[0].target.endswith(model)
        counters = cluster.snapshot().counters
        num_fallbacks = sum(hop == "fallback" for hop in messages.values()) or counters.dispatch_fallbacks
        assert (counters.router_hits, counters.dispatch_hits) == (20, 20 - num_fallbacks)


def test_a_routing_stub_gets_the_field_and_ids_that_its_source_leaves_out() -> None:
    """The rule's field, and its words; under every backend that has stubs."""
    said = {
        "stub://r": "stub://r?field=intent&ids=billing,technical,legal",
        "stub://r?step_ms=2": "stub://r?step_ms=2&field=intent&ids=billing,technical,legal",
        "stub://r?field=intent": "stub://r?field=intent&ids=billing,technical,legal",
        "stub://r?ids=legal": "stub://r?ids=legal&field=intent",
        "stub://r?field=topic&ids=legal": "stub://r?field=topic&ids=legal",
    }
    for source, served in said.items():
        manifest = parse(SUPPORT_OF_STUBS.replace("stub://r,", f"'{source}',"))
        for backend in (Backend.AUTO, Backend.STUB, OneModel(source)):
            assert served_by(manifest, backend).entry("router").source == served
            assert served_by(served_by(manifest, backend), backend) == served_by(manifest, backend)
    others = [entry.source for entry in served_by(parse(SUPPORT_OF_STUBS), Backend.AUTO).entries[1:]]
    assert others == ["stub://b", "stub://t", "stub://l", "stub://claude-haiku"]


def test_a_stub_stands_for_the_server_of_a_remote_model_unless_there_is_one() -> None:
    served = served_by(parse(SUPPORT_OF_STUBS), Backend.AUTO)
    assert served.entry("fallback").tier is Tier.STANDBY
    remote = SUPPORT_OF_STUBS.replace("tier: remote", "remote: {base_url: 'http://127.0.0.1:9/v1'}")
    assert served_by(parse(remote), Backend.AUTO).entry("fallback") == parse(remote).entry("fallback")
    assert served_by(parse(SUPPORT), Backend.AUTO) == parse(SUPPORT), "what is no stub stays as it is"


def test_one_backend_model_serves_every_name_including_remote_ones() -> None:
    """Personas are the manifest's own."""
    manifest = parse(SUPPORT.replace("tier: standby", "tier: standby\n      system_prompt: Be precise."))
    served = served_by(manifest, OneModel("hf://org/name"))
    assert {entry.source for entry in served.entries} == {"hf://org/name"}
    assert {entry.tier for entry in served.entries} == {Tier.RESIDENT, Tier.STANDBY}
    assert [replace(e, source="", tier=Tier.STANDBY) for e in served.entries] == [
        replace(e, source="", tier=Tier.STANDBY) for e in manifest.entries
    ]


async def test_an_answer_of_few_tokens_ends_by_itself() -> None:
    async with clustered(SUPPORT, "stub") as cluster:
        answer = await say(cluster, "I was charged twice, please refund one of it", max_tokens=8)
        assert answer.text == "[stub:billing] ok len=44 max=8"
        assert answer.output.completions[0].finish_reason is FinishReason.STOP
        assert answer.output.num_output_tokens == len(["[stub:billing] ok len=", *"44", " max=", *"8", "<|end|>"])
