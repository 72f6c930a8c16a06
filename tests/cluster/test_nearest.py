"""Dispatch by nearest examples: the decision, and the block of the manifest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import dump, parse
from lockstep.cluster.nearest import NearestRule, answer_with_vector, decide, embedding_of, message_of
from lockstep.cluster.state import ClusterOptions
from lockstep.core.request import FinishReason
from lockstep.engine.outputs import Completion, RequestOutput, Timings, TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.engine.scoring import cosine
from lockstep.errors import DeadlineError, InvalidParameterError, LockstepError, ManifestError, NumericsError
from lockstep.replay.trace import open_trace
from lockstep.worker.flight.entries import Dispatched
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.link import WorkerOptions
from tests.cluster.clusters import say
from tests.waiting import HANG_S

RULE = NearestRule("specialists", {"billing": ("refund", "charge"), "technical": ("error",)})
EAST, NORTH = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
MANIFEST = """
cluster: c
models:
  embedder: {source: 'pocket://', task: embed}
  specialists:
    - {id: billing, source: 'pocket://'}
    - {id: technical, source: 'pocket://'}
fallback: {source: 'pocket://', id: general}
routing:
  entry: embedder
  dispatch:
    kind: nearest
    set: specialists
    examples: {billing: [refund, charge], technical: error}
    min_score: 0.5
"""


def test_the_most_similar_example_decides() -> None:
    decision = decide(RULE, [EAST, NORTH, -EAST], NORTH * 3)
    assert decision.target == "billing"
    assert decision.scores == (("billing", 1.0), ("technical", 0.0))
    assert decide(RULE, [EAST, NORTH, -EAST], -EAST).target == "technical"


def test_a_score_has_the_bits_of_the_cosine_of_two_vectors() -> None:
    rng = np.random.default_rng(0)
    examples, message = list(rng.standard_normal((3, 100), np.float32)), rng.standard_normal(100, np.float32)
    examples[1][:] = 0
    expected = [cosine(example, message) for example in examples]
    assert decide(RULE, examples, message).scores == (("billing", max(expected[:2])), ("technical", expected[2]))


def test_of_equal_scores_the_first_model_wins() -> None:
    assert decide(RULE, [EAST, EAST, EAST], EAST).target == "billing"


@pytest.mark.parametrize(("min_score", "target"), [(None, "billing"), (0.6, "billing"), (0.8, None)])
def test_a_score_below_the_smallest_decides_nothing(min_score: float | None, target: str | None) -> None:
    rule = NearestRule(RULE.set, RULE.examples, min_score)
    assert decide(rule, [EAST, EAST, -EAST], EAST + NORTH).target == target


def test_the_last_message_of_the_user_is_embedded() -> None:
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "second"},
    ]
    call = GenerationRequest(Conversation(messages), session_id="s", tenant="t", deadline_s=2.0)
    question = embedding_of(message_of(call.prompt), "embedder", call)
    assert (question.prompt, question.pooling, question.model) == ("second", "model", "embedder")
    assert (question.session_id, question.tenant, question.deadline_s) == (None, "t", 2.0)
    assert message_of("plain text") == "plain text"


@pytest.mark.parametrize("prompt", [(1, 2), Conversation([{"role": "assistant", "content": "x"}])])
def test_a_prompt_without_text_of_a_user_cannot_be_routed(prompt: Conversation | tuple[int, ...]) -> None:
    with pytest.raises(InvalidParameterError):
        message_of(prompt)


def test_the_block_is_read_and_written() -> None:
    manifest = parse(MANIFEST)
    assert manifest.routing is not None
    assert manifest.routing.rule == NearestRule(RULE.set, RULE.examples, 0.5)
    assert manifest.targets == ("billing", "technical")
    assert parse(dump(manifest)) == manifest


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        ("kind: nearest", "kind: closest", "routing.dispatch.kind"),
        ("set: specialists", "set: others", "routing.dispatch.set"),
        ("technical: error", "legal: error", "routing.dispatch.examples.legal"),
        ("technical: error", "technical: []", "routing.dispatch.examples"),
        ("min_score: 0.5", "min_score: 2", "routing.dispatch.min_score"),
        ("entry: embedder", "entry: billing", "routing.entry"),
        ("{source: 'pocket://', task: embed}", "{remote: {base_url: 'http://127.0.0.1:1/v1'}}", "routing.entry"),
        ("fallback: {source: 'pocket://', id: general}\n", "", "routing.dispatch.min_score"),
        (
            "entry: embedder",
            "entry: embedder\n  dispatch_rule: 'embedder.output.x -> specialists.{x}'",
            "routing.dispatch",
        ),
        ("entry: embedder", "entry: embedder\n  literal: {a: billing}", "routing.literal"),
    ],
)
def test_a_wrong_block_names_its_place(before: str, after: str, where: str) -> None:
    with pytest.raises(ManifestError) as raised:
        parse(MANIFEST.replace(before, after))
    assert where in [problem.where for problem in raised.value.problems]


async def test_a_message_goes_to_the_model_of_its_nearest_example(tmp_path: Path) -> None:
    text = MANIFEST.replace("min_score: 0.5", "min_score: -1")
    worker = WorkerOptions("process", trace=TraceOptions(str(tmp_path)))
    cluster = Cluster(parse(text), ClusterOptions(worker=worker))
    await asyncio.wait_for(cluster.start(), HANG_S)
    try:
        first, again = await say(cluster, "refund", max_tokens=2), await say(cluster, "refund", max_tokens=2)
        other = await say(cluster, "error", max_tokens=2)
    finally:
        await asyncio.wait_for(cluster.close(), HANG_S)
    assert (first.model, other.model) == ("billing", "technical")
    [hop], [same] = first.hops, again.hops
    assert (hop.model, hop.completion, hop.intent, hop.target) == ("embedder", "", "billing", "specialists.billing")
    assert dict(hop.scores)["billing"] == pytest.approx(1)
    assert hop.scores == same.scores
    decided = [entry for entry in open_trace(tmp_path).entries() if isinstance(entry, Dispatched)]
    assert [(each.target, each.scores) for each in decided] == [
        ("billing", hop.scores),
        ("billing", hop.scores),
        ("technical", other.hops[0].scores),
    ]


def test_an_embedding_that_ended_early_is_an_error_and_no_decision() -> None:
    def ended(reason: FinishReason, error: LockstepError | None) -> TokenOutput:
        whole = RequestOutput(1, (5,), (Completion(0, "", (), reason, None, None),), 0, 0, Timings(0, None, 0), error)
        return TokenOutput(1, 0, (), "", reason, request=whole)

    failure = NumericsError("the model produced NaN")
    with pytest.raises(NumericsError):
        answer_with_vector([ended(FinishReason.ERROR, failure)])
    with pytest.raises(DeadlineError):
        answer_with_vector([ended(FinishReason.DEADLINE, None)])
