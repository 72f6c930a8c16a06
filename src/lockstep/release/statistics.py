"""Statistics that hold however often one looks: nearest ranks, long-run variances, e-processes, e-BH.

Three things are here, and nothing else decides in sequential mode:

- `Studentised`: the mean of a series against a bound, by the Gaussian mixture of asymptotic confidence sequences
  (Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence
  sequences", 2021, one-sided form). Series of one server are not independent, so the variance is the long-run one: of
  means of blocks of 1, 2, 4, ... neighbours, as long as there are `MIN_BLOCKS` of them, the largest counts; and as long
  as the series is shorter than `MIN_TIMES_CORRELATED` times what it forgets in, there is no evidence at all.
- `bet_below`: the mean of events between -1 and 1, by betting on blocks of neighbours (Waudby-Smith and Ramdas,
  "Estimating means of bounded random variables by betting", 2024): exact while no block knows of those before it, and
  so the one to trust with events that are too rare to have a variance yet.
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
_erfc = np.vectorize(math.erfc, otypes=[np.float64])  # NumPy has none

MIN_BLOCKS = 10
"""As many blocks are wanted for the variance of their means."""
MIN_TIMES_CORRELATED = 100.0
"""Looks begin when there are as many times the pairs that are worth one independent pair."""
MIN_PAIRS = 100
"""And not before."""
BEST_AT = 500.0
"""Pairs at which the mixture's bound is narrowest."""
LOOKS_PER_OCTAVE = 16
"""Looks at a series, evenly in the logarithm of its length; the last one is at its end."""
STAKES = (0.1, 0.25, 0.5, 0.75, 0.95)
"""Parts of a unit that are bet on each block; their gains are averaged."""
_LEAST_VARIANCE = 1e-24
"""Of series that never change."""


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
    """Series against a bound at each look, looks along the last axis."""

    mean: Floats
    half_width: Floats
    """Of the confidence sequence at alpha, one-sided; infinite while there is no evidence."""
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
    num_octaves = math.ceil(math.log2(num_pairs / first)) + 1
    grid = np.unique(np.floor(first * 2.0 ** (np.arange(num_octaves * LOOKS_PER_OCTAVE) / LOOKS_PER_OCTAVE)))
    return np.append(grid[grid < num_pairs].astype(np.int64), num_pairs)


def track(series: Floats, bound: float, alpha: float, looks: NDArray[np.int64], floor: float = 0.0) -> Track:
    """Follow series.

    Args:
        series: shape (..., pairs): a number per pair, in the order of time.
        bound: the mean that is judged.
        alpha: chance of a false alarm that the confidence sequence may have.
        looks: pairs so far at each look, none above the number of pairs.
        floor: so many pairs with a square of 1 are added to the variance: events that may not have been seen yet.
    """
    sums = np.concatenate([np.zeros((*series.shape[:-1], 1)), np.cumsum(series, axis=-1)], axis=-1)
    num = np.maximum(looks, 1)
    mean = sums[..., looks] / num
    variance, forgets_in = _long_run_variance(sums, looks)
    scale = np.sqrt(np.maximum(np.maximum(variance, floor / num), _LEAST_VARIANCE))
    is_evidence = (looks >= MIN_PAIRS) & (looks >= MIN_TIMES_CORRELATED * forgets_in)
    excess = np.where(is_evidence, (mean - bound) * looks / scale, 0.0)
    return Track(
        mean,
        np.where(is_evidence, scale * _boundary(looks, alpha) / num, math.inf),
        np.where(is_evidence, _log_mixture(excess, looks), 0.0),
        np.where(is_evidence, _log_mixture(-excess, looks), 0.0),
    )


def bet_below(series: Floats, bound: float, block: int, looks: NDArray[np.int64]) -> Floats:
    """Logarithm of the e-value against: the mean of these events is at least the bound.

    Args:
        series: shape (..., pairs), from -1 to 1.
        bound: above 0 and below 1.
        block: neighbours that are one bet.
        looks: pairs so far at each look.
    """
    num_blocks = series.shape[-1] // block
    means = series[..., : num_blocks * block].reshape(*series.shape[:-1], num_blocks, block).mean(axis=-1)
    gains = np.stack([np.cumsum(np.log1p(stake * (bound - means)), axis=-1) for stake in STAKES])
    most = gains.max(axis=0)
    mixed = most + np.log(np.exp(gains - most).mean(axis=0))
    return np.concatenate([np.zeros((*series.shape[:-1], 1)), mixed], axis=-1)[..., looks // block]


def e_bh(log_values: Sequence[float], alpha: float) -> list[int]:
    """Places of the hypotheses that are rejected at a false discovery rate of alpha, whatever their dependence."""
    order = sorted(range(len(log_values)), key=lambda place: (-log_values[place], place))
    num_rejected = 0
    for rank, place in enumerate(order, 1):
        if log_values[place] >= math.log(len(log_values) / (alpha * rank)):
            num_rejected = rank
    return sorted(order[:num_rejected])


def _long_run_variance(sums: Floats, looks: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Variance of one pair as the mean's uncertainty has it, and how many pairs are worth one independent pair."""
    largest = np.zeros((*sums.shape[:-1], len(looks)))
    alone = largest.copy()
    size = 1
    while size * MIN_BLOCKS < sums.shape[-1]:
        means = np.diff(sums[..., ::size], axis=-1) / size
        first, second = np.cumsum(means, axis=-1), np.cumsum(means * means, axis=-1)
        num_blocks = looks // size
        has_enough = num_blocks >= MIN_BLOCKS
        count = num_blocks[has_enough]
        centre = first[..., count - 1] / count
        spread = np.maximum(second[..., count - 1] / count - centre * centre, 0.0)
        found = size * spread * count / (count - 1)
        if size == 1:
            alone[..., has_enough] = found
        largest[..., has_enough] = np.maximum(largest[..., has_enough], found)
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
    near = np.log(_erfc(-np.maximum(x, -30.0) / math.sqrt(2.0)) * 0.5)
    below = np.minimum(x, -30.0)
    far = -0.5 * below * below - np.log(-below) - 0.5 * math.log(2.0 * math.pi)
    return np.where(x < -30.0, far, near)
