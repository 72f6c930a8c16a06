"""Figures of a recorded run: its steps and requests, and a workload made from the requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import NamedTuple

from lockstep.core.policy import output_limit
from lockstep.replay.playback import Playback, played
from lockstep.replay.played_sequences import PlayedSequence, PlayedSequences
from lockstep.replay.rerun import DecidedStep, request_of
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.trace import Trace
from lockstep.replay.trace_integrity import with_losses
from lockstep.replay.workload import ArrivalUnit, Workload, WorkloadRequest
from lockstep.worker.flight.entries import EngineEntry


class LiveStep(NamedTuple):
    """One recorded step."""

    engine: int
    step: int
    start_us: int
    """Start of the step, from the beginning of the recording."""
    duration_us: int
    gap_us: int
    """Time between the end of the device's previous turn and the start of this one, including idle time."""
    is_after_idle: bool
    """True if no engine had work during the gap; such a gap is not part of a step's cost."""
    num_prefill_tokens: int
    num_decode_seqs: int
    """Number of tokens outside of prompts: one per decoding sequence, or all tokens of a jump-forward segment."""
    num_context_tokens: int
    """Sum over rows of start + length; see `CostModel`."""


def live_steps(trace: Trace, engine: int | None = None) -> Iterator[LiveStep]:
    """Recorded steps of one engine (None: all engines), in the order in which the records were closed.

    Raises:
        TraceError: the recording is damaged or incomplete, or differs from this version's decisions.
    """
    for event in played(trace):
        if isinstance(event, DecidedStep) and engine in (None, event.engine):
            yield live_step(event)


def live_step(event: DecidedStep) -> LiveStep:
    """Figures of a step that was decided again."""
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


def live_requests(trace: Trace, engine: int | None = None) -> Iterator[RequestOutcome]:
    """Requests that arrived and ended during the recording, of one engine (None: all engines), in the order of their
    ends.

    Ticks are steps of the engine. Times count from the begin of the recording; a negative time belongs to a request
    that waited at that moment. A request that a command ended has the end of the step before.

    Raises:
        TraceError: the recording is damaged or incomplete, or differs from this version's decisions.
    """
    sequences = PlayedSequences()
    for event in played(trace):
        for ended in sequences.take(event):
            if engine in (None, ended.engine.number):
                yield ended.outcome


def workload_of(trace: Trace, engine: int = 0) -> Workload:
    """Workload of an engine's requests with the lengths of their answers, in picoseconds from the first arrival.

    A request that was aborted or unfinished at the end has the tokens that it received. Requests without tokens, and
    requests that were already open at the beginning, are omitted.

    Raises:
        TraceError: the recording has no such engine, or is damaged or incomplete.
    """
    traced = trace.engine(engine)
    sequences = PlayedSequences()
    served: list[PlayedSequence] = []
    playback = Playback(trace.entries())
    for event in played(trace, playback):
        served.extend(each for each in sequences.take(event) if each.engine.number == engine)
    served.extend(each for each in sequences.open.values() if each.engine.number == engine)
    notes = tuple(map(str, with_losses(trace.findings, playback.losses)))
    return workload_of_sequences(trace.files[0].name, traced, served, notes)


def workload_of_sequences(
    name: str, engine: EngineEntry, sequences: Iterable[PlayedSequence], notes: tuple[str, ...] = ()
) -> Workload:
    """Workload of an engine's sequences with their lengths, in picoseconds from the first arrival; sequences without
    tokens are omitted."""
    served = [each for each in sequences if each.outcome.num_output_tokens]
    served.sort(key=lambda each: (each.outcome.arrival_ps, each.added.seq_id))
    first_ps = served[0].outcome.arrival_ps if served else 0
    partial = 1 + max((max(each.added.contents, default=0) for each in served), default=0)
    requests = tuple(_request(each, first_ps, engine, partial + index) for index, each in enumerate(served))
    config = asdict(engine.config)
    if len(engine.config.groups) == 1:
        del config["groups"]
    return Workload(name, requests, ArrivalUnit.PS, engine.config.block_size, config, notes)


def _request(sequence: PlayedSequence, first_ps: int, engine: EngineEntry, partial: int) -> WorkloadRequest:
    """One request; ``partial`` is a unique content for a last block that is not full."""
    added, outcome = sequence.added, sequence.outcome
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
