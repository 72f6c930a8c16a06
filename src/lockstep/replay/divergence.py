"""Divergence of two sides: finds the first step that they decide differently, and classifies the difference.

A side is a simulation, or an engine of a recording. Both get the same requests, so a sequence has the same id on both
until they diverge.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from lockstep.core.request import FinishReason
from lockstep.core.step import Chunk, StepEvents, StepPlan
from lockstep.replay.playback import played
from lockstep.replay.rerun import DecidedStep
from lockstep.replay.simulator import Simulation
from lockstep.replay.timeline import Tick
from lockstep.replay.trace import Trace
from lockstep.replay.workload import PS_PER_US

STEP_WORK = 10
"""Work of planning one step, in rows."""


class Change(Enum):
    """Kinds of decisions that can differ, in the order in which a step makes them. Comparisons use the same order."""

    REFUSAL = "refusal"
    """One side refuses a request at its arrival."""
    IDLE = "idle"
    """One side has no work, or has ended."""
    VICTIM = "victim"
    """Another sequence is preempted, or only one side preempts a sequence."""
    MOVE = "move"
    """The victims are the same, but one side saves their blocks to the host and the other drops them."""
    TURN = "turn"
    """A running sequence takes part in one side's step and waits on the other side."""
    CHUNK = "chunk"
    """A sequence computes a different number of tokens."""
    RESUMPTION = "resumption"
    """A preempted sequence runs again on one side only."""
    ADMISSION = "admission"
    """A different request is admitted from the queue."""
    CACHE = "cache"
    """The same request is admitted, with a different part of its prompt from the cache."""
    BLOCK = "block"
    """The same work uses different blocks."""
    END = "end"
    """A different sequence ends, or with another reason."""


@dataclass(frozen=True, slots=True)
class StepDecision:
    """Decision of one side in one step."""

    plan: StepPlan | None
    """Plan of the step; None: no step ran."""
    events: StepEvents | None
    refused: tuple[str, ...] = ()
    """Names of the requests that were refused when they arrived before this step."""


@dataclass(frozen=True, slots=True)
class Difference:
    """First difference of two decisions, in the order of deciding."""

    change: Change
    only_a: tuple[int, ...]
    """Ids of the sequences (for refusals: indices in ``StepDecision.refused``) with this decision on side A only, or
    with a different one on each side. For blocks: sequences whose tables differ."""
    only_b: tuple[int, ...]


def difference(a: StepDecision, b: StepDecision) -> Difference | None:
    """First difference between two decisions of a step; None: they are equal."""
    if a.refused != b.refused:
        return Difference(
            Change.REFUSAL, _missing_indices(a.refused, b.refused), _missing_indices(b.refused, a.refused)
        )
    if a.plan is None or b.plan is None:
        if a.plan is b.plan:
            return None
        return Difference(Change.IDLE, a.plan.seq_ids if a.plan else (), b.plan.seq_ids if b.plan else ())
    if a.plan == b.plan:
        return None if a.events == b.events else _ends(a.events, b.events)
    return (
        _lists(Change.VICTIM, a.plan.preempted, b.plan.preempted)
        or _moves(a.plan, b.plan)
        or _rows(a.plan, b.plan)
        or _lists(Change.RESUMPTION, a.plan.resumed, b.plan.resumed)
        or _lists(Change.ADMISSION, a.plan.admitted, b.plan.admitted)
        or _new_rows(a.plan, b.plan)
        or _blocks(a.plan, b.plan)
    )


