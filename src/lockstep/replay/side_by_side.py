"""Two simulations in lock-step: the first step that they decide differently."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.core.step import StepEvents
from lockstep.replay.divergence import Change, Decision, Difference, difference
from lockstep.replay.simulator import Simulation
from lockstep.replay.timeline import Tick

STEP_WORK = 10
"""A step costs about as much as so many rows."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of one side when the two differed."""

    decision: Decision
    run_tick: int
    """First tick of the run of equal steps that the step is in; its own number mostly."""
    tick: int
    start_ps: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step that two sides decide differently."""

    num_equal_steps: int
    """Steps before it, in which both decided the same; idle ones not counted."""
    a: Place
    b: Place
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
    """Rows that both sides planned, and ``STEP_WORK`` for each plan."""


class _Side:
    """A simulation that is read step by step although it tells runs of them."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._num_refused = 0
        self.tick: Tick | None = None
        self.offset = 0
        """Steps of the run that are read already."""
        self.refused: tuple[str, ...] = ()
        self.work = 0
        self.read(0)

    @property
    def left(self) -> int:
        return 0 if self.tick is None else self.tick.num_ticks - self.offset

    def read(self, num_steps: int) -> None:
        """Go on by so many steps, at most those that are left of the run."""
        self.offset += num_steps
        if self.left == 0:
            self.tick, self.offset = self._simulation.step(), 0
            refusals = self._simulation.refusals
            self.refused, self._num_refused = tuple(refusals[self._num_refused :]), len(refusals)
            if self.tick is not None and self.tick.plan is not None:
                self.work += STEP_WORK + len(self.tick.plan.seq_ids)

    def decision(self) -> Decision:
        """The next step's. Later ones of a run are the first, so much further on."""
        plan, events = (None, None) if self.tick is None else (self.tick.plan, self.tick.events)
        if plan is None or events is None or self.offset == 0:
            return Decision(plan, events, self.refused if self.offset == 0 else ())
        step = plan.step + self.offset
        starts = tuple([start + self.offset for start in plan.starts])
        later = replace(plan, step=step, starts=starts, evicted=(), admitted=(), resumed=(), preempted=())
        return Decision(later, StepEvents(step, (), events.num_tokens))

    def place(self) -> Place:
        """Where it stands; times within a run are those of its first step when the run has only that."""
        tick = self.tick
        if tick is None:
            return Place(self.decision(), self._simulation.tick, self._simulation.tick, self._simulation.now_ps)
        start_ps = tick.start_ps + tick.duration_ps * self.offset // tick.num_ticks
        return Place(self.decision(), tick.tick, tick.tick + self.offset, start_ps)


def compare(a: Simulation, b: Simulation, max_steps: int | None = None) -> Comparison:
    """Run both until they decide a step differently, or both are over.

    Args:
        a, b: fresh simulations.
        max_steps: how many equal steps are enough; None: all.
    """
    side_a, side_b = _Side(a), _Side(b)
    num_equal = 0
    while True:
        decision_a, decision_b = side_a.decision(), side_b.decision()
        found = difference(decision_a, decision_b)
        work = side_a.work + side_b.work
        if found is not None:
            divergence = Divergence(num_equal, side_a.place(), side_b.place(), found)
            return Comparison(divergence, num_equal, work)
        lefts = [side.left for side in (side_a, side_b) if side.tick is not None]
        is_enough = max_steps is not None and num_equal >= max_steps and decision_a.plan is not None
        if not lefts or is_enough:
            return Comparison(None, num_equal, work)
        both = min(lefts)
        num_equal += both if decision_a.plan is not None else 0
        side_a.read(both)
        side_b.read(both)
