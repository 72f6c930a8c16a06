"""What a replay tells whoever watches it: one value per step, or per run of steps that repeat each other."""

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
    """Of all of them."""
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
    """What became of one request. Ticks and times are of the logical clock; -1: it never came so far."""

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
