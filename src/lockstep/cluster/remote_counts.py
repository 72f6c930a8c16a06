"""What is counted of one remote model; the breaker beside it knows only what decides."""

from __future__ import annotations

import msgspec

from lockstep.cluster.breaker import BreakerState
from lockstep.engine.metrics import HISTOGRAMS, Histogram, HistogramSnapshot


class RemoteSnapshot(msgspec.Struct, frozen=True):
    """A remote model's dealings with its server since the start."""

    model: str
    breaker: str
    """``closed``: it is asked; ``open``: it is left alone after its failures; ``half_open``: one request tries."""
    num_open: int
    """Calls that are being answered."""
    requests_total: int
    """Calls, those that were left alone included."""
    attempts_total: int
    """Requests that were sent; a call may be tried again before its first byte."""
    failures_total: int
    """Attempts that failed, before their first byte or later, by the other server's fault."""
    refusals_total: int
    """Calls that the open breaker kept back."""
    first_byte_s: HistogramSnapshot
    """From sending an attempt to the first event of its answer."""


class RemoteCounts:
    """Written by one event loop."""

    def __init__(self) -> None:
        self.requests_total = 0
        self.attempts_total = 0
        self.failures_total = 0
        self.refusals_total = 0
        self._first_byte_s = Histogram(HISTOGRAMS["time_to_first_token_seconds"])

    def began(self, waited_s: float) -> None:
        """The first event of an answer has come."""
        self._first_byte_s.observe(waited_s)

    def snapshot(self, model: str, breaker: BreakerState, num_open: int) -> RemoteSnapshot:
        return RemoteSnapshot(
            model,
            breaker,
            num_open,
            self.requests_total,
            self.attempts_total,
            self.failures_total,
            self.refusals_total,
            self._first_byte_s.snapshot(),
        )
