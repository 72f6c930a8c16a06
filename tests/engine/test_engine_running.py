"""`Engine.run` on a thread: it waits without polling, ends on request, and completes every request.

Its periodic check for work is longer than any test waits, so all progress in these tests comes from wake-ups.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest

from lockstep.core.request import FinishReason
from lockstep.engine.deadlines import ManualClock
from lockstep.engine.engine import Engine
from lockstep.engine.outputs import RequestOutput, StepOutputs, TokenOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import RequestFailedError, UsageError
from lockstep.executors.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine
from tests.waiting import ENDLESS_MS, HANG_S, Gate, until

SLOW = "stub://alpha?step_ms=20"
ENDLESS = SamplingParams(max_tokens=8_000, ignore_eos=True)
"""Sampling of a slow request that runs for more than two minutes."""


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    """Engines that only go on if something wakes them."""
    return partial(make_engine, idle_wait_s=100 * HANG_S)


class Running:
    """An engine on a thread, with the result of its run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.engine.run()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self.thread.join(HANG_S)
        assert not self.thread.is_alive(), "the run ends"


@contextmanager
def running(engine: Engine) -> Iterator[Running]:
    run = Running(engine)
    try:
        yield run
    finally:
        engine.stop()
        run.join()
    assert run.error is None


def answer_of(outputs: SimpleQueue[TokenOutput]) -> RequestOutput:
    """Last output that a request's callback gets."""
    while (request := outputs.get(timeout=HANG_S).request) is None:
        pass
    return request


def ask(engine: Engine, prompt: str, params: SamplingParams | None = None, **more: Any) -> SimpleQueue[TokenOutput]:
    outputs: SimpleQueue[TokenOutput] = SimpleQueue()
    request = GenerationRequest(prompt, params or SamplingParams(max_tokens=40), **more)
    engine.submit(request, outputs.put)
    return outputs


