"""When requests are due."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.bench.runner import arrival_times


@given(st.integers(1, 200), st.floats(0.01, 1e4), st.sampled_from((0.3, 1.0, 5.0, math.inf)), st.integers(0, 2**32 - 1))
def test_times_ascend_and_the_last_is_due_at_count_over_rate(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times = arrival_times(count, rate, burstiness, seed)
    assert len(times) == count
    assert all(0 <= before <= after for before, after in pairwise(times))
    assert times[-1] == pytest.approx(count / rate)


def test_the_same_seed_gives_the_same_times_and_another_others() -> None:
    assert arrival_times(50, 3.0, 1.0, 7) == arrival_times(50, 3.0, 1.0, 7)
    assert arrival_times(50, 3.0, 1.0, 7) != arrival_times(50, 3.0, 1.0, 8)


def test_an_infinite_rate_makes_everything_due_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, 0) == (0.0, 0.0, 0.0)
    assert arrival_times(0, 5.0, 1.0, 0) == ()


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_of_that_shape_does(burstiness: float) -> None:
    """Its coefficient of variation is 1 / sqrt(shape): 1 for a Poisson process."""
    times = arrival_times(20_000, 10.0, burstiness, 3)
    gaps = [after - before for before, after in pairwise((0.0, *times))]
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_infinite_burstiness_is_a_metronome() -> None:
    assert arrival_times(4, 2.0, math.inf, 0) == (0.5, 1.0, 1.5, 2.0)
