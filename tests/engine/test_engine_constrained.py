"""Constrained requests in the step loop: jump-forward tokens, ends, and faults that affect only their request."""

from __future__ import annotations

import json

import pytest

from lockstep.core.request import FinishReason
from lockstep.core.step import StepEvents, StepPlan, StepResult
from lockstep.engine.engine import Engine
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import InvalidParameterError, RequestFailedError
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams
from lockstep.executors.stub import END_ID
from tests.engine.conftest import MakeEngine

WORDS = Constraint.choice(["billing", "technical", "none"])
FIXED = '{"status":"this is long and fixed","answer":'
DOCUMENT = Constraint.json_schema(
    {
        "type": "object",
        "properties": {"status": {"const": "this is long and fixed"}, "answer": {"type": "boolean"}},
        "required": ["status", "answer"],
        "additionalProperties": False,
    }
)


def answer(engine: Engine, constraint: Constraint, **params: object) -> RequestOutput:
    values = {"max_tokens": 100, "temperature": 0.0, "constraint": constraint, **params}
    request_id = engine.submit(GenerationRequest("hello", SamplingParams(**values)))  # type: ignore[arg-type]  # by name
    engine.run_until_idle()
    engine.scheduler.check()
    output = engine.result(request_id)
    assert output is not None
    return output


def test_an_answer_ends_without_an_end_token_if_nothing_can_follow(make_engine: MakeEngine) -> None:
    completion = answer(make_engine(), WORDS).completions[0]
    assert completion.text in ("billing", "technical", "none")
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, None)
    assert bytes(completion.token_ids).decode() == completion.text


def test_an_answer_ends_by_an_end_token_if_more_could_follow(make_engine: MakeEngine) -> None:
    """The stub's tokens are allowed, and then its end token is."""
    completion = answer(make_engine(), Constraint.regex(r"\[stub:alpha\] [a-z0-9= ]*")).completions[0]
    assert completion.text == "[stub:alpha] ok len=5 max=100"
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, END_ID)


