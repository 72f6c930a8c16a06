"""Device scheduler: deficit round robin over measured step time among the replicas that have work.

A round gives every replica credit by the weight of its priority class; a step is paid for when its duration is known,
so the last one of a round may run into debt, which later rounds pay off. Time is a value here, in whole microseconds:
the same durations and the same work give the same turns, also when they are read from a recording.

Who has work waits a bounded time. With q the quantum, w weights and c the longest step of each, replica i steps again
after at most ``(ceil(c_i / (q * w_i)) + 1) * sum(q * w_j + c_j for others j)``: in a round each other one spends its
credit and at most one step beyond. Over any time in which all have work, what two of them got, each divided by its
weight, differs by at most ``q + max(c_i / w_i)``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from lockstep.core.request import Priority, weight_of

QUANTUM_US = 5_000
"""What a round gives for each unit of weight: a handful of steps of a small model, a fraction of one of a large."""
SeatRow = tuple[str, int, int, int]
"""A replica's key, what a round gives it, what it has left of that, and its last turn."""


@dataclass(slots=True)
class _Seat:
    """One replica's place at the device."""

    key: str
    priority: int
    grant_us: int
    """What a round gives it, and the most that it ever has."""
    credit_us: int
    """What is left of it; below zero, what it owes."""
    last_turn: int = 0


_by_turn = attrgetter("priority", "last_turn")


class DeviceScheduler:
    """Choice of the replica that steps now, and account of what that cost.

    Within a round, the best class that has credit steps first; within a class, who stepped longest ago; then who was
    loaded first. Nobody saves: a replica without work keeps at most one round's credit, and when no one has work, all
    debts are forgotten.
    """

    def __init__(self) -> None:
        self._seats: dict[str, _Seat] = {}
        self._seated: Mapping[str, int] = {}
        """The replica of these credits."""
        self._with_work: Collection[str] = ()
        self._busy: list[_Seat] = []
        """Theirs who have work, in order of loading."""
        self._num_turns = 0

    @classmethod
    def of(cls, num_turns: int, seats: Sequence[SeatRow]) -> DeviceScheduler:
        """The scheduler as it was when `seats` was read."""
        scheduler = cls()
        scheduler._num_turns = num_turns
        scheduler._seats = {key: _Seat(key, Priority.NORMAL, *counts) for key, *counts in seats}
        return scheduler

    def seats(self) -> tuple[int, list[SeatRow]]:
        """The whole state: turns so far, and everyone's place."""
        seats = self._seats.items()
        return self._num_turns, [(key, seat.grant_us, seat.credit_us, seat.last_turn) for key, seat in seats]

    def choose(self, priorities: Mapping[str, int], with_work: Collection[str]) -> str | None:
        """The replica that steps now; None: no one has work.

        Args:
            priorities: the class of each replica that is loaded, in order of loading.
            with_work: those of them that have something to do. Neither is ever changed, so that the same object need
                not be looked through again.
        """
        if priorities is not self._seated or with_work is not self._with_work:
            if priorities is not self._seated:
                self._seat(priorities)
            self._seated, self._with_work = priorities, with_work
            self._busy = [self._seats[key] for key in priorities if key in with_work]
        if not self._busy:
            for seat in self._seats.values():
                seat.credit_us = seat.grant_us
            return None
        able = [seat for seat in self._busy if seat.credit_us > 0] or self._begin_round()
        chosen = able[0] if len(able) == 1 else min(able, key=_by_turn)
        self._num_turns += 1
        chosen.last_turn = self._num_turns
        return chosen.key

    def spend(self, replica: str, duration_us: int) -> None:
        """A replica's step took so long."""
        assert duration_us >= 0, f"a step of {duration_us} us"
        self._seats[replica].credit_us -= duration_us

    def _seat(self, priorities: Mapping[str, int]) -> None:
        """Know exactly those who are loaded; a newcomer takes part in the round."""
        if len(self._seats) > len(priorities) or any(key not in priorities for key in self._seats):
            self._seats = {key: seat for key, seat in self._seats.items() if key in priorities}
        for key, priority in priorities.items():
            grant_us = QUANTUM_US * weight_of(priority)
            seat = self._seats.get(key)
            if seat is None:
                self._seats[key] = _Seat(key, priority, grant_us, grant_us)
                continue
            seat.priority = priority
            if seat.grant_us != grant_us:
                seat.grant_us, seat.credit_us = grant_us, min(seat.credit_us, grant_us)

    def _begin_round(self) -> list[_Seat]:
        """Give credit until some of those who have work have some: all the rounds at once that this takes. Returns
        them."""
        num_rounds = min(-seat.credit_us // seat.grant_us + 1 for seat in self._busy)
        for seat in self._seats.values():
            seat.credit_us = min(seat.credit_us + num_rounds * seat.grant_us, seat.grant_us)
        return [seat for seat in self._busy if seat.credit_us > 0]
