"""Anytime-valid statistics: computes nearest ranks, long-run variances, e-processes and e-BH.

Only the following three methods decide in sequential mode. Each is exact under a condition that a server does not quite
meet, so each description also states what holds in practice:

- `track`: the mean of a series against a bound, by a half-normal mixture of Gaussian likelihood ratios (Robbins,
  "Statistical methods related to the law of the iterated logarithm", 1970). For Gaussian excesses of variance 1 it is
  an e-process, exactly, at every n. In practice excesses are divided by an estimated deviation, and only their sums
  become Gaussian, by the central limit theorem. The result is an asymptotic confidence sequence (Waudby-Smith, Arbour,
  Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", 2021), whose error
  rate tends to alpha as the first look gets later. Therefore there is a minimum for the first look.
- `bet_below`: the mean of events between -1 and 1, by betting on blocks of neighbouring pairs (Waudby-Smith and Ramdas,
  "Estimating means of bounded random variables by betting", 2024). It is exact at every n and needs no variance, as
  long as no block has a conditional mean, given the blocks before it, below the bound of the tested hypothesis. It
  therefore decides for events that are too rare for an estimate of their variance. Bursts of events that are longer
  than half a block violate the condition.
- `e_bh` (Wang and Ramdas, "False discovery rate control with e-values", 2022) over metrics and segments: exact for
  e-values under any dependence, and at any stopping time for e-processes of one filtration. The e-values of `track`
  have this property asymptotically and jointly (Ignatiadis, Wang, Ramdas, "Asymptotic and compound e-values", 2024),
  because series of one stream converge to one Gaussian process with independent increments.

Successive answers of one server are correlated, so `track` divides by the long-run deviation. To estimate its square,
the long-run variance, blocks of 1, 2, 4, ... neighbouring pairs are formed, as long as there are `MIN_BLOCKS` blocks.
For each length, the variance of the block means is multiplied by the block length, and one standard error (of the same
number of normal blocks) is added. The largest result is used. Blocks of about the square root of n alone would be
consistent (under mixing, with more than two moments). The largest result is not smaller, so the estimate errs on the
side of no decision. Without the standard error, a queue that is rarely long has 7 % false alarms instead of 5 %. A
correlation that is longer than the series is not visible in it: variances then grow with the block length up to the
longest blocks. Therefore there is no evidence while n is below `MIN_TIMES_CORRELATED` times the ratio of the largest
variance to that of single pairs. No estimate at a look depends on later pairs.

docs/gate-error-rates.md has simulated error rates on short, correlated and heavy-tailed series.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Looks = NDArray[np.int64]
Measure = Callable[[Floats, Looks], tuple[Floats, Floats]]
"""Function of cumulative sums and looks that returns the long-run variance, and the number of pairs with which evidence
begins, at each look."""
_erfc = np.vectorize(math.erfc, otypes=[np.float64])  # NumPy has none

MIN_BLOCKS = 10
"""Minimum number of blocks for an estimate of the variance of their means."""
MIN_TIMES_CORRELATED = 100.0
"""Number of effectively independent pairs with which evidence begins."""
MIN_PAIRS = 100
"""Minimum number of pairs with which evidence begins."""
MIXTURE_PRECISION = 500.0
"""Reciprocal of the variance of the half-normal distribution of effects (in deviations of one pair). Relative to n,
bounds are narrowest at six times as many pairs. A larger value would decide later; a smaller value would give the first
hundred pairs more weight."""
LEAST_EVENTS = 3.0
"""Minimum number of events that a series is assumed to have: with a probability of 5 %, three expected events do not
occur."""
LOOKS_PER_OCTAVE = 16
"""Number of looks per doubling of the series' length. The last look is at its end."""
STAKES = (0.5, 0.95)
"""Fractions of the capital that are bet on each block. The average of their gains is again an e-process."""
_LEAST_VARIANCE = 1e-24
"""Variance that is assumed for series that never change."""


def nearest_rank(values: Floats, fraction: float) -> float:
    """Percentile by nearest rank: the smallest value that is at least as large as this fraction of the values.

    Args:
        fraction: above 0, at most 1.

    Returns:
        The value; NaN if there are no values.
    """
    if not len(values):
        return math.nan
    rank = max(1, math.ceil(fraction * len(values) - 1e-9))
    return float(np.partition(values, rank - 1)[rank - 1])


@dataclass(frozen=True, slots=True)
class Track:
    """Test of series against a bound at each look. The last axis of all arrays is the looks."""

    mean: Floats
    scale: Floats
    """Long-run standard deviation of one pair."""
    begins: Floats
    """Number of pairs with which evidence begins, as estimated at that look."""
    lower: Floats
    """Lower end of the confidence sequence, one-sided at alpha; -inf while there is no evidence."""
    upper: Floats
    """Upper end of the confidence sequence, one-sided at alpha; inf while there is no evidence."""
    log_above: Floats
    """Logarithm of the e-value against the hypothesis that the mean is at most the bound; -inf while there is no
    evidence."""
    log_below: Floats
    """Logarithm of the e-value against the hypothesis that the mean is at least the bound; -inf while there is no
    evidence."""


