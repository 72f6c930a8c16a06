"""Reader of flight recordings: turns each sequence that `lockstep serve --trace` recorded into an observation.

While a recording is read, this version of the scheduler repeats its decisions, so that times and queue positions are
only taken from steps that this version reproduces. Answers of two recordings are compared by their keyed digests if
both used a key with the same name, and by their tokens if both contain content. Otherwise the recordings are evidence
of latency only.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec

from lockstep.core.request import FinishReason
from lockstep.errors import EvidenceError, LockstepError, TraceError
from lockstep.executors.base import environment_digest
from lockstep.release.decisions import decisions_of
from lockstep.release.documents import write_lines
from lockstep.release.observation import SIDES, Side
from lockstep.release.reading import Source, read
from lockstep.release.store import Store
from lockstep.replay.live import Lives
from lockstep.replay.playback import Event, Playback
from lockstep.replay.readers import reading as workloads
from lockstep.replay.rerun import AppliedCommand, DecidedStep, DivergedError
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.trace import CutFile, Trace, open_trace
from lockstep.replay.workload import PS_PER_MS
from lockstep.worker.flight.content import Digests, decode_request
from lockstep.worker.flight.entries import (
    Added,
    Arrival,
    EngineEntry,
    Entry,
    Header,
    OutputDigest,
    RequestDigest,
    RequestEntry,
    Tokens,
)

FORMAT = "lockstep recording"
BACKEND = "lockstep"
_WEIGHTS = ("artifact", "model")
"""Entries of an environment that identify the weights, which are compared separately."""
_PRECISION = ("quantize", "kv_cache_precision")
"""Entries of an environment with the configured precision, which is compared separately."""
_OF_SERVER = re.compile(r"req-[0-9a-f]{32}")
"""Ids that a server generated because the caller sent none. They match nothing on another server."""
_CONTENT_KEY = b"lockstep gate"
"""Key for digests of recorded content. It need not be secret, since the recording has the content itself."""
_PS_PER_S = 1000 * PS_PER_MS
_FAILURES = (FinishReason.ERROR, FinishReason.DEADLINE)


class Sameness(Enum):
    """Means of comparing the answers of two recordings."""

    DIGESTS = "digests"
    """Both recordings have digests under a key with the same name."""
    CONTENT = "content"
    """Both recordings contain prompts and answers."""
    NONE = "none"
    """Answers cannot be compared."""


@dataclass(frozen=True, slots=True)
class Recordings:
    """Both sides after they were read, at least one of them from a recording."""

    traces: Mapping[Side, Trace]
    """Recordings by side."""
    sources: tuple[Source, ...]
    notes: tuple[str, ...]
    """Remarks on the recordings, for the verdict."""

    def decisions(self) -> dict[str, Any] | None:
        """Differences between the scheduler decisions of both sides; None: only one side is a recording."""
        if len(self.traces) < len(SIDES):
            return None
        return decisions_of(*(self.traces[side] for side in SIDES))


def is_recording(path: Path) -> bool:
    """True for a folder, and for a file that begins like a recording."""
    try:
        return workloads.is_recording(path)
    except LockstepError:
        return False


def read_recordings(store: Store, paths: Sequence[Path]) -> Recordings:
    """Read both sides, at least one of which is a recording, and create the views of a store.

    Args:
        paths: paths of baseline and candidate.

    Raises:
        EvidenceError: a recording is damaged, contains several runs or is empty, or the other file cannot be read.
    """
    traces = {side: _opened(path) for side, path in zip(SIDES, paths, strict=True) if is_recording(path)}
    sameness, notes = sameness_of(traces)
    has_tokens = len(traces) < len(SIDES) or all(trace.header.has_content for trace in traces.values())
    sources = []
    for side, path in zip(SIDES, paths, strict=True):
        trace = traces.get(side)
        if trace is None:
            sources.append(read(store, path, side)[0])
            continue
        sequences = _Sequences(trace, sameness, has_tokens and trace.header.has_content)
        rows = store.folder / f"recording-{side}.jsonl"
        try:
            num_rows = write_lines(rows, map(msgspec.json.encode, sequences.observations()))
        except TraceError as error:
            raise EvidenceError(f"{path}: {error}") from error
        if not num_rows:
            raise EvidenceError(f"{path}: no sequence both began and ended within this recording")
        sources.append(replace(read(store, rows, side)[0], path=path, format=FORMAT))
        notes += [f"the {side}: {each}" for each in (*map(str, trace.findings), *sequences.notes())]
    return Recordings(traces, tuple(sources), tuple(notes))


def sameness_of(traces: Mapping[Side, Trace]) -> tuple[Sameness, list[str]]:
    """Means of comparing the answers, and notes on why they cannot be compared."""
    headers = [trace.header for trace in traces.values()]
    names = [header.key_name for header in headers]
    if len(headers) == len(SIDES) and names[0] and names[0] == names[1]:
        return Sameness.DIGESTS, []
    if all(header.has_content for header in headers):
        return Sameness.CONTENT, []
    if len(headers) < len(SIDES):
        return Sameness.NONE, ["answers were not compared: only one side is a recording, and it holds no contents"]
    if not all(names):
        return Sameness.NONE, ["answers were not compared: a recording without digests, such as a replay's, has none"]
    return Sameness.NONE, [
        "answers were not compared: the recordings' digests have unlike keys; give both servers the same --trace-key"
    ]


def _opened(path: Path) -> Trace:
    try:
        trace = open_trace(path)
        if trace.num_runs == 1:
            trace.check_as_recorded("the gate")
    except TraceError as error:
        raise EvidenceError(str(error)) from error
    if trace.num_runs > 1:
        raise EvidenceError(
            f"{path}: contains {trace.num_runs} runs; pass the files of one run, or a folder with one run"
        )
    return trace


@dataclass(slots=True)
class _Sequence:
    """Recorded sequence: its request, times, tokens and end."""

    sibling_of: int | None = None
    num_prompt_tokens: int | None = None
    request_id: str | None = None
    seed: int | None = None
    """Seed of the sampling; None: the sequence does not sample randomly, or the seed was not recorded."""
    prompt: bytes = b""
    parameters: bytes = b""
    segment: str = ""
    num_siblings: int = 0
    num_waiting: int = 0
    """Number of other sequences that waited when this one arrived."""
    num_held_blocks: int | None = None
    """Blocks that all sequences together held after the step of this one's first token."""
    num_blocks: int | None = None
    """Size of the KV pool in blocks after the step of the first token."""
    last_us: int | None = None
    """End of the step of the latest token, in microseconds."""
    gaps_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    end: OutputDigest | None = None


