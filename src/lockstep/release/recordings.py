"""Flight recordings as observations: each sequence that `lockstep serve --trace` recorded is one request of its side.

The steps of a recording are decided again while it is read, so that its figures result from decisions of this version.
Answers of two recordings compare by their keyed digests if the keys have the same name, and by their tokens if both
recordings have content; otherwise they are evidence of latency only.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import compress, pairwise
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
from lockstep.replay.playback import Event, Playback
from lockstep.replay.played_sequences import PlayedSequence, PlayedSequences
from lockstep.replay.readers import reading as workloads
from lockstep.replay.rerun import AppliedCommand, DecidedStep
from lockstep.replay.trace import Trace, open_trace
from lockstep.replay.verify_report import DivergedError
from lockstep.replay.workload import PS_PER_MS
from lockstep.worker.flight.content import Digests, decode_request
from lockstep.worker.flight.entries import Added, Arrival, EngineEntry, OutputDigest, RequestDigest, RequestEntry

FORMAT = "lockstep recording"
BACKEND = "lockstep"
_WEIGHTS = ("artifact", "model")
"""Entries of an environment that name the weights, which are compared separately."""
_PRECISION = ("quantize", "kv_cache_precision")
"""Entries of an environment that name the precision, which is a setting and therefore not part of the environment's
digest."""
_OF_SERVER = re.compile(r"req-[0-9a-f]{32}")
"""Ids that a server generated for requests without one. They differ between servers."""
_CONTENT_KEY = b"lockstep gate"
"""Key for digests of contents that the recording contains anyway."""
_PS_PER_S = 1000 * PS_PER_MS
_FAILURES = (FinishReason.ERROR, FinishReason.DEADLINE)


class Sameness(Enum):
    """Means by which the answers of two recordings compare."""

    DIGESTS = "digests"
    """Both recordings have digests under keys of the same name."""
    CONTENT = "content"
    """Both recordings contain prompts and answers."""
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Recordings:
    """Recordings among the two sides, and remarks about them."""

    traces: Mapping[Side, Trace]
    sources: tuple[Source, ...]
    notes: tuple[str, ...]

    def decisions(self) -> dict[str, Any] | None:
        """Compare the decisions of both sides; None: only one side is a recording."""
        if len(self.traces) < len(SIDES):
            return None
        return decisions_of(*(self.traces[side] for side in SIDES))


def is_recording(path: Path) -> bool:
    """True for a folder or file with a recording."""
    try:
        return workloads.is_recording(path)
    except LockstepError:
        return False


def read_recordings(store: Store, paths: Sequence[Path]) -> Recordings:
    """Read both sides, at least one of which is a recording, as the views of a store.

    Args:
        paths: paths of baseline and candidate.

    Raises:
        EvidenceError: a recording is damaged, of several runs or empty, or the other file cannot be read.
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
            raise EvidenceError(f"{path}: no sequence arrived and ended within this recording")
        sources.append(replace(read(store, rows, side)[0], path=path, format=FORMAT))
        notes += [f"the {side}: {each}" for each in (*map(str, trace.findings), *sequences.notes())]
    return Recordings(traces, tuple(sources), tuple(notes))


