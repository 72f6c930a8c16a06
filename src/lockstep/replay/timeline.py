"""Timeline of a replay: defines ticks, their records, the outcomes of requests, and totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Final, NamedTuple

from lockstep.core.sequence import FinishedSequence
from lockstep.core.step import StepEvents, StepPlan

MAX_TICKS = 500_000
"""Maximum ticks in a report; further ones are omitted with a warning."""
DEFAULT_MAX_TICKS = 10_000
"""Maximum ticks of a replay whose report lists them without --ticks."""


class Tick(NamedTuple):
    """One step, a run of steps in which every row of ``plan`` decodes one token more each time, or idle ticks."""

    tick: int
    """Number of the first tick, including idle ones."""
    num_ticks: int
    start_ps: int
    """Logical time at the begin of the first tick."""
    duration_ps: int
    """Total duration of all of them."""
    plan: StepPlan | None
    """Plan of the first; None: idle, no step ran."""
    events: StepEvents | None
    """Events of the first. Only the first can admit, preempt or finish sequences, or allocate blocks."""
    num_prefill_tokens: int
    """Prompt tokens that each of them computes; 0 in a run of several."""
    num_decoded_tokens: int
    """Total output tokens of all of them."""
    num_queued: int
    """Number of queued or preempted requests after admission."""
    num_active: int
    """Number of running requests after admission, including those that end with this step."""
    num_used_blocks: int
    """Blocks in use during the step, including those of sequences that end with it."""

    @property
    def num_decode_inputs(self) -> int:
        """Tokens per step that are not prompt tokens."""
        return 0 if self.plan is None else self.plan.num_tokens - self.num_prefill_tokens


class Course(NamedTuple):
    """Times of a request's phases in one unit: ticks, where the end of one is the begin of the next, or picoseconds."""

    arrival: int
    admitted: int
    """Begin of the step that admitted it; -1, as in the following fields: not reached."""
    first_token: int
    """End of the step with its first token."""
    finished: int
    """End of its last step."""
    num_output_tokens: int

    @property
    def ttft(self) -> int:
        """Time from arrival to first token."""
        return self.first_token - self.arrival

    @property
    def e2e(self) -> int:
        """Time from arrival to end."""
        return self.finished - self.arrival

    def tpot(self, scale: int = 1) -> int:
        """Mean time of the tokens after the first, in ``scale``-ths of the unit, rounded down; 0 if there are none."""
        return (self.finished - self.first_token) * scale // max(1, self.num_output_tokens - 1)


@dataclass(slots=True)
class RequestOutcome:
    """Outcome of one request. Ticks and times are those of the logical clock; -1: not reached."""

    name: Final[str]
    seq_id: int
    """Sequence id; -1: refused at its arrival."""
    priority: Final[int]
    tenant: Final[str]
    num_prompt_tokens: Final[int]
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    arrival_tick: int = -1
    admitted_tick: int = -1
    first_token_tick: int = -1
    finished_tick: int = -1
    arrival_ps: int = -1
    admitted_ps: int = -1
    """Begin of the step that admitted it."""
    first_token_ps: int = -1
    """End of the step with its first token."""
    finished_ps: int = -1
    """End of its last step."""
    refusal: str = ""
    """Reason of the refusal; empty: not refused."""

    def end(self, sequence: FinishedSequence, tick: int, end_ps: int) -> None:
        """Record that its sequence ended with a step."""
        self.finished_tick, self.finished_ps = tick, end_ps
        self.num_cached_tokens, self.num_preemptions = sequence.num_cached_tokens, sequence.num_preemptions

    @property
    def is_completed(self) -> bool:
        return self.finished_tick >= 0

    @property
    def in_ticks(self) -> Course:
        """Phases in ticks; the end of a tick is the begin of the next."""
        first, last = self.first_token_tick, self.finished_tick
        first, last = first + (first >= 0), last + (last >= 0)
        return Course(self.arrival_tick, self.admitted_tick, first, last, self.num_output_tokens)

    @property
    def in_ps(self) -> Course:
        """Phases in picoseconds."""
        return Course(self.arrival_ps, self.admitted_ps, self.first_token_ps, self.finished_ps, self.num_output_tokens)


Watcher = Callable[[Tick], None]


