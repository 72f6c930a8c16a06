"""Numbers of drafts: only where the expected tokens in a time grow."""

from __future__ import annotations

import random

import pytest

from lockstep.engine.draft_counts import (
    FIRST_ODDS,
    FLAT_PRICES,
    MARGIN_PERCENT,
    ONE,
    Acceptance,
    Price,
    draft_counts,
    step_us,
)

PRICES = (Price(1, 1000), Price(2, 1100), Price(4, 1500), Price(8, 3500))


def test_a_step_costs_as_measured_and_between_and_after_as_a_line() -> None:
    assert [step_us(PRICES, rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == [1000, 1100, 1300, 1500, 2500, 3500, 4500]
    assert step_us(FLAT_PRICES, 50) == FLAT_PRICES[0].duration_us
    assert step_us(PRICES[1:], 1) == 1100


def rate(prices: tuple[Price, ...], num_rows: int, odds: dict[int, tuple[int, int]], counts: dict[int, int]) -> float:
    """Expected tokens in a microsecond."""
    tokens = float(num_rows)
    for seq_id, count in counts.items():
        tokens += sum((odds[seq_id][0] / ONE) ** place for place in range(1, count + 1))
    return tokens / step_us(prices, num_rows + sum(counts.values()))


@pytest.mark.parametrize("seed", range(40))
def test_drafts_are_the_best_of_all_numbers_by_rank(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    odds = {seq_id: (rng.randrange(100, ONE), rng.randint(1, 4)) for seq_id in range(rng.randint(1, 4))}
    num_rows = len(odds) + rng.randint(0, 3)
    counts = draft_counts(PRICES, num_rows, odds)
    best = max(
        rate(PRICES, num_rows, odds, _first(odds, total)) for total in range(1 + sum(most for _, most in odds.values()))
    )
    plain = rate(PRICES, num_rows, odds, {})
    if counts:
        assert rate(PRICES, num_rows, odds, counts) >= 0.99 * best
        assert rate(PRICES, num_rows, odds, counts) > plain * (1 + (MARGIN_PERCENT - 1) / 100)
    else:
        assert best <= plain * (1 + (MARGIN_PERCENT + 1) / 100)


def _first(odds: dict[int, tuple[int, int]], total: int) -> dict[int, int]:
    """The most probable drafts, so many."""
    ranked = sorted(
        ((chance / ONE) ** place, -seq_id) for seq_id, (chance, most) in odds.items() for place in range(1, most + 1)
    )[::-1]
    counts: dict[int, int] = {}
    for _, seq_id in ranked[:total]:
        counts[-seq_id] = counts.get(-seq_id, 0) + 1
    return counts


def test_no_drafts_where_rows_cost_as_much_as_they_may_give() -> None:
    linear = (Price(1, 1000), Price(2, 2000))
    assert draft_counts(linear, 1, {0: (ONE - 1, 5)}) == {}
    assert draft_counts(FLAT_PRICES, 32, dict.fromkeys(range(32), (50, 5))) != {}, "rows cost nothing"


def test_likelier_sequences_get_more_drafts() -> None:
    counts = draft_counts(PRICES, 2, {4: (300, 5), 7: (1000, 5)})
    assert counts.get(7, 0) > counts.get(4, 0)


def test_acceptance_approaches_what_is_seen_by_length_of_match() -> None:
    acceptance = Acceptance()
    assert [acceptance.odds(length) for length in (1, 2, 3, 4, 20)] == [*FIRST_ODDS, FIRST_ODDS[-1]]
    for _ in range(40):
        acceptance.observe((1, 2), (1, 2, 3), 2)
        acceptance.observe((1, 2), (9,), 7)
    assert acceptance.odds(2) > 0.95 * ONE
    assert acceptance.odds(4) < 0.05 * ONE
    assert acceptance.odds(1) == FIRST_ODDS[0]


def test_guesses_after_a_wrong_one_do_not_count() -> None:
    once, twice = Acceptance(), Acceptance()
    once.observe((1,), (2,), 1)
    twice.observe((1, 5, 5), (2, 5, 5), 1)
    assert once.odds(1) == twice.odds(1) < FIRST_ODDS[0]
