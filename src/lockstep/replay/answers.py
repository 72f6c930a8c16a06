"""Recorded answers of a recording with content: what each request got, when, and in which chunks it was shown.

The steps are decided again, as everywhere in this package, which gives the sequence of each row; nothing is computed.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress

from lockstep.cluster.recorded_index import Delivery, RecordedAnswer, RecordedCompletion, RecordedIndex
from lockstep.core.request import FinishReason, Request
from lockstep.engine.request import GenerationRequest
from lockstep.errors import TraceError
from lockstep.replay.live import Lives
from lockstep.replay.playback import Arrived, Playback, played
from lockstep.replay.rerun import DecidedStep
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.trace import CutFile, Trace
from lockstep.replay.trace_integrity import with_losses
from lockstep.replay.workload import PS_PER_US
from lockstep.worker.flight.content import decode_request, parameters_as_bytes
from lockstep.worker.flight.entries import (
    Added,
    EngineEntry,
    Entry,
    Header,
    OutputDigest,
    RequestDigest,
    RequestEntry,
    Shown,
    Tokens,
)

MAX_TOKENS = 1 << 27
"""Of all answers of a recording together: half a gigabyte."""


@dataclass(slots=True)
class RecordedName:
    """One served name of a recording: its answers, and the engine that last answered to it."""

    name: str
    engine: EngineEntry
    index: RecordedIndex = field(default_factory=RecordedIndex)


@dataclass(slots=True)
class RecordedAnswers:
    """Answers of a recording by the names that requests had, in the order in which these came."""

    by_name: dict[str, RecordedName] = field(default_factory=dict)
    num_unended: int = 0
    """Requests without the end of their answer: the recording broke off, or has lost it."""
    num_others: int = 0
    """Requests for embeddings, which no recording holds."""
    notes: tuple[str, ...] = ()
    """What is to be reported of the recording's files."""

    @property
    def num_answers(self) -> int:
        return sum(each.index.num_answers for each in self.by_name.values())


@dataclass(slots=True)
class _Sequence:
    """One sequence while its recording is read."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    steps: list[tuple[int, int]] = field(default_factory=list)
    """End of each step that gave it tokens, in microseconds of its run, and how many."""
    reason: FinishReason | None = None
    outcome: RequestOutcome | None = None
    """Once it has ended."""


@dataclass(slots=True)
class _Request:
    """One request while its recording is read."""

    request: GenerationRequest
    engine: EngineEntry
    name: str
    sequences: list[_Sequence]
    arrival_us: int = 0
    chunks: tuple[tuple[int, int, int], ...] = ()


Key = tuple[int, int]
"""Engine and sequence."""


class _Reader:
    """Reads one recording, run after run."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._requests: list[_Request] = []
        self._engines: dict[int, EngineEntry] = {}
        self._names: dict[Key, str] = {}
        self._by_first: dict[Key, _Request] = {}
        """Requests of the run by their first sequence."""
        self._by_sequence: dict[Key, _Sequence] = {}
        self._rows: dict[int, deque[tuple[tuple[int, ...], ...]]] = {}
        """Tokens of each engine's steps that were not decided again yet."""
        self._place = ("", 0)
        """Run and number of the file that is read."""
        self._num_tokens = 0
        self._lives = Lives()

    def read(self) -> RecordedAnswers:
        playback = Playback(self._seen())
        for event in played(self._trace, playback):
            match event:
                case Arrived(came, arrival_us):
                    if (request := self._by_first.get((came.engine, came.seq_id))) is not None:
                        request.arrival_us = arrival_us
                case DecidedStep():
                    self._step(event)
            for life in self._lives.take(event):
                if (ended := self._by_sequence.get((life.added.engine, life.added.seq_id))) is not None:
                    ended.outcome = life.outcome
        notes = tuple(map(str, with_losses(self._trace.findings, playback.losses)))
        return _answers_of(self._requests, notes)

    def _seen(self) -> Iterator[Entry | CutFile]:
        """All entries; those that a playback does not report, or reports too late, are noted on the way."""
        for entry in self._trace.entries():
            match entry:
                case Header(run=run, file=file, gap=gap):
                    if run != self._place[0]:
                        self._forget_run()
                    elif file != self._place[1] + 1 or gap:
                        self._rows.clear()
                    self._place = run, file
                case EngineEntry(number=number):
                    self._engines[number] = entry
                case Added(engine=engine, seq_id=seq_id, request=Request(sibling_of=first)):
                    sequence = self._by_sequence[engine, seq_id] = _Sequence()
                    if first is not None and (engine, first) in self._by_first:
                        self._by_first[engine, first].sequences.append(sequence)
                case RequestDigest(engine=engine, seq_id=seq_id, external_id=name):
                    self._names[engine, seq_id] = name
                case RequestEntry():
                    self._begin(entry)
                case Tokens(engine, rows):
                    self._rows.setdefault(engine, deque()).append(rows)
                case OutputDigest(engine=engine, seq_id=seq_id, reason=reason):
                    if (ended := self._by_sequence.get((engine, seq_id))) is not None:
                        ended.reason = reason
                case Shown(engine, seq_id, chunks):
                    if (request := self._by_first.get((engine, seq_id))) is not None:
                        request.chunks = chunks
                case CutFile():
                    self._rows.clear()
            yield entry

    def _forget_run(self) -> None:
        """Another run begins, whose engines and sequences are numbered anew."""
        self._engines, self._names, self._rows = {}, {}, {}
        self._by_first, self._by_sequence, self._lives = {}, {}, Lives()

    def _begin(self, entry: RequestEntry) -> None:
        key = entry.engine, entry.seq_id
        engine = self._engines[entry.engine]
        name = self._names.pop(key, "") or f"{entry.engine}.{entry.seq_id}"
        request = _Request(decode_request(entry.request), engine, name, [self._by_sequence[key]])
        self._requests.append(request)
        self._by_first[key] = request

    def _step(self, step: DecidedStep) -> None:
        rows = self._rows.get(step.engine)
        if step.events is None or not rows:
            return
        end_us = step.timing.start_us + step.timing.duration_us
        for seq_id, tokens in zip(compress(step.plan.seq_ids, step.plan.samples), rows.popleft(), strict=False):
            sequence = self._by_sequence.get((step.engine, seq_id))
            if sequence is not None and tokens:
                sequence.tokens.extend(tokens)
                sequence.steps.append((end_us, len(tokens)))
                self._num_tokens += len(tokens)
        if self._num_tokens > MAX_TOKENS:
            raise TraceError(
                f"{self._trace.files[0].parent}: it holds more than {MAX_TOKENS:,} tokens of answers; "
                "name a file of it by itself"
            )


