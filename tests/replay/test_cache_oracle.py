"""How much a cache without bounds would hit."""

from __future__ import annotations

from lockstep.replay.cache_oracle import unlimited_hit_rate
from lockstep.replay.workload import ArrivalUnit, Workload, WorkloadRequest


def test_every_block_that_came_before_is_a_hit() -> None:
    contents = [(0, 1, 2), (0, 1, 3), (), (0,), (4, 5)]
    requests = tuple(WorkloadRequest("", 9, 1, 1, 0, contents=each) for each in contents)
    assert unlimited_hit_rate(Workload("w", requests, ArrivalUnit.PS, 3)) == (3, 9)
    assert unlimited_hit_rate(Workload("w", (), ArrivalUnit.PS, 3)) == (0, 0)