class _Sequences:
    """Sequences of one recording during its playback."""

    def __init__(self, trace: Trace, sameness: Sameness, has_tokens: bool) -> None:
        self._trace = trace
        self._sameness = sameness
        self._has_tokens = has_tokens
        self._content_digests = Digests(_CONTENT_KEY)
        self._entries = self._tapped()
        self._playback = Playback(self._entries)
        self._diverged: DivergedError | None = None
        self._num_untimed = 0
        self._lives = Lives()
        self._engines: dict[int, EngineEntry] = {}
        self._open: dict[tuple[int, int], _Sequence] = {}
        """Sequences without an observation so far, by engine and sequence id."""
        self._tokens: dict[int, deque[tuple[tuple[int, ...], ...]]] = {}
        """Tokens of steps that were not played back yet, by engine."""
        self._num_of_name: Counter[str] = Counter()
        """Number of requests so far, by id or content."""

    def observations(self) -> Iterator[dict[str, Any]]:
        """One observation for each sequence that began and ended within the recording.

        Raises:
            TraceError: the rest of the recording cannot be read.
        """
        try:
            for event in self._playback.play():
                self._take(event)
                for life in self._lives.take(event):
                    yield self._observation((life.added.engine, life.added.seq_id), life.outcome)
        except DivergedError as diverged:
            self._diverged = diverged
            yield from self._without_times()

    def _without_times(self) -> Iterator[dict[str, Any]]:
        """Observations of sequences that ended after the playback diverged. Their answers are still evidence."""
        for key in [key for key, each in self._open.items() if each.end is not None]:
            yield self._observation(key, None)
        for entry in self._entries:
            if isinstance(entry, OutputDigest) and (entry.engine, entry.seq_id) in self._open:
                yield self._observation((entry.engine, entry.seq_id), None)

    def notes(self) -> Iterator[str]:
        """Remarks on missing times and sequences. Complete only after all observations were read."""
        if self._diverged is not None:
            yield (
                f"this version decides otherwise than was recorded from step {self._diverged.step} of engine "
                f"{self._diverged.engine} on ({self._diverged.what}); {self._num_untimed:,} answers are without times"
            )
        elif self._lives.open:
            yield f"{len(self._lives.open):,} sequences were under way when the recording ended, and are left out"

    def _tapped(self) -> Iterator[Entry | CutFile]:
        """Entries of the recording. Entries that are not events of a playback are stored in passing."""
        for entry in self._trace.entries():
            match entry:
                case Header() | CutFile():
                    self._tokens.clear()
                case EngineEntry():
                    self._engines[entry.number] = entry
                case Added():
                    request = entry.request
                    self._open[entry.engine, entry.seq_id] = _Sequence(request.sibling_of, request.num_prompt_tokens)
                case Arrival():
                    self._arrive(entry)
                case RequestDigest():
                    self._name(entry)
                case RequestEntry() if self._sameness is Sameness.CONTENT:
                    self._digest(entry)
                case OutputDigest() if (entry.engine, entry.seq_id) in self._open:
                    self._open[entry.engine, entry.seq_id].end = entry
                case Tokens() if self._has_tokens:
                    self._tokens.setdefault(entry.engine, deque()).append(entry.tokens)
            yield entry

    def _arrive(self, entry: Arrival) -> None:
        sequence = self._open[entry.engine, entry.seq_id]
        sequence.seed = entry.seed
        if sequence.sibling_of is None:
            return
        first = self._open.get((entry.engine, sequence.sibling_of))
        if first is None:
            return
        first.num_siblings += 1
        sequence.seed = None if first.seed is None else first.seed + first.num_siblings
        sequence.prompt, sequence.parameters, sequence.segment = first.prompt, first.parameters, first.segment
        sequence.request_id = None if first.request_id is None else f"{first.request_id}.{first.num_siblings}"

    def _name(self, entry: RequestDigest) -> None:
        sequence = self._open[entry.engine, entry.seq_id]
        sequence.segment = entry.segment
        sequence.seed = sequence.seed if entry.draws else None
        sequence.request_id = entry.external_id
        if self._sameness is Sameness.DIGESTS:
            sequence.prompt, sequence.parameters = entry.prompt, entry.parameters
        if self._sameness is not Sameness.CONTENT:
            self._number(sequence)

    def _digest(self, entry: RequestEntry) -> None:
        request = decode_request(entry.request)
        assert isinstance(request.prompt, tuple), "a recorded prompt is token ids"
        sequence = self._open[entry.engine, entry.seq_id]
        sequence.prompt = self._content_digests.prompt(request.prompt)
        sequence.parameters = self._content_digests.parameters(request)
        self._number(sequence)

    def _number(self, sequence: _Sequence) -> None:
        """Set a request's id: the caller's, or else a digest of its content. Repeated ids get a number, from 2 on."""
        name = sequence.request_id or ""
        if sequence.prompt and (not name or _OF_SERVER.fullmatch(name)):
            name = f"{sequence.prompt.hex()}{sequence.parameters.hex()}"
        self._num_of_name[name] += 1
        number = self._num_of_name[name]
        sequence.request_id = (name if number == 1 else f"{name}#{number}") if name else None

    def _take(self, event: Event) -> None:
        match event:
            case AppliedCommand(engine, Added() as added, _):
                stats = self._playback.engines[engine].scheduler.stats()
                waiting = stats.num_queued + stats.num_preempted - 1
                self._open[engine, added.seq_id].num_waiting = waiting
            case DecidedStep():
                self._step(event)

    def _step(self, step: DecidedStep) -> None:
        if step.events is None:
            return
        queued = self._tokens.get(step.engine)
        rows = queued.popleft() if queued else ()
        end_us = step.timing.start_us + step.timing.duration_us
        sampling = compress(step.plan.seq_ids, step.plan.samples)
        for at, (seq_id, num_tokens) in enumerate(zip(sampling, step.events.num_tokens, strict=False)):
            sequence = self._open.get((step.engine, seq_id))
            if sequence is None or not num_tokens:
                continue
            if sequence.last_us is None:
                stats = self._playback.engines[step.engine].scheduler.stats()
                sequence.num_held_blocks, sequence.num_blocks = stats.num_held_blocks, stats.num_blocks
            else:
                sequence.gaps_ms.append((end_us - sequence.last_us) / 1e3)
            sequence.gaps_ms += [0.0] * (num_tokens - 1)
            sequence.last_us = end_us
            if at < len(rows):
                sequence.tokens += rows[at]

    def _observation(self, key: tuple[int, int], outcome: RequestOutcome | None) -> dict[str, Any]:
        """Observation of a sequence that has ended.

        Args:
            outcome: times of the request; None: unknown.
        """
        engine, sequence = self._engines[key[0]], self._open.pop(key, _Sequence())
        end = sequence.end
        failure = end.reason.value if end is not None and end.reason in _FAILURES else None
        row: dict[str, Any] = {
            "request_id": sequence.request_id,
            "index": key[1] if self._trace.header.is_simulated else None,
            "model": engine.name,
            "artifact": engine.fingerprint or None,
            "deterministic": engine.environment.get("executor") == "native" or None,
            "precision": _precision_of(engine),
            "environment": _environment_of(engine),
            "backend": BACKEND,
            "replica_id": engine.key,
            "scheduler": engine.config.order,
            "segment": sequence.segment or None,
            "prompt_digest": sequence.prompt.hex() or None,
            "params_digest": sequence.parameters.hex() or None,
            "seed": None if sequence.seed is None else _signed(sequence.seed),
            "prompt_tokens": sequence.num_prompt_tokens,
            "ok": failure is None,
            "error": failure,
        }
        is_whole = end is None or end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if end is not None and is_whole:  # an answer that its client aborted has no output, length or times
            row["output_tokens"] = end.num_tokens
            if self._sameness is Sameness.DIGESTS:
                row["fingerprint"] = end.output.hex()
            if self._has_tokens and 0 < end.num_tokens == len(sequence.tokens):
                row["token_ids"] = sequence.tokens
        if outcome is None:
            self._num_untimed += 1
            return row
        row |= {
            "ts": outcome.arrival_ps / _PS_PER_S,
            "queue_depth": sequence.num_waiting,
            "kv_used": sequence.num_held_blocks,
            "kv_total": sequence.num_blocks,
        }
        if is_whole:
            row |= {"output_tokens": outcome.num_output_tokens, "latency_ms": outcome.in_ps.e2e / PS_PER_MS}
        if is_whole and outcome.first_token_ps >= 0:
            row |= {"ttft_ms": outcome.in_ps.ttft / PS_PER_MS, "token_latencies_ms": sequence.gaps_ms}
        return row


def _environment_of(engine: EngineEntry) -> str:
    """Digest of the software versions that determine the bits of an answer. It is the same on every machine."""
    chosen = (*_WEIGHTS, *_PRECISION)
    return environment_digest({name: value for name, value in engine.environment.items() if name not in chosen})


def _precision_of(engine: EngineEntry) -> str | None:
    """Configured precision in words; None: the engine has no precision settings."""
    return ", ".join(f"{name} {engine.environment[name]}" for name in _PRECISION if name in engine.environment) or None


def _signed(seed: int) -> int:
    """Seed as a signed 64-bit number, the type of its column."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
