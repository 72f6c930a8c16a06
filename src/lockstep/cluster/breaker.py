"""Circuit breaker: leaves another server alone that fails. Pure: times come in, decisions go out.

After some failures in a row no one asks for a while; then one request tries, and its first byte lets the others in
again. Failures of requests that were let in before the state last changed say nothing of now, and are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lockstep.worker.health import backoff_s


class BreakerState(StrEnum):
    """States of a breaker, by who is let in."""

    CLOSED = "closed"
    """Everybody."""
    OPEN = "open"
    """No request, until its rest is over."""
    HALF_OPEN = "half_open"
    """One request, which tries."""


_MOVES: Mapping[BreakerState, tuple[BreakerState, ...]] = {
    BreakerState.CLOSED: (BreakerState.OPEN,),
    BreakerState.OPEN: (BreakerState.HALF_OPEN,),
    BreakerState.HALF_OPEN: (BreakerState.CLOSED, BreakerState.OPEN),
}
"""Every change there is: as many failures in a row as are borne; its rest is over and somebody asks; the request that
tries has its first byte, or never will have, or its client left before anything was known."""


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """Bounds of a breaker: the number of failures in a row, and the rest of the server after them."""

    num_failures: int = 5
    """In a row, until it opens."""
    rest_s: float = 2.0
    """Of the first opening; each that follows without a whole answer in between doubles it."""
    max_rest_s: float = 60.0

    def __post_init__(self) -> None:
        assert self.num_failures >= 1
        assert 0.0 < self.rest_s <= self.max_rest_s


@dataclass(frozen=True, slots=True)
class Admission:
    """Admission of one request; its ending is noted with this."""

    era: int
    """How often the breaker had changed."""


class Breaker:
    """The breaker of one server. `admit` every request; then call `began` at its first byte, and one of the three
    endings."""

    def __init__(self, options: BreakerOptions) -> None:
        self._options = options
        self._state = BreakerState.CLOSED
        self._era = 0
        self._num_failures = 0
        self._num_openings = 0
        """Since the last whole answer."""
        self._until_s = 0.0

    @property
    def state(self) -> BreakerState:
        return self._state

    def wait_s(self, now_s: float) -> float:
        """Seconds after which it is worth asking; at least one retry's worth while another request tries."""
        if self._state is BreakerState.CLOSED:
            return 0.0
        return self._options.rest_s if self._state is BreakerState.HALF_OPEN else max(0.0, self._until_s - now_s)

    def admit(self, now_s: float) -> Admission | None:
        """Let a request in; None: not now, see `wait_s`."""
        if self._state is BreakerState.OPEN and now_s >= self._until_s:
            self._change(BreakerState.HALF_OPEN)
        elif self._state is not BreakerState.CLOSED:
            return None
        return Admission(self._era)

    def began(self, admission: Admission) -> Admission:
        """Note a first byte; returns the admission for its ending. One failure more would open the breaker again."""
        if admission.era != self._era or self._state is not BreakerState.HALF_OPEN:
            return admission
        self._num_failures = self._options.num_failures - 1
        self._change(BreakerState.CLOSED)
        return Admission(self._era)

    def succeeded(self, admission: Admission) -> None:
        """Note a request that was answered as it should be, be it with a refusal."""
        admission = self.began(admission)
        if admission.era == self._era:
            self._num_failures = self._num_openings = 0

    def failed(self, admission: Admission, now_s: float) -> None:
        """Note a request that was not answered, or not to the end."""
        if admission.era != self._era:
            return
        if self._state is BreakerState.HALF_OPEN:
            self._open(now_s)
            return
        self._num_failures += 1
        if self._num_failures >= self._options.num_failures:
            self._open(now_s)

    def left(self, admission: Admission) -> None:
        """Note a request that no one waits for any more, and of which nothing is known: the next one may try."""
        if admission.era == self._era and self._state is BreakerState.HALF_OPEN:
            self._change(BreakerState.OPEN)

    def _open(self, now_s: float) -> None:
        options = self._options
        self._num_openings += 1
        self._until_s = now_s + backoff_s(self._num_openings, options.rest_s, options.max_rest_s)
        self._change(BreakerState.OPEN)

    def _change(self, state: BreakerState) -> None:
        assert state in _MOVES[self._state], f"a breaker does not go from {self._state} to {state}"
        self._state = state
        self._era += 1
