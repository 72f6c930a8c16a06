"""What a server is doing with its life, and how many requests it is answering: the two facts that draining needs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import Enum


class Phase(Enum):
    """From the first moment on requests are admitted: while the model loads it is the cluster that refuses them."""

    ADMITTING = "admitting"
    DRAINING = "draining"
    """Nothing new; what is in flight may finish."""
    ENDING = "ending"
    """What is in flight ends with an error."""
    FORCED = "forced"
    """Connections are closed as they are."""


AFTER_SIGNAL: Mapping[Phase, Phase] = {
    Phase.ADMITTING: Phase.DRAINING,
    Phase.DRAINING: Phase.ENDING,
    Phase.ENDING: Phase.FORCED,
    Phase.FORCED: Phase.FORCED,
}
"""Every further SIGTERM or SIGINT hurries."""


class Lifecycle:
    """One server's phase. Moves forward only; used from one event loop."""

    def __init__(self) -> None:
        self._phase = Phase.ADMITTING
        self._changed = asyncio.Event()
        self._drains = asyncio.Event()

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def is_admitting(self) -> bool:
        return self._phase is Phase.ADMITTING

    def on_signal(self) -> None:
        """SIGTERM or SIGINT came."""
        self._phase = AFTER_SIGNAL[self._phase]
        self._changed.set()
        self._drains.set()

    def end(self) -> None:
        """Time is up for what is in flight."""
        if self._phase is Phase.DRAINING:
            self._phase = Phase.ENDING

    async def drains(self) -> None:
        """Wait until nothing new is admitted; any number may wait."""
        await self._drains.wait()

    async def changed(self) -> Phase:
        """Wait for a signal; one that came since the last wait counts."""
        await self._changed.wait()
        self._changed.clear()
        return self._phase


class Traffic:
    """Requests that are being answered, streams and others."""

    def __init__(self) -> None:
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_open(self) -> int:
        return self._num_open

    def enter(self) -> None:
        self._num_open += 1
        self._idle.clear()

    def leave(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing is being answered."""
        await self._idle.wait()
