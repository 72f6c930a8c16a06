"""Deadlines of requests: ends requests by the engine's clock. Engine thread only.

A request may have two deadlines: ``queue_deadline_s`` for its wait until a step computes any of its tokens, including
the prompt's, and ``deadline_s`` for its whole answer. Both end it with the finish reason ``deadline``; the error is
`QueueDeadlineError` or `DeadlineError`. Like any error of an accepted request, it is part of the output and of the
whole answer, together with the text so far. A stream and `LLM` raise it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.errors import DeadlineError, QueueDeadlineError

MAX_STALE = 1_024
"""Deadlines of ended requests that may remain in the heap, in addition to four for each open request."""


@dataclass(frozen=True, slots=True, order=True)
class Due:
    """One deadline of one request."""

    at_s: float
    """Time of the engine's `Clock`."""
    request_id: int
    while_running: bool
    """True: ``deadline_s``, which also applies to running requests. False: ``queue_deadline_s``, which sorts first of
    two deadlines at the same time."""
    after_s: float
    """Seconds after the arrival, as in the request."""

    def error(self) -> DeadlineError:
        """The error that ends the request."""
        if not self.while_running:
            return QueueDeadlineError(
                f"none of the request's tokens was computed within {self.after_s:g} s; send it again when the "
                "load is lower, or raise the deadline",
                param="queue_deadline_s",
            )
        return DeadlineError(
            f"the answer was not complete after {self.after_s:g} s; raise the deadline or request fewer tokens",
            param="deadline_s",
        )


class Deadlines:
    """Heap of deadlines, earliest first. Of two at the same time, that of the earlier request comes first."""

    def __init__(self) -> None:
        self._heap: list[Due] = []

    def add(self, request_id: int, arrival_s: float, queue_deadline_s: float | None, deadline_s: float | None) -> None:
        """Add the deadlines, in seconds, of a request that arrived at ``arrival_s``."""
        for while_running, after_s in ((False, queue_deadline_s), (True, deadline_s)):
            if after_s is not None:
                heapq.heappush(self._heap, Due(arrival_s + after_s, request_id, while_running, after_s))

    def pop_due(self, now_s: float) -> Sequence[Due]:
        """Remove and return the deadlines that have passed. Their requests may have ended already."""
        due: list[Due] = []
        while self._heap and self._heap[0].at_s <= now_s:
            due.append(heapq.heappop(self._heap))
        return due

    def forget_stale(self, open_ids: Collection[int]) -> None:
        """Remove the deadlines of ended requests, once there are more than ``MAX_STALE`` allows."""
        if len(self._heap) > 4 * len(open_ids) + MAX_STALE:
            self._heap = [due for due in self._heap if due.request_id in open_ids]
            heapq.heapify(self._heap)

    @property
    def next_s(self) -> float | None:
        """Time of the next deadline; None: there is none."""
        return self._heap[0].at_s if self._heap else None


class Clock(Protocol):
    """Clock for deadlines: seconds since an arbitrary origin; never decreases."""

    def now_s(self) -> float: ...


class ManualClock:
    """A clock that moves only by its methods, for tests and simulation."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward. A negative step is a programming error."""
        assert seconds >= 0, f"a clock never goes back (got {seconds})"
        self._now_s += seconds
