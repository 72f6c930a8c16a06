"""Step prices: define a linear model in whole picoseconds, and detect steps beyond the measured range."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.replay.timeline import Tick
from lockstep.replay.workload import PS_PER_MS


@dataclass(frozen=True, slots=True)
class CostModel:
    """Linear model of ``step_ps``: a constant, another one for steps with prefill, and prices of prefill tokens,
    decoding sequences and context tokens.

    Prices are integers, so that the duration of a run of equal steps is exactly the sum of its steps.
    """

    constant_ps: int = 10 * PS_PER_MS
    prefill_token_ps: int = 0
    """Price of each prompt token that the step computes."""
    decode_seq_ps: int = 0
    """Price of each sequence that computes one token, or a jump-forward segment."""
    context_token_ps: int = 0
    """Price of each position that a row attends to: start + length, summed over rows."""
    prefill_step_ps: int = 0
    """Price of a step that computes any prompt tokens, since it uses other kernels."""

    def step_ps(self, num_prefill_tokens: int, num_decode_seqs: int, num_context_tokens: int) -> int:
        """Duration of one step, in picoseconds."""
        return (
            self.constant_ps
            + self.prefill_token_ps * num_prefill_tokens
            + self.decode_seq_ps * num_decode_seqs
            + self.context_token_ps * num_context_tokens
            + (self.prefill_step_ps if num_prefill_tokens else 0)
        )

    def run_ps(self, num_steps: int, num_decode_seqs: int, num_context_tokens: int) -> int:
        """Duration of steps in which the same sequences decode one token each; the context is that of the first
        step."""
        growth = num_decode_seqs * (num_steps * (num_steps - 1) // 2)
        return num_steps * self.step_ps(0, num_decode_seqs, num_context_tokens) + self.context_token_ps * growth

    def num_begun_within(self, gap_ps: int, num_steps: int, num_decode_seqs: int, num_context_tokens: int) -> int:
        """Number of steps of such a run that begin within ``gap_ps`` after the begin of the first."""
        if gap_ps <= 0:
            return 0
        if not self.context_token_ps:
            step_ps = self.step_ps(0, num_decode_seqs, 0)
            return min(num_steps, -(-gap_ps // step_ps)) if step_ps else num_steps
        begins = range(num_steps)
        return bisect_left(begins, gap_ps, key=lambda step: self.run_ps(step, num_decode_seqs, num_context_tokens))


Ranges = Mapping[str, tuple[int, int]]
"""Measured minimum and maximum of each feature, by its name in cost files."""
FEATURES = ("prefill tokens", "decoding sequences", "context tokens")


class Extrapolation:
    """A watcher that records the maximum of each feature over all steps."""

    def __init__(self, ranges: Ranges) -> None:
        self._limits = tuple(ranges[name][1] if name in ranges else None for name in FEATURES)
        self._most = [0, 0, 0]
        self._num_steps = 0
        self._num_beyond = 0

    def __call__(self, tick: Tick) -> None:
        """Add the next tick or run of ticks."""
        plan = tick.plan
        if plan is None:
            return
        context = sum(plan.starts) + plan.num_tokens + (tick.num_ticks - 1) * len(plan.seq_ids)
        values = tick.num_prefill_tokens, tick.num_decode_inputs, context
        self._num_steps += tick.num_ticks
        self._most = list(map(max, self._most, values))
        if any(limit is not None and value > limit for value, limit in zip(values, self._limits, strict=True)):
            self._num_beyond += tick.num_ticks

    def note(self) -> str:
        """Warning about the times; empty: every step is within the measured range."""
        beyond = [
            f"up to {most:,} {name} (measured: {limit:,})"
            for name, most, limit in zip(FEATURES, self._most, self._limits, strict=True)
            if limit is not None and most > limit
        ]
        if not beyond:
            return ""
        share = self._num_beyond / self._num_steps
        return f"times are extrapolated for {share:.1%} of the steps, which compute {', '.join(beyond)}"
