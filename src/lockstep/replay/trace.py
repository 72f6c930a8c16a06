"""Our own recordings as values: what a live run did, when, and for how long; and its requests as a workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.core.policy import output_limit
from lockstep.core.request import FinishReason
from lockstep.core.sequence import FinishedSequence
from lockstep.errors import TraceError
from lockstep.replay.playback import Arrived, Playback, Played
from lockstep.replay.rerun import Obeyed, PartedError, request_of
from lockstep.replay.trace_file import Cut, engine_of, part_of, read_entries
from lockstep.replay.trace_file import TracedEngine as TracedEngine
from lockstep.replay.wholeness import Finding, Kind, arranged, with_losses
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit, Workload, WorkloadRequest
from lockstep.worker.flight.entries import Added, EngineEntry, Entry, Header
from lockstep.worker.flight.format import SUFFIX

PS_PER_US = PS_PER_MS // 1000


@dataclass(frozen=True, slots=True)
class Trace:
    """A recording, or several: files in order. Nothing is held but this; every reading starts anew."""

    files: tuple[Path, ...]
    engines: tuple[TracedEngine, ...]
    """Of the first file, in order of their numbers."""
    has_content: bool
    lockstep: str
    """The version that recorded it."""
    machine: str
    """What it was recorded on; empty: it does not say, as recordings of early versions and of simulated runs."""
    is_simulated: bool
    """Whether a replay wrote it: its times are logical ones."""
    findings: tuple[Finding, ...] = ()
    """What is to be said of the files: missing, repeated, out of place, cut; they tell by themselves."""
    has_beginning: bool = True
    """Whether the first file is the first of its run."""
    num_runs: int = 1
    """That were recorded in the directory."""

    def check_unbroken(self, verb: str) -> None:
        """Refuse a recording with holes or gaps, for who has to follow it from step to step.

        Raises:
            TraceError: something is not there; the message says what.
        """
        for each in self.findings:
            if each.kind.is_hole or each.kind is Kind.GAP:
                raise TraceError(f"{each}; {verb} follows every step and cannot pass over that: name a file by itself")

    def entries(self) -> Iterator[Entry | Cut]:
        """Everything, file by file.

        Raises:
            TraceError: a file is damaged, of a newer version, or no recording.
        """
        for path in self.files:
            yield from read_entries(path)


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


def open_trace(path: str | Path) -> Trace:
    """Find the files of a recording, in a directory or one by itself, and read what the first says of its engines.

    Raises:
        TraceError: there is none, it is of a newer version, or damaged.
    """
    path = Path(path)
    found = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not found:
        raise TraceError(f"{path}: no recording is there; its files end with {SUFFIX}")
    parts, findings = arranged([part_of(each) for each in found], is_alone=not path.is_dir())
    if not parts:
        raise TraceError(f"{path}: it breaks off before anything was recorded")
    engines: dict[int, TracedEngine] = {}
    facts: dict[str, Any] = {}
    for entry in read_entries(parts[0].path):
        if isinstance(entry, Header):
            facts = entry.facts
        elif isinstance(entry, EngineEntry):
            engine = engine_of(entry.facts)
            engines[engine.number] = engine
    return Trace(
        tuple(part.path for part in parts),
        tuple(engines[number] for number in sorted(engines)),
        bool(facts.get("has_content")),
        str(facts.get("lockstep", "")),
        str(facts.get("machine", "")),
        bool(facts.get("simulated")),
        findings,
        parts[0].number == 1,
        len({part.run for part in parts}),
    )


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
                    life.added.priority,
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


def _request(life: _Life, first_us: int, engine: TracedEngine, partial: int) -> WorkloadRequest:
    """One request; ``partial`` is a content that nobody else has, for a last block that is not full."""
    added = life.added
    contents = added.contents
    if contents and len(contents) * engine.config.block_size < added.num_prompt_tokens:
        contents += (partial,)
    return WorkloadRequest(
        str(added.seq_id),
        added.num_prompt_tokens,
        output_limit(engine.config, request_of(added)),
        life.num_output_tokens,
        (life.arrival_us - first_us) * PS_PER_US,
        added.priority,
        str(added.tenant),
        contents,
    )


def played(trace: Trace, playback: Playback | None = None) -> Iterator[object]:
    """Everything that a recording tells, step by step (`Playback.play`).

    Args:
        playback: what plays it, for who wants to look into it meanwhile; it has the trace's entries.

    Raises:
        TraceError: it cannot be read on, or is not what this version decides.
    """
    try:
        yield from (playback or Playback(trace.entries())).play()
    except PartedError as parted:
        raise TraceError(
            f"the recording is not what this version decides: engine {parted.engine}, step {parted.step}: "
            f"{parted.what}; `lockstep replay --verify` shows more"
        ) from parted