def _missing_indices(names: tuple[str, ...], others: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(place for place, name in enumerate(names) if name not in others)


def _lists(change: Change, a: tuple[int, ...], b: tuple[int, ...]) -> Difference | None:
    if a == b:
        return None
    only_a = tuple(seq_id for seq_id in a if seq_id not in b)
    only_b = tuple(seq_id for seq_id in b if seq_id not in a)
    if not only_a and not only_b:  # the same ids in another order
        place = next(place for place, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        only_a, only_b = a[place : place + 1], b[place : place + 1]
    return Difference(change, only_a, only_b)


def _moves(a: StepPlan, b: StepPlan) -> Difference | None:
    """Victims whose blocks are moved to the host on one side only. Different host blocks are a difference of blocks."""
    if [device for device, _ in a.swap_out] == [device for device, _ in b.swap_out]:
        return None
    return Difference(Change.MOVE, a.preempted, b.preempted)


def rows_of(plan: StepPlan | None) -> dict[int, Chunk]:
    """Rows of a plan by sequence id; empty if no step ran."""
    return {} if plan is None else {row.seq_id: row for row in plan.chunks()}


def _rows(a: StepPlan, b: StepPlan) -> Difference | None:
    """Difference in the rows of sequences that ran before this step."""
    old_a, old_b = (
        {seq_id: row for seq_id, row in rows_of(plan).items() if seq_id not in (*plan.admitted, *plan.resumed)}
        for plan in (a, b)
    )
    if tuple(old_a) != tuple(old_b):
        return _lists(Change.TURN, tuple(old_a), tuple(old_b))
    return _lengths([(old_a[seq_id], old_b[seq_id]) for seq_id in old_a])


def _lengths(pairs: list[tuple[Chunk, Chunk]]) -> Difference | None:
    ids = tuple(x.seq_id for x, y in pairs if (x.length, x.samples) != (y.length, y.samples))
    return Difference(Change.CHUNK, ids, ids) if ids else None


def _new_rows(a: StepPlan, b: StepPlan) -> Difference | None:
    """Difference in the rows of sequences that run from this step on; these are the same on both sides."""
    rows_a, rows_b = rows_of(a), rows_of(b)
    both = [(rows_a[seq_id], rows_b[seq_id]) for seq_id in rows_a if seq_id in rows_b]
    cached = tuple(x.seq_id for x, y in both if x.start != y.start)
    if cached:
        return Difference(Change.CACHE, cached, cached)
    return _lists(Change.TURN, a.seq_ids, b.seq_ids) or _lengths(both)


def _blocks(a: StepPlan, b: StepPlan) -> Difference:
    ids = tuple(
        seq_id for seq_id, x, y in zip(a.seq_ids, a.tables, b.tables, strict=True) if x != y
    )  # empty: only the evicted content or the host blocks differ
    return Difference(Change.BLOCK, ids, ids)


def _ends(a: StepEvents | None, b: StepEvents | None) -> Difference:
    ended_a, ended_b = (_ended(events) for events in (a, b))
    only_a = tuple(seq_id for seq_id, reason in ended_a.items() if ended_b.get(seq_id) is not reason)
    only_b = tuple(seq_id for seq_id, reason in ended_b.items() if ended_a.get(seq_id) is not reason)
    return Difference(Change.END, only_a, only_b)


def _ended(events: StepEvents | None) -> dict[int, FinishReason]:
    return {} if events is None else {finish.seq_id: finish.reason for finish in events.finished}


@dataclass(frozen=True, slots=True)
class SidePosition:
    """State of one side at the divergence."""

    decision: StepDecision
    run_tick: int
    """First tick of the run of equal steps that contains the step; usually the step's tick."""
    tick: int
    start_ps: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step that two sides decide differently."""

    num_equal_steps: int
    """Number of equal steps before it, without idle ticks."""
    a: SidePosition
    b: SidePosition
    difference: Difference

    @property
    def change(self) -> Change:
        return self.difference.change


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of running two sides in lock-step."""

    divergence: Divergence | None
    num_equal_steps: int
    work: int
    """Rows that both sides planned, plus ``STEP_WORK`` for each plan."""


class Side(Protocol):
    """A source of steps with a current step."""

    num_left: int
    """Number of equal steps from the current one on, which the side counts as one run; 0: the side has ended."""
    work: int

    def advance(self, num_steps: int) -> None:
        """Skip ``num_steps`` steps, at most ``num_left``."""

    def decision(self) -> StepDecision:
        """Decision of the current step."""

    def place(self) -> SidePosition:
        """Position of the current step."""


class SimulatedSide:
    """A new simulation as a side: splits its runs of equal steps into single steps."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._tick: Tick | None = None
        self._offset = 0
        """Number of steps of the run that were already read."""
        self._refused: tuple[str, ...] = ()
        self._num_refused = 0
        self.num_left = 0
        self.work = 0
        self.advance(0)

    def advance(self, num_steps: int) -> None:
        self._offset += num_steps
        self.num_left -= num_steps
        if self.num_left == 0:
            self._tick, self._offset = tick, _ = self._simulation.step(), 0
            refusals = self._simulation.refusals
            self._refused, self._num_refused = tuple(refusals[self._num_refused :]), len(refusals)
            self.num_left = 0 if tick is None else tick.num_ticks
            if tick is not None and tick.plan is not None:
                self.work += STEP_WORK + len(tick.plan.seq_ids)

    def decision(self) -> StepDecision:
        """Decision of the current step. Later steps of a run are the first one, moved by the offset."""
        plan, events = (None, None) if self._tick is None else (self._tick.plan, self._tick.events)
        if plan is None or events is None or self._offset == 0:
            return StepDecision(plan, events, self._refused if self._offset == 0 else ())
        step = plan.step + self._offset
        starts = tuple([start + self._offset for start in plan.starts])
        later = replace(plan, step=step, starts=starts, evicted=(), admitted=(), resumed=(), preempted=())
        return StepDecision(later, StepEvents(step, (), events.num_tokens))

    def place(self) -> SidePosition:
        """Position of the current step; within a run, times are those of the run's first step."""
        tick = self._tick
        if tick is None:
            return SidePosition(self.decision(), self._simulation.tick, self._simulation.tick, self._simulation.now_ps)
        start_ps = tick.start_ps + tick.duration_ps * self._offset // tick.num_ticks
        return SidePosition(self.decision(), tick.tick, tick.tick + self._offset, start_ps)


class RecordedSide:
    """A recorded engine as a side: the scheduler decides its steps again. Its ticks are its steps."""

    work = 0

    def __init__(self, trace: Trace, engine: int) -> None:
        self._steps = (each for each in played(trace) if isinstance(each, DecidedStep) and each.engine == engine)
        self._num_steps = -1
        self.num_left = 0
        self.advance(1)

    def advance(self, num_steps: int) -> None:
        self._step = next(self._steps, None)
        self._num_steps += num_steps
        self.num_left = int(self._step is not None)

    def decision(self) -> StepDecision:
        return StepDecision(None, None) if self._step is None else StepDecision(self._step.plan, self._step.events)

    def place(self) -> SidePosition:
        start_us = 0 if self._step is None else self._step.timing.start_us
        return SidePosition(self.decision(), self._num_steps, self._num_steps, start_us * PS_PER_US)


def compare(a: Side, b: Side, max_steps: int | None = None) -> Comparison:
    """Run both sides until they decide a step differently, or both have ended.

    Args:
        max_steps: maximum number of equal steps to compare; None: all.
    """
    num_equal = 0
    while True:
        decision_a, decision_b = a.decision(), b.decision()
        found = difference(decision_a, decision_b)
        work = a.work + b.work
        if found is not None:
            return Comparison(Divergence(num_equal, a.place(), b.place(), found), num_equal, work)
        is_busy = decision_a.plan is not None
        num_left = min((side.num_left for side in (a, b) if side.num_left), default=0)
        if not num_left or (max_steps is not None and num_equal >= max_steps and is_busy):
            return Comparison(None, num_equal, work)
        num_equal += num_left if is_busy else 0
        for side in (a, b):
            side.advance(num_left)
