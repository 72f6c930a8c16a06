"""Device scheduler: runs deficit round robin over measured step time among the replicas that have work.

In each round every replica gets credit in proportion to the weight of its priority. A step is charged when its duration
is known, so the last step of a round may overdraw the credit; later rounds make up for it. Times are plain values in
whole microseconds: the same durations and the same work give the same schedule, also when they are read from a
recording.

A replica with work waits a bounded time. With q the quantum, w the weights and c the longest step of each replica,
replica i steps again after at most ``(ceil(c_i / (q * w_i)) + 1) * sum(q * w_j + c_j for others j)``: in a round, each
other replica spends its credit and at most one step more. Over any time in which all replicas have work, the step times
of two replicas, each divided by its weight, differ by at most ``q + max(c_i / w_i)``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from lockstep.core.request import Priority, weight_of

QUANTUM_US = 5_000
"""Credit per round for each unit of weight: several steps of a small model, a fraction of a step of a large one."""
CreditRow = tuple[str, int, int, int]
"""A replica's key, credit per round, remaining credit, and number of its last step on the device."""


@dataclass(slots=True)
class _ReplicaCredit:
    """Credit of one replica on the device."""

    key: str
    priority: int
    grant_us: int
    """Credit that it gets per round, and the maximum that it can have."""
    credit_us: int
    """Remaining credit; below zero, debt."""
    last_turn: int = 0


_by_turn = attrgetter("priority", "last_turn")


class DeviceScheduler:
    """Chooses the replica of each step and charges its duration.

    Within a round, the replica of the highest priority that has credit steps first; within a priority, the one that
    stepped longest ago, then the one that was loaded first. Credit is not saved: a replica without work keeps at most
    one round's credit, and when no replica has work, all debts are cleared.
    """

    def __init__(self) -> None:
        self._credits: dict[str, _ReplicaCredit] = {}
        self._priorities: Mapping[str, int] = {}
        """Priorities for which `_credits` is up to date."""
        self._with_work: Collection[str] = ()
        self._busy: list[_ReplicaCredit] = []
        """Credits of the replicas that have work, in order of loading."""
        self._num_turns = 0

    @classmethod
    def of(cls, num_turns: int, rows: Sequence[CreditRow]) -> DeviceScheduler:
        """Restore a scheduler from the result of `credit_rows`."""
        scheduler = cls()
        scheduler._num_turns = num_turns
        scheduler._credits = {key: _ReplicaCredit(key, Priority.NORMAL, *counts) for key, *counts in rows}
        return scheduler

    def credit_rows(self) -> tuple[int, list[CreditRow]]:
        """The whole state: the number of steps so far, and the credit of each replica."""
        rows = [(key, each.grant_us, each.credit_us, each.last_turn) for key, each in self._credits.items()]
        return self._num_turns, rows

    def choose(self, priorities: Mapping[str, int], with_work: Collection[str]) -> str | None:
        """Return the replica that steps now; None: no replica has work.

        Args:
            priorities: priority of each loaded replica, in order of loading.
            with_work: the replicas that have work. Neither argument may ever be modified, so that the same object need
                not be checked again.
        """
        if priorities is not self._priorities or with_work is not self._with_work:
            if priorities is not self._priorities:
                self._update_replicas(priorities)
            self._priorities, self._with_work = priorities, with_work
            self._busy = [self._credits[key] for key in priorities if key in with_work]
        if not self._busy:
            for credit in self._credits.values():
                credit.credit_us = credit.grant_us
            return None
        able = [credit for credit in self._busy if credit.credit_us > 0] or self._begin_round()
        chosen = able[0] if len(able) == 1 else min(able, key=_by_turn)
        self._num_turns += 1
        chosen.last_turn = self._num_turns
        return chosen.key

    def spend(self, replica: str, duration_us: int) -> None:
        """Charge the duration of a replica's step."""
        assert duration_us >= 0, f"a step of {duration_us} us"
        self._credits[replica].credit_us -= duration_us

    def _update_replicas(self, priorities: Mapping[str, int]) -> None:
        """Update the credits to the loaded replicas. A new replica gets the credit of a round."""
        if len(self._credits) > len(priorities) or any(key not in priorities for key in self._credits):
            self._credits = {key: credit for key, credit in self._credits.items() if key in priorities}
        for key, priority in priorities.items():
            grant_us = QUANTUM_US * weight_of(priority)
            credit = self._credits.get(key)
            if credit is None:
                self._credits[key] = _ReplicaCredit(key, priority, grant_us, grant_us)
                continue
            credit.priority = priority
            if credit.grant_us != grant_us:
                credit.grant_us, credit.credit_us = grant_us, min(credit.credit_us, grant_us)

    def _begin_round(self) -> list[_ReplicaCredit]:
        """Start as many rounds as are needed until a replica with work has credit. Returns the replicas with work and
        credit."""
        num_rounds = min(-credit.credit_us // credit.grant_us + 1 for credit in self._busy)
        for credit in self._credits.values():
            credit.credit_us = min(credit.credit_us + num_rounds * credit.grant_us, credit.grant_us)
        return [credit for credit in self._busy if credit.credit_us > 0]
