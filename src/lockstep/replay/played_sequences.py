"""Sequences of a played recording: collects their requests, times, tokens and ends."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress

from lockstep.core.sequence import FinishedSequence
from lockstep.replay.playback import Arrived, Event
from lockstep.replay.rerun import AppliedCommand, DecidedStep
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.workload import PS_PER_US
from lockstep.worker.flight.entries import Added, Arrival, EngineEntry, OutputDigest, RequestDigest


@dataclass(slots=True)
class PlayedSequence:
    """One sequence of a recording, up to the current event."""

    engine: EngineEntry
    added: Added
    outcome: RequestOutcome
    first: PlayedSequence | None = None
    """First sequence of its request; None: this is the first one, or the first one is missing."""
    index: int = 0
    """Index among the sequences of its request; 0: the first."""
    num_siblings: int = 0
    """Number of later sequences of its request, if this is the first."""
    arrival: Arrival | None = None
    digest: RequestDigest | None = None
    """Digest of its request, if this is the first sequence."""
    end: OutputDigest | None = None
    tokens: array[int] = field(default_factory=lambda: array("I"))
    """Tokens; empty if the recording has no content or tokens are not collected."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """End of each step that produced tokens, in microseconds of its run, and the number of its tokens."""


class PlayedSequences:
    """Open sequences of a played recording.

    Args:
        with_tokens: collect also their tokens and the ends of their steps.
    """

    def __init__(self, *, with_tokens: bool = False) -> None:
        self.open: dict[tuple[int, int], PlayedSequence] = {}
        """Open sequences by engine and id."""
        self._with_tokens = with_tokens
        self._engines: dict[int, EngineEntry] = {}
        self._ends: dict[int, tuple[int, int]] = {}
        """Number and end of each engine's last step."""

    def take(self, event: Event) -> Iterator[PlayedSequence]:
        """Process one event, and yield the sequences that it ended."""
        match event:
            case DecidedStep():
                self._step(event)
                yield from self._ended(event.engine, event.finished)
            case AppliedCommand(engine, _, finished):
                yield from self._ended(engine, finished)
            case EngineEntry():
                self._engines[event.number] = event
            case Added():
                self._add(event)
            case Arrived(came, arrival_us):
                if (sequence := self.open.get((came.engine, came.seq_id))) is not None:
                    sequence.outcome.arrival_ps = arrival_us * PS_PER_US
            case Arrival() | RequestDigest() | OutputDigest():
                if (sequence := self.open.get((event.engine, event.seq_id))) is not None:
                    _note(sequence, event)

    def _add(self, added: Added) -> None:
        request, engine = added.request, self._engines.get(added.engine)
        if engine is None:
            return  # the playback reports this error
        outcome = RequestOutcome(
            str(added.seq_id),
            added.seq_id,
            request.priority,
            str(added.tenant),
            request.num_prompt_tokens,
            arrival_tick=added.step,
            arrival_ps=0,
        )
        first = None if request.sibling_of is None else self.open.get((added.engine, request.sibling_of))
        sequence = PlayedSequence(engine, added, outcome, first)
        if first is not None:
            sequence.index = first.num_siblings = first.num_siblings + 1
        self.open[added.engine, added.seq_id] = sequence

    def _step(self, step: DecidedStep) -> None:
        number, plan, timing = step.engine, step.plan, step.timing
        end_us = timing.start_us + timing.duration_us
        self._ends[number] = plan.step, end_us * PS_PER_US
        for seq_id in plan.admitted:
            if (sequence := self.open.get((number, seq_id))) is not None:
                sequence.outcome.admitted_tick = plan.step
                sequence.outcome.admitted_ps = timing.start_us * PS_PER_US
        sampling = compress(plan.seq_ids, plan.samples)
        for seq_id, num_tokens in zip(sampling, () if step.events is None else step.events.num_tokens, strict=False):
            sequence = self.open.get((number, seq_id))
            if sequence is None:
                continue
            outcome = sequence.outcome
            outcome.num_output_tokens += num_tokens
            if outcome.first_token_tick < 0:
                outcome.first_token_tick, outcome.first_token_ps = plan.step, end_us * PS_PER_US
            if self._with_tokens and num_tokens:
                sequence.steps.append((end_us, num_tokens))
                sequence.tokens.extend(step.tokens.get(seq_id, ()))

    def _ended(self, number: int, finished: Iterable[FinishedSequence]) -> Iterator[PlayedSequence]:
        for each in finished:
            sequence = self.open.pop((number, each.seq_id), None)
            if sequence is not None:
                sequence.outcome.end(each, *self._ends.get(number, (0, 0)))
                yield sequence


def _note(sequence: PlayedSequence, entry: Arrival | RequestDigest | OutputDigest) -> None:
    match entry:
        case Arrival():
            sequence.arrival = entry
        case RequestDigest():
            sequence.digest = entry
        case OutputDigest():
            sequence.end = entry
