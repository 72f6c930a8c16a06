"""Counters and gauges of a scheduler: steps, tokens and blocks only, times are the engine's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lockstep.core.request import FinishReason
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
        """A request was admitted; requests that do not read the cache count no query."""
        if seq.request.reads_cache and seq.request.block_hashes:
            self.prefix_queries_tokens += seq.num_prompt
            self.prefix_hits_tokens += seq.num_cached_tokens

    def count_finish(self, seq: Sequence, reason: FinishReason) -> None:
        self.num_finished[reason] += 1
        self.num_recomputed_tokens += seq.num_recomputed_tokens
