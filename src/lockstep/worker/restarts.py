"""When a worker that ended is started again. Pure: times come in, delays go out."""

from __future__ import annotations

import math

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
HEALTHY_S = 60.0
"""A worker that served so long had no part in the deaths before it."""
PROCESS_START_S = 1.0
"""About what a worker needs before it can load."""
MIN_RETRY_AFTER_S = 1.0


class Restarts:
    """The first death is answered at once; each that follows soon after doubles the wait."""

    def __init__(self) -> None:
        self._num_deaths = 0
        self._up_since_s: float | None = None
        self.start_at_s = 0.0
        """When the next worker is started, after one was lost."""
        self._back_at_s = 0.0
        """When it will have loaded everything, as far as one can tell."""

    def schedule(self, now_s: float, load_s: float) -> None:
        """It ended, or did not come up: decide when the next start is, and guess when it will have loaded everything.

        Args:
            load_s: how long that took the last time.
        """
        self.start_at_s = now_s + self.delay_s(now_s)
        self._back_at_s = self.start_at_s + PROCESS_START_S + load_s

    def retry_after_s(self, now_s: float) -> float:
        """Whole seconds until what is not there is likely to be; a first load says nothing of its end."""
        return max(MIN_RETRY_AFTER_S, math.ceil(self._back_at_s - now_s))

    def up(self, now_s: float) -> None:
        """The worker serves; only the first word of it counts."""
        if self._up_since_s is None:
            self._up_since_s = now_s

    def delay_s(self, now_s: float) -> float:
        """It ended, or did not come up: seconds until the next start."""
        if self._up_since_s is not None and now_s - self._up_since_s >= HEALTHY_S:
            self._num_deaths = 0
        self._up_since_s = None
        self._num_deaths += 1
        if self._num_deaths == 1:
            return 0.0
        return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(self._num_deaths - 2, 16)))
