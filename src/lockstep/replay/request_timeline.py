"""Timeline of one request in a recording: collects its steps, wait reasons and tokens while the recording is played.

A request is found by the caller's name for it, its ``x-request-id``. It may have several sequences, one for each
prompt, choice and hop. A name that a client used twice stands for several requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any

from lockstep.core.policy import SchedulerConfig
from lockstep.core.request import FinishReason
from lockstep.core.step import Limit, Reason
from lockstep.core.wording import Reached, phrase
from lockstep.errors import TraceError
from lockstep.replay.explain import listed
from lockstep.replay.playback import Arrived, Event, Playback
from lockstep.replay.rerun import AppliedCommand, DecidedStep
from lockstep.replay.trace import CutFile, Trace
from lockstep.worker.flight.entries import (
    Aborted,
    Added,
    Dispatched,
    EngineEntry,
    Header,
    OutputDigest,
    RequestDigest,
    Vector,
)

MAX_SHOWN_TOKENS = 64
"""Maximum tokens of one sequence in the text; the JSON form has all."""
MAX_SHOWN_RANGES = 40
"""Maximum lines of steps of one sequence in the text."""


@dataclass(slots=True)
class StepRange:
    """Consecutive steps of one kind: parts of the prompt, or one token each."""

    first_step: int
    last_step: int
    start: int
    """Position of the first computed token; of an encoder, stage times tokens plus token."""
    num_tokens: int
    """Number of computed tokens, without rejected drafts; of an encoder, of tokens and stages."""
    num_sampled: int
    """Number of sampled tokens."""


@dataclass(slots=True)
class TimelineWait:
    """Steps without this sequence, for one reason."""

    reason: str
    """Last reason that the planner reported."""
    first_step: int
    last_step: int
    num_steps: int


@dataclass(slots=True)
class SequenceTimeline:
    """Timeline of one sequence of the request."""

    engine: int
    name: str
    """Name of the engine's model."""
    sequence: int
    sibling_of: int | None = None
    """Sequence that computes the prompt for this one; None: this sequence computes it."""
    priority: int = 0
    prompt_tokens: int = 0
    num_stages: int = 1
    """Number of times that each prompt token is computed: the stages of an encoder; 1: a decoder."""
    cached_tokens: int | None = None
    """Cached tokens of the prompt; None: nothing was computed."""
    queued_ms: float | None = None
    """Time from the arrival to the scheduler, in which a request waits for its session or its blocks."""
    first_token_ms: float | None = None
    """Time from the arrival to the first token."""
    end_ms: float | None = None
    added_step: int | None = None
    """First step that could include it."""
    steps: list[StepRange] = field(default_factory=list)
    waits: list[TimelineWait] = field(default_factory=list)
    preemptions: int = 0
    output_tokens: int = 0
    tokens: list[int] | None = None
    """Tokens, if the recording has content."""
    gives_vector: bool = False
    """Whether its answer is a vector and not tokens."""
    vector_size: int | None = None
    """Size of its vector, if the recording has content."""
    dispatched: str | None = None
    """Model that was chosen by the vector, empty for the fallback; None: the vector chose none."""
    scores: dict[str, float] = field(default_factory=dict)
    """Best cosine of each model's examples, if the vector chose a model."""
    end: str | None = None
    """Reason of its end; None: it had not ended at the end of the recording or at the divergence."""


