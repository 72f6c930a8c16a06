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
FIRST_ODDS = (640, 128, 384, 576, 768)
"""Assumed acceptance of a draft after a difference, and after 1, 2, 3, and 4 or more matching tokens, until it was
seen."""
MAX_ODDS = ONE - ONE // 16
"""Greatest assumed acceptance. Many right guesses one after the other would otherwise count as certainty, and the next
wrong one cost more than they gave: with many sequences, a draft costs almost as much as its token is worth."""
MIN_ODDS = ONE // 16
"""A draft that is less likely is not made."""
ROWS_OF_A_CONTEXT = 4
"""Number of drafts whose attention takes as long as that of their sequence's first row, since they read the same
context."""
ROUNDING_US = 3
"""Durations are rounded down by less than this."""
_WEIGHT = 3
"""An observation counts as 1 / 2**3 of the acceptance."""


class Price(NamedTuple):
    """Measured duration of a step of one sequence with a short context."""

    num_rows: int
    """Number of tokens that it computes."""
    duration_us: int


class Prices(NamedTuple):
    """Measured durations, from which those of other steps follow."""

    steps: tuple[Price, ...]
    """By ascending number of rows, with durations that do not fall."""
    context_ns: int = 0
    """Duration of a row for each token of its context."""

    def step_us(self, num_rows: int, num_context: int, num_drafts: int) -> int:
        """Duration of a step.

        Args:
            num_rows: number of sequences, each of which gets a token.
            num_context: number of tokens of their contexts.
            num_drafts: number of drafts.
        """
        context = num_context + num_context * num_drafts // (num_rows * ROWS_OF_A_CONTEXT)
        return rows_us(self.steps, num_rows + num_drafts) + self.context_ns * context // 1000


FLAT_PRICES = Prices((Price(1, 1000),))
"""Prices of a model whose steps take the same time with any number of rows."""


def rows_us(prices: Sequence[Price], num_rows: int) -> int:
    """Duration of a step with short contexts: between two prices by a line, after the last one by the line through the
    last two."""
    at = len(prices) - 1
    if num_rows < prices[at].num_rows:
        at = bisect_left(prices, num_rows, key=lambda price: price.num_rows)
    if at == 0:
        return prices[0].duration_us
    low, high = prices[at - 1], prices[at]
    slope = high.duration_us - low.duration_us
    return low.duration_us + slope * (num_rows - low.num_rows) // (high.num_rows - low.num_rows)


class Acceptance:
    """Share of right guesses of one sequence, by the number of tokens that matched; 0: after a difference."""

    __slots__ = ("_odds",)

    def __init__(self) -> None:
        self._odds = [*FIRST_ODDS]

    def odds(self, num_matched: int) -> int:
        """Probability, in parts of `ONE`, that a guessed token is right if the ones before it are."""
        return min(self._odds[min(num_matched, len(self._odds) - 1)], MAX_ODDS)

    @property
    def best(self) -> int:
        """Greatest of the probabilities."""
        return min(max(self._odds), MAX_ODDS)

    def observe(self, guessed: str, got: str, num_matched: int) -> None:
        """Compare guessed tokens, drafted or not, with those that the sequence got."""
        at = min(num_matched, len(self._odds) - 1)
        for guess, token in zip(guessed, got, strict=False):
            self._odds[at] += ((ONE if guess == token else 0) - self._odds[at]) >> _WEIGHT
            if guess != token:
                return


def least_chance(prices: Prices, num_rows: int, num_context: int, most: int) -> int:
    """Probability of guesses, in parts of `ONE`, below which no number of drafts is better than none; if greater than
    `ONE`, none is in any case. A bound that takes no guesses.

    Args:
        num_rows, num_context: see `Prices.step_us`.
        most: maximum number of drafts of a sequence.
    """
    plain_us = prices.step_us(num_rows, num_context, 0)
    # Tokens and durations are lines between two prices, so their quotient is greatest at a price.
    counts = [price.num_rows - num_rows for price in prices.steps if 0 < price.num_rows - num_rows < num_rows * most]
    least = ONE + 1
    for count in (*counts, num_rows * most):
        longest_us = (100 + MARGIN_PERCENT) * (prices.step_us(num_rows, num_context, count) - ROUNDING_US)
        least = min(least, num_rows * ONE * (longest_us - 100 * plain_us) // (100 * plain_us * count))
    return least


def draft_counts(
    prices: Prices, num_rows: int, num_context: int, odds: Mapping[int, tuple[int, int]]
) -> dict[int, int]:
    """Number of drafts of each sequence: those that give the most expected tokens in a time.

    Drafts are added in the order of their probability, as long as any number of them is better than all smaller ones.

    Args:
        num_rows, num_context: see `Prices.step_us`.
        odds: sequence id to the probability of its next guess, and the number of its guesses.

    Returns:
        By sequence id; sequences without drafts are left out.
    """
    ranked: list[tuple[int, int]] = []
    for seq_id, (chance, most) in odds.items():
        likely = chance
        for _ in range(most):
            if likely < MIN_ODDS:
                break
            ranked.append((-likely, seq_id))
            likely = likely * chance // ONE
    ranked.sort()
    tokens = num_rows * ONE
    best, best_tokens = 0, tokens * (100 + MARGIN_PERCENT) // 100
    last_us = best_us = prices.step_us(num_rows, num_context, 0)
    for count, (negative, _) in enumerate(ranked, 1):
        tokens -= negative
        duration_us = prices.step_us(num_rows, num_context, count)
        if tokens * best_us > best_tokens * duration_us:
            best, best_tokens, best_us = count, tokens, duration_us
        elif num_rows + count > prices.steps[-1].num_rows and tokens * last_us < (tokens + negative) * duration_us:
            break  # rows have one price from here on, and the next drafts are less likely
        last_us = duration_us
    counts: dict[int, int] = {}
    for _, seq_id in ranked[:best]:
        counts[seq_id] = counts.get(seq_id, 0) + 1
    return counts
