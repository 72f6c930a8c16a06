"""Numbers of drafts: only where the expected tokens in a time grow."""

from __future__ import annotations

import random

import pytest

from lockstep.engine.draft_counts import (
    FIRST_ODDS,
    FLAT_PRICES,
    MARGIN_PERCENT,
    MAX_ODDS,
    ONE,
    Acceptance,
    Price,
    Prices,
    draft_counts,
    least_chance,
    rows_us,
)

STEPS = (Price(1, 1000), Price(2, 1100), Price(4, 1500), Price(8, 3500))


def test_rows_cost_as_measured_and_between_and_after_as_a_line() -> None:
    assert [rows_us(STEPS, rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == [1000, 1100, 1300, 1500, 2500, 3500, 4500]
    assert rows_us(FLAT_PRICES.steps, 50) == FLAT_PRICES.steps[0].duration_us
    assert rows_us(STEPS[1:], 1) == 1100


def test_contexts_cost_once_for_each_sequence_and_a_quarter_for_each_draft() -> None:
    prices = Prices(STEPS, 500)
    assert prices.step_us(2, 4000, 0) == 1100 + 2000
    assert prices.step_us(2, 4000, 2) == 1500 + 2000 + 2 * 250


def rate(prices: Prices, num_rows: int, odds: dict[int, tuple[int, int]], counts: dict[int, int]) -> float:
    """Expected tokens in a microsecond."""
    tokens = float(num_rows)
    for seq_id, count in counts.items():
        tokens += sum((odds[seq_id][0] / ONE) ** place for place in range(1, count + 1))
    return tokens / prices.step_us(num_rows, 100 * num_rows, sum(counts.values()))


@pytest.mark.parametrize("seed", range(80))
def test_drafts_are_the_best_of_all_numbers_by_rank(seed: int) -> None:
    """And the bound excludes no sequence that could get some."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    prices = Prices(STEPS, rng.choice([0, 300, 5000]))
    odds = {seq_id: (rng.randrange(100, ONE), rng.randint(1, 4)) for seq_id in range(rng.randint(1, 4))}
    num_rows = len(odds) + rng.randint(0, 12)
    counts = draft_counts(prices, num_rows, 100 * num_rows, odds)
    best = max(
        rate(prices, num_rows, odds, _first(odds, total)) for total in range(1 + sum(most for _, most in odds.values()))
    )
    plain = rate(prices, num_rows, odds, {})
    if counts:
        assert rate(prices, num_rows, odds, counts) >= 0.99 * best
        assert rate(prices, num_rows, odds, counts) > plain * (1 + (MARGIN_PERCENT - 1) / 100)
        most = max(most for _, most in odds.values())
        least = least_chance(prices, num_rows, 100 * num_rows, most)
        assert least <= max(chance for chance, _ in odds.values())
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
    linear = Prices((Price(1, 1000), Price(2, 2000)))
    assert draft_counts(linear, 1, 100, {0: (ONE - 1, 5)}) == {}
    assert least_chance(linear, 1, 100, 5) > ONE
    assert draft_counts(FLAT_PRICES, 32, 3200, dict.fromkeys(range(32), (100, 5))) != {}, "rows cost nothing"
    assert least_chance(FLAT_PRICES, 32, 3200, 5) < 100


def test_long_contexts_make_drafts_worth_more() -> None:
    odds = dict.fromkeys(range(8), (700, 5))
    prices = Prices((Price(1, 1000), Price(2, 1800)), 300)
    assert draft_counts(prices, 8, 0, odds) == {}
    assert draft_counts(prices, 8, 8 * 4000, odds) != {}


def test_likelier_sequences_get_more_drafts() -> None:
    counts = draft_counts(Prices(STEPS), 2, 200, {4: (300, 5), 7: (1000, 5)})
    assert counts.get(7, 0) > counts.get(4, 0)


def test_acceptance_approaches_what_is_seen_by_length_of_match() -> None:
    acceptance = Acceptance()
    assert [acceptance.odds(length) for length in (0, 1, 2, 3, 4, 20)] == [*FIRST_ODDS, FIRST_ODDS[-1]]
    assert acceptance.best == max(FIRST_ODDS)
    for _ in range(40):
        acceptance.observe("ab", "abc", 2)
        acceptance.observe("ab", "z", 7)
        acceptance.observe("ab", "z", 0)
    assert acceptance.odds(2) == acceptance.best == MAX_ODDS
    assert acceptance.odds(4) < 0.05 * ONE
    assert acceptance.odds(0) < 0.05 * ONE
    assert acceptance.odds(1) == FIRST_ODDS[1]


def test_guesses_after_a_wrong_one_do_not_count() -> None:
    once, twice = Acceptance(), Acceptance()
    once.observe("a", "b", 1)
    twice.observe("acc", "bcc", 1)
    assert once.odds(1) == twice.odds(1) < FIRST_ODDS[1]