def test_jump_forward_segments_are_published_with_the_sampled_token(make_engine: MakeEngine) -> None:
    engine = make_engine(max_forced_tokens=10)
    outputs: list[TokenOutput] = []
    params = SamplingParams(temperature=0.0, max_tokens=100, constraint=DOCUMENT)
    engine.submit(GenerationRequest("hello", params), outputs.append)
    engine.run_until_idle()
    text = "".join(output.text for output in outputs)
    assert json.loads(text)["status"] == "this is long and fixed"
    sizes = [len(output.token_ids) for output in outputs]
    assert sizes[: len(FIXED) // 10] == [10] * (len(FIXED) // 10)
    assert max(sizes) == 10
    assert sum(sizes) == len(text) == outputs[-1].request.num_output_tokens  # type: ignore[union-attr]  # the last has it
    assert all(bytes(output.token_ids).decode() == output.text for output in outputs)


def test_the_scheduler_receives_the_number_of_tokens_of_each_step(make_engine: MakeEngine) -> None:
    seen: list[tuple[StepPlan, StepResult, StepEvents]] = []
    engine = make_engine(
        observer=lambda plan, result, events: seen.append((plan, result, events)), max_forced_tokens=10
    )
    completion = answer(engine, DOCUMENT).completions[0]
    counts = [result.num_tokens[0] for _, result, _ in seen]
    assert sum(counts) == len(completion.token_ids)
    assert [events.num_tokens[0] for _, _, events in seen] == counts
    assert [plan.lengths[0] for plan, _, _ in seen[1:]] == counts[:-1]


def test_with_logprobs_tokens_are_sampled_one_by_one_and_equal(make_engine: MakeEngine) -> None:
    engine = make_engine()
    together, single = answer(engine, DOCUMENT), answer(engine, DOCUMENT, logprobs=2)
    assert together.completions[0].token_ids == single.completions[0].token_ids
    logprobs = single.completions[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == len(single.completions[0].token_ids)
    assert logprobs[0].logprob < -50, "log-probabilities are the model's own, before the constraint"


@pytest.mark.parametrize("max_tokens", [1, 7, 16, 17, 43, 44, 45])
def test_max_tokens_ends_inside_a_jump_forward_segment(make_engine: MakeEngine, max_tokens: int) -> None:
    completion = answer(make_engine(), DOCUMENT, max_tokens=max_tokens).completions[0]
    assert len(completion.token_ids) == max_tokens
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.text == FIXED[:max_tokens] if max_tokens < len(FIXED) else completion.text.startswith(FIXED)


def test_a_document_that_ends_at_max_tokens_has_stopped(make_engine: MakeEngine) -> None:
    completion = answer(make_engine(), Constraint.choice(["four"]), max_tokens=4).completions[0]
    assert (completion.text, completion.finish_reason) == ("four", FinishReason.STOP)


def test_stop_strings_and_stop_tokens_are_found_inside_a_jump_forward_segment(make_engine: MakeEngine) -> None:
    engine = make_engine()
    by_text = answer(engine, DOCUMENT, stop=("long",)).completions[0]
    assert (by_text.text, by_text.stop_reason) == ('{"status":"this is ', "long")
    assert len(by_text.token_ids) == len('{"status":"this is long')
    by_token = answer(engine, DOCUMENT, stop_token_ids=(ord("g"),)).completions[0]
    assert (by_token.text, by_token.stop_reason) == ('{"status":"this is lon', ord("g"))


def test_the_end_of_the_grammar_ends_before_min_tokens_and_after_end_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert answer(engine, Constraint.choice(["yes"]), min_tokens=20).text == "yes"
    repeated = Constraint.regex("a{2,9}")
    eager = {END_ID: 50.0}
    assert answer(engine, repeated, logit_bias=eager).text == "aa"
    assert answer(engine, repeated, logit_bias=eager, min_tokens=5).text == "aaaaa"
    past = answer(engine, repeated, logit_bias=eager, ignore_eos=True).completions[0]
    assert (past.text, past.finish_reason) == ("a" * 9, FinishReason.STOP)


def test_metrics_count_jump_forward_tokens(make_engine: MakeEngine) -> None:
    """One inter-token latency per token after the first, including jump-forward tokens."""
    engine = make_engine()
    outputs = [answer(engine, DOCUMENT), answer(engine, WORDS, n=3)]
    metrics = engine.metrics()
    num_tokens = sum(output.num_output_tokens for output in outputs)
    assert metrics.counters["generation_tokens"] == num_tokens
    assert metrics.histograms["inter_token_latency_seconds"].count == num_tokens - 4
    assert metrics.histograms["time_to_first_token_seconds"].count == 4


def test_siblings_have_separate_grammars(make_engine: MakeEngine) -> None:
    output = answer(make_engine(), Constraint.regex("[a-z]{12}"), n=4, temperature=9.0, seed=5)
    texts = [completion.text for completion in output.completions]
    assert len(set(texts)) == 4
    assert all(len(text) == 12 for text in texts)


def test_an_invalid_constraint_is_refused_at_submission(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidParameterError, match="unclosed") as caught:
        engine.submit(GenerationRequest("hello", SamplingParams(constraint=Constraint.regex("(["))))
    assert caught.value.param == "constraint"
    assert not engine.has_work


def test_a_failing_grammar_ends_only_its_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    explosive = Constraint.regex(r"(\w{1,1000}){1,1000}")
    params = [SamplingParams(temperature=9.0, seed=1, max_tokens=60, ignore_eos=True, constraint=explosive)]
    params += [SamplingParams(temperature=0.0, max_tokens=40), SamplingParams(max_tokens=40, constraint=WORDS)]
    ids = [engine.submit(GenerationRequest("hello", each)) for each in params]
    engine.run_until_idle()
    failed, free, chosen = (engine.result(request_id) for request_id in ids)
    assert failed is not None
    assert isinstance(failed.error, RequestFailedError)
    assert "the constraint cannot continue" in str(failed.error)
    assert failed.completions[0].finish_reason is FinishReason.ERROR
    assert free is not None
    assert free.text == "[stub:alpha] ok len=5 max=40"
    assert chosen is not None
    assert chosen.text in ("billing", "technical", "none")
    engine.scheduler.check()


def test_a_faulty_row_fails_even_if_the_constraint_masks_the_fault(make_engine: MakeEngine) -> None:
    output = answer(make_engine("stub://alpha?nan_every=2"), Constraint.regex("[a-z]{9}"))
    assert "produced NaN or infinity" in str(output.error)


def test_special_tokens_are_text_on_request(make_engine: MakeEngine) -> None:
    """An end token among them ends the answer, and its text is not part of it."""
    engine = make_engine()
    constraint = Constraint.lark('start: "a" <|user|> "b" <|system|>? "c"*')
    params = SamplingParams(max_tokens=50, temperature=0.0, constraint=constraint, logit_bias={END_ID: 100.0})
    texts = []
    for shown in ((), ("<|user|>", "<|end|>", "ordinary"), ("<|system|>",)):
        request_id = engine.submit(GenerationRequest("hello", params, shown_specials=shown))
        engine.run_until_idle()
        output = engine.result(request_id)
        assert output is not None
        assert output.completions[0].stop_reason == END_ID
        texts.append(output.text)
    assert texts == ["ab", "a<|user|>b", "ab"]


@pytest.mark.parametrize("shown", [("",), ("x",) * 65, (5,)])
def test_special_tokens_that_are_not_texts_are_refused(make_engine: MakeEngine, shown: tuple[str, ...]) -> None:
    with pytest.raises(InvalidParameterError, match="at most 64 texts") as caught:
        make_engine().submit(GenerationRequest("hello", shown_specials=shown))
    assert caught.value.param == "shown_specials"
