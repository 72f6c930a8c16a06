"""Whose step is next on a device: the one place where replicas that have work are weighed against each other.

Deficit round robin over measured step time. A round gives every replica credit by the weight of its priority class; a
step is paid for when its duration is known, so the last one of a round may run into debt, which later rounds pay off.
Time is a value here: the same durations and the same work give the same turns.

Who has work waits a bounded time. With q the quantum, w weights and c the longest step of each, replica i steps again
after at most ``(ceil(c_i / (q * w_i)) + 1) * sum(q * w_j + c_j for others j)``: in a round each other one spends its
credit and at most one step beyond. Over any time in which all have work, what two of them got, each divided by its
weight, differs by at most ``q + max(c_i / w_i)``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lockstep.core.request import Priority

QUANTUM_NS = 5_000_000
"""What a round gives for each unit of weight: a handful of steps of a small model, a fraction of one of a large."""
WEIGHTS: Mapping[int, int] = MappingProxyType(
    {Priority.CRITICAL: 8, Priority.HIGH: 4, Priority.NORMAL: 2, Priority.LOW: 1}
)
"""Shares of the device, while all have work. Of classes without a row of their own the nearest counts."""


def weight_of(priority: int) -> int:
    """The weight of any priority class; lower classes weigh more."""
    return WEIGHTS[min(max(priority, Priority.CRITICAL), Priority.LOW)]


@dataclass(slots=True)
class _Seat:
    """One replica's place at the device."""

    grant_ns: int
    """What a round gives it, and the most that it ever has."""
    credit_ns: int
    """What is left of it; below zero, what it owes."""
    last_turn: int = 0


class Turns:
    """Who steps now, and what that cost.

    Within a round, the best class that has credit steps first; within a class, who stepped longest ago; then who was
    loaded first. Nobody saves: a replica without work keeps at most one round's credit, and when nobody has work, all
    debts are forgotten.
    """

    def __init__(self) -> None:
        self._seats: dict[str, _Seat] = {}
        self._seated: Mapping[str, int] = {}
        """Whose seats these are."""
        self._num_turns = 0

    def choose(self, priorities: Mapping[str, int], with_work: Collection[str]) -> str | None:
        """The replica that steps now; None: nobody has work.

        Args:
            priorities: the class of each replica that is loaded, in order of loading; never changed, so that the same
                object need not be looked through again.
            with_work: those of them that have something to do.
        """
        if priorities is not self._seated:
            self._seat(priorities)
            self._seated = priorities
        busy = [key for key in priorities if key in with_work]
        if not busy:
            for seat in self._seats.values():
                seat.credit_ns = seat.grant_ns
            return None
        seats = self._seats
        if all(seats[key].credit_ns <= 0 for key in busy):
            self._begin_round(busy)
        able = (key for key in busy if seats[key].credit_ns > 0)
        chosen = min(able, key=lambda key: (priorities[key], seats[key].last_turn))
        self._num_turns += 1
        seats[chosen].last_turn = self._num_turns
        return chosen

    def spend(self, replica: str, duration_ns: int) -> None:
        """A replica's step took so long."""
        assert duration_ns >= 0, f"a step of {duration_ns} ns"
        self._seats[replica].credit_ns -= duration_ns

    def _seat(self, priorities: Mapping[str, int]) -> None:
        """Know exactly those who are loaded; a newcomer takes part in the round."""
        if len(self._seats) > len(priorities) or any(key not in priorities for key in self._seats):
            self._seats = {key: seat for key, seat in self._seats.items() if key in priorities}
        for key, priority in priorities.items():
            grant_ns = QUANTUM_NS * weight_of(priority)
            seat = self._seats.get(key)
            if seat is None:
                self._seats[key] = _Seat(grant_ns, grant_ns)
            elif seat.grant_ns != grant_ns:
                seat.grant_ns, seat.credit_ns = grant_ns, min(seat.credit_ns, grant_ns)

    def _begin_round(self, busy: list[str]) -> None:
        """Give credit until one of those who have work has some: all the rounds at once that this takes."""
        seats = self._seats
        num_rounds = min(-seats[key].credit_ns // seats[key].grant_ns + 1 for key in busy)
        for seat in seats.values():
            seat.credit_ns = min(seat.credit_ns + num_rounds * seat.grant_ns, seat.grant_ns)
