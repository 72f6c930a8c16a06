"""Now and then a step in figures, for whoever watches a device at work: a sample at a bounded rate, off until asked."""

from __future__ import annotations

import math

import msgspec

from lockstep.core.step import StepPlan

MAX_STEP_REPORTS_PER_S = 50.0
"""Of each replica, whatever is asked for."""


class StepReport(msgspec.Struct, frozen=True, array_like=True):
    """What one step batched, and how long it took."""

    replica: str
    step: int
    """Its number in its replica."""
    num_sequences: int
    num_tokens: int
    """Computed by it, of prompts and of answers."""
    num_samples: int
    """Sequences that got a token."""
    duration_s: float
    num_unreported: int
    """Steps of the replica between the report before and this one."""


class StepSampler:
    """Which steps are reported. `watch` is for any thread, the rest for one."""

    def __init__(self) -> None:
        self._interval_s = math.inf
        self._last: dict[str, tuple[float, int]] = {}
        """When each replica was reported last, and how many of its steps were not since."""

    def watch(self, max_per_s: float) -> None:
        """Report at most so many steps of each replica in a second; 0: none."""
        self._last = {}
        self._interval_s = 1 / min(max_per_s, MAX_STEP_REPORTS_PER_S) if max_per_s > 0 else math.inf

    @property
    def is_watched(self) -> bool:
        """Whether any step is reported."""
        return self._interval_s < math.inf

    def report(self, replica: str, plan: StepPlan, duration_s: float, now_s: float) -> StepReport | None:
        """A step has ended now; None: it is not reported."""
        interval_s = self._interval_s
        last_s, num_unreported = self._last.get(replica, (-math.inf, 0))
        if now_s - last_s < interval_s or interval_s == math.inf:
            self._last[replica] = last_s, num_unreported + 1
            return None
        self._last[replica] = now_s, 0
        return StepReport(
            replica, plan.step, plan.num_sequences, plan.num_tokens, plan.num_samples, duration_s, num_unreported
        )

    def forget(self, replica: str) -> None:
        """It is unloaded."""
        self._last.pop(replica, None)
