"""Bytes of one budget while a plan is made: free, becoming free, and for whom. Closed; knows no replica."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Ledger:
    """What is left to claim.

    Args:
        room: free bytes; negative when more is taken than the budget allows.
        coming: bytes that become free, each with the key of whom they were freed for; None: whoever needs them.
        claims: who may claim, and how much; what was freed for others, or is more, is for whoever needs it.
    """

    def __init__(self, room: int, coming: Iterable[tuple[str | None, int]], claims: Mapping[str, int]) -> None:
        self.room = max(0, room)
        """Free, and claimed by nobody yet."""
        self.missing = max(0, -room)
        """Bytes by which the budget is exceeded."""
        self._spare = 0
        self._own = dict.fromkeys(claims, 0)
        for key, num_bytes in coming:
            self.add_coming(key, num_bytes)
        for key, claimed in claims.items():
            self._spare += max(0, self._own[key] - claimed)
            self._own[key] = min(self._own[key], claimed)

    def add_coming(self, key: str | None, num_bytes: int) -> None:
        """These bytes become free."""
        if key in self._own:
            self._own[key] += num_bytes
        else:
            self._spare += num_bytes

    def lacking(self, key: str, num_bytes: int) -> int:
        """How many bytes a claim lacks when all has become free that it may take; at most 0: it needs only wait."""
        return num_bytes - self._own[key] - self._spare - self.room

    def spend(self, key: str, num_bytes: int) -> None:
        """Take free bytes now; what was to become free for this claim is for whoever needs it."""
        assert num_bytes <= self.room, f"{num_bytes} bytes for {key!r} are more than the {self.room} that are free"
        self.room -= num_bytes
        self._spare += self._own.pop(key, 0)

    def reserve(self, key: str, num_bytes: int, expected: int = 0) -> None:
        """Claim what was freed for this key, then what it expects from others, then what becomes free, then room."""
        own = self._own.pop(key)
        self._spare += max(0, own - num_bytes)
        rest = max(0, num_bytes - own - expected)
        from_spare = min(rest, self._spare)
        self._spare -= from_spare
        self.room -= rest - from_spare
