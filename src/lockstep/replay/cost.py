"""How long a step takes: a linear model in whole picoseconds. Values in, values out."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from lockstep.replay.workload import PS_PER_MS


@dataclass(frozen=True, slots=True)
class CostModel:
    """``step_ps`` = constant, another where prompts move on, and prefill tokens, decoding sequences and context tokens,
    each times its price.

    Whole numbers, because then a run of equal steps has a closed sum that is exactly that of its steps.
    """

    constant_ps: int = 10 * PS_PER_MS
    prefill_token_ps: int = 0
    """For each prompt token that the step computes."""
    decode_seq_ps: int = 0
    """For each sequence that computes one token, or a forced segment."""
    context_token_ps: int = 0
    """For each position that a row attends to: start + length, summed over rows."""
    prefill_step_ps: int = 0
    """For a step that computes any prompt token: other kernels, another shape."""

    def step_ps(self, num_prefill_tokens: int, num_decode_seqs: int, num_context_tokens: int) -> int:
        """The duration of one step."""
        return (
            self.constant_ps
            + self.prefill_token_ps * num_prefill_tokens
            + self.decode_seq_ps * num_decode_seqs
            + self.context_token_ps * num_context_tokens
            + (self.prefill_step_ps if num_prefill_tokens else 0)
        )

    def run_ps(self, num_steps: int, num_decode_seqs: int, num_context_tokens: int) -> int:
        """The duration of steps in which the same sequences decode one token each; the context is the first one's."""
        growth = num_decode_seqs * (num_steps * (num_steps - 1) // 2)
        return num_steps * self.step_ps(0, num_decode_seqs, num_context_tokens) + self.context_token_ps * growth

    def num_begun_within(self, gap_ps: int, num_steps: int, num_decode_seqs: int, num_context_tokens: int) -> int:
        """How many of the steps of such a run begin before ``gap_ps`` is over, counted from the first one's begin."""
        if gap_ps <= 0:
            return 0
        if not self.context_token_ps:
            step_ps = self.step_ps(0, num_decode_seqs, 0)
            return min(num_steps, -(-gap_ps // step_ps)) if step_ps else num_steps
        begins = range(num_steps)
        return bisect_left(begins, gap_ps, key=lambda step: self.run_ps(step, num_decode_seqs, num_context_tokens))
