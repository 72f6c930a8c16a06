"""Figures of a recorded run: its steps, its requests, and these as a workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import compress
from typing import NamedTuple

from lockstep.core.policy import output_limit
from lockstep.core.sequence import FinishedSequence
from lockstep.errors import TraceError
from lockstep.replay.playback import Arrived, Event, Playback, played
from lockstep.replay.rerun import AppliedCommand, DecidedStep, request_of
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.trace import Trace
from lockstep.replay.trace_integrity import with_losses
from lockstep.replay.workload import PS_PER_US, ArrivalUnit, Workload, WorkloadRequest
from lockstep.worker.flight.entries import Added, EngineEntry


class LiveStep(NamedTuple):
    """One recorded step."""

    engine: int
    step: int
    start_us: int
    """From the beginning of the recording."""
    duration_us: int
    gap_us: int
    """Between the end of the device's turn before and the start of this one, idle time included."""
    is_after_idle: bool
    """Whether no engine had work in that gap; then the gap is no part of a step's cost."""
    num_prefill_tokens: int
    num_decode_seqs: int
    """Tokens that are no prompt: one for each sequence that decodes, or each token of a forced segment."""
    num_context_tokens: int
    """start + length, summed over rows: see `CostModel`."""


def live_steps(trace: Trace, engine: int | None = None) -> Iterator[LiveStep]:
    """Every recorded step, in the order in which their engines' records closed; None: of all engines.

    Raises:
        TraceError: the recording cannot be read on, or is not what this version decides.
    """
    for event in played(trace):
        if isinstance(event, DecidedStep) and engine in (None, event.engine):
            yield live_step(event)


def live_step(event: DecidedStep) -> LiveStep:
    """A step that was decided again, in figures."""
    plan, timing = event.plan, event.timing
    num_tokens = plan.num_tokens
    return LiveStep(
        event.engine,
        plan.step,
        timing.start_us,
        timing.duration_us,
        timing.gap_us,
        timing.is_after_idle,
        plan.num_prompt_tokens,
        num_tokens - plan.num_prompt_tokens,
        sum(plan.starts) + num_tokens,
    )


class SequenceLife(NamedTuple):
    """One sequence that came during the recording."""

    added: Added
    outcome: RequestOutcome


class Lives:
    """The sequences of a recording that are under way."""

    def __init__(self) -> None:
        self.open: dict[tuple[int, int], SequenceLife] = {}
        """By engine and id."""
        self._arrivals_ps: dict[tuple[int, int], int] = {}
        """Of sequences whose commands have not taken effect."""
        self._ends: dict[int, tuple[int, int]] = {}
        """Number and end of each engine's last step."""

    def take(self, event: Event) -> Iterator[SequenceLife]:
        """Go on by one event; the sequences that ended with it."""
        match event:
            case Arrived(came, arrival_us):
                self._arrivals_ps[came.engine, came.seq_id] = arrival_us * PS_PER_US
            case AppliedCommand(number, command, finished):
                if isinstance(command, Added):
                    self._add(command)
                yield from self._ended(number, finished)
            case DecidedStep():
                self._step(event)
                yield from self._ended(event.engine, event.finished)

    def _add(self, added: Added) -> None:
        key = added.engine, added.seq_id
        outcome = RequestOutcome(
            str(added.seq_id),
            added.seq_id,
            added.request.priority,
            str(added.tenant),
            added.request.num_prompt_tokens,
            arrival_tick=added.step,
            arrival_ps=self._arrivals_ps.pop(key, 0),
        )
        self.open[key] = SequenceLife(added, outcome)

    def _step(self, step: DecidedStep) -> None:
        number, plan, timing = step.engine, step.plan, step.timing
        end_ps = (timing.start_us + timing.duration_us) * PS_PER_US
        self._ends[number] = plan.step, end_ps
        for seq_id in plan.admitted:
            life = self.open.get((number, seq_id))
            if life is not None:
                life.outcome.admitted_tick, life.outcome.admitted_ps = plan.step, timing.start_us * PS_PER_US
        sampling = compress(plan.seq_ids, plan.samples)
        for seq_id, num_tokens in zip(sampling, () if step.events is None else step.events.num_tokens, strict=False):
            life = self.open.get((number, seq_id))
            if life is not None:
                life.outcome.num_output_tokens += num_tokens
                if life.outcome.first_token_tick < 0:
                    life.outcome.first_token_tick, life.outcome.first_token_ps = plan.step, end_ps

    def _ended(self, number: int, finished: Iterable[FinishedSequence]) -> Iterator[SequenceLife]:
        for sequence in finished:
            life = self.open.pop((number, sequence.seq_id), None)
            if life is not None:
                life.outcome.end(sequence, *self._ends.get(number, (0, 0)))
                yield life


