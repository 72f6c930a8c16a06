"""Figures of a recorded run: its steps, its requests, and these as a workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.core.policy import output_limit
from lockstep.core.request import FinishReason
from lockstep.core.sequence import FinishedSequence
from lockstep.errors import TraceError
from lockstep.replay.playback import Arrived, Playback, Played, played
from lockstep.replay.rerun import Obeyed, request_of
from lockstep.replay.trace import Trace
from lockstep.replay.wholeness import with_losses
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload, WorkloadRequest
from lockstep.worker.flight.entries import Added, EngineEntry

PS_PER_US = PS_PER_MS // 1000


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
    """Whether nobody had work in that gap: it says nothing of what a step costs."""
    num_prefill_tokens: int
    num_decode_seqs: int
    """Tokens that are no prompt: one for each sequence that decodes, or each token of a forced segment."""
    num_context_tokens: int
    """start + length, summed over rows: see `CostModel`."""
    num_decoded_tokens: int
    """Output tokens that it brought."""


class LiveRequest(NamedTuple):
    """What became of one recorded sequence. Times are from the beginning of the recording; -1: it never came so far."""

    engine: int
    seq_id: int
    arrival_us: int
    """Below 0: it waited already when the recording began."""
    admitted_us: int
    """Begin of the step that admitted it."""
    first_token_us: int
    """End of the step that brought its first token."""
    finished_us: int
    """End of its last step, or of the one before a command ended it."""
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    reason: FinishReason


def live_steps(trace: Trace, engine: int | None = None) -> Iterator[LiveStep]:
    """Every recorded step, in the order in which their engines' records closed; None: of all engines.

    Raises:
        TraceError: the recording cannot be read on, or is not what this version decides.
    """
    for event in played(trace):
        if not isinstance(event, Played) or engine not in (None, event.ran.engine):
            continue
        plan, events, timing = event.ran.plan, event.ran.events, event.timing
        num_tokens = plan.num_tokens
        yield LiveStep(
            event.ran.engine,
            plan.step,
            timing.start_us,
            timing.duration_us,
            timing.gap_us,
            timing.is_after_idle,
            plan.num_prompt_tokens,
            num_tokens - plan.num_prompt_tokens,
            sum(plan.starts) + num_tokens,
            0 if events is None else sum(events.num_tokens),
        )


@dataclass(slots=True)
class _Life:
    """One sequence under way."""

    added: Added
    arrival_us: int = 0
    admitted_us: int = -1
    first_token_us: int = -1
    num_output_tokens: int = 0


class _Lives:
    """The sequences of a recording that came during it."""

    def __init__(self) -> None:
        self.open: dict[tuple[int, int], _Life] = {}
        self._arrivals: dict[tuple[int, int], int] = {}
        """Told before the command takes effect."""
        self._end_us: dict[int, int] = {}

    def take(self, event: object) -> Iterator[tuple[_Life, FinishedSequence, int]]:
        """Who ended with it, and when."""
        finished: tuple[FinishedSequence, ...] = ()
        number = 0
        match event:
            case Arrived():
                self._arrivals[event.came.engine, event.came.seq_id] = event.arrival_us
            case Obeyed(number, command, finished):
                if isinstance(command, Added):
                    key = number, command.seq_id
                    self.open[key] = _Life(command, self._arrivals.pop(key, 0))
            case Played():
                number, finished = event.ran.engine, event.ran.finished
                self._step(event)
        for sequence in finished:
            life = self.open.pop((number, sequence.seq_id), None)
            if life is not None:
                yield life, sequence, self._end_us.get(number, 0)

    def _step(self, event: Played) -> None:
        number, plan, events = event.ran.engine, event.ran.plan, event.ran.events
        end_us = self._end_us[number] = event.timing.start_us + event.timing.duration_us
        for seq_id in plan.admitted:
            life = self.open.get((number, seq_id))
            if life is not None:
                life.admitted_us = event.timing.start_us
        sampling = (seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples)
        for seq_id, num_tokens in zip(sampling, () if events is None else events.num_tokens, strict=False):
            life = self.open.get((number, seq_id))
            if life is not None:
                life.num_output_tokens += num_tokens
                if life.first_token_us < 0:
                    life.first_token_us = end_us


def live_requests(trace: Trace, engine: int | None = None) -> Iterator[LiveRequest]:
    """Every request that came and ended during the recording, in the order in which they ended; None: of all engines.

    Raises:
        TraceError: the recording cannot be read on, or is not what this version decides.
    """
    lives = _Lives()
    for event in played(trace):
        for life, ended, end_us in lives.take(event):
            if engine in (None, life.added.engine):
                yield LiveRequest(
                    life.added.engine,
                    ended.seq_id,
                    life.arrival_us,
                    life.admitted_us,
                    life.first_token_us,
                    end_us,
                    life.added.request.priority,
                    ended.num_prompt_tokens,
                    ended.num_output_tokens,
                    ended.num_cached_tokens,
                    ended.reason,
                )


def workload_of(trace: Trace, engine: int = 0) -> Workload:
    """An engine's requests with the lengths that their answers had, in picoseconds from the first one's arrival.

    Who was aborted, or was under way at the end, gets the tokens that it got; who got none is left out, and so is who
    was under way in the beginning.

    Raises:
        TraceError: there is no such engine, or the recording cannot be read on.
    """
    traced = {each.number: each for each in trace.engines}.get(engine)
    if traced is None:
        raise TraceError(
            f"the recording has no engine {engine}; it has {', '.join(str(e.number) for e in trace.engines)}"
        )
    lives = _Lives()
    served: list[_Life] = []
    playback = Playback(trace.entries())
    for event in played(trace, playback):
        served.extend(life for life, _, _ in lives.take(event) if life.added.engine == engine)
    served.extend(life for (number, _), life in lives.open.items() if number == engine)
    served = sorted((life for life in served if life.num_output_tokens), key=_order)
    first_us = served[0].arrival_us if served else 0
    partial = 1 + max((max(life.added.contents, default=0) for life in served), default=0)
    requests = tuple(_request(life, first_us, traced, partial + index) for index, life in enumerate(served))
    config = {name: getattr(traced.config, name) for name in traced.config.__slots__}
    notes = tuple(map(str, with_losses(trace.findings, playback.losses)))
    return Workload(trace.files[0].name, requests, ArrivalUnit.PS, traced.config.block_size, config, notes)


def _order(life: _Life) -> tuple[int, int]:
    return life.arrival_us, life.added.seq_id


def _request(life: _Life, first_us: int, engine: EngineEntry, partial: int) -> WorkloadRequest:
    """One request; ``partial`` is a content that nobody else has, for a last block that is not full."""
    added = life.added
    contents = added.contents
    if contents and len(contents) * engine.config.block_size < added.request.num_prompt_tokens:
        contents += (partial,)
    return WorkloadRequest(
        str(added.seq_id),
        added.request.num_prompt_tokens,
        output_limit(engine.config, request_of(added)),
        life.num_output_tokens,
        (life.arrival_us - first_us) * PS_PER_US,
        added.request.priority,
        str(added.tenant),
        contents,
    )
