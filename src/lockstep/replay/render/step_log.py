"""The first ticks of a replay in words: who was admitted, who decoded, who ended, who lost blocks. Bounded."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.replay.timeline import Tick

MAX_LINES = 500
"""More lines nobody reads; a page that has them is slow."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """What one tick did, or a run of ticks that repeat each other. Ids are the scheduler's."""

    tick: int
    num_ticks: int
    start_ps: int
    duration_ps: int
    admitted: tuple[int, ...]
    prefilled: tuple[int, ...]
    """Who computes several tokens, or none that is sampled: prompts, and what preemption lost."""
    num_prefill_tokens: int
    decoded: tuple[int, ...]
    """Who samples: decodes, and prompts that end in it."""
    num_decoded_tokens: int
    completed: tuple[tuple[int, str], ...]
    """With the reason."""
    preempted: tuple[int, ...]
    resumed: tuple[int, ...]
    num_queued: int
    num_active: int
    num_used_blocks: int


class StepLog:
    """A watcher that keeps the first lines and counts the others."""

    def __init__(self, max_lines: int = MAX_LINES) -> None:
        self._max_lines = max_lines
        self.lines: list[StepLine] = []
        self.num_left_out = 0
        """Lines that were not kept."""

    def __call__(self, tick: Tick) -> None:
        """Take in what the replay did next."""
        if len(self.lines) < self._max_lines:
            self.lines.append(_line(tick))
        else:
            self.num_left_out += 1


def _line(tick: Tick) -> StepLine:
    plan, events = tick.plan, tick.events
    chunks = tuple(plan.chunks()) if plan is not None else ()
    return StepLine(
        tick=tick.tick,
        num_ticks=tick.num_ticks,
        start_ps=tick.start_ps,
        duration_ps=tick.duration_ps,
        admitted=plan.admitted if plan is not None else (),
        prefilled=tuple(chunk.seq_id for chunk in chunks if chunk.length > 1 or not chunk.samples),
        num_prefill_tokens=tick.num_prefill_tokens,
        decoded=tuple(chunk.seq_id for chunk in chunks if chunk.samples),
        num_decoded_tokens=tick.num_decoded_tokens,
        completed=tuple((seq_id, reason.value) for seq_id, reason in events.finished) if events is not None else (),
        preempted=plan.preempted if plan is not None else (),
        resumed=plan.resumed if plan is not None else (),
        num_queued=tick.num_queued,
        num_active=tick.num_active,
        num_used_blocks=tick.num_used_blocks,
    )
