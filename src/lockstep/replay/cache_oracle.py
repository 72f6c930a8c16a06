"""What a prefix cache can give at most: how many blocks of a workload were there before. No scheduler takes part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lockstep.replay.workload import WorkloadRequest

MAX_CONTENTS = 1 << 22
"""Different ids that are remembered one by one, some 70 bytes each; a workload with more has no figure."""


class UnlimitedCache:
    """A cache that forgets nothing and has each block at once, in the file's own blocks.

    Equal ids are equal blocks with equal past, so every id that came before is a hit; partial last blocks count. Ids
    that are dense, each new one the next number, are remembered as one number.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self.num_hits = 0
        self.is_exceeded = False
        """Whether there were too many different ids to count on; the figures are of those before."""
        self._first_unseen = 0
        """All ids below it came."""
        self._seen: set[int] = set()
        """Those above it that came."""

    def passing(self, requests: Iterable[WorkloadRequest]) -> Iterator[WorkloadRequest]:
        """The same requests, counted when they are taken: one pass over a file serves a replay and this."""
        for request in requests:
            if not self.is_exceeded:
                self._count(request.contents)
            yield request

    def _count(self, contents: tuple[int, ...]) -> None:
        first_unseen, seen = self._first_unseen, self._seen
        num_new = 0
        for content in contents:
            if content == first_unseen:
                num_new += 1
                first_unseen += 1
                while first_unseen in seen:
                    seen.remove(first_unseen)
                    first_unseen += 1
            elif content > first_unseen and content not in seen:
                num_new += 1
                seen.add(content)
        self._first_unseen = first_unseen
        self.num_blocks += len(contents)
        self.num_hits += len(contents) - num_new
        if len(seen) > MAX_CONTENTS:
            self.is_exceeded = True
            seen.clear()
