"""A draw obeys the rules exactly and has the distribution that it should, whichever way it was made."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.executors.logits import columns
from lockstep.executors.rejection_sampling import (
    EXP_MARGIN,
    Head,
    Support,
    TokenRandom,
    _Nucleus,
    _Shares,
    draw_from_nucleus,
    first_hit,
    hits,
)
from lockstep.executors.row_math import row_math
from lockstep.executors.sampling import MAX_SORTED, draw
from lockstep.executors.sampling_params import ResolvedSampling
from tests.executors.sampling_reference import Floats, kept
from tests.executors.test_logits import SIZES, rows

SAMPLINGS = st.builds(
    ResolvedSampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_k=st.one_of(st.just(0), st.integers(1, 400)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
)


def random_at(seed: int, position: int) -> TokenRandom:
    random = TokenRandom(seed)
    random.at(position)
    return random


@settings(max_examples=200)
@given(st.integers(0, 2**32), SIZES, st.one_of(st.none(), st.integers(1, 40)), SAMPLINGS)
def test_no_token_outside_of_the_rules_is_drawn(
    seed: int, size: int, levels: int | None, sampling: ResolvedSampling
) -> None:
    row = rows(seed, size, levels)
    allowed = set(kept(row, sampling).ids.tolist())
    for position in range(8):
        assert draw(row, sampling, random_at(seed, position)) in allowed


@settings(max_examples=150)
@given(st.integers(0, 2**32), SIZES, st.integers(1, MAX_SORTED), st.floats(0.05, 1.0), st.sampled_from([0.0, 0.05]))
def test_few_tokens_are_drawn_as_from_the_sorted_vocabulary(
    seed: int, size: int, top_k: int, top_p: float, min_p: float
) -> None:
    """The same uniform number gives the same token as the reference's cumulated probabilities."""
    row = rows(seed, size, None)
    sampling = ResolvedSampling(0.8, top_k, top_p, min_p)
    reference = kept(row, sampling)
    masses = np.cumsum(reference.probabilities)
    for position in range(4):
        uniform = random_at(seed, position).uniform()
        if np.abs(masses - uniform).min() > 1e-12:
            expected = int(reference.ids[masses.searchsorted(uniform, side="right")])
            assert draw(row, sampling, random_at(seed, position)) == expected


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 50, 4_096, 5_003]),
    st.one_of(st.none(), st.integers(1, 9)),
    st.floats(0.001, 0.999),
    st.sampled_from([0.2, 1.0, 3.0]),
)
def test_membership_of_a_nucleus_is_decided_exactly(
    seed: int, size: int, levels: int | None, top_p: float, temperature: float
) -> None:
    row = rows(seed, size, levels)
    sampling = ResolvedSampling(temperature, top_p=top_p)
    cols = columns(row)
    weights = row_math().weigh_lightly(row, cols.peak, temperature)
    nucleus = _Nucleus(row, cols.peak, sampling, weights, _Shares(weights).total)
    inside = set(kept(row, sampling).ids.tolist())
    order = np.random.default_rng(seed).permutation(size)[:200].tolist()
    assert [nucleus.holds(token) for token in order] == [token in inside for token in order]


@settings(max_examples=100)
@given(
    st.integers(0, 2**32),
    st.sampled_from([40, 5_003, 6_400]),
    st.one_of(st.none(), st.integers(1, 30)),
    st.floats(0.05, 0.95),
    st.sampled_from([0.05, 0.2, 0.5]),
)
def test_tokens_that_the_head_marks_as_certain_are_in_the_kept_set(
    seed: int, size: int, levels: int | None, top_p: float, temperature: float
) -> None:
    row = rows(seed, size, levels)
    sampling = ResolvedSampling(temperature, top_p=top_p)
    head = Head(columns(row), sampling)
    inside = set(kept(row, sampling).ids.tolist())
    for position in range(10):
        token, is_in = head.draw(random_at(seed, position))
        if is_in:
            assert token in inside


def test_the_head_is_enough_for_a_peaked_row() -> None:
    row = rows(3, 49_157, None)
    sampling = ResolvedSampling(0.15, top_p=0.9)
    drawn = [Head(columns(row), sampling).draw(random_at(3, position)) for position in range(300)]
    assert sum(is_in for _, is_in in drawn) > 200


def test_light_weights_are_within_their_margin() -> None:
    """Sums of float32 weights differ from float64 sums by less than half of EXP_MARGIN."""
    for seed in range(40):
        print(f"seed {seed}")
        row = rows(seed, 49_157, None) * np.float32(1 + seed % 7)
        for temperature in (0.05, 0.7, 1.0, 3.0):
            exact = float(row_math().weigh(row, float(row.max()), temperature).sum())
            light = _Shares(row_math().weigh_lightly(row, float(row.max()), temperature)).total
            assert abs(light - exact) < EXP_MARGIN / 2 * exact


