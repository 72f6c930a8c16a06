"""Scheduler statistics: counters and gauges of steps, tokens and blocks; times are measured by the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

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
