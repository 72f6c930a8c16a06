"""A pooled vector depends on the prompt's hidden states, and not on how they were computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.artifacts.task import POOLINGS, Pooling
from lockstep.engine.output_rules import Pooler

LENGTH, SIZE = 23, 8
STATES = np.random.default_rng(2).standard_normal((LENGTH, SIZE)).astype(np.float32)


def feed(pooler: Pooler, start: int, length: int) -> None:
    offsets = pooler.rows_of(start, length)
    pooler.add(start, offsets, STATES[start + offsets.start : start + offsets.stop])


@pytest.mark.parametrize("pooling", POOLINGS)
@given(cuts=st.lists(st.integers(1, LENGTH - 1), unique=True).map(sorted), repeat=st.integers(0, LENGTH))
def test_chunks_and_recomputation_change_no_bit(pooling: Pooling, cuts: list[int], repeat: int) -> None:
    whole, cut = Pooler(pooling, LENGTH), Pooler(pooling, LENGTH)
    feed(whole, 0, LENGTH)
    for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        feed(cut, start, end - start)
        if start < repeat <= end:
            feed(cut, 0, repeat)
    assert np.array_equal(whole.vector(), cut.vector())


def test_mean_and_last_pooling_match_their_definitions() -> None:
    mean, last = Pooler("mean", LENGTH), Pooler("last", LENGTH)
    for pooler in (mean, last):
        feed(pooler, 0, LENGTH)
    np.testing.assert_allclose(mean.vector(), STATES.astype(np.float64).mean(0), rtol=1e-6)
    assert np.array_equal(last.vector(), STATES[-1])


def test_last_pooling_reads_only_the_last_row() -> None:
    pooler = Pooler("last", LENGTH)
    assert list(pooler.rows_of(0, 10)) == []
    assert list(pooler.rows_of(10, 13)) == [12]


def test_a_partial_prompt_has_no_vector() -> None:
    pooler = Pooler("mean", LENGTH)
    feed(pooler, 0, 5)
    with pytest.raises(AssertionError, match="5 of 23 positions"):
        pooler.vector()
