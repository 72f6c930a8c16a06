"""Step loop: every request gets one complete answer, and a fault affects only its request."""

from __future__ import annotations

import pytest

from lockstep.core.request import FinishReason
from lockstep.engine.deadlines import ManualClock
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import (
    ExecutorError,
    InvalidParameterError,
    NumericsError,
    PromptTooLongError,
    QueueFullError,
    RequestFailedError,
)
from lockstep.executors.sampling_params import SamplingParams
from lockstep.executors.stub import END_ID, VOCAB_SIZE
from tests.engine.conftest import MakeEngine

HELLO = "[stub:alpha] ok len=5 max=100"


def ask(prompt: str = "hello", **params: object) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParams(**{"max_tokens": 100, **params}))  # type: ignore[arg-type]  # by name


def one(result: RequestOutput | None) -> RequestOutput:
    assert result is not None
    return result


def test_an_answer_is_complete_and_can_be_read_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request_id = engine.submit(ask())
    assert not engine.is_complete(request_id)
    engine.run_until_idle()
    output = one(engine.result(request_id))
    assert output.text == HELLO
    assert output.completions[0].finish_reason is FinishReason.STOP
    assert output.completions[0].stop_reason == END_ID
    assert output.completions[0].token_ids[-1] == END_ID
    assert engine.is_complete(request_id)
    assert engine.result(request_id) is None
    engine.scheduler.check()


def test_streamed_pieces_concatenate_to_the_answer(make_engine: MakeEngine) -> None:
    engine = make_engine()
    outputs: list[TokenOutput] = []
    engine.submit(ask(), outputs.append)
    engine.run_until_idle()
    assert "".join(output.text for output in outputs) == HELLO
    assert [output.is_final for output in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1].request
    assert last is not None
    assert last.text == HELLO
    assert last.num_output_tokens == sum(len(output.token_ids) for output in outputs)


def test_many_requests_share_steps_and_keep_their_own_answers(make_engine: MakeEngine) -> None:
    sizes: list[int] = []
    engine = make_engine(observer=lambda plan, result, events: sizes.append(plan.num_sequences))
    prompts = ["x" * length for length in range(1, 40)]
    ids = [engine.submit(ask(prompt)) for prompt in prompts]
    engine.run_until_idle()
    texts = [one(engine.result(request_id)).text for request_id in ids]
    assert texts == [f"[stub:alpha] ok len={len(prompt)} max=100" for prompt in prompts]
    assert max(sizes) > 10


