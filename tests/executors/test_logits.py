"""The greatest logits are found exactly, ties and odd sizes included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.executors.logits import at_least, bound_of_greatest, columns, greatest, token_logprobs
from tests.executors.sampling_reference import Floats, log_softmax, ranked

SIZES = st.one_of(st.integers(1, 300), st.integers(4_090, 4_400), st.sampled_from([6_400, 6_401, 6_463]))


def rows(seed: int, size: int, levels: int | None) -> Floats:
    """Random logits; `levels`: so few different values that most are tied."""
    random = np.random.default_rng(seed)
    if levels is not None:
        return random.integers(0, levels, size).astype(np.float32)
    return (random.standard_normal(size) * 3).astype(np.float32)


@settings(max_examples=150)
@given(st.integers(0, 2**32), SIZES, st.one_of(st.none(), st.integers(1, 2_000)), st.data())
def test_the_greatest_are_those_of_a_full_sort(seed: int, size: int, levels: int | None, data: st.DataObject) -> None:
    row = rows(seed, size, levels)
    cols = columns(row)
    count = data.draw(st.one_of(st.integers(1, size), st.integers(1, min(size, 64))))
    values, ids = greatest(cols, count)
    expected = ranked(row)[:count]
    assert cols.peak == row.max()
    assert ids.tolist() == expected.tolist()
    assert values.tolist() == row[expected].tolist()


@settings(max_examples=100)
@given(st.integers(0, 2**32), SIZES, st.one_of(st.none(), st.integers(1, 50)), st.floats(-9, 60, width=32))
def test_everything_at_least_as_great_is_found(seed: int, size: int, levels: int | None, bound: float) -> None:
    row = rows(seed, size, levels)
    _, ids = at_least(columns(row), np.float32(bound))
    assert ids.tolist() == [i for i in ranked(row).tolist() if row[i] >= np.float32(bound)]


@pytest.mark.parametrize("size", [100, 5_000])
def test_a_row_with_few_possible_tokens_has_a_bound(size: int) -> None:
    row = np.full(size, -np.inf, np.float32)
    row[[3, 70]] = 1.0
    assert bound_of_greatest(columns(row), 5) == -np.inf
    assert greatest(columns(row), 3)[1].tolist() == [3, 70, 0]


@pytest.mark.parametrize("size", [100, 5_000])
@pytest.mark.parametrize("place", [0, 50, -1])
def test_nan_anywhere_is_the_peak(size: int, place: int) -> None:
    row = np.zeros(size, np.float32)
    row[place] = np.nan
    assert np.isnan(columns(row).peak)


@pytest.mark.parametrize("size", [7, 5_003, 49_152])
def test_logprobs_are_those_of_the_softmax(size: int) -> None:
    row = rows(11, size, None)
    exact = log_softmax(row)
    found = token_logprobs(row, 3, 5)
    assert found.logprob == pytest.approx(exact[3], abs=1e-5)
    assert [token for token, _ in found.top] == ranked(row)[:5].tolist()
    assert [value for _, value in found.top] == pytest.approx([exact[token] for token, _ in found.top], abs=1e-5)
    assert token_logprobs(row, 3, 0).top == ()