def test_the_loop_waits_for_work(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two requests it is idle: one check, then it waits until it is woken."""
    engine = make_engine()
    num_empty = num_waits = 0
    step, wait = engine.step, engine.wait

    def counted_step() -> StepOutputs:
        nonlocal num_empty
        did = step()
        num_empty += did.plan is None
        return did

    def counted_wait(timeout_s: float) -> None:
        nonlocal num_waits
        num_waits += 1
        wait(timeout_s)

    monkeypatch.setattr(engine, "step", counted_step)
    monkeypatch.setattr(engine, "wait", counted_wait)
    with running(engine):
        for number in range(1, 6):
            until(lambda: num_waits > 0 and not engine.has_work)
            assert answer_of(ask(engine, "x" * number)).text == f"[stub:alpha] ok len={number} max=40"
    assert num_empty <= num_waits + 1, "an empty step is followed by a wait"
    assert num_waits <= 12, "it was woken by requests and by the end, and by nothing else"


def test_requests_from_many_threads_are_answered(make_engine: MakeEngine) -> None:
    """When a request is complete, its result is available."""
    engine = make_engine()

    def user(number: int) -> list[str]:
        texts = []
        for length in range(1, 20):
            request_id = engine.submit(GenerationRequest("x" * (number + length), SamplingParams(max_tokens=40)))
            until(lambda request_id=request_id: engine.is_complete(request_id))  # type: ignore[misc]  # bound now
            output = engine.result(request_id)
            assert output is not None
            texts.append(output.text)
        return texts

    with running(engine), ThreadPoolExecutor(8) as users:
        answers = list(users.map(user, range(8)))
    for number, texts in enumerate(answers):
        assert texts == [f"[stub:alpha] ok len={number + length} max=40" for length in range(1, 20)]
    engine.scheduler.check()


def test_stopping_ends_open_requests_and_accepts_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(SLOW)
    with running(engine) as run:
        outputs = ask(engine, "hello", ENDLESS)
        outputs.get(timeout=HANG_S)
        kept = engine.submit(GenerationRequest("hello", ENDLESS))
        engine.stop()
        run.join()
        assert answer_of(outputs).completions[0].finish_reason is FinishReason.ABORT
        result = engine.result(kept)
        assert result is not None
        assert (engine.num_open, engine.has_work) == (0, False)
        with pytest.raises(UsageError, match="this engine was stopped and takes no requests"):
            engine.submit(GenerationRequest("hello"))
        assert engine.num_open == 0
        engine.stop()
        engine.run()
    engine.scheduler.check()


def test_stopping_during_a_step_ends_after_it(make_engine: MakeEngine, gate: Gate) -> None:
    engine = make_engine(f"stub://alpha?step_ms={ENDLESS_MS}")
    with running(engine) as run:
        outputs = ask(engine, "hello", ENDLESS)
        until(lambda: gate.num_held == 1, "a step is under way")
        engine.stop()
        assert run.thread.is_alive(), "who stops does not wait"
        gate.open()
        run.join()
        assert answer_of(outputs).num_output_tokens == 1


def test_a_run_that_was_stopped_before_its_start_ends(make_engine: MakeEngine) -> None:
    engine = make_engine()
    outputs = ask(engine, "hello")
    engine.stop()
    engine.run()
    assert answer_of(outputs).completions[0].finish_reason is FinishReason.ABORT


def test_a_callback_may_stop_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(SLOW)
    run = Running(engine)
    engine.submit(GenerationRequest("hello", ENDLESS), lambda output: engine.stop())
    run.join()
    assert run.error is None
    assert engine.num_open == 0


def test_each_request_submitted_during_a_stop_is_rejected_or_finished(make_engine: MakeEngine) -> None:
    """No request is accepted and lost."""
    for _ in range(20):
        engine = make_engine()
        taken: list[SimpleQueue[TokenOutput]] = []
        begun = threading.Barrier(4)

        def user(engine: Engine = engine, taken: list[Any] = taken, begun: threading.Barrier = begun) -> None:
            begun.wait(HANG_S)
            while True:
                try:
                    taken.append(ask(engine, "hello", SamplingParams(max_tokens=2)))
                except UsageError:
                    return

        with ThreadPoolExecutor(3) as users:
            asked = [users.submit(user) for _ in range(3)]
            run = Running(engine)
            begun.wait(HANG_S)
            until(lambda taken=taken: len(taken) > 3)  # type: ignore[misc]  # bound now
            engine.stop()
            run.join()
            for each in asked:
                each.result(HANG_S)
        for outputs in taken:
            answer_of(outputs)
        assert (engine.num_open, engine.has_work) == (0, False)


def test_a_broken_loop_fails_all_requests_and_raises(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(SLOW)
    outputs = ask(engine, "hello", ENDLESS)
    kept = engine.submit(GenerationRequest("hello", ENDLESS))
    engine.step()

    def broken() -> None:
        raise AssertionError("conservation violated")

    monkeypatch.setattr(engine.scheduler, "schedule", broken)
    run = Running(engine)
    run.join()
    assert isinstance(run.error, AssertionError)
    results = answer_of(outputs), engine.result(kept)
    for result in results:
        assert result is not None
        assert isinstance(result.error, RequestFailedError)
        assert "conservation violated" in str(result.error)
    with pytest.raises(UsageError, match=r"this engine failed .*conservation violated"):
        engine.submit(GenerationRequest("hello"))


def test_a_step_that_fails_ends_its_requests_and_not_the_run(make_engine: MakeEngine) -> None:
    engine = make_engine("stub://alpha?fail_every=4")
    with running(engine):
        failed = answer_of(ask(engine, "hello"))
        assert "fail_every=4" in str(failed.error)
        assert answer_of(ask(engine, "hello", SamplingParams(max_tokens=2))).text == "[s"


def test_an_interrupt_from_a_callback_does_not_end_the_thread(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()

    def leave(output: TokenOutput) -> None:
        raise SystemExit(3)

    with running(engine):
        engine.submit(GenerationRequest("hello"), leave)
        assert answer_of(ask(engine, "hello")).text == "[stub:alpha] ok len=5 max=40"
    assert "interrupted in the engine's thread" in caplog.text


def test_an_interrupt_on_the_main_thread_is_raised(make_engine: MakeEngine) -> None:
    """As for Ctrl-C; other waiting threads get an error."""
    engine = make_engine(SLOW)
    other = ask(engine, "hello", ENDLESS)

    def leave(output: TokenOutput) -> None:
        raise KeyboardInterrupt

    engine.submit(GenerationRequest("hello"), leave)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert isinstance(answer_of(other).error, RequestFailedError)
    assert engine.is_stopped


def test_steps_run_on_one_thread(make_engine: MakeEngine) -> None:
    """Only one loop may run on that thread."""
    engine = make_engine()
    with running(engine):
        refused: SimpleQueue[UsageError] = SimpleQueue()

        def run_again(output: TokenOutput) -> None:
            try:
                engine.run()
            except UsageError as error:
                refused.put(error)

        engine.submit(GenerationRequest("hello", SamplingParams(max_tokens=1)), run_again)
        assert "cannot call run() again" in str(refused.get(timeout=HANG_S))
        ask(engine, "hello").get(timeout=HANG_S)
        for another in (engine.step, engine.run):
            with pytest.raises(UsageError, match="another thread runs this engine's steps"):
                another()
        assert answer_of(ask(engine, "hello")).text == "[stub:alpha] ok len=5 max=40"


def test_a_request_that_waits_for_a_session_begins_when_the_session_is_idle(
    make_engine: MakeEngine, clock: ManualClock
) -> None:
    """This also holds if a deadline makes room after the check, without waking the engine."""
    engine = make_engine(SLOW)
    with running(engine):
        busy = ask(engine, "hello", ENDLESS, session_id="a", max_active_sessions=1, deadline_s=5.0)
        busy.get(timeout=HANG_S)
        waiting = ask(engine, "hello", session_id="b", max_active_sessions=1)
        until(lambda: engine.num_waiting == 1 and engine.num_running == 1)
        clock.advance(10.0)
        assert answer_of(busy).completions[0].finish_reason is FinishReason.DEADLINE
        assert answer_of(waiting).text == "[stub:alpha] ok len=5 max=40"
