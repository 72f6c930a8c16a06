"""A scheduler that tells a tape all that it is told: whoever gives the command, none goes unrecorded.

The engine adds what a scheduler does not know: which request a sequence belongs to, and the fingerprint's records.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from lockstep.core.fingerprint import Fingerprint
from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason, Request
from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepResult
from lockstep.engine.generation import Generation


class Tape(Protocol):
    """Hears what decides an engine's steps, in order, on the engine's thread. Never raises.

    ``step`` is the number of the next step; a command that comes while a step is under way (``in_step``) has that of
    the step after.
    """

    def opened(self, scheduler: Scheduler, fingerprint: Fingerprint) -> None:
        """Once, before everything else, on any thread: whose decisions these are."""
        ...

    def added(self, seq_id: int, request: Request, step: int) -> None: ...

    def aborted(self, seq_id: int, reason: FinishReason, step: int, in_step: bool) -> None: ...

    def pinned(self, hashes: Seq[bytes], step: int) -> None: ...

    def swept(self, hashes: Seq[bytes], step: int) -> None: ...

    def cache_reset(self, step: int) -> None: ...

    def came(self, generation: Generation, waited_s: float) -> None:
        """The sequence that was just added: whose it is, and for how long it waited for that."""
        ...

    def committed(self, record: bytes | None, result: StepResult, touched: Seq[Generation]) -> None:
        """A step has brought this; ``record`` is what it closed, ``touched`` are those that sampled."""
        ...

    def failed(self, record: bytes | None) -> None:
        """A step failed; ``record`` is what it closed."""
        ...


class TapedScheduler(Scheduler):
    """Decides as any other; tells of commands that had an effect or may have one."""

    def __init__(self, config: SchedulerConfig, tape: Tape) -> None:
        super().__init__(config)
        self._tape = tape

    def add(self, request: Request) -> int:
        seq_id = super().add(request)
        self._tape.added(seq_id, request, self._step)
        return seq_id

    def abort(self, seq_id: int, reason: FinishReason = FinishReason.ABORT) -> bool:
        is_in_step = self._pending is not None
        was_there = super().abort(seq_id, reason)
        if was_there:
            self._tape.aborted(seq_id, reason, self._step, is_in_step)
        return was_there

    def pin(self, hashes: Seq[bytes]) -> None:
        super().pin(hashes)
        if hashes:
            self._tape.pinned(hashes, self._step)

    def sweep(self, hashes: Seq[bytes]) -> tuple[int, ...]:
        freed = super().sweep(hashes)
        if hashes:
            self._tape.swept(hashes, self._step)
        return freed

    def reset_prefix_cache(self) -> int:
        num_blocks = super().reset_prefix_cache()
        self._tape.cache_reset(self._step)
        return num_blocks