def test_max_tokens_ends_with_length_and_counts_exactly(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request_id = engine.submit(ask(max_tokens=4))
    engine.run_until_idle()
    completion = one(engine.result(request_id)).completions[0]
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == 4
    assert completion.text == "[stu"


def test_a_stop_string_ends_the_text_before_it_and_never_leaks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    pieces: list[TokenOutput] = []
    engine.submit(ask(stop=("k len", "never")), pieces.append)
    engine.run_until_idle()
    last = pieces[-1].request
    assert last is not None
    completion = last.completions[0]
    assert (completion.text, completion.stop_reason) == ("[stub:alpha] o", "k len")
    assert "".join(piece.text for piece in pieces) == completion.text


def test_stop_token_ids_and_min_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.submit(ask(stop_token_ids=(ord(":"),)))
    late = engine.submit(ask(stop=("[", "o"), min_tokens=5))
    engine.run_until_idle()
    assert one(engine.result(first)).completions[0].stop_reason == ord(":")
    assert one(engine.result(late)).text == "[stub:alpha] "


def test_ignore_eos_continues_until_length(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request_id = engine.submit(ask(ignore_eos=True, max_tokens=50))
    engine.run_until_idle()
    completion = one(engine.result(request_id)).completions[0]
    assert (len(completion.token_ids), completion.finish_reason) == (50, FinishReason.LENGTH)


def test_siblings_are_ordered_by_index(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request_id = engine.submit(ask(n=3))
    engine.run_until_idle()
    output = one(engine.result(request_id))
    assert [completion.index for completion in output.completions] == [0, 1, 2]
    assert {completion.text for completion in output.completions} == {HELLO}


def test_only_the_last_output_of_siblings_that_end_in_one_step_has_the_whole_answer(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    outputs: list[TokenOutput] = []
    engine.submit(GenerationRequest("alike", SamplingParams(n=3, max_tokens=4, ignore_eos=True)), outputs.append)
    engine.run_until_idle()
    assert [output.request is not None for output in outputs].count(True) == 1
    answer = outputs[-1].request
    assert answer is not None
    assert sorted(output.index for output in outputs if output.is_final) == [0, 1, 2]
    for completion in answer.completions:
        assert "".join(output.text for output in outputs if output.index == completion.index) == completion.text


def test_logprobs_come_with_each_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request_id = engine.submit(ask(logprobs=2, max_tokens=4))
    engine.run_until_idle()
    completion = one(engine.result(request_id)).completions[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 4
    assert [entry.top[0][0] for entry in completion.logprobs] == list(completion.token_ids)


def test_abort_keeps_the_tokens_so_far_and_affects_no_other_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    aborted, other = engine.submit(ask()), engine.submit(ask("world!"))
    for _ in range(4):
        engine.step()
    engine.abort(aborted)
    engine.abort(12345)
    engine.run_until_idle()
    completion = one(engine.result(aborted)).completions[0]
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.text == HELLO[:4]
    assert one(engine.result(other)).text == "[stub:alpha] ok len=6 max=100"
    engine.scheduler.check()


def test_a_deadline_ends_a_request_that_is_late(make_engine: MakeEngine, clock: ManualClock) -> None:
    engine = make_engine()
    late = engine.submit(GenerationRequest("hello", SamplingParams(max_tokens=100), deadline_s=1.0))
    in_time = engine.submit(GenerationRequest("hello", SamplingParams(max_tokens=100), deadline_s=2.0))
    engine.step()
    clock.advance(1.5)
    engine.run_until_idle()
    assert one(engine.result(late)).completions[0].finish_reason is FinishReason.DEADLINE
    assert one(engine.result(in_time)).text == HELLO


def test_a_failing_step_fails_its_requests_with_the_reason_and_the_engine_continues(make_engine: MakeEngine) -> None:
    engine = make_engine("stub://alpha?fail_every=5")
    failed = [engine.submit(ask()), engine.submit(ask())]
    while not all(engine.is_complete(request_id) for request_id in failed):
        engine.step()
    for request_id in failed:
        output = one(engine.result(request_id))
        assert output.completions[0].finish_reason is FinishReason.ERROR
        assert isinstance(output.error, ExecutorError)
        assert "fail_every=5" in str(output.error)
    engine.scheduler.check()
    after = engine.submit(ask(max_tokens=3))
    engine.run_until_idle()
    assert one(engine.result(after)).text == "[st"


def test_a_row_of_nan_fails_only_its_request(make_engine: MakeEngine) -> None:
    engine = make_engine("stub://alpha?nan_every=7")
    ids = [engine.submit(ask(max_tokens=3)) for _ in range(3)]
    engine.run_until_idle()
    outputs = [one(engine.result(request_id)) for request_id in ids]
    errors = [output.error for output in outputs]
    assert isinstance(errors[0], NumericsError)
    assert errors[1:] == [None, None]
    assert [output.completions[0].finish_reason.value for output in outputs] == ["error", "length", "length"]
    engine.scheduler.check()


def test_a_raising_callback_ends_only_its_own_request(make_engine: MakeEngine) -> None:
    engine = make_engine()

    def explode(output: TokenOutput) -> None:
        raise ValueError("the caller's fault")

    bad = engine.submit(ask(), explode)
    good = engine.submit(ask())
    engine.run_until_idle()
    assert engine.is_complete(bad)
    assert one(engine.result(good)).text == HELLO
    engine.scheduler.check()


def test_a_refused_request_is_not_queued(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=64)
    with pytest.raises(PromptTooLongError, match="at most 63"):
        engine.submit(ask("x" * 64, max_tokens=None))
    with pytest.raises(InvalidParameterError, match="max_tokens"):
        engine.submit(ask("x" * 60, max_tokens=5))
    with pytest.raises(InvalidParameterError, match="not in the vocabulary"):
        engine.submit(GenerationRequest([1, 2, VOCAB_SIZE]))
    with pytest.raises(InvalidParameterError, match="empty"):
        engine.submit(ask(""))
    with pytest.raises(InvalidParameterError, match="deadline_s"):
        engine.submit(GenerationRequest("x", deadline_s=-1.0))
    assert not engine.has_work


def test_a_full_queue_refuses_requests_and_serves_the_queued_ones(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_queued_reqs=2)
    ids = [engine.submit(ask(max_tokens=2)) for _ in range(3)]
    engine.run_until_idle()
    outputs = [one(engine.result(request_id)) for request_id in ids]
    assert [type(output.error) for output in outputs] == [type(None), type(None), QueueFullError]


def test_a_rejected_request_whose_callback_raises_affects_no_other_request(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_queued_reqs=1)

    def explode(output: TokenOutput) -> None:
        raise ValueError("the caller's fault")

    good = engine.submit(ask(max_tokens=2))
    engine.submit(ask(max_tokens=2), explode)
    engine.run_until_idle()
    assert one(engine.result(good)).text == "[s"


def test_siblings_are_possible_with_the_largest_seed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request_id = engine.submit(ask(n=2, seed=2**64 - 1, temperature=1.0))
    engine.run_until_idle()
    assert one(engine.result(request_id)).error is None


def test_unread_results_are_bounded(make_engine: MakeEngine) -> None:
    engine = make_engine(max_finished=2)
    ids = [engine.submit(ask(max_tokens=1)) for _ in range(4)]
    engine.run_until_idle()
    assert [engine.result(request_id) is not None for request_id in ids] == [False, False, True, True]


def test_a_repeated_prompt_is_cached(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = "x" * 100
    cold, warm, salted = (
        engine.submit(ask(prompt, max_tokens=2)),
        None,
        GenerationRequest(prompt, SamplingParams(max_tokens=2), cache_salt="other"),
    )
    engine.run_until_idle()
    warm = engine.submit(ask(prompt, max_tokens=2))
    other = engine.submit(salted)
    engine.run_until_idle()
    cached = [one(engine.result(request_id)).num_cached_tokens for request_id in (cold, warm, other)]
    assert cached == [0, 96, 0]


def test_metrics_count_every_token_exactly(make_engine: MakeEngine) -> None:
    """For R requests of T tokens: R*(T-1) inter-token latencies, R*(prompt+T) tokens in steps."""
    engine = make_engine()
    requests, tokens = 5, 9
    for _ in range(requests):
        engine.submit(ask(max_tokens=tokens, ignore_eos=True))
        engine.run_until_idle()
    snapshot = engine.metrics()
    histograms = snapshot.histograms
    assert histograms["inter_token_latency_seconds"].count == requests * (tokens - 1)
    assert histograms["iteration_tokens_total"].sum == requests * (5 + tokens)
    assert histograms["iteration_tokens_total"].count == requests * tokens
    assert histograms["time_to_first_token_seconds"].count == requests
    assert histograms["e2e_request_latency_seconds"].count == requests
    assert snapshot.counters["generation_tokens"] == requests * tokens
    assert snapshot.counters["prompt_tokens"] == requests * 5
    assert snapshot.finished == {"length": requests}


def test_gauges_return_to_zero_after_everything_is_aborted(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=16)
    ids = [engine.submit(ask("x" * 60)) for _ in range(12)]
    for _ in range(3):
        engine.step()
    busy = engine.metrics().gauges
    assert busy["num_requests_running"] > 0
    assert busy["num_requests_waiting"] > 0
    assert busy["kv_cache_usage_perc"] > 0
    for request_id in ids:
        engine.abort(request_id)
    engine.step()
    assert not any(engine.metrics().gauges.values())
    engine.scheduler.check()


def test_an_internal_fault_is_reported_in_the_error(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    request_id = engine.submit(ask())

    def broken(batch: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(engine.model.executor, "execute", broken)
    engine.run_until_idle()
    error = one(engine.result(request_id)).error
    assert isinstance(error, RequestFailedError)
    assert "boom" in str(error)
