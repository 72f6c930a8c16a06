"""Recorded answers: collects the answer of each request of a recording with content, with its times and chunks.

The scheduler decides the steps again, as everywhere in this package; that yields the sequence of each row. No model
runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from lockstep.cluster.recorded_index import Delivery, RecordedAnswer, RecordedCompletion, RecordedIndex
from lockstep.core.request import Request
from lockstep.engine.request import GenerationRequest
from lockstep.errors import TraceError
from lockstep.replay.playback import Playback, played
from lockstep.replay.played_sequences import PlayedSequence, PlayedSequences
from lockstep.replay.rerun import DecidedStep
from lockstep.replay.trace import Trace
from lockstep.replay.trace_integrity import with_losses
from lockstep.replay.workload import PS_PER_US
from lockstep.worker.flight.content import decode_request, parameters_as_bytes
from lockstep.worker.flight.entries import Added, EngineEntry, Header, RequestEntry, Shown

MAX_TOKENS = 1 << 27
"""Maximum tokens of all answers of a recording together: half a gigabyte."""


@dataclass(slots=True)
class RecordedName:
    """One served name of a recording: its answers, and the last engine that served it."""

    name: str
    engine: EngineEntry
    index: RecordedIndex = field(default_factory=RecordedIndex)


@dataclass(slots=True)
class RecordedAnswers:
    """Answers of a recording by the model names in its requests, in the order in which the names first occur."""

    by_name: dict[str, RecordedName] = field(default_factory=dict)
    num_unended: int = 0
    """Number of requests whose answer has no end in the recording, because it was cut or is incomplete."""
    num_others: int = 0
    """Number of requests for embeddings; recordings hold no embeddings."""
    notes: tuple[str, ...] = ()
    """Warnings about the recording's files."""

    @property
    def num_answers(self) -> int:
        return sum(each.index.num_answers for each in self.by_name.values())


@dataclass(slots=True)
class _Request:
    """One request while its recording is read."""

    request: GenerationRequest
    sequences: list[PlayedSequence]
    chunks: tuple[tuple[int, int, int], ...] = ()


class _Reader:
    """Reads one recording, run by run."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._requests: list[_Request] = []
        self._by_first: dict[tuple[int, int], _Request] = {}
        """Requests of the run by their first sequence: engine and sequence id."""
        self._run = ""
        self._num_tokens = 0
        self._sequences = PlayedSequences(with_tokens=True)

    def read(self) -> RecordedAnswers:
        playback = Playback(self._trace.entries())
        for event in played(self._trace, playback):
            if isinstance(event, Header) and event.run != self._run:
                # A new run begins; its engines and sequences are numbered from the start again.
                self._run, self._by_first, self._sequences = event.run, {}, PlayedSequences(with_tokens=True)
            deque(self._sequences.take(event), maxlen=0)
            match event:
                case Added(request=Request(sibling_of=int() as first)):
                    if (request := self._by_first.get((event.engine, first))) is not None:
                        request.sequences.append(self._sequences.open[event.engine, event.seq_id])
                case RequestEntry():
                    key = event.engine, event.seq_id
                    request = _Request(decode_request(event.request), [self._sequences.open[key]])
                    self._by_first[key] = request
                    self._requests.append(request)
                case Shown(engine, seq_id, chunks):
                    if (request := self._by_first.get((engine, seq_id))) is not None:
                        request.chunks = chunks
                case DecidedStep():
                    self._count(event)
        return _answers_of(self._requests, tuple(map(str, with_losses(self._trace.findings, playback.losses))))

    def _count(self, step: DecidedStep) -> None:
        self._num_tokens += sum(map(len, step.tokens.values()))
        if self._num_tokens > MAX_TOKENS:
            raise TraceError(
                f"{self._trace.files[0].parent}: the recording has more than {MAX_TOKENS:,} tokens of answers; "
                "name a single file of it"
            )


def read_answers(trace: Trace) -> RecordedAnswers:
    """Collect the answers of all requests of a recording.

    Raises:
        TraceError: the recording has no content, is damaged or incomplete, differs from this version's decisions, or is
            too large.
    """
    if not trace.header.has_content:
        raise TraceError(
            f"{trace.files[0]}: the recording has no content to answer with; record with `lockstep serve --trace DIR "
            "--trace-content`, which records prompts and answers"
        )
    return _Reader(trace).read()


def _answers_of(requests: Iterable[_Request], notes: tuple[str, ...]) -> RecordedAnswers:
    found = RecordedAnswers(notes=notes)
    for each in requests:
        if each.request.gives_vector:
            found.num_others += 1
            continue
        ended = [RecordedCompletion(s.tokens, s.end.reason) for s in each.sequences if s.end is not None]
        if len(ended) < each.request.params.n:
            found.num_unended += 1
            continue
        engine = each.sequences[0].engine
        name = each.request.model or each.request.adapter or engine.name
        of_name = found.by_name.setdefault(name, RecordedName(name, engine))
        of_name.engine = engine
        of_name.index.add(each.request.prompt_ids, _answer_of(each, tuple(ended)))
    return found


def _answer_of(request: _Request, sequences: tuple[RecordedCompletion, ...]) -> RecordedAnswer:
    first = request.sequences[0]
    outcome, seed = first.outcome, request.request.params.seed
    assert seed is not None, "a recorded request has its drawn seed"
    return RecordedAnswer(
        (first.digest and first.digest.external_id) or f"{first.engine.number}.{first.added.seq_id}",
        parameters_as_bytes(replace(request.request, adapter="")),  # an index is of one name, which stands for it
        seed,
        sequences,
        tuple(_deliveries(request)),
        max(0, (outcome.admitted_ps - outcome.arrival_ps) // PS_PER_US),
        outcome.num_cached_tokens,
        sum(each.outcome.num_preemptions for each in request.sequences),
    )


def _deliveries(request: _Request) -> Iterator[Delivery]:
    """Chunks as they were delivered, then the undelivered tokens step by step."""
    left = [len(sequence.tokens) for sequence in request.sequences]
    arrival_us = request.sequences[0].outcome.arrival_ps // PS_PER_US
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
                steps.append(Delivery(max(now_us, end_us - arrival_us), completion, rest))
            skipped -= min(skipped, num_tokens)
    yield from sorted(steps, key=lambda step: step.at_us)
