"""What a tick did, as a value that a file can hold."""

from __future__ import annotations

import msgspec

from lockstep.core.step import StepPlan
from lockstep.replay.timeline import Tick

MAX_RECORDS = 500_000
"""Ticks and runs of ticks that are kept; those after them are left out, and the report says so."""


class TickRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tick, or ``num_ticks`` that are alike: then everything happens in each of them. Ids are sequence numbers."""

    tick: int
    start_ps: int
    duration_ps: int
    """Of all of them together."""
    num_ticks: int = 1
    admitted: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()
    decoded: tuple[int, ...] = ()
    """Who got a token."""
    completed: tuple[int, ...] = ()
    prefill_tokens: int = 0
    """Prompt tokens computed in each."""
    admitted_prefill_tokens: int = 0
    """Those of them that were of requests admitted in it."""
    decoded_tokens: int = 0
    """In each."""
    queued: int = 0
    active: int = 0
    used_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


class TickRecorder:
    """A watcher that keeps the records."""

    def __init__(self, most: int = MAX_RECORDS) -> None:
        self.records: list[TickRecord] = []
        self._most = most
        self.num_left_out = 0

    def __call__(self, tick: Tick) -> None:
        if len(self.records) < self._most:
            self.records.append(record_of(tick))
        else:
            self.num_left_out += 1


def record_of(tick: Tick) -> TickRecord:
    """The record of one tick, or run of ticks."""
    plan, events = tick.plan, tick.events
    if plan is None or events is None:
        return TickRecord(tick.tick, tick.start_ps, tick.duration_ps, tick.num_ticks)
    return TickRecord(
        tick=tick.tick,
        start_ps=tick.start_ps,
        duration_ps=tick.duration_ps,
        num_ticks=tick.num_ticks,
        admitted=plan.admitted,
        resumed=plan.resumed,
        preempted=plan.preempted,
        decoded=tuple([seq_id for seq_id, samples in zip(plan.seq_ids, plan.samples, strict=True) if samples]),
        completed=tuple([finish.seq_id for finish in events.finished]),
        prefill_tokens=tick.num_prefill_tokens,
        admitted_prefill_tokens=_tokens_of(plan, plan.admitted),
        decoded_tokens=tick.num_decoded_tokens // tick.num_ticks,
        queued=tick.num_queued,
        active=tick.num_active,
        used_blocks=tick.num_used_blocks,
        swapped_out_blocks=len(plan.swap_out),
        swapped_in_blocks=len(plan.swap_in),
    )


def _tokens_of(plan: StepPlan, seq_ids: tuple[int, ...]) -> int:
    """Tokens that the plan computes of some sequences; all prompt, as those who were just admitted have no other."""
    return sum(length for seq_id, length in zip(plan.seq_ids, plan.lengths, strict=True) if seq_id in seq_ids)