NUM_DRAWS = 3_000


def assert_distributed(drawn: list[int], probabilities: npt.NDArray[np.float64]) -> None:
    """Pearson's chi-squared over at most 30 groups of tokens, with a bound that a fair draw passes but for 1 in 10**7.

    The bound is Wilson's and Hilferty's cube-root normal approximation.
    """
    order = np.argsort(-probabilities, kind="stable")
    group = np.empty(len(order), np.int64)
    group[order] = np.minimum((np.cumsum(probabilities[order]) - probabilities[order]) * 30, 29).astype(np.int64)
    expected = np.bincount(group, probabilities, 30) * len(drawn)
    seen = np.bincount(group[drawn], minlength=30).astype(np.float64)
    assert seen[expected == 0].sum() == 0
    used = expected > 5
    statistic = float(((seen[used] - expected[used]) ** 2 / expected[used]).sum())
    freedom = max(1, int(used.sum()) - 1)
    normal = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    print(f"chi-squared {statistic:.1f} with {freedom} degrees of freedom, {normal:.2f} deviations")
    assert normal < 5.2


CASES = {
    "temperature": ResolvedSampling(0.9),
    "flat": ResolvedSampling(4.0),
    "peaked": ResolvedSampling(0.2),
    "top_k": ResolvedSampling(1.0, top_k=30),
    "large top_k": ResolvedSampling(2.0, top_k=700),
    "top_p": ResolvedSampling(0.3, top_p=0.8),
    "peaked top_p": ResolvedSampling(0.4, top_p=0.95),
    "very peaked top_p": ResolvedSampling(0.15, top_p=0.7),
    "wide top_p": ResolvedSampling(2.0, top_p=0.9),
    "wide small top_p": ResolvedSampling(5.0, top_p=0.1),
    "min_p": ResolvedSampling(1.0, min_p=0.1),
    "wide min_p": ResolvedSampling(3.0, min_p=0.05),
    "all of them": ResolvedSampling(1.5, top_k=300, top_p=0.95, min_p=0.01),
    "large top_k and top_p": ResolvedSampling(3.0, top_k=900, top_p=0.7),
}


@pytest.mark.parametrize("size", [150, 4_133])
@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_reference_distribution(name: str, size: int) -> None:
    sampling, seed = CASES[name], 20_261
    print(f"seed {seed}")
    row = rows(seed, size, None)
    reference = kept(row, sampling)
    probabilities = np.zeros(size)
    probabilities[reference.ids] = reference.probabilities
    random = TokenRandom(seed)
    drawn = []
    for position in range(NUM_DRAWS):
        random.at(position)
        token = draw(row, sampling, random)
        assert token is not None
        drawn.append(token)
    assert_distributed(drawn, probabilities)


def softmax(row: Floats, temperature: float) -> npt.NDArray[np.float64]:
    weights = row_math().weigh(row, float(row.max()), temperature)
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result


@pytest.mark.parametrize(("size", "temperature"), [(150, 0.9), (4_133, 0.9), (4_159, 3.0), (6_400, 0.3)])
def test_many_points_hit_in_proportion_to_the_weights(size: int, temperature: float) -> None:
    row = rows(7, size, None)
    cols, random = columns(row), random_at(7, 0)
    batches = (ids for _ in range(20) for _, ids in hits(cols, temperature, np.float32(-np.inf), random))
    assert_distributed(np.concatenate(list(batches)).tolist(), softmax(row, temperature))


@pytest.mark.parametrize(("size", "temperature"), [(150, 0.9), (4_133, 0.35), (4_159, 0.5)])
def test_throws_at_the_head_hit_all_tokens_in_proportion_to_the_weights(size: int, temperature: float) -> None:
    """The bars over the rest count as much as they must, and single tokens beside the grid too."""
    row = rows(7, size, None)
    row[-1] = row.max()
    head = Head(columns(row), ResolvedSampling(temperature, top_p=0.9))
    masses, random = np.cumsum(head.bars), random_at(7, 0)
    thrown = [head.throw(masses, random) for _ in range(20_000)]
    assert_distributed([token for token in thrown if token is not None], softmax(row, temperature))


@pytest.mark.parametrize("size", [63, 150, 4_133])
def test_draws_from_all_tokens_are_in_proportion_to_the_weights(size: int) -> None:
    row = rows(7, size, None)
    row[-1] = row.max()
    shares, random = _Shares(row_math().weigh_lightly(row, float(row.max()), 1.0)), random_at(7, 0)
    assert_distributed([shares.draw(random) for _ in range(10_000)], softmax(row, 1.0))


