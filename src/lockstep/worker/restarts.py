"""When a worker that ended is started again. Pure: times come in, delays go out."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
HEALTHY_S = 60.0
"""A worker that served so long had no part in the deaths before it."""


class Restarts:
    """The first death is answered at once; each that follows soon after doubles the wait."""

    def __init__(self) -> None:
        self._num_deaths = 0
        self._up_since_s: float | None = None

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
