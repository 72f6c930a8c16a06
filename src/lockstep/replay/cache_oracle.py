"""What a prefix cache can give at most: how many blocks of a workload were there before. No scheduler takes part."""

from __future__ import annotations

from lockstep.replay.workload import Workload


def unlimited_hit_rate(workload: Workload) -> tuple[int, int]:
    """(hits, blocks) of a cache that forgets nothing and has each block at once, in the file's own blocks.

    Equal ids are equal blocks with equal past, so every id that came before is a hit; partial last blocks count.
    """
    seen: set[int] = set()
    num_blocks = 0
    for request in workload.requests:
        num_blocks += len(request.contents)
        seen.update(request.contents)
    return num_blocks - len(seen), num_blocks
