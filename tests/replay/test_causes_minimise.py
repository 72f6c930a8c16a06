"""Minimisation compared with brute force over every subset of a few items."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from lockstep.replay.causes import minimise

ITEMS = tuple("abcdefg")
subsets = st.frozensets(st.sampled_from(ITEMS))


def all_subsets(items: tuple[str, ...]) -> list[frozenset[str]]:
    return [frozenset(each) for each in chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))]


@given(st.sets(subsets, min_size=1))
def test_monotonic_behaviour_is_minimised_to_a_smallest_set(causes: set[frozenset[str]]) -> None:
    found = minimise(ITEMS, lambda items: any(cause <= set(items) for cause in causes))

    shown = [each for each in all_subsets(ITEMS) if any(cause <= each for cause in causes)]
    minimal = [each for each in shown if not any(other < each for other in shown)]
    assert frozenset(found.items) in minimal
    assert found.is_minimal


@given(st.sets(subsets))
def test_no_single_item_of_a_minimum_can_be_left_out(showing: set[frozenset[str]]) -> None:
    """This also holds if more items hide the behaviour."""
    shown = {*showing, frozenset(ITEMS)}

    found = minimise(ITEMS, lambda items: frozenset(items) in shown)

    assert frozenset(found.items) in shown
    assert not any(frozenset(found.items) - {item} in shown for item in found.items)
    assert found.items == tuple(item for item in ITEMS if item in found.items), "the order is kept"


@given(subsets, st.integers(0, 20))
def test_the_number_of_probes_is_limited(cause: frozenset[str], max_probes: int) -> None:
    asked = []

    def shows(items: tuple[str, ...]) -> bool:
        asked.append(items)
        return cause <= set(items)

    found = minimise(ITEMS, shows, lambda: len(asked) < max_probes)

    assert found.num_probes == len(asked) <= max_probes
    assert cause <= set(found.items), "what is left shows it, even when it is not the least"
    assert found.is_minimal or len(asked) == max_probes


def test_minimising_needs_far_fewer_probes_than_items() -> None:
    found = minimise(range(4096), lambda items: {7, 2048, 4000} <= set(items))

    assert found.items == (7, 2048, 4000)
    assert found.num_probes < 200
