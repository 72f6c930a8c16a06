"""Statistics that hold however often one looks: nearest ranks, long-run variances, e-processes, e-BH.

Two processes are here, and nothing else decides in sequential mode:

- `Studentised`: the mean of a series against a bound, by the Gaussian mixture of asymptotic confidence sequences
  (Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence
  sequences", 2021, one-sided form). Series of one server are not independent, so the variance is the long-run one: of
  means of blocks of 1, 2, 4, ... neighbours, as long as there are `MIN_BLOCKS` of them, the largest counts; and as long
  as the series is shorter than `MIN_TIMES_CORRELATED` times what it forgets in, there is no evidence at all.
- e-BH (Wang and Ramdas, "False discovery rate control with e-values", 2022) over metrics and segments.

The guarantee is asymptotic; docs/gate-error-rates.md has what it is worth, by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_BLOCKS = 10
"""As many blocks are wanted for the variance of their means."""
MIN_TIMES_CORRELATED = 100.0
"""Looks begin when there are as many times the pairs that are worth one independent pair."""
MIN_PAIRS = 100
"""And not before."""
BEST_AT = 500.0
"""Pairs at which the mixture's bound is narrowest."""
MAX_LOOKS = 400
"""Looks at one series, evenly in the logarithm of its length; the last one is at its end."""


def nearest_rank(values: Floats, fraction: float) -> float:
    """The smallest value that at least this fraction of all are not above; NaN of none.

    Args:
        fraction: above 0, at most 1.
    """
    if not len(values):
        return math.nan
    rank = max(1, math.ceil(fraction * len(values) - 1e-9))
    return float(np.partition(values, rank - 1)[rank - 1])


@dataclass(frozen=True, slots=True)
class Track:
    """A series against a bound, at each look."""

    looks: NDArray[np.int64]
    """Pairs so far."""
    mean: Floats
    half_width: Floats
    """Of the confidence sequence at `alpha`, one-sided; infinite while there is no evidence."""
    log_above: Floats
    """Logarithm of the e-value against: the mean is at most the bound."""
    log_below: Floats
    """Logarithm of the e-value against: the mean is at least the bound."""

    @property
    def lower(self) -> float:
        """The best lower bound of the mean so far; -inf while there is none."""
        return float(np.max(self.mean - self.half_width, initial=-math.inf))

    @property
    def upper(self) -> float:
        """The best upper bound of the mean so far; inf while there is none."""
        return float(np.min(self.mean + self.half_width, initial=math.inf))


def looks_of(num_pairs: int, first: int = MIN_PAIRS) -> NDArray[np.int64]:
    """When a series of so many pairs is looked at: those before the last one are the same for every longer series."""
    if num_pairs < first:
        return np.empty(0, np.int64)
    grid = np.unique(np.floor(first * 2.0 ** (np.arange(MAX_LOOKS) / 16)).astype(np.int64))
    return np.append(grid[grid < num_pairs], num_pairs)


def track(
    series: Floats, bound: float, alpha: float, looks: NDArray[np.int64] | None = None, floor: float = 0.0
) -> Track:
    """Follow a series.

    Args:
        series: a number per pair, in the order of time.
        bound: the mean that is judged.
        alpha: chance of a false alarm that the confidence sequence may have.
        looks: how long the series is at each look; default: those of `looks_of`.
        floor: least variance of one pair, for events that may not have been seen yet.
    """
    looks = looks_of(len(series)) if looks is None else looks
    sums = np.concatenate([[0.0], np.cumsum(series)])
    mean = sums[looks] / np.maximum(looks, 1)
    variance, forgets_in = _long_run_variance(series, sums, looks)
    variance = np.maximum(variance, floor / np.maximum(looks, 1))
    is_evidence = (looks >= MIN_PAIRS) & (looks >= MIN_TIMES_CORRELATED * forgets_in)
    scale = np.sqrt(np.maximum(variance, 1e-24))
    excess = np.where(is_evidence, (mean - bound) * looks / scale, 0.0)
    log_above = np.where(is_evidence, _log_mixture(excess, looks), 0.0)
    log_below = np.where(is_evidence, _log_mixture(-excess, looks), 0.0)
    width = np.where(is_evidence, scale * _boundary(looks, alpha) / np.maximum(looks, 1), math.inf)
    return Track(looks, mean, width, log_above, log_below)


def e_bh(log_values: Sequence[float], alpha: float) -> list[int]:
    """Places of the hypotheses that are rejected at a false discovery rate of alpha, whatever their dependence."""
    order = sorted(range(len(log_values)), key=lambda place: (-log_values[place], place))
    num_rejected = 0
    for rank, place in enumerate(order, 1):
        if log_values[place] >= math.log(len(log_values) / (alpha * rank)):
            num_rejected = rank
    return sorted(order[:num_rejected])


def _long_run_variance(series: Floats, sums: Floats, looks: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Variance of one pair as the mean's uncertainty has it, and how many pairs are worth one independent pair."""
    largest = np.zeros(len(looks))
    alone = np.zeros(len(looks))
    size = 1
    while size <= len(series) // MIN_BLOCKS:
        means = np.diff(sums[::size]) / size
        first, second = np.cumsum(means), np.cumsum(means * means)
        num_blocks = looks // size
        has_enough = num_blocks >= MIN_BLOCKS
        count = num_blocks[has_enough]
        centre = first[count - 1] / count
        found = size * np.maximum(second[count - 1] / count - centre * centre, 0.0) * count / (count - 1)
        if size == 1:
            alone[has_enough] = found
        largest[has_enough] = np.maximum(largest[has_enough], found)
        size *= 2
    return largest, np.where(alone > 0, largest / np.where(alone > 0, alone, 1.0), 1.0)


def _log_mixture(excess: Floats, looks: NDArray[np.int64]) -> Floats:
    """Logarithm of the one-sided Gaussian mixture at a sum of standardised excesses."""
    width = looks / BEST_AT + 1.0
    return math.log(2.0) - 0.5 * np.log(width) + _gain(excess / np.sqrt(BEST_AT * width))


def _boundary(looks: NDArray[np.int64], alpha: float) -> Floats:
    """The sum of standardised excesses at which the mixture reaches 1 / alpha, by Newton's method."""
    width = looks / BEST_AT + 1.0
    wanted = math.log(1.0 / alpha) - math.log(2.0) + 0.5 * np.log(width)
    point = np.sqrt(2.0 * wanted + 2.0)  # above the root of a convex function: Newton falls to it from there
    for _ in range(8):
        slope = point + np.exp(-0.5 * point * point - _log_normal_cdf(point)) / math.sqrt(2.0 * math.pi)
        point = point - (_gain(point) - wanted) / slope
    return point * np.sqrt(BEST_AT * width)


def _gain(point: Floats) -> Floats:
    return 0.5 * point * point + _log_normal_cdf(point)


def _log_normal_cdf(x: Floats) -> Floats:
    """Logarithm of the normal distribution function, also far below its mean (Mills' ratio)."""
    near = np.log(np.array([0.5 * math.erfc(-each / math.sqrt(2.0)) for each in np.maximum(x, -30.0)]))
    below = np.minimum(x, -30.0)
    far = -0.5 * below * below - np.log(-below) - 0.5 * math.log(2.0 * math.pi)
    return np.where(x < -30.0, far, near)