def looks_of(num_pairs: int, first: int = MIN_PAIRS) -> Looks:
    """Numbers of pairs at which a series is evaluated. All but the last are the same for every longer series."""
    if num_pairs < first:
        return np.empty(0, np.int64)
    num_octaves = math.ceil(math.log2(num_pairs / first)) + 1
    grid = np.unique(np.floor(first * 2.0 ** (np.arange(num_octaves * LOOKS_PER_OCTAVE) / LOOKS_PER_OCTAVE)))
    return np.append(grid[grid < num_pairs].astype(np.int64), num_pairs)


def variance_of_blocks(sums: Floats, looks: Looks) -> tuple[Floats, Floats]:
    """Long-run variance of one pair, and the number of pairs with which evidence begins, at each look.

    Args:
        sums: sums of the first 0, 1, 2, ... pairs, along the last axis.
    """
    variance, forgets_in = _long_run_variance(sums, looks)
    return variance, np.maximum(MIN_TIMES_CORRELATED * forgets_in, MIN_PAIRS)


def track(
    series: Floats,
    bound: float,
    alpha: float,
    looks: Looks,
    *,
    is_event: bool = False,
    measure: Measure = variance_of_blocks,
) -> Track:
    """Test series against a bound at each look. The module docstring states what is exact and what is asymptotic.

    Args:
        series: numbers per pair in the order of time, of shape (..., pairs).
        bound: bound on the mean.
        alpha: allowed probability of a false alarm on each side of the confidence sequence.
        looks: number of pairs at each look, at most the number of pairs.
        is_event: True if the numbers are -1, 0 and 1. A series that has few events by chance also has little variance
            by chance. To test a larger mean, its variance is therefore scaled to that mean: proportionally more events,
            in clusters of the same length.
        measure: estimator of the long-run variance.
    """
    start = series[..., :1]
    series = series - start  # a series that never changes has a variance of 0, not of rounding
    sums = np.concatenate([np.zeros_like(start), np.cumsum(series, axis=-1)], axis=-1)
    num = np.maximum(looks, 1)
    mean = sums[..., looks] / num + start
    variance, begins = measure(sums, looks)
    rate = np.full_like(mean, math.inf)
    if is_event:
        seen = np.concatenate([np.zeros_like(start), np.cumsum(np.abs(series + start), axis=-1)], axis=-1)[..., looks]
        rate = np.maximum(seen, LEAST_EVENTS) / num
        variance = np.maximum(variance, LEAST_EVENTS / num)
    scale = np.sqrt(np.maximum(variance, _LEAST_VARIANCE))
    is_evidence = looks >= begins
    excess = np.where(is_evidence, (mean - bound) * looks / scale, 0.0)
    width = np.where(is_evidence, scale * _boundary(looks, alpha) / num, math.inf)
    at_bound = np.sqrt(1.0 + np.maximum(bound - mean, 0.0) / rate)
    return Track(
        mean=mean,
        scale=scale,
        begins=begins,
        lower=mean - width,
        upper=mean + _width_where_more(width, rate),
        log_above=np.where(is_evidence, _log_mixture(excess, looks), -math.inf),
        log_below=np.where(is_evidence, _log_mixture(-excess / at_bound, looks), -math.inf),
    )


def _width_where_more(width: Floats, rate: Floats) -> Floats:
    """Distance w' that solves w' = width * sqrt(1 + w' / rate)."""
    known = np.where(np.isinf(width), 0.0, width)
    more = known * known / rate
    return np.where(np.isinf(width), math.inf, 0.5 * (more + np.sqrt(more * more + 4.0 * known * known)))


def width_after(scale: float | Floats, num_pairs: Looks, alpha: float) -> Floats:
    """Width of the one-sided confidence sequence of a series after `num_pairs` pairs.

    Args:
        scale: long-run standard deviation of one pair.
    """
    return scale * _boundary(num_pairs, alpha) / num_pairs


