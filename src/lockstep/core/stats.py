"""Scheduler statistics: counters and gauges of steps, tokens and blocks; times are measured by the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lockstep.core.blocks import BlockPool, HostPool
from lockstep.core.request import FinishReason
from lockstep.core.sequence import Sequence
from lockstep.core.step import StepPlan


class SchedulerStats(NamedTuple):
    """Current gauges, and counters since the start."""

    num_running: int
    num_queued: int
    num_preempted: int
    """Number of sequences that are preempted now; ``num_preemptions`` counts how often it happened."""
    num_queued_tokens: int
    """Number of prompt tokens in the queue."""
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Number of blocks that are not held but whose content can be hit."""
    num_held_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    kv_usage: float
    """Held blocks over all blocks, 0 to 1."""
    num_steps: int
    num_failed_steps: int
    num_prompt_tokens: int
    """Number of computed prompt tokens, including recomputation, without cache hits."""
    num_generation_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    """Number of tokens that were computed again, of sequences that have ended."""
    prefix_queries_tokens: int
    """Prompt tokens looked up in the prefix cache, once per request."""
    prefix_hits_tokens: int
    num_allocated_blocks: int
    num_evicted_blocks: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_finished: tuple[tuple[FinishReason, int], ...]
    """Ended sequences by reason, in the order of the enum."""


@dataclass(slots=True)
class Counters:
    """The counters behind the stats."""

    num_failed_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    num_evicted_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def copy(self) -> Counters:
        return replace(self, num_finished=dict(self.num_finished))

    def count_moves(self, plan: StepPlan) -> None:
        self.num_evicted_blocks += len(plan.evicted)
        self.num_swapped_out_blocks += len(plan.swap_out)
        self.num_swapped_in_blocks += len(plan.swap_in)

    def count_lookup(self, seq: Sequence) -> None:
        """Count the cache lookup of an admitted request. Requests that do not read the cache count no query."""
        if seq.request.reads_cache and seq.request.block_hashes:
            self.prefix_queries_tokens += seq.num_prompt
            self.prefix_hits_tokens += seq.num_cached_tokens

    def count_finish(self, seq: Sequence, reason: FinishReason) -> None:
        self.num_finished[reason] += 1
        self.num_recomputed_tokens += seq.num_recomputed_tokens


def stats_of(
    counters: Counters,
    pool: BlockPool,
    host: HostPool,
    sizes: tuple[int, int, int, int],
    num_steps: int,
    num_uncounted_tokens: int,
) -> SchedulerStats:
    """Collect the stats.

    Args:
        sizes: numbers of running, queued and preempted sequences, and of queued prompt tokens.
        num_uncounted_tokens: generated tokens that the counters do not have yet.
    """
    num_held = pool.num_blocks - pool.num_available
    return SchedulerStats(
        *sizes,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free,
        num_cached_blocks=pool.num_cached,
        num_held_blocks=num_held,
        num_host_blocks=host.num_blocks,
        num_free_host_blocks=host.num_free,
        kv_usage=num_held / pool.num_blocks,
        num_steps=num_steps,
        num_failed_steps=counters.num_failed_steps,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_generation_tokens=counters.num_generation_tokens + num_uncounted_tokens,
        num_preemptions=counters.num_preemptions,
        num_recomputed_tokens=counters.num_recomputed_tokens,
        prefix_queries_tokens=counters.prefix_queries_tokens,
        prefix_hits_tokens=counters.prefix_hits_tokens,
        num_allocated_blocks=pool.num_allocated,
        num_evicted_blocks=counters.num_evicted_blocks,
        num_swapped_out_blocks=counters.num_swapped_out_blocks,
        num_swapped_in_blocks=counters.num_swapped_in_blocks,
        num_finished=tuple(counters.num_finished.items()),
    )
