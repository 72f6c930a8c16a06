"""Which steps are reported: one at once, then as seldom as was asked, and none that nobody asked for."""

from __future__ import annotations

from lockstep.core.step import StepPlan
from lockstep.worker.step_loop import MAX_STEP_REPORTS_PER_S, StepSampler


def plan_of(step: int) -> StepPlan:
    return StepPlan(step, (), (), (), (), (1, 2), (0, 7), (4, 1), ((1,), (2,)), (False, True))


def reported(sampler: StepSampler, times_s: list[float], replica: str = "a") -> list[tuple[int, int]]:
    """Numbers of the steps that are reported, and how many each stands for beside itself."""
    reports = [sampler.report(replica, plan_of(step), 0.01, now_s) for step, now_s in enumerate(times_s)]
    return [(report.step, report.num_unreported) for report in reports if report is not None]


def test_nothing_is_reported_unless_steps_are_watched() -> None:
    sampler = StepSampler()
    assert reported(sampler, [0.0, 10.0]) == []
    sampler.watch(1.0)
    assert reported(sampler, [0.0, 0.5, 1.0, 1.5, 1.75, 2.0]) == [(0, 0), (2, 1), (5, 2)]
    sampler.watch(0.0)
    assert reported(sampler, [9.0, 20.0]) == []
    assert not sampler.is_watched


def test_the_report_rate_is_bounded_for_any_requested_rate() -> None:
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


def test_a_report_has_the_counts_of_its_batch() -> None:
    sampler = StepSampler()
    sampler.watch(1.0)
    report = sampler.report("a", plan_of(3), 0.25, 0.0)
    assert report is not None
    assert (report.num_sequences, report.num_tokens, report.num_samples, report.duration_s) == (2, 5, 1, 0.25)
