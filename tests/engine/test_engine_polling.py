"""Engines that are stepped by their caller: outputs of each step, unread answers, counts."""

from __future__ import annotations

from lockstep.core.request import FinishReason
from lockstep.engine.deadlines import ManualClock
from lockstep.engine.outputs import TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import QueueFullError
from lockstep.executors.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine


def ask(prompt: str = "hello", max_tokens: int = 100, n: int = 1) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParams(max_tokens=max_tokens, n=n))


def test_a_step_returns_the_outputs_of_every_request(make_engine: MakeEngine) -> None:
    """The same outputs as callbacks get, in the same order, and those of requests without a callback."""
    engine = make_engine()
    told: list[TokenOutput] = []
    asked = engine.submit(ask(max_tokens=5), told.append)
    polled = engine.submit(ask("world!", n=2))
    steps = []
    while engine.has_work:
        step = engine.step()
        assert step.plan is not None
        assert len(step.outputs) == step.plan.num_samples
        steps.append(step.outputs)
    outputs = [output for step in steps for output in step]
    assert [output for output in outputs if output.request_id == asked] == told
    of_polled = [output for output in outputs if output.request_id == polled]
    result = engine.result(polled)
    assert result is not None
    assert [output.request for output in of_polled if output.request is not None] == [result]
    for completion in result.completions:
        mine = [output for output in of_polled if output.index == completion.index]
        assert tuple(token for output in mine for token in output.token_ids) == completion.token_ids
        assert "".join(output.text for output in mine) == completion.text
        assert mine[-1].finish_reason is completion.finish_reason
    empty = engine.step()
    assert (empty.plan, empty.outputs) == (None, [])


def test_a_step_returns_requests_that_it_ended_without_computing(make_engine: MakeEngine, clock: ManualClock) -> None:
    engine = make_engine(max_num_queued_reqs=2)
    aborted = engine.submit(ask())
    late = engine.submit(GenerationRequest("hello", SamplingParams(), deadline_s=1.0))
    refused = engine.submit(ask())
    engine.abort(aborted)
    clock.advance(2.0)
    step = engine.step()
    assert step.plan is None
    ended = {output.request_id: output for output in step.outputs}
    reasons = {request_id: output.finish_reason for request_id, output in ended.items()}
    assert reasons == {
        aborted: FinishReason.ABORT,
        late: FinishReason.DEADLINE,
        refused: FinishReason.ERROR,
    }
    assert isinstance(ended[refused].error, QueueFullError)
    assert all(output.request is not None for output in ended.values())


def test_a_failing_step_returns_its_failed_requests(make_engine: MakeEngine) -> None:
    engine = make_engine("stub://alpha?fail_every=2")
    ids = [engine.submit(ask()), engine.submit(ask())]
    engine.step()
    failed = engine.step()
    assert failed.plan is not None
    assert [(output.request_id, output.finish_reason) for output in failed.outputs] == [
        (request_id, FinishReason.ERROR) for request_id in ids
    ]


def test_finished_answers_are_drained_in_the_order_in_which_they_ended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    long, short = engine.submit(ask(max_tokens=9)), engine.submit(ask(max_tokens=2))
    engine.submit(ask(max_tokens=2), lambda output: None)
    engine.run_until_idle()
    assert [output.request_id for output in engine.drain_finished()] == [short, long]
    assert engine.drain_finished() == ()
    assert engine.result(long) is None


def test_counts_of_running_waiting_and_open_requests(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=3)
    engine.submit(ask(n=2, max_tokens=2))
    for _ in range(3):
        engine.submit(ask(max_tokens=2))
    assert (engine.num_open, engine.num_running, engine.num_waiting) == (4, 0, 4)
    engine.step()
    assert (engine.num_open, engine.num_running, engine.num_waiting) == (4, 3, 2)
    assert engine.scheduler.num_unfinished == 5
    engine.run_until_idle()
    assert (engine.num_open, engine.num_running, engine.num_waiting) == (0, 0, 0)
