"""Speed, limit and the spreading of arrivals with coarse timestamps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, groupby, islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import TraceError, UsageError
from lockstep.replay.readers.reading import MAX_SAME_STAMP, ReadOptions, shaped
from lockstep.replay.workload import WorkloadRequest

STAMPS = st.lists(st.integers(0, 1 << 60).map(lambda stamp: stamp // 3000 * 3000), max_size=40).map(sorted)


def at(arrivals: list[int]) -> list[WorkloadRequest]:
    return [WorkloadRequest(str(index), 1, 1, 1, arrival, place=f"f:{index}") for index, arrival in enumerate(arrivals)]


def arrivals_of(arrivals: list[int], options: ReadOptions) -> list[int]:
    requests = list(shaped(at(arrivals), options))
    assert [request.name for request in requests] == [str(index) for index in range(len(requests))]
    return [request.arrival for request in requests]


@given(STAMPS, st.integers(0, 1 << 64))
def test_equal_timestamps_are_spread_up_to_the_next_one(stamps: list[int], seed: int) -> None:
    """Arrivals stay in order, in integers and within the gap after their timestamp; the same seed gives the same
    ones."""
    options = ReadOptions(dequantize_seed=seed)
    spread = list(shaped(at(stamps), options, from_first=False))
    assert spread == list(shaped(at(stamps), options, from_first=False))
    distinct = [stamp for stamp, _ in groupby(stamps)]
    next_of = dict(pairwise(distinct))
    for stamp, request in zip(stamps, spread, strict=True):
        assert isinstance(request.arrival, int)
        last_gap = distinct[-1] - distinct[-2] if len(distinct) > 1 else 1
        assert stamp <= request.arrival < next_of.get(stamp, stamp + last_gap)
    assert [request.arrival for request in spread] == sorted(request.arrival for request in spread)


def test_spreading_is_deterministic_for_a_seed() -> None:
    """These numbers are part of every published figure with this seed."""
    stamps = [0, 0, 0, 3000, 3000, 6000]
    assert arrivals_of(stamps, ReadOptions(dequantize_seed=0)) == [0, 1034, 2549, 4336, 5775, 8633]
    assert arrivals_of(stamps, ReadOptions(dequantize_seed=1)) != arrivals_of(stamps, ReadOptions(dequantize_seed=0))


@given(STAMPS.filter(bool), st.fractions(min_value="1/1000", max_value=1000).map(float))
def test_speed_divides_the_time_since_the_first(stamps: list[int], speed: float) -> None:
    hurried = arrivals_of(stamps, ReadOptions(speed=speed))
    for stamp, arrival in zip(stamps, hurried, strict=True):
        assert arrival == pytest.approx((stamp - stamps[0]) / speed, rel=1e-9, abs=1)


def test_a_speed_is_used_as_an_exact_decimal() -> None:
    """A speed of 0.1 turns 1 into exactly 10, although the binary number for 0.1 is slightly greater than a tenth."""
    assert arrivals_of([5, 6, 12], ReadOptions(speed=0.1)) == [0, 10, 70]


def test_a_limit_ends_reading() -> None:
    def endless() -> Iterator[WorkloadRequest]:
        for arrival in count():
            assert arrival < 20
            yield WorkloadRequest(str(arrival), 1, 1, 1, arrival)

    assert len(list(shaped(endless(), ReadOptions(limit=3)))) == 3
    assert len(list(shaped(endless(), ReadOptions(limit=3, dequantize_seed=1)))) == 3


def test_unsorted_arrivals_are_refused_with_their_line() -> None:
    with pytest.raises(TraceError, match=r"f:2: arrives before the request above it"):
        arrivals_of([0, 5, 4], ReadOptions())


def test_too_many_equal_timestamps_are_refused() -> None:
    endless = (WorkloadRequest(str(index), 1, 1, 1, 0, place=f"f:{index}") for index in count())
    with pytest.raises(TraceError, match=f"f:{MAX_SAME_STAMP}: more than {MAX_SAME_STAMP} equal timestamps"):
        list(islice(shaped(endless, ReadOptions(dequantize_seed=0)), 1))


@pytest.mark.parametrize(
    ("speed", "limit", "seed", "message"),
    [
        (0.0, None, None, "the speed is 0.0"),
        (-1.0, None, None, "the speed is -1.0"),
        (float("nan"), None, None, "the speed is nan"),
        (float("inf"), None, None, "the speed is inf"),
        (1.0, 0, None, "the limit is 0"),
        (1.0, None, -1, "the seed is -1"),
    ],
)
def test_invalid_options_are_refused(speed: float, limit: int | None, seed: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ReadOptions(speed, limit, seed)
