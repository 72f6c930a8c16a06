"""Time as a value: the one seam through which the engine reads a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary origin; never decreases."""

    def now_s(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    now_s = staticmethod(time.perf_counter)


class ManualClock:
    """A clock that moves only when told to: for tests and simulation."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; a clock that goes back is a programming error."""
        assert seconds >= 0, f"a clock never goes back (got {seconds})"
        self._now_s += seconds