class RequestTimeline:
    """Collects the events of one request from a playback.

    Args:
        name: the caller's name of the request.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.sequences: list[SequenceTimeline] = []
        self._run = ""
        self._file = 0
        self._has_content = False
        self._engines: dict[int, EngineEntry] = {}
        """Engines by number."""
        self._callers: dict[tuple[int, int], str] = {}
        """Names of open requests, by engine and sequence."""
        self._open: dict[tuple[int, int], SequenceTimeline] = {}
        self._found: dict[tuple[int, int], SequenceTimeline] = {}
        """Sequences of the run, also those that have ended."""
        self._arrivals_us: dict[tuple[int, int], int] = {}
        self._reasons: dict[int, list[Reason]] = {}
        """Reasons of the current step, by engine."""
        self._waits: dict[tuple[int, int, Limit], TimelineWait] = {}

    # -- events -------------------------------------------------------------------------------------------------------

    def take(self, event: Event, playback: Playback) -> None:
        """Process an event, and let the planner report why the request waits."""
        match event:
            case Header():
                self._begin_file(event)
            case CutFile():
                self._file = -1
            case EngineEntry():
                self._engines[event.number] = event
            case Added() if (event.engine, event.request.sibling_of) in self._open:
                self._open_sequence(event.engine, event.seq_id)
            case RequestDigest():
                self._callers[event.engine, event.seq_id] = event.external_id
                if event.external_id == self.name:
                    self._open_sequence(event.engine, event.seq_id)
            case OutputDigest():
                self._callers.pop((event.engine, event.seq_id), None)
                if (ended := self._found.get((event.engine, event.seq_id))) is not None:
                    ended.gives_vector = event.reason is FinishReason.STOP and not event.num_tokens
            case Vector(engine, seq_id, numbers) if (engine, seq_id) in self._found:
                self._found[engine, seq_id].vector_size = len(numbers) // 4
            case Dispatched(engine, seq_id, target, scores) if (engine, seq_id) in self._found:
                self._found[engine, seq_id].dispatched = target
                self._found[engine, seq_id].scores = dict(scores)
            case Arrived(came, arrival_us) if (came.engine, came.seq_id) in self._open:
                self._open[came.engine, came.seq_id].queued_ms = came.waited_us / 1e3
                self._arrivals_us[came.engine, came.seq_id] = arrival_us
            case AppliedCommand(engine, Added() as added) if (engine, added.seq_id) in self._open:
                sequence, asked = self._open[engine, added.seq_id], added.request
                sequence.added_step, sequence.sibling_of = added.step, asked.sibling_of
                sequence.priority = asked.priority
                sequence.prompt_tokens = asked.num_prompt_tokens // sequence.num_stages
                reasons = self._reasons.setdefault(engine, [])
                playback.engines[engine].explain = reasons.append
            case AppliedCommand(engine, Aborted() as aborted) if (engine, aborted.seq_id) in self._open:
                self._end(engine, aborted.seq_id, aborted.reason.value, event)
            case DecidedStep(engine):
                self._step(event, playback)
        if isinstance(event, DecidedStep | AppliedCommand) and not any(key[0] == event.engine for key in self._open):
            playback.engines[event.engine].explain = None

    def check_found(self, trace: Trace) -> None:
        """Raise an error if the recording does not have the request.

        Raises:
            TraceError: the recording has no request of this name.
        """
        if not self.sequences:
            raise TraceError(
                f"{trace.files[0].parent}: the recording has no request {self.name!r}; its name is the x-request-id "
                "of its answer. The latest second may not be written yet, and the oldest files may be deleted"
            )

    def _begin_file(self, header: Header) -> None:
        if header.run != self._run or header.file != self._file + 1 or header.gap:
            for known in (self._open, self._found, self._arrivals_us, self._reasons, self._waits, self._callers):
                known.clear()  # all of them are dicts
        self._run, self._file, self._has_content = header.run, header.file, header.has_content

    def _open_sequence(self, engine: int, seq_id: int) -> None:
        tokens: list[int] | None = [] if self._has_content else None
        sequence = SequenceTimeline(engine, "", seq_id, tokens=tokens)
        if (entry := self._engines.get(engine)) is not None:
            sequence.name, sequence.num_stages = entry.name, entry.num_stages
        self._open[engine, seq_id] = self._found[engine, seq_id] = sequence
        self.sequences.append(sequence)

    # -- one step -----------------------------------------------------------------------------------------------------

    def _step(self, event: DecidedStep, playback: Playback) -> None:
        engine, plan = event.engine, event.plan
        reasons = self._reasons.get(engine, [])
        times_text, reasons[:] = tuple(reasons), ()
        sampling = compress(plan.seq_ids, plan.samples)
        counts = {} if event.result is None else dict(zip(sampling, event.result.num_tokens, strict=True))
        rejected = _rejected(event)
        for row in plan.chunks():
            sequence = self._open.get((engine, row.seq_id))
            if sequence is None:
                continue
            if sequence.cached_tokens is None:
                sequence.cached_tokens = row.start
            count = 0 if sequence.gives_vector else counts.get(row.seq_id, 0)
            _compute(sequence, plan.step, row.start, row.length - rejected.get(row.seq_id, 0), count)
            if count and not sequence.output_tokens:
                sequence.first_token_ms = self._since_arrival_ms(engine, row.seq_id, event)
            sequence.output_tokens += count
            if sequence.tokens is not None:
                sequence.tokens += event.tokens.get(row.seq_id, ())
        for seq_id in plan.preempted:
            if (sequence := self._open.get((engine, seq_id))) is not None:
                sequence.preemptions += 1
        config = playback.engines[engine].config
        for reason in times_text:
            if reason.seq_id not in plan.seq_ids and reason.limit is not Limit.CHUNK:
                self._wait(engine, reason, plan.step, config)
        for finish in () if event.events is None else event.events.finished:
            if (engine, finish.seq_id) in self._open:
                self._end(engine, finish.seq_id, finish.reason.value, event)

    def _wait(self, engine: int, reason: Reason, step: int, config: SchedulerConfig) -> None:
        sequence = self._open.get((engine, reason.seq_id))
        if sequence is None or not (words := self._words(engine, reason, config, sequence.num_stages)):
            return
        key = (engine, reason.seq_id, reason.limit)
        wait = self._waits.get(key)
        if wait is None:
            wait = self._waits[key] = TimelineWait(words, step, step, 0)
            sequence.waits.append(wait)
        wait.num_steps += wait.last_step != step or not wait.num_steps
        wait.reason, wait.last_step = words, step

    def _words(self, engine: int, reason: Reason, config: SchedulerConfig, num_stages: int) -> str:
        names = [self._callers.get((engine, each)) or f"sequence {each}" for each in reason.others]
        others = listed(list(dict.fromkeys(names)))
        reached = Reached(reason.limit, reason.used, reason.most, reason.needed, others, len(names))
        return phrase(reached._replace(num_stages=num_stages), config)

    def _end(self, engine: int, seq_id: int, reason: str, event: DecidedStep | AppliedCommand) -> None:
        sequence = self._open.pop((engine, seq_id))
        sequence.end = reason
        if isinstance(event, DecidedStep):
            sequence.end_ms = self._since_arrival_ms(engine, seq_id, event)

    def _since_arrival_ms(self, engine: int, seq_id: int, event: DecidedStep) -> float | None:
        arrival_us = self._arrivals_us.get((engine, seq_id))
        return None if arrival_us is None else (event.timing.start_us + event.timing.duration_us - arrival_us) / 1e3

    # -- output -------------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """The timeline as an object."""
        return {"id": self.name, "sequences": [asdict(sequence) for sequence in self.sequences]}

    def describe(self) -> Iterator[str]:
        """The timeline as lines."""
        count = len(self.sequences)
        yield f"request {self.name}: {count} sequence{'s' * (count != 1)}"
        for sequence in self.sequences:
            yield from _lines(sequence)


def _rejected(event: DecidedStep) -> dict[int, int]:
    """Number of rejected drafts by sequence."""
    plan, result = event.plan, event.result
    if not plan.drafts:
        return {}
    sampling = list(compress(plan.seq_ids, plan.samples))
    accepted = (0,) * len(sampling) if result is None else result.num_accepted
    drafts = compress(plan.drafts, plan.samples)
    return {seq_id: count - good for seq_id, count, good in zip(sampling, drafts, accepted, strict=True)}


def _compute(sequence: SequenceTimeline, step: int, start: int, length: int, num_sampled: int) -> None:
    """Add a step to the last range, or begin a new range if the step is of another kind."""
    last = sequence.steps[-1] if sequence.steps else None
    is_next = last is not None and last.last_step == step - 1 and last.start + last.num_tokens == start
    if last is not None and is_next and last.num_sampled and length == num_sampled:
        last.last_step = step
        last.num_tokens += length
        last.num_sampled += num_sampled
    else:
        sequence.steps.append(StepRange(step, step, start, length, num_sampled))


def _lines(sequence: SequenceTimeline) -> Iterator[str]:
    name = f"sequence {sequence.sequence} of engine {sequence.engine} ({sequence.name})"
    cached = "" if not sequence.cached_tokens else f" ({sequence.cached_tokens} cached)"
    end = "unfinished" if sequence.end is None else f"ended: {sequence.end}"
    stages = "" if sequence.num_stages == 1 else f" in {sequence.num_stages} stages"
    answer = f"{sequence.output_tokens} output tokens"
    if sequence.gives_vector:
        answer = "a vector" if sequence.vector_size is None else f"a vector of {sequence.vector_size} numbers"
    yield f"{name}: {sequence.prompt_tokens} prompt tokens{stages}{cached}; {answer}; {end}"
    if sequence.dispatched is not None:
        scores = ", ".join(f"{model} {score:.4f}" for model, score in sequence.scores.items())
        yield f"  its vector chose {sequence.dispatched or 'the fallback'} by nearest examples: {scores}"
    times = (
        ("queued", sequence.queued_ms),
        ("first token", sequence.first_token_ms),
        ("end", sequence.end_ms),
    )
    times_text = ", ".join(f"{what} {value:.1f} ms" for what, value in times if value is not None)
    if times_text:
        yield f"  after arrival:  {times_text}"
    for wait in sequence.waits:
        yield f"  waited in {_steps(wait.first_step, wait.last_step, wait.num_steps)}: {wait.reason}"
    if sequence.preemptions:
        yield f"  preempted {sequence.preemptions} time{'s' * (sequence.preemptions != 1)}"
    for stretch in sequence.steps[:MAX_SHOWN_RANGES]:
        where = _positions(sequence, stretch.start, stretch.start + stretch.num_tokens - 1)
        got = f", {stretch.num_sampled} new" if stretch.num_sampled else ""
        num_steps = stretch.last_step - stretch.first_step + 1
        yield f"  {_steps(stretch.first_step, stretch.last_step, num_steps)}: computes {where}{got}"
    if len(sequence.steps) > MAX_SHOWN_RANGES:
        yield f"  and {len(sequence.steps) - MAX_SHOWN_RANGES} more (--json has them)"
    if sequence.tokens:
        rest = len(sequence.tokens) - MAX_SHOWN_TOKENS
        more = f" and {rest} more" if rest > 0 else ""
        yield f"  tokens: {' '.join(map(str, sequence.tokens[:MAX_SHOWN_TOKENS]))}{more}"


def _positions(sequence: SequenceTimeline, first: int, last: int) -> str:
    """Computed positions as tokens, and for an encoder as tokens of stages."""
    if sequence.num_stages == 1:
        return f"{first}..{last}"
    (stage, token), (last_stage, last_token) = (divmod(each, sequence.prompt_tokens) for each in (first, last))
    if stage == last_stage:
        return f"{token}..{last_token} in stage {stage}"
    return f"from {token} in stage {stage} to {last_token} in stage {last_stage}"


def _steps(first: int, last: int, count: int) -> str:
    if first == last:
        return f"step {first}"
    return f"steps {first} to {last}" if last - first + 1 == count else f"{count} steps from {first} to {last}"
