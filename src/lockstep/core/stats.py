"""What a scheduler counts. Counts of steps, tokens and blocks only: times are the engine's."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.core.kv import KVCache
from lockstep.core.queue import WaitingQueue
from lockstep.core.request import FinishReason
from lockstep.core.roster import Roster
from lockstep.core.sequence import Sequence
from lockstep.core.step import StepPlan


class SchedulerStats(NamedTuple):
    """Gauges of this moment and counters since the start."""

    num_running: int
    num_queued: int
    num_preempted: int
    """Preempted now; ``num_preemptions`` counts how often it happened."""
    num_queued_tokens: int
    """Prompt tokens in the queue."""
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Not held, but their content can be hit."""
    num_held_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    kv_usage: float
    """Held blocks over all blocks, 0 to 1."""
    num_steps: int
    num_failed_steps: int
    num_prompt_tokens: int
    """Prompt tokens computed, those of recomputation included, hits not."""
    num_generation_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    """Of sequences that ended: tokens that were computed again."""
    prefix_queries_tokens: int
    """Prompt tokens looked up in the prefix cache, once per request."""
    prefix_hits_tokens: int
    num_allocated_blocks: int
    num_evicted_blocks: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_finished: tuple[tuple[FinishReason, int], ...]
    """Ended sequences by reason, in the order of the enum."""


class Counters:
    """The counters behind the stats."""

    def __init__(self) -> None:
        self.num_failed_steps = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_preemptions = 0
        self._num_recomputed_tokens = 0
        self._prefix_queries_tokens = 0
        self._prefix_hits_tokens = 0
        self._num_evicted_blocks = 0
        self._num_swapped_out_blocks = 0
        self._num_swapped_in_blocks = 0
        self._num_finished = dict.fromkeys(FinishReason, 0)

    def count_moves(self, plan: StepPlan) -> None:
        self._num_evicted_blocks += len(plan.evicted)
        self._num_swapped_out_blocks += len(plan.swap_out)
        self._num_swapped_in_blocks += len(plan.swap_in)

    def count_lookup(self, seq: Sequence) -> None:
        """A request was admitted; requests that do not read the cache ask it nothing."""
        if seq.request.reads_cache and seq.request.block_hashes:
            self._prefix_queries_tokens += seq.num_prompt
            self._prefix_hits_tokens += seq.num_cached_tokens

    def count_finish(self, seq: Sequence, reason: FinishReason) -> None:
        self._num_finished[reason] += 1
        self._num_recomputed_tokens += seq.num_recomputed_tokens

    def snapshot(
        self, num_steps: int, queue: WaitingQueue, roster: Roster, kv: KVCache, num_unwritten_tokens: int
    ) -> SchedulerStats:
        """Copy everything.

        Args:
            num_unwritten_tokens: generated tokens that are not counted yet.
        """
        pool, host = kv.pool, kv.host
        num_held = pool.num_blocks - pool.num_available
        return SchedulerStats(
            num_running=roster.num_running,
            num_queued=len(queue),
            num_preempted=len(roster.preempted),
            num_queued_tokens=queue.num_tokens,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_held_blocks=num_held,
            num_host_blocks=host.num_blocks,
            num_free_host_blocks=host.num_free,
            kv_usage=num_held / pool.num_blocks,
            num_steps=num_steps,
            num_failed_steps=self.num_failed_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens + num_unwritten_tokens,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
            prefix_queries_tokens=self._prefix_queries_tokens,
            prefix_hits_tokens=self._prefix_hits_tokens,
            num_allocated_blocks=pool.num_allocated,
            num_evicted_blocks=self._num_evicted_blocks,
            num_swapped_out_blocks=self._num_swapped_out_blocks,
            num_swapped_in_blocks=self._num_swapped_in_blocks,
            num_finished=tuple(self._num_finished.items()),
        )
