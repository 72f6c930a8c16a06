"""Whether a worker gets on with its work, judged from its last report alone."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.worker.messages import HealthReport


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """How long is too long."""

    step_s: float = 30.0
    """While requests wait, a step is to be completed within this time."""
    answer_s: float = 10.0
    """A worker is asked every second; it answers between two instructions, whatever step is running."""


def trouble(limits: HealthLimits, report: HealthReport | None, age_s: float) -> str:
    """What is wrong, in one sentence; empty: nothing.

    Args:
        report: the worker's last; None: it has not answered yet.
        age_s: since then, or since its start.
    """
    if age_s > limits.answer_s:
        return f"the device worker has not answered for {age_s:.0f} s"
    if report is not None and report.waiting_s > 0 and report.waiting_s + age_s > limits.step_s:
        return f"no step was completed for {report.waiting_s + age_s:.0f} s while requests wait"
    return ""