def test_the_distribution_test_would_notice_a_tilt() -> None:
    """The negative twin: a fifth too little temperature is seen."""
    row = rows(20_261, 4_133, None)
    probabilities = np.zeros(len(row))
    reference = kept(row, ResolvedSampling(1.0))
    probabilities[reference.ids] = reference.probabilities
    random = TokenRandom(1)
    drawn = []
    for position in range(NUM_DRAWS):
        random.at(position)
        drawn.append(draw(row, ResolvedSampling(0.8), random))
    with pytest.raises(AssertionError):
        assert_distributed([token for token in drawn if token is not None], probabilities)


@pytest.mark.parametrize("size", [150, 4_133])
def test_ties_at_a_large_top_k_are_cut_by_id(size: int) -> None:
    row = np.zeros(size, np.float32)
    sampling = ResolvedSampling(1.0, top_k=size - 10)
    drawn = {draw(row, sampling, random_at(2, position)) for position in range(2_000)}
    assert max(token for token in drawn if token is not None) < size - 10
    assert len(drawn) > (size - 10) // 3


def test_impossible_tokens_are_never_drawn() -> None:
    row = np.full(5_003, -np.inf, np.float32)
    row[[1, 777, 5_002]] = [0.0, 0.5, 0.2]
    for sampling in CASES.values():
        drawn = {draw(row, sampling, random_at(4, position)) for position in range(60)}
        assert drawn <= {1, 777, 5_002}


@pytest.mark.parametrize("fault", [np.nan, np.inf])
@pytest.mark.parametrize("size", [150, 5_003])
@pytest.mark.parametrize("name", CASES)
def test_a_faulty_row_gives_no_token(name: str, size: int, fault: float) -> None:
    row: Floats = rows(1, size, None)
    row[size - 2] = fault
    assert draw(row, CASES[name], random_at(1, 1)) is None
    assert draw(row, ResolvedSampling(0.0), None) is None
    assert draw(np.full(size, -np.inf, np.float32), CASES[name], random_at(1, 1)) is None


def test_a_single_token_is_drawn() -> None:
    for sampling in CASES.values():
        assert draw(np.zeros(1, np.float32), sampling, random_at(1, 1)) == 0


def test_rejection_and_the_nucleus_agree_with_their_rules_under_a_support() -> None:
    """A support that ends within a tie is respected by both ways of drawing."""
    row = np.repeat(np.arange(64, dtype=np.float32) / np.float32(16), 80)
    support = Support(np.float32(3.0), int(np.flatnonzero(row == 3.0)[5]))
    cols = columns(row)
    for position in range(200):
        random = random_at(9, position)
        accepted = first_hit(cols, 1.0, support, random)
        token = draw_from_nucleus(cols, ResolvedSampling(1.0, top_p=0.999), support, random)
        for drawn in (accepted, token):
            assert row[drawn] > 3.0 or (row[drawn] == 3.0 and drawn <= support.last_id)


def words(seed: int, position: int, count: int = 8) -> list[int]:
    random = TokenRandom(seed)
    random.at(position)
    return [int(word) for word in random.words(count)]


def test_the_words_are_philox_as_published() -> None:
    """Known answer of Random123 (kat_vectors, philox4x64 10 rounds, all zero): numpy counts up before it generates."""
    generator = np.random.Philox(key=0, counter=2**256 - 1)
    expected = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert [int(word) for word in generator.random_raw(4)] == expected


def test_the_words_are_numpys_for_this_key_and_counter() -> None:
    expected = np.random.Philox(key=1_234, counter=77 << 64).random_raw(8)
    assert words(1_234, 77) == [int(word) for word in expected]


def test_random_words_of_a_position_are_independent_of_earlier_draws() -> None:
    random = TokenRandom(5)
    random.at(3)
    random.words(7)
    random.uniform()
    random.at(9)
    assert [int(word) for word in random.words(8)] == words(5, 9)
    random.at(3)
    assert [int(word) for word in random.words(8)] == words(5, 3)


def test_seeds_and_positions_differ() -> None:
    drawn = {tuple(words(seed, position)) for seed in (0, 1, -1, 2**63) for position in (0, 1, 2**20)}
    assert len(drawn) == 12
    assert words(-1, 0) == words(2**64 - 1, 0)


def test_uniforms_stay_below_one_times_any_total() -> None:
    largest = ((2**64 - 1) >> 12) * 2.0**-52
    for total in np.random.default_rng(3).random(1_000) * 10.0 ** np.arange(-300, 300, 0.6):
        assert largest * total < total
