"""Progress of a replay's requests in tokens and times: computes the results of plans, since no model runs."""

from __future__ import annotations

from collections import Counter
from itertools import compress
from typing import Final

from lockstep.core.request import FinishReason
from lockstep.core.step import StepPlan, StepResult
from lockstep.replay.cost import CostModel
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.workload import WorkloadRequest

GAP_QUANTUM_PS = 1_000_000
"""Resolution of counted gaps: one microsecond. Without it, a trace could have as many counters as steps."""


class Gaps:
    """Counts of the gaps between two tokens of a request."""

    def __init__(self) -> None:
        self.by_ticks: Counter[int] = Counter()
        self.by_us: Counter[int] = Counter()
        """Number of gaps by their length in microseconds, rounded down."""

    def count(self, num_ticks: int, gap_ps: int, times: int) -> None:
        self.by_ticks[num_ticks] += times
        self.by_us[gap_ps // GAP_QUANTUM_PS] += times

    def count_run(self, cost: CostModel, num_steps: int, num_seqs: int, num_context_tokens: int) -> None:
        """Count steps in which each of ``num_seqs`` sequences got a token; the context is that of the first step."""
        self.by_ticks[1] += num_steps * num_seqs
        first_ps = cost.step_ps(0, num_seqs, num_context_tokens)
        growth_ps = cost.context_token_ps * num_seqs
        last_ps = first_ps + growth_ps * (num_steps - 1)
        if first_ps // GAP_QUANTUM_PS == last_ps // GAP_QUANTUM_PS:
            self.by_us[first_ps // GAP_QUANTUM_PS] += num_steps * num_seqs
        else:
            for gap_ps in range(first_ps, last_ps + 1, growth_ps):
                self.by_us[gap_ps // GAP_QUANTUM_PS] += num_seqs


class RequestProgress:
    """Progress of one request between its arrival and its end."""

    __slots__ = ("last_token_ps", "last_token_tick", "left", "outcome", "request")

    def __init__(self, request: WorkloadRequest, outcome: RequestOutcome, left: int) -> None:
        self.request: Final = request
        self.outcome: Final = outcome
        """Outcome so far."""
        self.left = left
        """Number of tokens left to generate."""
        self.last_token_tick = -1
        self.last_token_ps = -1


class Progress:
    """Open sequences, and the batch: the sequences that sampled in the last step.

    While the batch stays the same, its tokens are counted once for all its sequences.
    """

    def __init__(self) -> None:
        self.lives: dict[int, RequestProgress] = {}
        self.gaps = Gaps()
        self._ids: tuple[int, ...] | None = None
        """Ids of the batch; None: the next step forms a new one."""
        self._batch: list[RequestProgress] = []
        self._num_got = 0
        """Tokens per sequence since the batch was formed, which are not yet subtracted from those left."""
        self._least = 0
        """Least number of tokens left of a sequence when the batch was formed."""
        self._no_ends: tuple[None, ...] = ()
        self._ones: tuple[int, ...] = ()
        self._last_tick = -1
        self._last_ps = -1

    def admit(self, plan: StepPlan, tick: int, start_ps: int) -> None:
        """Record the requests that this step admits."""
        for seq_id in plan.admitted:
            outcome = self.lives[seq_id].outcome
            outcome.admitted_tick, outcome.admitted_ps = tick, start_ps

    def answer(self, plan: StepPlan) -> StepResult:
        """Result of a plan: one token per sampling sequence; STOP for those that end before their limit."""
        ids = plan.seq_ids
        if False in plan.samples:
            ids = tuple(compress(ids, plan.samples))
        if ids != self._ids:
            self.settle()
            self._form(ids)
        if self._num_got + 1 < self._least:
            return StepResult(self._ones, self._no_ends)
        last = self._num_got + 1
        return StepResult(self._ones, tuple([_reason(life) if life.left == last else None for life in self._batch]))

    def take(self, tick: int, end_ps: int) -> None:
        """Complete the step of the last `answer`."""
        if self._num_got:
            self.gaps.count(tick - self._last_tick, end_ps - self._last_ps, len(self._batch))
        else:
            num_together = 0
            for life in self._batch:
                outcome = life.outcome
                if outcome.first_token_tick < 0:
                    outcome.first_token_tick, outcome.first_token_ps = tick, end_ps
                elif life.last_token_tick == self._last_tick:
                    num_together += 1
                else:
                    self.gaps.count(tick - life.last_token_tick, end_ps - life.last_token_ps, 1)
            if num_together:
                self.gaps.count(tick - self._last_tick, end_ps - self._last_ps, num_together)
        self._num_got += 1
        self._last_tick, self._last_ps = tick, end_ps

    def repeat(self, num_steps: int, tick: int, end_ps: int) -> None:
        """Add one token per sequence of the batch for each of ``num_steps``; the caller counts the gaps."""
        self._num_got += num_steps
        self._last_tick, self._last_ps = tick, end_ps

    @property
    def num_quiet_steps(self) -> int:
        """Number of steps of this batch in which no sequence ends."""
        return self._least - self._num_got - 1

    def settle(self) -> None:
        """Add the batch's tokens since the last call to its sequences."""
        num_got, self._num_got = self._num_got, 0
        self._ids = None
        if num_got:
            for life in self._batch:
                life.left -= num_got
                life.outcome.num_output_tokens += num_got
                life.last_token_tick, life.last_token_ps = self._last_tick, self._last_ps

    def _form(self, ids: tuple[int, ...]) -> None:
        self._ids = ids
        self._batch = [self.lives[seq_id] for seq_id in ids]
        self._least = min([life.left for life in self._batch], default=0)
        self._no_ends = (None,) * len(ids)
        self._ones = (1,) * len(ids)


def _reason(life: RequestProgress) -> FinishReason | None:
    """STOP; or None at the token limit, where the scheduler itself ends the request with LENGTH."""
    return FinishReason.STOP if life.request.num_output_tokens < life.request.max_output_tokens else None
