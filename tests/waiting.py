"""Waiting in tests: for what can be observed, never for a time to be over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HANG_S = 120.0
"""The bound of every wait. It finds what hangs: on a machine as slow as one likes, what gets on takes less."""
ENDLESS_MS = 600_000
"""For a stub's step or load that lasts as long as a test looks. What ends it is its process's end, or a `Gate`."""
_LOOK_S = 0.01


def until(is_so: Callable[[], bool], what: str = "what is waited for comes") -> None:
    """Wait for a truth that comes by itself."""
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(_LOOK_S)


class Gate:
    """Where the endless sleeps of this process's stubs end: steps and loads last until a test has seen enough."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.num_held = 0
        """Steps and loads that have come so far; counted by one thread at a time."""

    def open(self) -> None:
        """Let through who waits, and who is still to come."""
        self._opened.set()

    def sleep(self, duration_s: float) -> None:
        if duration_s < ENDLESS_MS / 1e3:
            time.sleep(duration_s)
        else:
            self.num_held += 1
            assert self._opened.wait(HANG_S), "nobody opened the gate"
