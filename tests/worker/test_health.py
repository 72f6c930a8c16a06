"""Whether a worker gets on, judged from its last report."""

from __future__ import annotations

from lockstep.worker.health import HealthLimits, trouble
from lockstep.worker.messages import HealthReport

LIMITS = HealthLimits(step_s=30.0, answer_s=10.0)


def test_an_idle_worker_may_be_silent_between_two_questions() -> None:
    assert trouble(LIMITS, None, 0.5) == ""
    assert trouble(LIMITS, HealthReport(0, 0.0, 0, 0), 9.0) == ""


def test_a_worker_that_does_not_answer_is_not_ready() -> None:
    assert "not answered for 11 s" in trouble(LIMITS, HealthReport(0, 0.0, 0, 0), 11.0)
    assert "not answered for 11 s" in trouble(LIMITS, None, 11.0)


def test_a_step_that_takes_too_long_while_requests_wait_is_not_ready() -> None:
    assert trouble(LIMITS, HealthReport(0, 29.0, 1, 0), 0.5) == ""
    assert "no step was completed for 31 s" in trouble(LIMITS, HealthReport(0, 29.0, 1, 0), 2.0)
