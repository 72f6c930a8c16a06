"""Whether a worker gets on with its work, or hangs, by what it was heard to say. Pure: times come in."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.worker.messages import HealthReport

ASK_INTERVAL_S = 1.0
"""So often a worker is asked. Silence is counted in questions and not on a clock: when the whole machine was suspended,
or this process stopped, nothing was asked."""
MAX_SILENCE_S = 60.0
"""A healthy worker answers within 0.3 s of steps and 1.2 s beside grammars, on two cores that fifteen others use."""
MAX_LOAD_SILENCE_S = 600.0
"""Building a model holds the interpreter in native code, the longer the larger it is: 13 s on the same machine, for one
of 135 million parameters."""
MAX_STEP_S = 600.0
"""After so long most clients have given up waiting."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """How long is too long."""

    step_s: float = 30.0
    """While requests wait, a step is to be completed within this time; then requests are not sent here."""
    answer_s: float = 10.0
    """A worker is asked every second; it answers between two instructions, whatever step is running."""
    silence_s: float = MAX_SILENCE_S
    """Without any sign of life for so long, a worker process hangs and is killed; 0: no hanging process is."""
    load_s: float = MAX_LOAD_SILENCE_S
    """The same while it loads, and until its first word: a cold disk may take long over the imports."""


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


class Pulse:
    """One worker's signs of life."""

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

    def asked(self) -> None:
        """A question is on its way; so is one every `ASK_INTERVAL_S`."""
        self._num_silent += 1

    def heard(self) -> None:
        """It said something, whatever that is."""
        self._has_spoken, self._num_silent = True, 0

    def reported(self, report: HealthReport, now_s: float) -> None:
        """It answered."""
        self.report, self._report_s = report, now_s
        self._num_stuck = self._num_stuck + 1 if report.waiting_s > self._limits.step_s else 0

    def trouble(self, now_s: float) -> str:
        """Why requests would not be answered now, in one sentence; empty: they would."""
        return trouble(self._limits, self.report, now_s - self._report_s)

    def hang(self, *, is_loading: bool) -> str:
        """How it hangs, so that nothing but its end will help; empty: it does not."""
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
        """Its last report, in the middle of a sentence."""
        report = self.report
        if report is None:
            return "it has reported nothing"
        step = f", no step completed for {report.waiting_s:.1f} s" if report.waiting_s else ""
        return f"it last reported {report.num_running} running and {report.num_waiting} waiting requests{step}"
