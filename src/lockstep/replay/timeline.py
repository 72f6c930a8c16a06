"""Course of a replay as values: ticks for watchers, request outcomes, and the sums over both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from lockstep.core.step import StepEvents, StepPlan


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
    """Of the first. Only the first can admit, preempt, take blocks or finish somebody."""
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


@dataclass(slots=True)
class RequestOutcome:
    """Outcome of one request. Ticks and times are of the logical clock; -1: it never came so far."""

    name: Final[str]
    seq_id: Final[int]
    """-1: refused at its arrival."""
    priority: Final[int]
    tenant: Final[str]
    num_prompt_tokens: Final[int]
    num_output_tokens: Final[int]
    num_cached_tokens: Final[int]
    num_preemptions: Final[int]
    arrival_tick: Final[int]
    admitted_tick: Final[int]
    first_token_tick: Final[int]
    finished_tick: Final[int]
    arrival_ps: Final[int]
    admitted_ps: Final[int]
    """Begin of the step that admitted it."""
    first_token_ps: Final[int]
    """End of the step that brought its first token."""
    finished_ps: Final[int]
    """End of its last step."""
    refusal: Final[str] = ""
    """Why it was refused."""


Watcher = Callable[[Tick], None]


class Totals:
    """Sums and peaks over ticks.

    Args:
        max_active: sequences that may run at once.
    """

    def __init__(self, max_active: int) -> None:
        self._max_active = max_active
        self.num_ticks = 0
        """Idle ones counted."""
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
        """Ticks after whose admission somebody waited."""
        self.num_active_capacity_ticks = 0
        """Ticks in which as many ran as may."""

    def add(self, tick: Tick) -> None:
        """Take in one tick, or a run of them."""
        num_ticks = tick.num_ticks
        self.num_ticks += num_ticks
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
