"""A place is named if it explains a signal, and not if chance or a common cause suffices."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lockstep.release.traffic_parts import Cut, part_of_events, part_of_regression
from lockstep.release.verdict import ALL

NUM_PAIRS = 240
EVERYTHING = np.ones(NUM_PAIRS, np.bool_)
NUMBERS = np.arange(NUM_PAIRS)
PART = (NUMBERS % 4).astype(np.int32)
CHAT, MAIL = PART == 0, PART == 1
CUTS = (Cut(("chat", "mail", "code", "news"), PART),)


def cut(name: str, mask: NDArray[np.bool_]) -> Cut:
    return Cut((name, "others"), np.where(mask, 0, 1).astype(np.int32))


def test_events_of_one_place_are_located_also_with_one_outlier() -> None:
    affected = MAIL & (NUMBERS < 200)
    assert part_of_events(CUTS, EVERYTHING, affected).name == "mail"
    stray = affected.copy()
    stray[0] = True
    assert part_of_events(CUTS, EVERYTHING, stray).name == "mail"


def test_events_everywhere_have_no_place() -> None:
    assert part_of_events(CUTS, EVERYTHING, NUMBERS % 5 == 0).name == ALL


def test_a_few_events_together_by_chance_have_no_place() -> None:
    assert part_of_events(CUTS, EVERYTHING, NUMBERS == 1).name == ALL
    assert part_of_events(CUTS, EVERYTHING, np.isin(NUMBERS, (1, 5, 9))).name == ALL


def test_events_possible_in_only_one_place_have_no_place() -> None:
    assert part_of_events(CUTS, MAIL, MAIL).name == ALL


def test_of_two_places_that_hold_all_events_the_smaller_one_is_named() -> None:
    half = cut("half", NUMBERS % 2 == 1)
    assert part_of_events((half, *CUTS), EVERYTHING, MAIL).name == "mail"


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.02, 0.1, 0.5]))
def test_random_events_rarely_have_a_place(seed: int, rate: float) -> None:
    """Each of 20 draws has a probability below 1 in 1,000, so three wrong ones do not occur in practice."""
    rng = np.random.default_rng(seed)
    named = [part_of_events(CUTS, EVERYTHING, rng.random(NUM_PAIRS) < rate).name for _ in range(20)]
    assert sum(place != ALL for place in named) < 3


@given(st.integers(0, 2**32 - 1))
def test_a_regression_of_one_place_is_located_and_one_of_all_is_not(seed: int) -> None:
    rng = np.random.default_rng(seed)
    base = np.where(CHAT, 20.0, 200.0) * rng.lognormal(0, 0.1, NUM_PAIRS)
    equal = base * rng.lognormal(0, 0.05, NUM_PAIRS)
    assert part_of_regression(CUTS, EVERYTHING, base, np.where(MAIL, 3 * equal, equal)).name == "mail"
    assert part_of_regression(CUTS, EVERYTHING, base, 3 * equal).name == ALL


def test_a_constant_added_time_has_no_place() -> None:
    base = np.where(CHAT, 20.0, 2000.0) + NUMBERS / 100
    assert part_of_regression(CUTS, EVERYTHING, base, base + 500.0).name == ALL


def test_a_place_of_few_pairs_explains_no_percentile() -> None:
    few = NUMBERS < 9
    base = 100.0 + NUMBERS / 100
    assert part_of_regression((cut("few", few),), EVERYTHING, base, np.where(few, 500.0, base)).name == ALL


def test_a_place_with_two_names_has_both() -> None:
    place = part_of_events((*CUTS, cut("replica_id r2", MAIL)), EVERYTHING, MAIL)
    assert place.name == "mail, replica_id r2"
    assert np.array_equal(place.mask, MAIL)
