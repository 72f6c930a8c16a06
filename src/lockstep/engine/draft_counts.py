"""Numbers of drafts: how many each sequence gets in a step, from the acceptance of its last ones and the price of rows.

All numbers are integers, so that equal inputs give equal decisions everywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

ONE = 1 << 10
"""A probability of 1."""
MARGIN_PERCENT = 4
"""Drafts must be expected to give at least this many percent more tokens in a time."""
FIRST_ODDS = (128, 256, 512, 704)
"""Assumed acceptance of a draft after 1, 2, 3, and 4 or more matching tokens, until it was seen."""
_WEIGHT = 3
"""An observation counts as 1 / 2**3 of the acceptance."""


class Price(NamedTuple):
    """Measured duration of a step."""

    num_rows: int
    """Number of tokens that it computes."""
    duration_us: int


FLAT_PRICES = (Price(1, 1000),)
"""Prices of a model whose steps take the same time with any number of rows."""


def step_us(prices: Sequence[Price], num_rows: int) -> int:
    """Duration of a step, between two prices by a line, after the last one by the line through the last two.

    Args:
        prices: by ascending number of rows, with durations that do not fall.
    """
    at = min(bisect_left(prices, num_rows, key=lambda price: price.num_rows), len(prices) - 1)
    if at == 0:
        return prices[0].duration_us
    low, high = prices[at - 1], prices[at]
    slope = high.duration_us - low.duration_us
    return low.duration_us + slope * (num_rows - low.num_rows) // (high.num_rows - low.num_rows)


class Acceptance:
    """Share of right guesses of one sequence, by the number of tokens that matched."""

    __slots__ = ("_odds",)

    def __init__(self) -> None:
        self._odds = [*FIRST_ODDS]

    def odds(self, num_matched: int) -> int:
        """Probability, in parts of `ONE`, that a guessed token is right if the ones before it are."""
        return self._odds[min(num_matched, len(self._odds)) - 1]

    def observe(self, guessed: Sequence[int], got: Sequence[int], num_matched: int) -> None:
        """Compare guessed tokens, drafted or not, with those that the sequence got."""
        at = min(num_matched, len(self._odds)) - 1
        for guess, token in zip(guessed, got, strict=False):
            self._odds[at] += ((ONE if guess == token else 0) - self._odds[at]) >> _WEIGHT
            if guess != token:
                return


def draft_counts(prices: Sequence[Price], num_rows: int, odds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
    """Number of drafts of each sequence: those that give the most expected tokens in a time.

    Drafts are added in the order of their probability, as long as any number of them is better than all smaller ones.

    Args:
        prices: durations of steps, by ascending number of rows.
        num_rows: number of sequences that get a token in the step.
        odds: sequence id to the probability of its next guess, and the number of its guesses.

    Returns:
        By sequence id; sequences without drafts are left out.
    """
    ranked: list[tuple[int, int]] = []
    for seq_id, (chance, most) in odds.items():
        likely = chance
        for _ in range(most):
            ranked.append((-likely, seq_id))
            likely = likely * chance // ONE
    ranked.sort()
    tokens = num_rows * ONE
    best, best_tokens, best_us = 0, tokens * (100 + MARGIN_PERCENT) // 100, step_us(prices, num_rows)
    for count, (negative, _) in enumerate(ranked, 1):
        tokens -= negative
        duration_us = step_us(prices, num_rows + count)
        if tokens * best_us > best_tokens * duration_us:
            best, best_tokens, best_us = count, tokens, duration_us
    counts: dict[int, int] = {}
    for _, seq_id in ranked[:best]:
        counts[seq_id] = counts.get(seq_id, 0) + 1
    return counts
