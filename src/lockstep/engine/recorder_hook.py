"""Recorder hook: who is told of everything that decides an engine's steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.request import CommandListener
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepResult
from lockstep.engine.generation import Generation


class RecorderHook(CommandListener, Protocol):
    """Told of commands by the scheduler, and of the rest by the engine, in order, on its thread. Never raises."""

    def opened(self, scheduler: Scheduler, fingerprint: Fingerprint) -> None:
        """Once, before everything else, on any thread: whose decisions these are."""
        ...

    def came(self, generation: Generation, waited_s: float) -> None:
        """Whose the sequence is that was just added, and for how long it waited for that."""
        ...

    def committed(self, record: bytes | None, result: StepResult, touched: Sequence[Generation]) -> None:
        """A step has brought this; ``record`` is what it closed, ``touched`` are those that sampled."""
        ...

    def ended(self, generation: Generation) -> None:
        """A sequence has ended, in a step or outside, and its last token and reason are known."""
        ...

    def failed(self, record: bytes | None) -> None:
        """A step failed; ``record`` is what it closed."""
        ...
