"""Circuit breaker: blocks requests to a server that keeps failing. Pure: times are passed in.

After several consecutive failures no requests are sent for a while. Then one trial request is sent, and its first byte
lets the others through again. Failures of requests admitted before the last change of state are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lockstep.worker.health import backoff_s


class BreakerState(StrEnum):
    """State of a breaker, by the requests that it admits."""

    CLOSED = "closed"
    """All requests are admitted."""
    OPEN = "open"
    """No request is admitted until the pause is over."""
    HALF_OPEN = "half_open"
    """One trial request is admitted."""


_MOVES: Mapping[BreakerState, tuple[BreakerState, ...]] = {
    BreakerState.CLOSED: (BreakerState.OPEN,),
    BreakerState.OPEN: (BreakerState.HALF_OPEN,),
    BreakerState.HALF_OPEN: (BreakerState.CLOSED, BreakerState.OPEN),
}
"""Allowed transitions. Closed to open: the limit of consecutive failures is reached. Open to half-open: the pause is
over and a request arrives. Half-open to closed: the trial request received its first byte. Half-open to open: it
failed, or its client disconnected first."""


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """Limits of a breaker: the number of consecutive failures, and the pause after them."""

    num_failures: int = 5
    """Number of consecutive failures after which the breaker opens."""
    rest_s: float = 2.0
    """Pause in seconds after the first opening; it doubles with each further one until an answer is complete."""
    max_rest_s: float = 60.0

    def __post_init__(self) -> None:
        assert self.num_failures >= 1
        assert 0.0 < self.rest_s <= self.max_rest_s


@dataclass(frozen=True, slots=True)
class Admission:
    """Admission of one request; its result is reported with this."""

    era: int
    """Number of earlier changes of state."""


class Breaker:
    """Breaker of one server. Call `admit` for every request, `began` at its first byte, and one of `succeeded`,
    `failed` and `left` at its end."""

    def __init__(self, options: BreakerOptions) -> None:
        self._options = options
        self._state = BreakerState.CLOSED
        self._era = 0
        self._num_failures = 0
        self._num_openings = 0
        """Number of openings since the last complete answer."""
        self._until_s = 0.0

    @property
    def state(self) -> BreakerState:
        return self._state

    def wait_s(self, now_s: float) -> float:
        """Seconds until a request may be admitted; a full pause while the trial request is pending."""
        if self._state is BreakerState.CLOSED:
            return 0.0
        return self._options.rest_s if self._state is BreakerState.HALF_OPEN else max(0.0, self._until_s - now_s)

    def admit(self, now_s: float) -> Admission | None:
        """Admit a request; None: it is not admitted now, see `wait_s`."""
        if self._state is BreakerState.OPEN and now_s >= self._until_s:
            self._change(BreakerState.HALF_OPEN)
        elif self._state is not BreakerState.CLOSED:
            return None
        return Admission(self._era)

    def began(self, admission: Admission) -> Admission:
        """Record a first byte; returns the admission for the request's end. After a trial request, one more failure
        opens the breaker again."""
        if admission.era != self._era or self._state is not BreakerState.HALF_OPEN:
            return admission
        self._num_failures = self._options.num_failures - 1
        self._change(BreakerState.CLOSED)
        return Admission(self._era)

    def succeeded(self, admission: Admission) -> None:
        """Record a request that was answered properly, possibly with a rejection."""
        admission = self.began(admission)
        if admission.era == self._era:
            self._num_failures = self._num_openings = 0

    def failed(self, admission: Admission, now_s: float) -> None:
        """Record a request that was not answered, or not completely."""
        if admission.era != self._era:
            return
        if self._state is BreakerState.HALF_OPEN:
            self._open(now_s)
            return
        self._num_failures += 1
        if self._num_failures >= self._options.num_failures:
            self._open(now_s)

    def left(self, admission: Admission) -> None:
        """Record a request whose client disconnected before its result was known; another trial may follow."""
        if admission.era == self._era and self._state is BreakerState.HALF_OPEN:
            self._change(BreakerState.OPEN)

    def _open(self, now_s: float) -> None:
        options = self._options
        self._num_openings += 1
        self._until_s = now_s + backoff_s(self._num_openings, options.rest_s, options.max_rest_s)
        self._change(BreakerState.OPEN)

    def _change(self, state: BreakerState) -> None:
        assert state in _MOVES[self._state], f"invalid transition of a breaker from {self._state} to {state}"
        self._state = state
        self._era += 1
