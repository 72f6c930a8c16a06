"""Health of a worker: detects hangs from its reports and schedules restarts, without a clock or input and output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.worker.messages import HealthReport

ASK_INTERVAL_S = 1.0
"""Interval of health checks of a worker. Silence is counted in checks instead of by a clock, because there are no
checks while the machine is suspended or this process is stopped."""
MAX_SILENCE_S = 60.0
"""Default of `HealthLimits.silence_s`. A healthy worker answers within 0.3 s during steps and 1.2 s while grammars
compile, on two cores shared with fifteen others."""
MAX_LOAD_SILENCE_S = 600.0
"""Default of `HealthLimits.load_s`. Packing weights holds the interpreter lock in native code, for a time that grows
with their size."""
MAX_STEP_S = 600.0
"""Time limit of a step in seconds, after which most clients have disconnected."""
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
MAX_LINK_DELAY_S = 1.0
"""Maximum delay in seconds before a link to a worker of another process is retried. Such retries are cheap."""
HEALTHY_S = 60.0
"""Time of serving in seconds after which the end of a worker is independent of earlier failures."""
PROCESS_START_S = 1.0
"""Approximate time in seconds from the start of a worker until it can load."""
MIN_RETRY_AFTER_S = 1.0
MAX_DOUBLINGS = 16
"""Maximum number of doublings of a delay; the maximum delay is always reached earlier."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Limits beyond which a worker is unhealthy or hangs."""

    step_s: float = 30.0
    """Maximum time in seconds without a completed step while requests wait. Beyond it, no requests are sent to the
    worker."""
    answer_s: float = 10.0
    """Maximum time in seconds without an answer to the health checks. A worker answers them while a step runs."""
    silence_s: float = MAX_SILENCE_S
    """Time in seconds without any message after which a worker process is killed; 0: hanging processes are not
    killed."""
    load_s: float = MAX_LOAD_SILENCE_S
    """The same limit while the worker loads, and until its first message, since imports from a cold disk may take
    long."""
    first_delay_s: float = FIRST_DELAY_S
    """Delay in seconds before the second restart in a row, doubled with each that follows soon after."""
    max_delay_s: float = MAX_DELAY_S
    """Maximum delay in seconds before a restart. Links to workers of other processes are retried after at most
    `MAX_LINK_DELAY_S`."""


def trouble(limits: HealthLimits, report: HealthReport | None, age_s: float) -> str:
    """The trouble that a report shows, in one sentence; empty: none.

    Args:
        report: the worker's last report; None: it has not answered yet.
        age_s: time since the report, or since the worker's start.
    """
    if age_s > limits.answer_s:
        return f"the device worker has not answered for {age_s:.0f} s"
    if report is not None and report.waiting_s > 0 and report.waiting_s + age_s > limits.step_s:
        return f"no step was completed for {report.waiting_s + age_s:.0f} s while requests wait"
    return ""


class Pulse:
    """Health state of one worker."""

    def __init__(self, limits: HealthLimits, now_s: float) -> None:
        self.limits = limits
        """Limits that apply from now on."""
        self._report_s = now_s
        self.report: HealthReport | None = None
        """The last report; None: there is none yet."""
        self._has_answered = False
        self._num_silent = 0
        """Number of checks since its last message."""
        self._num_stuck = 0
        """Number of consecutive reports in which the same step takes too long."""

    def count_check(self) -> None:
        """Count a check. One is sent every `ASK_INTERVAL_S`."""
        self._num_silent += 1

    def count_message(self) -> None:
        """Count a message of the worker, of any kind."""
        self._has_answered, self._num_silent = True, 0

    def reported(self, report: HealthReport, now_s: float) -> None:
        """Store a report."""
        self.report, self._report_s = report, now_s
        self._num_stuck = self._num_stuck + 1 if report.waiting_s > self.limits.step_s else 0

    def trouble(self, now_s: float) -> str:
        """The reason why requests would not be answered now, in one sentence; empty: they would be."""
        return trouble(self.limits, self.report, now_s - self._report_s)

    def hang(self, *, is_loading: bool) -> str:
        """Describe a hang after which only a kill helps; empty: the worker does not hang."""
        limits = self.limits
        if not limits.silence_s:
            return ""
        silence_s = self._num_silent * ASK_INTERVAL_S
        is_busy = is_loading or not self._has_answered
        most_s = max(limits.load_s, limits.silence_s) if is_busy else limits.silence_s
        if silence_s >= max(most_s, 2 * ASK_INTERVAL_S):  # the last check was sent just now
            return f"{silence_s:.0f} s without a message" + ("" if self._has_answered else " since its start")
        stuck_s = limits.step_s + self._num_stuck * ASK_INTERVAL_S
        if stuck_s > max(MAX_STEP_S, limits.silence_s):
            return f"{stuck_s:.0f} s within one step"
        return ""

    @property
    def last_report(self) -> str:
        """The last report as a clause of a log message."""
        report = self.report
        if report is None:
            return "it has reported nothing"
        step = f", no step completed for {report.waiting_s:.1f} s" if report.waiting_s else ""
        return f"it last reported {report.num_running} running and {report.num_waiting} waiting requests{step}"


class Restarts:
    """Schedule of restarts: immediate after the first failure; the delay doubles with each that follows soon after.

    Args:
        limits: the delays between restarts.
        is_link: whether links are retried instead of starting processes.
    """

    def __init__(self, limits: HealthLimits | None = None, *, is_link: bool = False) -> None:
        self._limits = limits or HealthLimits()
        self._is_link = is_link
        self._num_deaths = 0
        self._up_since_s: float | None = None
        self.start_at_s = 0.0
        """Time at which the next worker is started, after one was lost."""
        self._back_at_s = 0.0
        """Estimated time at which it will have loaded everything."""

    def schedule(self, now_s: float, load_s: float) -> None:
        """Schedule the next start after a worker ended or failed to start, and estimate when it will have loaded
        everything.

        Args:
            load_s: how long loading took the last time.
        """
        self.start_at_s = now_s + self.delay_s(now_s)
        self._back_at_s = self.start_at_s + PROCESS_START_S + load_s

    def retry_after_s(self, now_s: float) -> float:
        """Whole seconds until the worker is likely to be ready. A first load has no estimate."""
        return max(MIN_RETRY_AFTER_S, math.ceil(self._back_at_s - now_s))

    def record_up(self, now_s: float) -> None:
        """Record that the worker serves. Only the first call for each worker counts."""
        if self._up_since_s is None:
            self._up_since_s = now_s

    def delay_s(self, now_s: float) -> float:
        """Seconds until the next start, after a worker ended or failed to start."""
        if self._up_since_s is not None and now_s - self._up_since_s >= HEALTHY_S:
            self._num_deaths = 0
        self._up_since_s = None
        self._num_deaths += 1
        most_s = MAX_LINK_DELAY_S if self._is_link else self._limits.max_delay_s
        return 0.0 if self._num_deaths == 1 else backoff_s(self._num_deaths - 1, self._limits.first_delay_s, most_s)


def backoff_s(num_failures: int, first_s: float, most_s: float) -> float:
    """Delay in seconds after this many consecutive failures (at least one): doubled by each, up to a maximum."""
    return min(most_s, first_s * 2.0 ** min(num_failures - 1, MAX_DOUBLINGS))
