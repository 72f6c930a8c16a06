"""Whose step is next on a device: the one place where replicas that have work are weighed against each other."""

from __future__ import annotations

from collections.abc import Iterable


class Turns:
    """Round robin over those that have work, in the order in which they were loaded."""

    def __init__(self) -> None:
        self._last: str | None = None

    def choose(self, replicas: Iterable[str], with_work: Iterable[str]) -> str | None:
        """The replica that steps now; None: nobody has work.

        Args:
            replicas: all keys, in order of loading.
            with_work: those of them that have something to do.
        """
        order, busy = list(replicas), set(with_work)
        begin = order.index(self._last) + 1 if self._last in order else 0
        chosen = next((key for key in order[begin:] + order[:begin] if key in busy), None)
        self._last = self._last if chosen is None else chosen
        return chosen
