"""Waiting in tests: for conditions that can be observed, never for a time to pass."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable

HANG_S = 120.0
"""The bound of every wait. It finds what hangs: on a machine as slow as one likes, what gets on takes less."""
ENDLESS_MS = 600_000
"""For a stub's step or load that lasts as long as a test looks. What ends it is its process's end, or a `Gate`."""
_LOOK_S = 0.01


def until(is_so: Callable[[], bool], what: str = "the condition holds") -> None:
    """Wait until a condition holds."""
    end_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(_LOOK_S)


async def eventually(is_so: Callable[[], bool | Awaitable[bool]], what: str = "the condition holds") -> None:
    """Wait until a condition holds, while other tasks run."""
    try:
        async with asyncio.timeout(HANG_S):
            while not (await found if inspect.isawaitable(found := is_so()) else found):
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise AssertionError(what) from None


class Gate:
    """Where the endless sleeps of this process's stubs end: steps and loads last until a test has seen enough."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = False
        self._num_let = 0
        self.num_held = 0
        """Steps and loads that have come so far; counted by one thread at a time."""

    def open(self) -> None:
        """Let through who waits, and who is still to come."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def let_one(self) -> None:
        """Let through one that waits, or else the next that comes."""
        with self._changed:
            self._num_let += 1
            self._changed.notify_all()

    def sleep(self, duration_s: float) -> None:
        if duration_s < ENDLESS_MS / 1e3:
            time.sleep(duration_s)
            return
        self.num_held += 1
        with self._changed:
            is_let = self._changed.wait_for(lambda: self._is_open or self._num_let > 0, HANG_S)
            assert is_let, "nobody opened the gate"
            self._num_let -= not self._is_open
