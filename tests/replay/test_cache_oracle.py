"""How much a cache without bounds would hit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.replay import cache_oracle
from lockstep.replay.cache_oracle import UnlimitedCache
from lockstep.replay.workload import WorkloadRequest


def requests_of(*contents: Sequence[int]) -> list[WorkloadRequest]:
    return [WorkloadRequest("", 9, 1, 1, 0, contents=tuple(each)) for each in contents]


def hit_rate(requests: Iterable[WorkloadRequest]) -> tuple[int, int]:
    """(hits, blocks)."""
    cache = UnlimitedCache()
    deque(cache.passing(requests), maxlen=0)
    return cache.num_hits, cache.num_blocks


def test_every_block_that_came_before_is_a_hit() -> None:
    assert hit_rate(requests_of((0, 1, 2), (0, 1, 3), (), (0,), (4, 5))) == (3, 9)
    assert hit_rate(()) == (0, 0)


@given(st.lists(st.lists(st.integers(0, 20) | st.integers(0, 1 << 63), max_size=8), max_size=20))
def test_ids_need_not_be_dense(contents: list[list[int]]) -> None:
    """What is remembered as one number and what one by one add up to a set of all."""
    every = [content for each in contents for content in each]
    assert hit_rate(requests_of(*contents)) == (len(every) - len(set(every)), len(every))


def test_requests_pass_as_they_are() -> None:
    requests = requests_of((0, 1), (1, 7))
    cache = UnlimitedCache()
    assert [*cache.passing(requests)] == requests
    assert (cache.num_hits, cache.num_blocks) == (1, 4)


def test_memory_is_bounded_by_giving_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_oracle, "MAX_CONTENTS", 3)
    dense, sparse = UnlimitedCache(), UnlimitedCache()
    for cache, stride in ((dense, 1), (sparse, 2)):
        assert len([*cache.passing(requests_of(range(0, 8 * stride, stride), (0,)))]) == 2
    assert (dense.is_exceeded, dense.num_hits, dense.num_blocks) == (False, 1, 9)
    assert sparse.is_exceeded
