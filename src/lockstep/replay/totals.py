"""Sums and peaks over the ticks of a replay."""

from __future__ import annotations

from lockstep.replay.timeline import Tick


class Totals:
    """What ticks add up to.

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
