"""What a routed call becomes at each of its hops: questions, decisions, personas, backends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from lockstep.cluster.backend import Backend, served_by
from lockstep.cluster.manifest import Manifest, ModelEntry, Persona, Tier
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.routing import DispatchDecision, Router, addressed
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams
from lockstep.pocket import BILLING_PERSONA, GENERAL_PERSONA, ROUTER_PERSONA
from tests.cluster.clusters import SUPPORT

MANIFEST = parse(SUPPORT)
ASKED_MESSAGES = [{"role": "user", "content": "hello"}]
ASKED = GenerationRequest(Conversation(ASKED_MESSAGES, {"tools": []}), SamplingParams(n=3, logprobs=2))
PERSONA = ModelEntry("m", "stub://m", system_prompt="Be kind.", sampling={"temperature": 0.5, "top_k": 7}, priority=-1)


def router_of(manifest: Manifest) -> Router:
    router = Router.of(manifest)
    assert isinstance(router, Router)
    return router


def messages_of(call: GenerationRequest) -> list[tuple[str, str]]:
    assert isinstance(call.prompt, Conversation)
    return [(message["role"], message["content"]) for message in call.prompt.messages]


def test_the_entry_prompt_is_constrained_to_words_of_the_rule() -> None:
    question = router_of(MANIFEST).question(ASKED)
    params = question.params
    assert (question.model, params.n, params.logprobs, params.temperature) == ("router", 1, None, 0.0)
    words = ["billing", "technical", "legal", "none"]
    assert params.constraint == Constraint.choice([*words, *(f"intent={word}" for word in words)])
    assert params.max_tokens == len("intent=technical") + 1
    assert messages_of(router_of(MANIFEST).question(structs.replace(ASKED, prompt="hello"))) == [("user", "hello")]
    with pytest.raises(InvalidParameterError, match="one model only"):
        router_of(MANIFEST).question(structs.replace(ASKED, prompt=(1, 2)))


DECISIONS = {
    "billing": DispatchDecision("billing", "billing"),
    "intent=legal": DispatchDecision("legal", "legal"),
    '{"intent": "technical"}': DispatchDecision("technical", "technical"),
    "none": DispatchDecision("none", "fallback", is_fallback=True),
    "weather": DispatchDecision("weather", "fallback", is_fallback=True),
    "I do not know": DispatchDecision(None, "fallback", is_fallback=True),
}


@pytest.mark.parametrize("answer", DECISIONS)
def test_answer_selects_the_next_model(answer: str) -> None:
    assert router_of(MANIFEST).decide(answer) == DECISIONS[answer]


def test_without_a_fallback_an_unmatched_answer_has_no_target() -> None:
    router = router_of(replace(MANIFEST, fallback=None))
    assert router.decide("none") == DispatchDecision("none", None)
    assert router.decide("legal") == DispatchDecision("legal", "legal")


def test_partial_answer_selects_the_next_model_when_unambiguous() -> None:
    router = router_of(MANIFEST)
    beginnings = ["", "i", "intent=", "intent=l", "b", "te", "none", "x"]
    assert [router.foresee(text) for text in beginnings] == [
        *(None, None, None, "legal", "billing", "technical", "fallback", None)
    ]


def test_a_persona_stands_before_the_conversation_or_after_it() -> None:
    assert messages_of(addressed(ASKED, PERSONA)) == [("system", "Be kind."), ("user", "hello")]
    suffix = replace(PERSONA, persona=Persona.SUFFIX)
    assert messages_of(addressed(ASKED, suffix)) == [("user", "hello"), ("system", "Be kind.")]
    going_on = structs.replace(ASKED, prompt=Conversation(ASKED_MESSAGES, continue_final=True))
    assert messages_of(addressed(going_on, suffix)) == [("system", "Be kind."), ("user", "hello")]
    own = Conversation([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}])
    both = addressed(structs.replace(ASKED, prompt=own), PERSONA)
    assert messages_of(both) == [("system", "Be kind.\n\nBe brief."), ("user", "hello")]
    assert addressed(structs.replace(ASKED, prompt="plain"), PERSONA).prompt == "plain"


def test_sampling_of_the_model_applies_to_unset_parameters() -> None:
    call = addressed(structs.replace(ASKED, params=SamplingParams(top_k=3), priority=1), PERSONA)
    assert (call.params.temperature, call.params.top_k, call.params.top_p) == (0.5, 3, None)
    assert (call.priority, call.model) == (0, "m")


def test_every_model_is_a_stub_and_the_entry_answers_with_ids() -> None:
    served = served_by(MANIFEST, Backend.STUB)
    assert [entry.source for entry in served.entries] == [
        "stub://router?field=intent&ids=billing,technical,legal",
        *("stub://billing", "stub://technical", "stub://legal", "stub://fallback"),
    ]
    assert served.entry("fallback").tier is Tier.STANDBY, "what was remote is loaded when it is needed"
    assert served_by(served, Backend.STUB) == served, "what is a stub stays as it is"


def test_every_model_is_the_embedded_one_with_its_persona() -> None:
    served = served_by(MANIFEST, Backend.POCKET)
    assert {entry.source for entry in served.entries} == {"pocket://"}
    assert {entry.persona for entry in served.entries} == {Persona.SUFFIX}
    words = [served.entry(id_).system_prompt for id_ in ("router", "billing", "fallback")]
    assert words == [ROUTER_PERSONA, BILLING_PERSONA, GENERAL_PERSONA]
    own = replace(MANIFEST, entries=(replace(MANIFEST.entries[0], system_prompt="Mine."), *MANIFEST.entries[1:]))
    assert served_by(own, Backend.POCKET).entry("router").system_prompt == "Mine."


def test_a_literal_map_sets_the_words_of_the_stub() -> None:
    text = SUPPORT.replace("routing:\n", "routing:\n  literal: refund=billing\n")
    served = served_by(parse(text), Backend.STUB)
    assert served.entries[0].source == "stub://router?field=intent&ids=refund,technical,legal"
    assert router_of(served).decide("intent=refund") == DispatchDecision("refund", "billing")
