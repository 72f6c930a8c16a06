"""What a page shows of one replay, kept in bounded memory while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.replay.records import TickRecorder
from lockstep.replay.render.sampler import TimelineSampler
from lockstep.replay.render.stalls import Stalls
from lockstep.replay.report import Report
from lockstep.replay.timeline import RequestOutcome, Tick

MAX_LINES = 500
"""Lines that the table of ticks has; more nobody reads, and a page that has them is slow."""


class Side:
    """A watcher of a replay; `end` adds what is known when it is over. A comparison has two."""

    def __init__(self) -> None:
        self.timeline = TimelineSampler()
        self.recorder = TickRecorder(MAX_LINES)
        self.stalls = Stalls()
        self._ended: tuple[Report, Sequence[RequestOutcome]] | None = None

    def __call__(self, tick: Tick) -> None:
        """Take in what the replay did next."""
        self.timeline(tick)
        self.recorder(tick)
        self.stalls(tick)

    def end(self, report: Report, outcomes: Sequence[RequestOutcome]) -> None:
        """Take in what it came to."""
        self._ended = report, outcomes

    @property
    def report(self) -> Report:
        assert self._ended is not None, "the replay has ended"
        return self._ended[0]

    @property
    def outcomes(self) -> Sequence[RequestOutcome]:
        assert self._ended is not None, "the replay has ended"
        return self._ended[1]