class Totals:
    """Sums and maxima over ticks.

    Args:
        max_active: maximum number of running sequences.
    """

    def __init__(self, max_active: int) -> None:
        self._max_active = max_active
        self.num_steps = 0
        self.busy_ps = 0
        """Total time of steps."""
        self.num_prefill_tokens = 0
        """Number of computed prompt tokens, without cache hits and including recomputed ones."""
        self.num_decoded_tokens = 0
        self.num_block_ticks = 0
        """Blocks in use, summed over ticks."""
        self.max_used_blocks = 0
        self.max_queued = 0
        self.max_active = 0
        self.num_queue_pressure_ticks = 0
        """Number of ticks with waiting requests after admission."""
        self.num_active_capacity_ticks = 0
        """Number of ticks with the maximum of running requests."""

    def add(self, tick: Tick) -> None:
        """Add one tick or a run of ticks."""
        num_ticks = tick.num_ticks
        if tick.plan is None:
            return
        self.num_steps += num_ticks
        self.busy_ps += tick.duration_ps
        self.num_prefill_tokens += num_ticks * tick.num_prefill_tokens
        self.num_decoded_tokens += tick.num_decoded_tokens
        self.num_block_ticks += num_ticks * tick.num_used_blocks
        if tick.num_used_blocks > self.max_used_blocks:
            self.max_used_blocks = tick.num_used_blocks
        if tick.num_active > self.max_active:
            self.max_active = tick.num_active
        if tick.num_active == self._max_active:
            self.num_active_capacity_ticks += num_ticks
        if tick.num_queued:
            self.num_queue_pressure_ticks += num_ticks
            if tick.num_queued > self.max_queued:
                self.max_queued = tick.num_queued


SequenceRef = int | str
"""Id of a sequence, or name of its request."""


@dataclass(frozen=True, slots=True)
class TickRecord:
    """One tick as stored in a file. All keys are always present; nothing happened is an empty list or 0."""

    tick: int
    start_ps: int
    duration_ps: int
    admitted: tuple[SequenceRef, ...] = ()
    resumed: tuple[SequenceRef, ...] = ()
    preempted: tuple[SequenceRef, ...] = ()
    decoded: tuple[SequenceRef, ...] = ()
    """Sequences that got a token."""
    completed: tuple[SequenceRef, ...] = ()
    prefill_tokens: int = 0
    """Number of computed prompt tokens."""
    admitted_prefill_tokens: int = 0
    """Number of computed prompt tokens of requests that this tick admitted."""
    decoded_tokens: int = 0
    queued: int = 0
    """Number of waiting requests after admission, including preempted ones."""
    active: int = 0
    used_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


class TickSpan(NamedTuple):
    """One tick, or several ticks with the same events."""

    first: TickRecord
    """Record of the first, with sequence ids; its duration is the total of all."""
    num_ticks: int


class TickRecorder:
    """A watcher that records the first spans.

    Args:
        most: maximum number of ticks.
    """

    def __init__(self, most: int = MAX_TICKS) -> None:
        self.spans: list[TickSpan] = []
        self.most = most
        self.num_left_out = 0

    def __call__(self, tick: Tick) -> None:
        if len(self.spans) < self.most:
            self.spans.append(TickSpan(_record_of(tick), tick.num_ticks))
        else:
            self.num_left_out += 1


def _record_of(tick: Tick) -> TickRecord:
    plan, events = tick.plan, tick.events
    if plan is None or events is None:
        return TickRecord(tick.tick, tick.start_ps, tick.duration_ps)
    lengths = zip(plan.seq_ids, plan.lengths, strict=True)
    return TickRecord(
        tick=tick.tick,
        start_ps=tick.start_ps,
        duration_ps=tick.duration_ps,
        admitted=plan.admitted,
        resumed=plan.resumed,
        preempted=plan.preempted,
        decoded=tuple(compress(plan.seq_ids, plan.samples)),
        completed=tuple([finish.seq_id for finish in events.finished]),
        prefill_tokens=tick.num_prefill_tokens,
        # All of it is prompt: newly admitted sequences have computed nothing else.
        admitted_prefill_tokens=sum(length for seq_id, length in lengths if seq_id in plan.admitted),
        decoded_tokens=tick.num_decoded_tokens // tick.num_ticks,
        queued=tick.num_queued,
        active=tick.num_active,
        used_blocks=tick.num_used_blocks,
        swapped_out_blocks=len(plan.swap_out),
        swapped_in_blocks=len(plan.swap_in),
    )


def names_of(outcomes: Iterable[RequestOutcome]) -> dict[SequenceRef, str]:
    """Names of requests in their file, by sequence id."""
    return {outcome.seq_id: outcome.name for outcome in outcomes if outcome.seq_id >= 0}
