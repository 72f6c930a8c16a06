"""Deadlines are told apart, follow the engine's clock, and leave what came before them in the answer."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from lockstep.core.request import FinishReason
from lockstep.engine.deadlines import MAX_STALE, Deadlines, ManualClock
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import DeadlineError, InvalidParameterError, LockstepError, QueueDeadlineError
from lockstep.executors.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine


def ask(**fields: float) -> GenerationRequest:
    return GenerationRequest("hello", SamplingParams(max_tokens=100), **fields)  # type: ignore[arg-type]  # deadlines by name


def ended(output: RequestOutput | None) -> tuple[type[LockstepError] | None, FinishReason, str]:
    assert output is not None
    completion = output.completions[0]
    return (type(output.error) if output.error else None), completion.finish_reason, completion.text


def test_a_late_answer_has_its_text_so_far_and_the_error(make_engine: MakeEngine, clock: ManualClock) -> None:
    engine = make_engine()
    request_id = engine.submit(ask(deadline_s=1.0))
    for _ in range(3):
        engine.step()
    clock.advance(1.0)
    engine.run_until_idle()
    assert ended(engine.result(request_id)) == (DeadlineError, FinishReason.DEADLINE, "[st")


def test_a_queue_deadline_ends_only_those_that_never_ran(make_engine: MakeEngine, clock: ManualClock) -> None:
    engine = make_engine(max_num_seqs=1)
    ran, waited, patient = (engine.submit(ask(queue_deadline_s=limit)) for limit in (1.0, 1.0, 9.0))
    engine.step()
    clock.advance(1.0)
    engine.run_until_idle()
    assert ended(engine.result(ran))[:2] == (None, FinishReason.STOP)
    assert ended(engine.result(waited)) == (QueueDeadlineError, FinishReason.DEADLINE, "")
    assert ended(engine.result(patient))[:2] == (None, FinishReason.STOP)
    engine.scheduler.check()


def test_of_two_deadlines_at_once_the_queue_is_named(make_engine: MakeEngine, clock: ManualClock) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit(ask())
    both = engine.submit(ask(queue_deadline_s=1.0, deadline_s=1.0))
    engine.step()
    clock.advance(2.0)
    engine.run_until_idle()
    output = engine.result(both)
    assert output is not None
    assert type(output.error) is QueueDeadlineError
    assert output.error.param == "queue_deadline_s"
    assert "within 1 s" in str(output.error)
    assert type(pickle.loads(pickle.dumps(output.error))) is QueueDeadlineError


def test_the_deadline_of_an_answer_also_ends_one_that_waits(make_engine: MakeEngine, clock: ManualClock) -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit(ask())
    late = engine.submit(ask(deadline_s=1.0))
    engine.step()
    clock.advance(1.5)
    engine.run_until_idle()
    assert ended(engine.result(late)) == (DeadlineError, FinishReason.DEADLINE, "")


def test_a_callback_sees_the_error_on_the_last_output(make_engine: MakeEngine, clock: ManualClock) -> None:
    engine = make_engine()
    outputs: list[TokenOutput] = []
    engine.submit(ask(deadline_s=1.0), outputs.append)
    engine.step()
    clock.advance(1.0)
    engine.run_until_idle()
    assert [type(output.error) for output in outputs] == [type(None), DeadlineError]
    assert outputs[-1].finish_reason is FinishReason.DEADLINE


async def test_a_stream_raises_it_after_what_came_before(make_engine: MakeEngine, clock: ManualClock) -> None:
    engine = make_engine()
    stream = engine.stream(ask(deadline_s=1.0))
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    engine.step()
    assert (await first).text == "["
    clock.advance(1.0)
    engine.step()
    with pytest.raises(DeadlineError, match="not complete after 1 s"):
        await anext(stream)


@pytest.mark.parametrize("name", ["deadline_s", "queue_deadline_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_deadline_that_is_no_time_is_refused(make_engine: MakeEngine, name: str, value: float) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} is .*; it must be positive") as caught:
        make_engine().submit(ask(**{name: value}))
    assert caught.value.param == name


def test_deadlines_of_ended_requests_are_forgotten() -> None:
    deadlines = Deadlines()
    for request_id in range(MAX_STALE + 10):
        deadlines.add(request_id, 0.0, None, 5.0 + request_id)
        deadlines.forget_stale({0, 1})
    assert deadlines.next_s == 5.0
    left = [due.request_id for due in deadlines.pop_due(1e9)]
    assert left[:2] == [0, 1]
    assert len(left) < 10