def sameness_of(traces: Mapping[Side, Trace]) -> tuple[Sameness, list[str]]:
    """Choose the means by which the answers compare, with remarks for the report."""
    headers = [trace.header for trace in traces.values()]
    names = [header.key_name for header in headers]
    if len(headers) == len(SIDES) and names[0] and names[0] == names[1]:
        return Sameness.DIGESTS, []
    if all(header.has_content for header in headers):
        return Sameness.CONTENT, []
    if len(headers) < len(SIDES):
        return Sameness.NONE, ["answers were not compared: only one side is a recording, and it has no content"]
    if not all(names):
        return Sameness.NONE, ["answers were not compared: a recording has no digests, as it was written by a replay"]
    return Sameness.NONE, [
        "answers were not compared: the recordings' digests have different keys; pass one --trace-key to both servers"
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
class _Observed:
    """Parts of a sequence's observation that are collected while it runs."""

    request_id: str | None = None
    prompt: bytes = b""
    parameters: bytes = b""
    num_waiting: int = 0
    """Number of other requests that waited when it arrived."""
    num_held_blocks: int | None = None
    """Number of held blocks of the pool after the step of its first token. `num_blocks` has all blocks at that time."""
    num_blocks: int | None = None


class _Sequences:
    """Sequences of one recording, collected while it is played."""

    def __init__(self, trace: Trace, sameness: Sameness, has_tokens: bool) -> None:
        self._trace = trace
        self._sameness = sameness
        self._has_tokens = has_tokens
        self._content_digests = Digests(_CONTENT_KEY)
        self._entries = trace.entries()
        self._playback = Playback(self._entries)
        self._diverged: DivergedError | None = None
        self._num_untimed = 0
        self._sequences = PlayedSequences(with_tokens=True)
        self._observed: dict[tuple[int, int], _Observed] = {}
        """Sequences without an observation so far, by engine and sequence id."""
        self._num_requests: Counter[str] = Counter()

    def observations(self) -> Iterator[dict[str, Any]]:
        """Yield the observation of each sequence that arrived and ended within the recording.

        Raises:
            TraceError: the recording cannot be read to its end.
        """
        try:
            for event in self._playback.play():
                for sequence in self._take(event):
                    yield self._observation(sequence)
        except DivergedError as diverged:
            self._diverged = diverged
            yield from self._without_times()

    def _without_times(self) -> Iterator[dict[str, Any]]:
        """Observations of sequences that ended after this version's decisions diverged; their answers are still
        evidence."""
        running = self._sequences.open
        for key in [key for key, each in running.items() if each.end is not None]:
            yield self._observation(running.pop(key), has_times=False)
        for entry in self._entries:
            deque(self._take(entry), maxlen=0)
            if isinstance(entry, OutputDigest) and (entry.engine, entry.seq_id) in running:
                yield self._observation(running.pop((entry.engine, entry.seq_id)), has_times=False)

    def notes(self) -> Iterator[str]:
        """Remarks on sequences without observations. Complete after `observations`."""
        if self._diverged is not None:
            yield (
                f"this version's decisions differ from the recording from step {self._diverged.step} of engine "
                f"{self._diverged.engine} on ({self._diverged.what}); {self._num_untimed:,} answers have no times"
            )
        elif self._sequences.open:
            yield f"{len(self._sequences.open):,} sequences were left out because the recording ended before they did"

    def _take(self, event: Event) -> Iterator[PlayedSequence]:
        """Process an event, and yield the sequences that it ended."""
        match event:
            case Added():
                self._observed[event.engine, event.seq_id] = _Observed()
            case Arrival():
                self._name_sibling(event)
            case RequestDigest():
                self._name(event)
            case RequestEntry() if self._sameness is Sameness.CONTENT:
                self._digest(event)
            case AppliedCommand(engine, Added() as added, _):
                stats = self._playback.engines[engine].scheduler.stats()
                self._observed[engine, added.seq_id].num_waiting = stats.num_queued + stats.num_preempted - 1
            case DecidedStep():
                self._step(event)
        yield from self._sequences.take(event)

    def _name_sibling(self, entry: Arrival) -> None:
        sequence = self._sequences.open[entry.engine, entry.seq_id]
        if sequence.first is None:
            return
        first = self._observed.get((entry.engine, sequence.first.added.seq_id))
        if first is not None:
            request_id = None if first.request_id is None else f"{first.request_id}.{sequence.index}"
            self._observed[entry.engine, entry.seq_id] = _Observed(request_id, first.prompt, first.parameters)

    def _name(self, entry: RequestDigest) -> None:
        observed = self._observed[entry.engine, entry.seq_id]
        observed.request_id = entry.external_id
        if self._sameness is Sameness.DIGESTS:
            observed.prompt, observed.parameters = entry.prompt, entry.parameters
        if self._sameness is not Sameness.CONTENT:
            self._number(observed)

    def _digest(self, entry: RequestEntry) -> None:
        request = decode_request(entry.request)
        assert isinstance(request.prompt, tuple), "a recorded prompt is token ids"
        observed = self._observed[entry.engine, entry.seq_id]
        observed.prompt = self._content_digests.prompt(request.prompt)
        observed.parameters = self._content_digests.parameters(request)
        self._number(observed)

    def _number(self, observed: _Observed) -> None:
        """Give a request the caller's id or one made from its content, with a number from the second equal id on."""
        name = observed.request_id or ""
        if observed.prompt and (not name or _OF_SERVER.fullmatch(name)):
            name = f"{observed.prompt.hex()}{observed.parameters.hex()}"
        self._num_requests[name] += 1
        number = self._num_requests[name]
        observed.request_id = (name if number == 1 else f"{name}#{number}") if name else None

    def _step(self, step: DecidedStep) -> None:
        if step.events is None:
            return
        sampling = compress(step.plan.seq_ids, step.plan.samples)
        for seq_id, num_tokens in zip(sampling, step.events.num_tokens, strict=False):
            observed = self._observed.get((step.engine, seq_id))
            if observed is not None and num_tokens and observed.num_blocks is None:
                stats = self._playback.engines[step.engine].scheduler.stats()
                observed.num_held_blocks, observed.num_blocks = stats.num_held_blocks, stats.num_blocks

    def _observation(self, sequence: PlayedSequence, *, has_times: bool = True) -> dict[str, Any]:
        """Make the observation of a sequence that has ended."""
        engine, outcome, seq_id, end = sequence.engine, sequence.outcome, sequence.added.seq_id, sequence.end
        observed = self._observed.pop((engine.number, seq_id))
        digest, seed = (sequence.first or sequence).digest, _seed_of(sequence)
        failure = end.reason.value if end is not None and end.reason in _FAILURES else None
        row: dict[str, Any] = {
            "request_id": observed.request_id,
            "index": seq_id if self._trace.header.is_simulated else None,
            "model": engine.name,
            "artifact": _artifact_of(engine, digest) or None,
            "deterministic": engine.environment.get("executor") == "native" or None,
            "precision": _precision_of(engine),
            "environment": _environment_of(engine),
            "backend": BACKEND,
            "replica_id": engine.key,
            "scheduler": engine.config.order,
            "segment": (digest and digest.segment) or None,
            "prompt_digest": observed.prompt.hex() or None,
            "params_digest": observed.parameters.hex() or None,
            "seed": None if seed is None else _signed(seed),
            "prompt_tokens": outcome.num_prompt_tokens,
            "ok": failure is None,
            "error": failure,
        }
        is_whole = end is None or end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if end is not None and is_whole:  # an aborted answer has no material, no length and no times
            row["output_tokens"] = end.num_tokens
            if self._sameness is Sameness.DIGESTS:
                row["fingerprint"] = end.output.hex()
            if self._has_tokens and 0 < end.num_tokens == len(sequence.tokens):
                row["token_ids"] = sequence.tokens.tolist()
        if not has_times:
            self._num_untimed += 1
            return row
        row |= {
            "ts": outcome.arrival_ps / _PS_PER_S,
            "queue_depth": observed.num_waiting,
            "kv_used": observed.num_held_blocks,
            "kv_total": observed.num_blocks,
        }
        if is_whole:
            row |= {"output_tokens": outcome.num_output_tokens, "latency_ms": outcome.in_ps.e2e / PS_PER_MS}
        if is_whole and outcome.first_token_ps >= 0:
            row |= {"ttft_ms": outcome.in_ps.ttft / PS_PER_MS, "token_latencies_ms": _gaps_ms(sequence)}
        return row


def _artifact_of(engine: EngineEntry, digest: RequestDigest | None) -> str:
    """Fingerprint of everything with which an answer was computed: the artifact's, and its adapter's if it has one."""
    adapter = "" if digest is None else digest.adapter_fingerprint
    return f"{engine.fingerprint}+{adapter}" if adapter else engine.fingerprint


def _seed_of(sequence: PlayedSequence) -> int | None:
    """Seed of a sequence's samples; None: it does not use one, or the seed is unknown."""
    if sequence.first is not None:
        seed = _seed_of(sequence.first)
        return None if seed is None else seed + sequence.index
    draws = sequence.digest is None or sequence.digest.draws
    return sequence.arrival.seed if sequence.arrival is not None and draws else None


def _gaps_ms(sequence: PlayedSequence) -> list[float]:
    """Time from each token to the next; 0 between tokens of one step."""
    ends_us = [end_us for end_us, num_tokens in sequence.steps for _ in range(num_tokens)]
    return [(after - before) / 1e3 for before, after in pairwise(ends_us)]


def _environment_of(engine: EngineEntry) -> str:
    """Digest of the software that affects the bits of an answer, equal on all machines."""
    chosen = (*_WEIGHTS, *_PRECISION)
    return environment_digest({name: value for name, value in engine.environment.items() if name not in chosen})


def _precision_of(engine: EngineEntry) -> str | None:
    """Chosen precision in words; None: the engine has none."""
    return ", ".join(f"{name} {engine.environment[name]}" for name in _PRECISION if name in engine.environment) or None


def _signed(seed: int) -> int:
    """Seed as a signed number of 64 bits, the type of its column."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
