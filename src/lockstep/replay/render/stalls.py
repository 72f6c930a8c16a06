"""When sequences were preempted: from the step that took their blocks to the one from which they run again."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.replay.timeline import Tick

MAX_STALLS = 200_000
"""That are kept; of a run that preempts more often, the first."""


class Stall(NamedTuple):
    """One sequence, for one time."""

    tick: int
    end_tick: int
    start_ps: int
    end_ps: int


class Stalls:
    """A watcher that keeps them by sequence."""

    def __init__(self) -> None:
        self._by_id: dict[int, list[Stall]] = {}
        self._open: dict[int, tuple[int, int]] = {}
        """Tick and picosecond since when."""
        self.num_left_out = 0
        self._count = 0

    def __call__(self, tick: Tick) -> None:
        """Take in what the replay did next."""
        plan = tick.plan
        if plan is None or not (plan.preempted or plan.resumed):
            return
        for seq_id in plan.resumed:
            since = self._open.pop(seq_id, None)
            if since is not None:
                self._by_id.setdefault(seq_id, []).append(Stall(since[0], tick.tick, since[1], tick.start_ps))
        for seq_id in plan.preempted:
            if self._count < MAX_STALLS:
                self._count += 1
                self._open[seq_id] = tick.tick, tick.start_ps
            else:
                self.num_left_out += 1

    def of(self, seq_id: int) -> tuple[Stall, ...]:
        """Of one sequence, in order."""
        return tuple(self._by_id.get(seq_id, ()))
