"""Statistics that hold however often one looks: nearest ranks, long-run variances, e-processes, e-BH.

Three methods decide in sequential mode, and nothing else does. Each is exact under a condition that a server does not
quite fulfil; its description has the condition that holds instead:

- `track`: the mean of a series against a bound, by a half-normal mixture of Gaussian likelihood ratios (Robbins,
  "Statistical methods related to the law of the iterated logarithm", 1970). For Gaussian excesses of variance 1 it is
  an e-process, exactly, at every n. Excesses are divided by an estimated deviation instead, and become Gaussian only
  together, by the central limit theorem: an asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy,
  Ramdas, "Time-uniform central limit theory and asymptotic confidence sequences", 2021), whose error rate is alpha in
  the limit of late first looks. That is why there is a first look.
- `bet_below`: the mean of events between -1 and 1, by betting on blocks of neighbours (Waudby-Smith and Ramdas,
  "Estimating means of bounded random variables by betting", 2024). Exact at every n, without a variance, as long as
  the mean of no block, given those before it, is less than the bound that it is claimed to reach. So it is what counts
  for events that are too rare to have a variance yet; where events come in longer bursts than half a block, the
  condition is broken.
- `e_bh` (Wang and Ramdas, "False discovery rate control with e-values", 2022) over metrics and segments: exact for
  e-values under any dependence, and at any stopping time for e-processes of one filtration. Those of `track` are
  asymptotically so (Ignatiadis, Wang, Ramdas, "Asymptotic and compound e-values", 2024), jointly, since series of one
  stream converge to one Gaussian process of independent increments.

Successive answers of one server are correlated, so `track` divides by the long-run deviation. Its variance is that of
means of blocks of 1, 2, 4, ... neighbours, as long as there are `MIN_BLOCKS` of them, times their length, and one
standard error (of as many normal blocks) more; the largest counts. Blocks of about the square root of n alone would be
consistent (under mixing, with more than two moments); the largest is not less, so it errs to the side of no decision.
Without the standard error, a queue that is rarely long has 7 % false alarms for 5 %. Memory that is longer than the
series cannot be seen in it: then variances grow with the length of blocks up to the longest, and as long as n is below
`MIN_TIMES_CORRELATED` times the largest over the variance of single pairs there is no evidence at all. No part of this
depends on what comes after a look.

docs/gate-error-rates.md has what is left of the guarantee on short, correlated and heavy-tailed series, by simulation.
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
"""Long-run variance, and the pairs with which evidence begins, from sums at looks."""
_erfc = np.vectorize(math.erfc, otypes=[np.float64])  # NumPy has none

MIN_BLOCKS = 10
"""Blocks whose means have a variance."""
MIN_TIMES_CORRELATED = 100.0
"""Evidence begins with so many times the pairs that are worth one independent pair."""
MIN_PAIRS = 100
"""Evidence never begins before."""
MIXTURE_PRECISION = 500.0
"""One over the variance of the half-normal distribution of effects (in deviations of one pair). Bounds are narrowest,
for their n, at six times as many pairs; a larger one would look later, a smaller one would trust the first hundred
pairs more."""
LEAST_EVENTS = 3.0
"""Events that a series is taken to have at the least: as many may have been missed with a chance of 5 %."""
LOOKS_PER_OCTAVE = 16
"""Looks at a series, evenly in the logarithm of its length; the last one is at its end."""
STAKES = (0.5, 0.95)
"""Parts of a unit that are bet on each block; the gains are averaged, which is an e-process again."""
_LEAST_VARIANCE = 1e-24
"""Variance of series that never change."""


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
    scale: Floats
    """Long-run standard deviation of one pair."""
    begins: Floats
    """Pairs with which evidence begins, as far as is known at that look."""
    lower: Floats
    """Lower end of the confidence sequence, one-sided at alpha; -inf while there is no evidence."""
    upper: Floats
    """Upper end of the confidence sequence, one-sided at alpha; inf while there is no evidence."""
    log_above: Floats
    """Logarithm of the e-value against: the mean is at most the bound; -inf while there is no evidence."""
    log_below: Floats
    """Logarithm of the e-value against: the mean is at least the bound; likewise."""


def looks_of(num_pairs: int, first: int = MIN_PAIRS) -> Looks:
    """Lengths at which a series is looked at; all but the last are the same for every longer series."""
    if num_pairs < first:
        return np.empty(0, np.int64)
    num_octaves = math.ceil(math.log2(num_pairs / first)) + 1
    grid = np.unique(np.floor(first * 2.0 ** (np.arange(num_octaves * LOOKS_PER_OCTAVE) / LOOKS_PER_OCTAVE)))
    return np.append(grid[grid < num_pairs].astype(np.int64), num_pairs)


def variance_of_blocks(sums: Floats, looks: Looks) -> tuple[Floats, Floats]:
    """Variance of one pair as the mean's uncertainty has it, and the pairs with which evidence begins.

    Args:
        sums: of the first 0, 1, 2, ... pairs, along the last axis.
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
    """Follow series; see the module for what is exact and what is asymptotic.

    Args:
        series: shape (..., pairs): a number per pair, in the order of time.
        bound: the mean that is judged.
        alpha: chance of a false alarm that each side of the confidence sequence may have.
        looks: pairs so far at each look, none above the number of pairs.
        is_event: whether numbers are -1, 0 and 1. A series of few events by chance has little variance by the same
            chance, so against a larger mean it has the variance that it would have there: of as many more events, in
            clusters as long.
        measure: estimate of the long-run variance.
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
    """The distance w' that equals width * sqrt(1 + w' / rate)."""
    known = np.where(np.isinf(width), 0.0, width)
    more = known * known / rate
    return np.where(np.isinf(width), math.inf, 0.5 * (more + np.sqrt(more * more + 4.0 * known * known)))


def width_after(scale: float | Floats, num_pairs: Looks, alpha: float) -> Floats:
    """Width of the one-sided confidence sequence of a series after so many pairs.

    Args:
        scale: long-run standard deviation of one pair.
    """
    return scale * _boundary(num_pairs, alpha) / num_pairs


def bet_below(series: Floats, bound: float, block: int, looks: Looks) -> Floats:
    """Logarithm of the e-value against: the mean of these events is at least the bound.

    Args:
        series: shape (..., pairs), from -1 to 1.
        bound: above 0 and below 1.
        block: neighbours that are one bet; what is left over at the end is not bet on.
        looks: pairs so far at each look.
    """
    means = _block_means(series, block)
    gains = np.stack([np.cumsum(np.log1p(stake * (bound - means)), axis=-1) for stake in STAKES])
    mixed = _log_mean_exp(gains)
    return np.concatenate([np.zeros((*series.shape[:-1], 1)), mixed], axis=-1)[..., looks // block]


def bet_upper(series: Floats, alpha: float, block: int) -> float:
    """Upper bound of the mean of these events at their end: the least that `bet_below` has ruled out at alpha; 1: none.

    Args:
        series: shape (pairs,), from -1 to 1.
        block: neighbours that are one bet.
    """
    means, times = np.unique(_block_means(series, block), return_counts=True)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        gains = np.array([float(np.sum(times * np.log1p(stake * (middle - means)))) for stake in STAKES])
        low, high = (low, middle) if _log_mean_exp(gains) >= math.log(1.0 / alpha) else (middle, high)
    return high


def e_bh(log_values: Floats, alpha: float, counts: Bools | None = None) -> Bools:
    """Hypotheses that are rejected at a false discovery rate of alpha, whatever their dependence.

    The k largest e-values are rejected for the largest k of which the k-th is at least (number of hypotheses) /
    (alpha k).

    Args:
        log_values: logarithms of e-values, shape (..., hypotheses).
        counts: which hypotheses there are, of the same shape; None: all of them.
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
    """Logarithm of the mean over the first axis of numbers that are given by their logarithms."""
    most = gains.max(axis=0)
    mixed: Floats = most + np.log(np.exp(gains - most).mean(axis=0))
    return mixed


