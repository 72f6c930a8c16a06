"""Progress of the requests of a replay, in tokens and times. Answers plans in the place of a model."""

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
"""Gaps between tokens are counted by whole microseconds: as many counters as steps of a trace would be too many."""


class Gaps:
    """Counts of each time between two tokens of a request."""

    def __init__(self) -> None:
        self.by_ticks: Counter[int] = Counter()
        self.by_us: Counter[int] = Counter()
        """Whole microseconds, rounded down."""

    def count(self, num_ticks: int, gap_ps: int, times: int) -> None:
        self.by_ticks[num_ticks] += times
        self.by_us[gap_ps // GAP_QUANTUM_PS] += times

    def count_run(self, cost: CostModel, num_steps: int, num_seqs: int, num_context_tokens: int) -> None:
        """Steps in which each of ``num_seqs`` got a token; the context is the first one's."""
        self.by_ticks[1] += num_steps * num_seqs
        first_ps = cost.step_ps(0, num_seqs, num_context_tokens)
        growth_ps = cost.context_token_ps * num_seqs
        last_ps = first_ps + growth_ps * (num_steps - 1)
        if first_ps // GAP_QUANTUM_PS == last_ps // GAP_QUANTUM_PS:
            self.by_us[first_ps // GAP_QUANTUM_PS] += num_steps * num_seqs
        else:
            for gap_ps in range(first_ps, last_ps + 1, growth_ps):
                self.by_us[gap_ps // GAP_QUANTUM_PS] += num_seqs


class RequestLife:
    """One request between its arrival and its end."""

    __slots__ = ("last_token_ps", "last_token_tick", "left", "outcome", "request")

    def __init__(self, request: WorkloadRequest, outcome: RequestOutcome, left: int) -> None:
        self.request: Final = request
        self.outcome: Final = outcome
        """Its outcome so far."""
        self.left = left
        """Tokens to come."""
        self.last_token_tick = -1
        self.last_token_ps = -1


class Progress:
    """The sequences under way, and the batch: those that sampled in the last step.

    As long as the same ones sample, their tokens are counted once for all of them.
    """

    def __init__(self) -> None:
        self.lives: dict[int, RequestLife] = {}
        self.gaps = Gaps()
        self._ids: tuple[int, ...] | None = None
        """Of the batch; None: the next step makes a new one."""
        self._batch: list[RequestLife] = []
        self._num_got = 0
        """Tokens that each of the batch got since it is this batch, not yet taken off from what is left."""
        self._least = 0
        """Tokens that were left, when it became this batch, to the one with the fewest."""
        self._no_ends: tuple[None, ...] = ()
        self._ones: tuple[int, ...] = ()
        self._last_tick = -1
        self._last_ps = -1

    def admit(self, plan: StepPlan, tick: int, start_ps: int) -> None:
        """Note the requests that left the queue in this step."""
        for seq_id in plan.admitted:
            outcome = self.lives[seq_id].outcome
            outcome.admitted_tick, outcome.admitted_ps = tick, start_ps

    def answer(self, plan: StepPlan) -> StepResult:
        """One token for each sequence that samples; STOP for those that are done before their limit."""
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
        """The step that was answered last has ended."""
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
        """The same ones got one token more in each of ``num_steps``; the caller counts their gaps."""
        self._num_got += num_steps
        self._last_tick, self._last_ps = tick, end_ps

    @property
    def num_quiet_steps(self) -> int:
        """Steps of this batch in which no sequence ends."""
        return self._least - self._num_got - 1

    def settle(self) -> None:
        """Add the tokens since the last call to the sequences of the batch."""
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


def _reason(life: RequestLife) -> FinishReason | None:
    """STOP, or None at the token limit, where the scheduler itself ends the request with LENGTH."""
    return FinishReason.STOP if life.request.num_output_tokens < life.request.max_output_tokens else None
