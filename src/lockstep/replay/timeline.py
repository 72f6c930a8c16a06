"""Course of a replay as values: ticks for watchers and as records, request outcomes, and the sums over both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import compress
from typing import Final, NamedTuple

from lockstep.core.sequence import FinishedSequence
from lockstep.core.step import StepEvents, StepPlan

MAX_TICKS = 500_000
"""Maximum ticks of a report; it leaves out those after them, and notes that."""
MAX_TICKS_UNASKED = 10_000
"""A replay of more has them only where they are requested."""


class Tick(NamedTuple):
    """One step, a run of steps in which every row of ``plan`` decodes one token more each time, or idle ticks."""

    tick: int
    """Number of the first, idle ones counted."""
    num_ticks: int
    start_ps: int
    """Logical time at which the first begins."""
    duration_ps: int
    """Duration of all of them."""
    plan: StepPlan | None
    """Of the first; None: idle, nothing ran."""
    events: StepEvents | None
    """Of the first. Only the first can admit, preempt or finish sequences, or take blocks."""
    num_prefill_tokens: int
    """Prompt tokens that each of them computes; 0 in a run of several."""
    num_decoded_tokens: int
    """Output tokens that all of them brought together."""
    num_queued: int
    """Waiting after admission: in the queue, or preempted."""
    num_active: int
    """Running after admission, those that end with this step included."""
    num_used_blocks: int
    """Held during the step, before those that end give theirs back."""

    @property
    def num_decode_inputs(self) -> int:
        """Tokens of each of the steps that are no prompt."""
        return 0 if self.plan is None else self.plan.num_tokens - self.num_prefill_tokens


class Course(NamedTuple):
    """Borders of a request's phases in one unit: ticks, of which one ends where the next begins, or picoseconds."""

    arrival: int
    admitted: int
    """Begin of the step that admitted it; -1: none did. Likewise the others."""
    first_token: int
    """End of the step that brought its first token."""
    finished: int
    """End of its last step."""
    num_output_tokens: int

    @property
    def ttft(self) -> int:
        """Arrival to first token."""
        return self.first_token - self.arrival

    @property
    def e2e(self) -> int:
        """Arrival to end."""
        return self.finished - self.arrival

    def tpot(self, scale: int = 1) -> int:
        """Mean time of the tokens after the first, in ``scale``-ths of the unit, rounded down; 0 if there are none."""
        return (self.finished - self.first_token) * scale // max(1, self.num_output_tokens - 1)


@dataclass(slots=True)
class RequestOutcome:
    """Outcome of one request. Ticks and times are of the logical clock; -1: it never came so far."""

    name: Final[str]
    seq_id: int
    """-1: refused at its arrival."""
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
    """End of the step that brought its first token."""
    finished_ps: int = -1
    """End of its last step."""
    refusal: str = ""
    """Why it was refused."""

    def end(self, sequence: FinishedSequence, tick: int, end_ps: int) -> None:
        """Note that its sequence ended with the step of that number."""
        self.finished_tick, self.finished_ps = tick, end_ps
        self.num_cached_tokens, self.num_preemptions = sequence.num_cached_tokens, sequence.num_preemptions

    @property
    def is_completed(self) -> bool:
        return self.finished_tick >= 0

    @property
    def in_ticks(self) -> Course:
        """Its phases in ticks; what ends with a tick ends at the begin of the next."""
        first, last = self.first_token_tick, self.finished_tick
        first, last = first + (first >= 0), last + (last >= 0)
        return Course(self.arrival_tick, self.admitted_tick, first, last, self.num_output_tokens)

    @property
    def in_ps(self) -> Course:
        """Its phases in picoseconds."""
        return Course(self.arrival_ps, self.admitted_ps, self.first_token_ps, self.finished_ps, self.num_output_tokens)


Watcher = Callable[[Tick], None]


class Totals:
    """Sums and peaks over ticks.

    Args:
        max_active: sequences that may run at once.
    """

    def __init__(self, max_active: int) -> None:
        self._max_active = max_active
        self.num_steps = 0
        self.busy_ps = 0
        """Time in steps."""
        self.num_prefill_tokens = 0
        """Prompt tokens computed, those computed again counted again, hits not."""
        self.num_decoded_tokens = 0
        self.num_block_ticks = 0
        """Blocks in use, summed over ticks."""
        self.max_used_blocks = 0
        self.max_queued = 0
        self.max_active = 0
        self.num_queue_pressure_ticks = 0
        """Ticks after whose admission requests still waited."""
        self.num_active_capacity_ticks = 0
        """Ticks in which as many ran as may."""

    def add(self, tick: Tick) -> None:
        """Take in one tick, or a run of them."""
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


Who = int | str
"""A sequence by its id, or its request by its name."""


@dataclass(frozen=True, slots=True)
class TickRecord:
    """One tick as a file holds it. Every key is always there: nothing happened is an empty list, or 0."""

    tick: int
    start_ps: int
    duration_ps: int
    admitted: tuple[Who, ...] = ()
    resumed: tuple[Who, ...] = ()
    preempted: tuple[Who, ...] = ()
    decoded: tuple[Who, ...] = ()
    """Those that got a token."""
    completed: tuple[Who, ...] = ()
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    admitted_prefill_tokens: int = 0
    """Those of them that were of requests admitted in it."""
    decoded_tokens: int = 0
    queued: int = 0
    """After admission, preempted ones counted; likewise the next."""
    active: int = 0
    used_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


class TickSpan(NamedTuple):
    """One tick, or several that are alike: then everything happens in each of them."""

    first: TickRecord
    """By ids of sequences; its duration is that of all of them together."""
    num_ticks: int


class TickRecorder:
    """A watcher that keeps the first spans.

    Args:
        most: how many.
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
        # All of it is prompt: those who were just admitted have computed nothing else.
        admitted_prefill_tokens=sum(length for seq_id, length in lengths if seq_id in plan.admitted),
        decoded_tokens=tick.num_decoded_tokens // tick.num_ticks,
        queued=tick.num_queued,
        active=tick.num_active,
        used_blocks=tick.num_used_blocks,
        swapped_out_blocks=len(plan.swap_out),
        swapped_in_blocks=len(plan.swap_in),
    )


def names_of(outcomes: Iterable[RequestOutcome]) -> dict[Who, str]:
    """Names of requests in their file, by the ids of their sequences."""
    return {outcome.seq_id: outcome.name for outcome in outcomes if outcome.seq_id >= 0}
