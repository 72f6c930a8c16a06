"""Signs of life of a worker and schedule of its restarts. Pure: reports and times come in, verdicts go out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.worker.messages import HealthReport

ASK_INTERVAL_S = 1.0
"""Interval of health checks of a worker. Silence is counted in checks and not on a clock: while the whole machine is
suspended, or this process is stopped, there are no checks."""
MAX_SILENCE_S = 60.0
"""A healthy worker answers within 0.3 s of steps and 1.2 s beside grammars, on two cores that fifteen others use."""
MAX_LOAD_SILENCE_S = 600.0
"""Packing weights holds the interpreter in native code, the longer the larger they are."""
MAX_STEP_S = 600.0
"""After so long most clients have given up waiting."""
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
MAX_LINK_DELAY_S = 1.0
"""For a link to a worker of another process, which costs little to try."""
HEALTHY_S = 60.0
"""A worker that served so long had no part in the deaths before it."""
PROCESS_START_S = 1.0
"""About what a worker needs before it can load."""
MIN_RETRY_AFTER_S = 1.0
MAX_DOUBLINGS = 16
"""Of any back-off; no bound is that far away."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Bounds beyond which a worker is in trouble, or hangs."""

    step_s: float = 30.0
    """While requests wait, a step is to be completed within this time; then requests are not sent here."""
    answer_s: float = 10.0
    """A worker is checked every second; it answers between two instructions, whatever step is running."""
    silence_s: float = MAX_SILENCE_S
    """Without any sign of life for so long, a worker process hangs and is killed; 0: no hanging process is."""
    load_s: float = MAX_LOAD_SILENCE_S
    """The same while it loads, and until its first word: a cold disk may take long over the imports."""


def trouble(limits: HealthLimits, report: HealthReport | None, age_s: float) -> str:
    """The trouble that a report shows, in one sentence; empty: none.

    Args:
        report: the worker's last; None: it has not answered yet.
        age_s: since then, or since its start.
    """
    if age_s > limits.answer_s:
        return f"the device worker has not answered for {age_s:.0f} s"
    if report is not None and report.waiting_s > 0 and report.waiting_s + age_s > limits.step_s:
        return f"no step was completed for {report.waiting_s + age_s:.0f} s while requests wait"
    return ""


class Pulse:
    """Signs of life of one worker."""

    def __init__(self, limits: HealthLimits, now_s: float) -> None:
        self._limits = limits
        self._report_s = now_s
        self.report: HealthReport | None = None
        """The last; None: there was none yet."""
        self._has_spoken = False
        self._num_silent = 0
        """Questions since its last word."""
        self._num_stuck = 0
        """Reports in a row by which one and the same step goes on for too long."""

    def count_question(self) -> None:
        """Count a question; one is sent every `ASK_INTERVAL_S`."""
        self._num_silent += 1

    def count_word(self) -> None:
        """Count a word of the worker, whatever it states."""
        self._has_spoken, self._num_silent = True, 0

    def reported(self, report: HealthReport, now_s: float) -> None:
        """Take over a report."""
        self.report, self._report_s = report, now_s
        self._num_stuck = self._num_stuck + 1 if report.waiting_s > self._limits.step_s else 0

    def trouble(self, now_s: float) -> str:
        """The reason why requests would not be answered now, in one sentence; empty: they would."""
        return trouble(self._limits, self.report, now_s - self._report_s)

    def hang(self, *, is_loading: bool) -> str:
        """The sign by which the worker hangs, so that nothing but its end will help; empty: it does not."""
        limits = self._limits
        if not limits.silence_s:
            return ""
        silence_s = self._num_silent * ASK_INTERVAL_S
        is_busy = is_loading or not self._has_spoken
        most_s = max(limits.load_s, limits.silence_s) if is_busy else limits.silence_s
        if silence_s >= max(most_s, 2 * ASK_INTERVAL_S):  # the last question was just asked
            return f"{silence_s:.0f} s without a sign of life" + ("" if self._has_spoken else " since its start")
        stuck_s = limits.step_s + self._num_stuck * ASK_INTERVAL_S
        if stuck_s > max(MAX_STEP_S, limits.silence_s):
            return f"{stuck_s:.0f} s within one step"
        return ""

    @property
    def last_words(self) -> str:
        """The last report, for the middle of a sentence."""
        report = self.report
        if report is None:
            return "it has reported nothing"
        step = f", no step completed for {report.waiting_s:.1f} s" if report.waiting_s else ""
        return f"it last reported {report.num_running} running and {report.num_waiting} waiting requests{step}"


class Restarts:
    """Schedule of restarts: the first death is answered at once, each that follows soon after doubles the wait.

    Args:
        is_link: whether links are tried again, and not processes started.
    """

    def __init__(self, *, is_link: bool = False) -> None:
        self._is_link = is_link
        self._num_deaths = 0
        self._up_since_s: float | None = None
        self.start_at_s = 0.0
        """When the next worker is started, after one was lost."""
        self._back_at_s = 0.0
        """When it will have loaded everything, as far as one can tell."""

    def schedule(self, now_s: float, load_s: float) -> None:
        """A worker ended, or did not come up: decide when the next starts, and guess when it will have loaded all.

        Args:
            load_s: how long that took the last time.
        """
        self.start_at_s = now_s + self.delay_s(now_s)
        self._back_at_s = self.start_at_s + PROCESS_START_S + load_s

    def retry_after_s(self, now_s: float) -> float:
        """Whole seconds until what is not there is likely to be; a first load has no estimate."""
        return max(MIN_RETRY_AFTER_S, math.ceil(self._back_at_s - now_s))

    def up(self, now_s: float) -> None:
        """The worker serves; only the first word of it counts."""
        if self._up_since_s is None:
            self._up_since_s = now_s

    def delay_s(self, now_s: float) -> float:
        """Seconds until the next start, after a worker ended or did not come up."""
        if self._up_since_s is not None and now_s - self._up_since_s >= HEALTHY_S:
            self._num_deaths = 0
        self._up_since_s = None
        self._num_deaths += 1
        most_s = MAX_LINK_DELAY_S if self._is_link else MAX_DELAY_S
        return 0.0 if self._num_deaths == 1 else backoff_s(self._num_deaths - 1, FIRST_DELAY_S, most_s)


def backoff_s(num_failures: int, first_s: float, most_s: float) -> float:
    """Seconds to wait after so many failures in a row (at least one): doubled by each, up to a bound."""
    return min(most_s, first_s * 2.0 ** min(num_failures - 1, MAX_DOUBLINGS))