def live_requests(trace: Trace, engine: int | None = None) -> Iterator[RequestOutcome]:
    """Every request that came and ended during the recording, in the order in which they ended; None: of all engines.

    Ticks are steps of the engine, and times count from the begin of the recording: below 0, a request waited then. One
    that a command ended has the end of the step before.

    Raises:
        TraceError: the recording cannot be read on, or is not what this version decides.
    """
    lives = Lives()
    for event in played(trace):
        for life in lives.take(event):
            if engine in (None, life.added.engine):
                yield life.outcome


def workload_of(trace: Trace, engine: int = 0) -> Workload:
    """An engine's requests with the lengths that their answers had, in picoseconds from the first one's arrival.

    A request that was aborted, or was under way at the end, has the tokens that it got. Requests without tokens, and
    requests that were under way at the beginning, are left out.

    Raises:
        TraceError: there is no such engine, or the recording cannot be read on.
    """
    traced = {each.number: each for each in trace.engines}.get(engine)
    if traced is None:
        raise TraceError(
            f"the recording has no engine {engine}; it has {', '.join(str(e.number) for e in trace.engines)}"
        )
    lives = Lives()
    served: list[SequenceLife] = []
    playback = Playback(trace.entries())
    for event in played(trace, playback):
        served.extend(life for life in lives.take(event) if life.added.engine == engine)
    served.extend(life for (number, _), life in lives.open.items() if number == engine)
    notes = tuple(map(str, with_losses(trace.findings, playback.losses)))
    return workload_of_lives(trace.files[0].name, traced, served, notes)


def workload_of_lives(
    name: str, engine: EngineEntry, lives: Iterable[SequenceLife], notes: tuple[str, ...] = ()
) -> Workload:
    """Sequences of an engine with the lengths that they had, in picoseconds from the first one's arrival; those that
    got no token are left out."""
    served = [life for life in lives if life.outcome.num_output_tokens]
    served.sort(key=lambda life: (life.outcome.arrival_ps, life.added.seq_id))
    first_ps = served[0].outcome.arrival_ps if served else 0
    partial = 1 + max((max(life.added.contents, default=0) for life in served), default=0)
    requests = tuple(_request(life, first_ps, engine, partial + index) for index, life in enumerate(served))
    config = asdict(engine.config)
    return Workload(name, requests, ArrivalUnit.PS, engine.config.block_size, config, notes)


def _request(life: SequenceLife, first_ps: int, engine: EngineEntry, partial: int) -> WorkloadRequest:
    """One request; ``partial`` is a content that nothing else has, for a last block that is not full."""
    added, outcome = life
    contents = added.contents
    if contents and len(contents) * engine.config.block_size < outcome.num_prompt_tokens:
        contents += (partial,)
    return WorkloadRequest(
        outcome.name,
        outcome.num_prompt_tokens,
        output_limit(engine.config, request_of(added)),
        outcome.num_output_tokens,
        outcome.arrival_ps - first_ps,
        outcome.priority,
        outcome.tenant,
        contents,
    )