def read_answers(trace: Trace) -> RecordedAnswers:
    """Everything that a recording's requests were answered.

    Raises:
        TraceError: it has no content, cannot be read on, is not what this version decides, or holds too much.
    """
    if not trace.header.has_content:
        raise TraceError(
            f"{trace.files[0]}: it has no content to answer with; record with `lockstep serve --trace DIR "
            "--trace-content`, which keeps prompts and answers"
        )
    return _Reader(trace).read()


def _answers_of(requests: Iterable[_Request], notes: tuple[str, ...]) -> RecordedAnswers:
    found = RecordedAnswers(notes=notes)
    for each in requests:
        if each.request.pooling is not None:
            found.num_others += 1
            continue
        ended = [RecordedCompletion(s.tokens, s.reason) for s in each.sequences if s.reason is not None]
        if len(ended) < each.request.params.n:
            found.num_unended += 1
            continue
        name = each.request.model or each.engine.name
        of_name = found.by_name.setdefault(name, RecordedName(name, each.engine))
        of_name.engine = each.engine
        of_name.index.add(each.request.prompt_ids, _answer_of(each, tuple(ended)))
    return found


def _answer_of(request: _Request, sequences: tuple[RecordedCompletion, ...]) -> RecordedAnswer:
    first = request.sequences[0].outcome
    seed = request.request.params.seed
    assert seed is not None, "a recorded request has the seed that was drawn"
    return RecordedAnswer(
        request.name,
        parameters_as_bytes(request.request),
        seed,
        sequences,
        tuple(_deliveries(request)),
        0 if first is None else max(0, first.admitted_ps // PS_PER_US - request.arrival_us),
        0 if first is None else first.num_cached_tokens,
        sum(s.outcome.num_preemptions for s in request.sequences if s.outcome is not None),
    )


def _deliveries(request: _Request) -> Iterator[Delivery]:
    """Chunks as they were shown; what was not, step by step."""
    left = [len(sequence.tokens) for sequence in request.sequences]
    now_us = 0
    for completion, num_tokens, after_us in request.chunks:
        now_us += after_us
        num_tokens = min(num_tokens, left[completion])
        left[completion] -= num_tokens
        yield Delivery(now_us, completion, num_tokens)
    steps: list[Delivery] = []
    for completion, sequence in enumerate(request.sequences):
        skipped = len(sequence.tokens) - left[completion]
        for end_us, num_tokens in sequence.steps:
            if (rest := num_tokens - min(skipped, num_tokens)) > 0:
                steps.append(Delivery(max(now_us, end_us - request.arrival_us), completion, rest))
            skipped -= min(skipped, num_tokens)
    yield from sorted(steps, key=lambda step: step.at_us)
