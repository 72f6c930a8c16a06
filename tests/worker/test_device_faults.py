"""Faults within a device worker: a defect ends what it concerns, everybody concerned is told, and nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from lockstep.engine.engine import Engine
from lockstep.errors import ExecutorError, QueueFullError, RequestFailedError
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.device import MAX_PREPARING
from lockstep.worker.messages import Abort, LoadFailed, Submit
from tests.worker.support import ENDLESS, Bench, ask, broken_steps, running


@pytest.fixture
def bench() -> Iterator[Bench]:
    with running() as bench:
        yield bench


def broken(*_: object, **__: object) -> NoReturn:
    raise ZeroDivisionError("a defect")


def test_a_worker_that_breaks_has_ended_every_request() -> None:
    """Also those of replicas that have nothing to do with it; the error reaches whoever runs the worker."""
    with running() as bench:
        for number, key in enumerate("ab"):
            bench.ready(key, "stub://alpha?step_ms=1")
            bench.tell(Submit(number, key, ask("x", ENDLESS)))
        with broken_steps():
            for number in range(2):
                answer = bench.answer(number).request
                assert answer is not None
                assert isinstance(answer.error, RequestFailedError)
                assert "the device worker failed: ZeroDivisionError('a defect')" in str(answer.error)
            bench.steps.join()
        failure, bench.failure = bench.failure, None
    assert isinstance(failure, ZeroDivisionError)


def test_an_interrupt_in_a_step_ends_its_requests_and_no_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.ready("a", "stub://alpha")
    executor = bench.worker.registry.present[0]["a"].engine.model.executor

    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(executor, "execute", interrupted)
        bench.tell(Submit(0, "a", ask("x")))
        answer = bench.answer(0).request
        assert answer is not None
        assert answer.error is not None
    bench.tell(Submit(1, "a", ask("x")))
    again = bench.answer(1).request
    assert again is not None
    assert again.text == "[stub:alpha] ok len=1 max=40"
    assert "interrupted in a step of a" in caplog.text
    assert bench.checked().fault == ""


def test_any_exception_of_a_library_is_a_failed_load(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("lockstep.worker.replica.load_model", broken)
        bench.load("a", "stub://alpha")
        error = bench.heard(LoadFailed).error
    assert isinstance(error, ExecutorError)
    assert str(error) == "stub://alpha: loading failed: ZeroDivisionError('a defect')"
    assert "loading stub://alpha failed" in caplog.text
    bench.ready("a", "stub://alpha")


@pytest.mark.parametrize("constraint", [None, Constraint.regex("x+")])
def test_request_that_cannot_be_prepared_does_not_affect_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, constraint: Constraint | None
) -> None:
    bench.ready("a", "stub://alpha")
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "submit", broken)
        bench.tell(Submit(0, "a", ask("x", SamplingParams(constraint=constraint))))
        error = bench.refusal(0)
    assert isinstance(error, RequestFailedError)
    assert "the request cannot be prepared: ZeroDivisionError('a defect')" in str(error)
    bench.tell(Submit(1, "a", ask("x")))
    assert bench.answer(1).request is not None


def test_grammars_that_are_being_prepared_are_bounded_and_can_be_aborted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storm of them fills its own queue, and nobody else's."""
    is_open, submit = threading.Event(), Engine.submit

    def late(engine: Engine, request: Any, **more: Any) -> int:
        if request.params.constraint is not None:
            is_open.wait()
        return submit(engine, request, **more)

    monkeypatch.setattr(Engine, "submit", late)
    bench.ready("a", "stub://alpha")
    for number in range(MAX_PREPARING + 2):
        constraint = Constraint.regex(f"a{{{min(number, 5) + 1}}}")
        bench.tell(Submit(number, "a", ask("x", SamplingParams(constraint=constraint, max_tokens=20))))
    for number in (MAX_PREPARING, MAX_PREPARING + 1):
        error = bench.refusal(number)
        assert isinstance(error, QueueFullError)
        assert f"{MAX_PREPARING} requests already wait for their grammars; try again later" in str(error)
    bench.tell(Submit(9_000, "a", ask("x")))
    assert bench.answer(9_000).request is not None, "one without a grammar waits for none"
    bench.tell(Abort("a", (2,)))
    is_open.set()
    for number in (0, 1):
        answer = bench.answer(number).request
        assert answer is not None
        assert answer.text == "a" * (number + 1)
    bench.tell(Submit(9_001, "a", ask("x")))
    assert bench.answer(9_001).request is not None
    assert bench.checked().fault == ""