def _long_run_variance(sums: Floats, looks: Looks) -> tuple[Floats, Floats]:
    """Variance of one pair as the mean's uncertainty has it, and how many pairs are worth one independent pair.

    Args:
        sums: of the first 0, 1, 2, ... pairs, along the last axis.
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

    The integral over x > 0 of 2 sqrt(r / 2 pi) exp(-r x^2 / 2) exp(x s - x^2 n / 2), with r the precision, s the sum
    and n the number of pairs; an e-process against means of at most 0, since every x is above 0.
    """
    width = looks / MIXTURE_PRECISION + 1.0
    return math.log(2.0) - 0.5 * np.log(width) + _gain(excess / np.sqrt(MIXTURE_PRECISION * width))


def _boundary(looks: Looks, alpha: float) -> Floats:
    """The sum of standardised excesses at which the mixture reaches 1 / alpha, by Newton's method."""
    width = looks / MIXTURE_PRECISION + 1.0
    wanted = math.log(1.0 / alpha) - math.log(2.0) + 0.5 * np.log(width)
    point = np.sqrt(2.0 * wanted + 2.0)  # above the root of a convex function: Newton falls to it from there
    for _ in range(8):
        density = np.exp(-0.5 * point * point) / math.sqrt(2.0 * math.pi)
        point = point - (_gain(point) - wanted) / (point + density / (0.5 * _erfc(-point / math.sqrt(2.0))))
    boundary: Floats = point * np.sqrt(MIXTURE_PRECISION * width)
    return boundary


def _gain(x: Floats) -> Floats:
    """Logarithm of exp(x^2 / 2) times the normal distribution function; far below the mean by Mills' ratio."""
    near = np.maximum(x, -30.0)
    far = np.minimum(x, -30.0)
    return np.where(
        x < -30.0,
        np.log1p(-1.0 / (far * far)) - np.log(-far) - 0.5 * math.log(2.0 * math.pi),
        0.5 * near * near + np.log(0.5 * _erfc(-near / math.sqrt(2.0))),
    )