def bet_below(series: Floats, bound: float, block: int, looks: Looks) -> Floats:
    """Logarithm of the e-value against the hypothesis that the mean of these events is at least the bound.

    Args:
        series: numbers from -1 to 1, of shape (..., pairs).
        bound: bound on the mean, above 0 and below 1.
        block: number of neighbouring pairs per bet. There is no bet on an incomplete block at the end.
        looks: number of pairs at each look.
    """
    means = _block_means(series, block)
    gains = np.stack([np.cumsum(np.log1p(stake * (bound - means)), axis=-1) for stake in STAKES])
    mixed = _log_mean_exp(gains)
    return np.concatenate([np.zeros((*series.shape[:-1], 1)), mixed], axis=-1)[..., looks // block]


def bet_upper(series: Floats, alpha: float, block: int) -> float:
    """Upper bound of the mean of these events at their end: the smallest bound that `bet_below` rejects at alpha, or 1.

    Args:
        series: numbers from -1 to 1, of shape (pairs,).
        block: number of neighbouring pairs per bet.
    """
    means, times = np.unique(_block_means(series, block), return_counts=True)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        gains = np.array([float(np.sum(times * np.log1p(stake * (middle - means)))) for stake in STAKES])
        low, high = (low, middle) if _log_mean_exp(gains) >= math.log(1.0 / alpha) else (middle, high)
    return high


def e_bh(log_values: Floats, alpha: float, counts: Bools | None = None) -> Bools:
    """Hypotheses that are rejected at a false discovery rate of alpha, under any dependence.

    The k largest e-values are rejected, for the largest k whose k-th largest e-value is at least
    (number of hypotheses) / (alpha k).

    Args:
        log_values: logarithms of e-values, of shape (..., hypotheses).
        counts: mask of the hypotheses to test, of the same shape; None: all.
    """
    if counts is None:
        counts = np.ones(log_values.shape, np.bool_)
    known = np.where(counts, log_values, -math.inf)
    ranked = -np.sort(-known, axis=-1)
    rank = np.arange(1, log_values.shape[-1] + 1)
    with np.errstate(divide="ignore"):
        wanted = np.log(counts.sum(axis=-1, keepdims=True)) - np.log(alpha * rank)
    limit = np.where((ranked >= wanted) & np.isfinite(ranked), ranked, math.inf).min(
        axis=-1, keepdims=True, initial=math.inf
    )
    rejected: Bools = known >= limit
    return rejected


def _block_means(series: Floats, block: int) -> Floats:
    num_blocks = series.shape[-1] // block
    means: Floats = series[..., : num_blocks * block].reshape(*series.shape[:-1], num_blocks, block).mean(axis=-1)
    return means


def _log_mean_exp(gains: Floats) -> Floats:
    """Logarithm of the mean over the first axis, of numbers given as logarithms."""
    most = gains.max(axis=0)
    mixed: Floats = most + np.log(np.exp(gains - most).mean(axis=0))
    return mixed


def _long_run_variance(sums: Floats, looks: Looks) -> tuple[Floats, Floats]:
    """Long-run variance of one pair, and the number of pairs that are worth one independent pair, at each look.

    Args:
        sums: sums of the first 0, 1, 2, ... pairs, along the last axis.
    """
    largest = np.zeros((*sums.shape[:-1], len(looks)))
    alone, careful = largest.copy(), largest.copy()
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
        careful[..., has_enough] = np.maximum(careful[..., has_enough], found * (1.0 + np.sqrt(2.0 / count)))
        size *= 2
    return careful, np.where(alone > 0, largest / np.where(alone > 0, alone, 1.0), 1.0)


def _log_mixture(excess: Floats, looks: Looks) -> Floats:
    """Logarithm of the mixture at a sum of standardised excesses.

    The mixture is the integral over x > 0 of 2 sqrt(r / 2 pi) exp(-r x^2 / 2) exp(x s - x^2 n / 2), where r is the
    precision, s the sum and n the number of pairs. It is an e-process against means of at most 0, since every x is
    above 0.
    """
    width = looks / MIXTURE_PRECISION + 1.0
    return math.log(2.0) - 0.5 * np.log(width) + _gain(excess / np.sqrt(MIXTURE_PRECISION * width))


def _boundary(looks: Looks, alpha: float) -> Floats:
    """Sum of standardised excesses at which the mixture reaches 1 / alpha, by Newton's method."""
    width = looks / MIXTURE_PRECISION + 1.0
    wanted = math.log(1.0 / alpha) - math.log(2.0) + 0.5 * np.log(width)
    point = np.sqrt(2.0 * wanted + 2.0)  # starts above the root of a convex function, so Newton converges
    for _ in range(8):
        density = np.exp(-0.5 * point * point) / math.sqrt(2.0 * math.pi)
        point = point - (_gain(point) - wanted) / (point + density / (0.5 * _erfc(-point / math.sqrt(2.0))))
    boundary: Floats = point * np.sqrt(MIXTURE_PRECISION * width)
    return boundary


def _gain(x: Floats) -> Floats:
    """Logarithm of exp(x^2 / 2) times the normal distribution function. Far below the mean, Mills' ratio is used."""
    near = np.maximum(x, -30.0)
    far = np.minimum(x, -30.0)
    return np.where(
        x < -30.0,
        np.log1p(-1.0 / (far * far)) - np.log(-far) - 0.5 * math.log(2.0 * math.pi),
        0.5 * near * near + np.log(0.5 * _erfc(-near / math.sqrt(2.0))),
    )
