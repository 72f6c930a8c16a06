"""Steps of a device: which are reported, and what becomes of everything when one breaks."""

from __future__ import annotations

import pytest

from lockstep.core.step import StepPlan
from lockstep.engine.outputs import StepOutputs
from lockstep.errors import RequestFailedError
from lockstep.worker.device import DeviceWorker
from lockstep.worker.messages import Event, Load, Loaded, Outputs, Submit, TrialOptions, Unload, Unloaded
from lockstep.worker.step_loop import MAX_STEP_REPORTS_PER_S, StepSampler
from tests.waiting import until
from tests.worker.support import ENDLESS, SHORT, SMALL, Bench, ask, running


def plan_of(step: int) -> StepPlan:
    return StepPlan(step, (), (), (), (), (1, 2), (0, 7), (4, 1), ((1,), (2,)), (False, True))


def reported(sampler: StepSampler, times_s: list[float], replica: str = "a") -> list[tuple[int, int]]:
    """Numbers of the steps that are reported, and how many each stands for beside itself."""
    reports = [sampler.report(replica, plan_of(step), 0.01, now_s) for step, now_s in enumerate(times_s)]
    return [(report.step, report.num_unreported) for report in reports if report is not None]


def test_nothing_is_reported_unless_asked_for() -> None:
    sampler = StepSampler()
    assert reported(sampler, [0.0, 10.0]) == []
    sampler.watch(1.0)
    assert reported(sampler, [0.0, 0.5, 1.0, 1.5, 1.75, 2.0]) == [(0, 0), (2, 1), (5, 2)]
    sampler.watch(0.0)
    assert reported(sampler, [9.0, 20.0]) == []
    assert not sampler.is_watched


def test_the_rate_is_bounded_whatever_is_asked_for() -> None:
    sampler = StepSampler()
    sampler.watch(1e12)
    assert len(reported(sampler, [number / 1000 for number in range(1000)])) <= MAX_STEP_REPORTS_PER_S + 1


def test_each_replica_has_its_own_turn_and_is_forgotten_when_unloaded() -> None:
    sampler = StepSampler()
    sampler.watch(1.0)
    assert reported(sampler, [0.0, 0.1], "a") == reported(sampler, [0.0, 0.1], "b") == [(0, 0)]
    sampler.forget("a")
    assert reported(sampler, [0.2], "a") == [(0, 0)]
    assert reported(sampler, [0.2], "b") == []


def test_a_report_says_what_was_batched() -> None:
    sampler = StepSampler()
    sampler.watch(1.0)
    report = sampler.report("a", plan_of(3), 0.25, 0.0)
    assert report is not None
    assert (report.num_sequences, report.num_tokens, report.num_samples, report.duration_s) == (2, 5, 1, 0.25)


def test_a_defect_of_a_step_ends_every_request_with_it_and_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the other replicas: nobody steps them any more."""
    events: list[Event] = []
    worker = DeviceWorker(events.append)
    for key in "ab":
        worker.handle(Load(key, f"stub://{key}", SMALL, TrialOptions(enabled=False)))
    until(lambda: sum(isinstance(event, Loaded) for event in events) == 2, "both are loaded")
    for number, key in enumerate("ab"):
        worker.handle(Submit(number, key, ask("x", ENDLESS)))

    def broken() -> StepOutputs:
        raise RuntimeError("a defect")

    monkeypatch.setattr(worker._registry.present.replicas["a"].engine, "step", broken)
    with pytest.raises(RuntimeError, match="a defect"):
        worker.run()
    endings = {
        output.request_id: output.error
        for event in events
        if isinstance(event, Outputs)
        for output in event.outputs
        if output.error is not None
    }
    assert endings.keys() == {0, 1}
    assert all(isinstance(error, RequestFailedError) for error in endings.values())
    assert "the device worker broke: RuntimeError('a defect')" in str(endings[1])
    assert worker._registry.present.replicas == {}
    told = len(events)
    worker.handle(Submit(2, "a", ask("x")))
    assert len(events) == told, "a worker that has ended takes nothing"


def test_an_interrupt_in_a_step_ends_neither_the_loop_nor_a_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of Ctrl-C out of a library: the step is over, and nobody above this thread can be interrupted."""
    interrupts = [KeyboardInterrupt()]

    def interrupted(bench: Bench) -> None:
        engine = bench.worker._registry.present.replicas["a"].engine
        step = engine.step

        def stepped() -> StepOutputs:
            outputs = step()
            if interrupts:
                raise interrupts.pop()
            return outputs

        monkeypatch.setattr(engine, "step", stepped)

    with running() as bench:
        bench.ready("a", "stub://alpha")
        interrupted(bench)
        bench.tell(Submit(1, "a", ask("x", SHORT)))
        assert bench.answer(1).error is None
        assert not interrupts
        assert "an interrupt in a step of a" in caplog.text


def test_a_replica_that_is_not_there_is_unloaded_all_the_same() -> None:
    with running() as bench:
        bench.tell(Unload("nobody"))
        assert bench.heard(Unloaded).replica == "nobody"
