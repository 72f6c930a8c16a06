"""Drafts of a recording: decides them again for the executing engine, and compares them with the recorded ones."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.engine.drafter import Drafts, Speculator
from lockstep.engine.generation import Generation
from lockstep.replay.verify_report import DivergedError
from lockstep.worker.flight.entries import EngineEntry, Proposed


class RecordedDrafts:
    """`Drafter` of an executing engine.

    Args:
        engine: the recorded engine, with the configuration of its drafts and the prices of rows.

    Raises:
        TraceError: the configuration is invalid.
    """

    def __init__(self, engine: EngineEntry) -> None:
        self._engine = engine
        self._speculator = Speculator.of(engine.speculation)
        self._recorded: Drafts = {}
        """Recorded drafts of the next step."""
        self._step = 0

    def take(self, proposed: Proposed) -> None:
        """Take the recorded drafts of the next step."""
        ids = [seq_id for seq_id, _ in proposed.drafts]
        if len(ids) != len(proposed.tokens):
            raise DivergedError(self._engine.number, proposed.step, "the recording has no tokens of its drafts")
        self._recorded, self._step = dict(zip(ids, proposed.tokens, strict=True)), proposed.step

    def propose(self, generations: Iterable[Generation]) -> Drafts:
        """Decide the drafts of the next step.

        Raises:
            DivergedError: the recorded ones differ.
        """
        recorded, self._recorded = self._recorded, {}
        computed = {seq_id: tuple(tokens) for seq_id, tokens in self._speculator.propose(generations).items()}
        if computed != recorded:
            what = f"the recorded drafts are {recorded}; here they are {computed}"
            raise DivergedError(self._engine.number, self._step, what)
        return recorded

    def ended(self, generation: Generation) -> None:
        self._speculator.ended(generation)
