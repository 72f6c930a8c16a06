"""One token from one row: temperature, min-p, top-k, top-p and the draw itself.

With x the logits, m their maximum and T the temperature, a token's weight is w = exp((x - m) / T). Tokens are ranked by
logit, of equals the lowest id first. min-p keeps tokens with w of at least min_p; top-k keeps the k first in rank;
top-p keeps a token when those before it weigh less than top_p of all that were kept so far, so the first always stays.

Where few tokens are left they are sorted and the draw is an inverse of their cumulated weights. Where many are left
(pure temperature, a wide nucleus) sampling_darts.py draws without looking at them all.
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.executors.sampling_darts import Darts, Support, Weights, weigh
from lockstep.executors.sampling_nucleus import draw_from_nucleus
from lockstep.executors.sampling_params import ResolvedSampling
from lockstep.executors.sampling_random import TokenRandom
from lockstep.executors.sampling_rows import (
    Columns,
    Floats,
    Ids,
    at_least,
    columns,
    greatest,
)

MAX_SORTED = 256
"""The largest top-k, and the largest number of columns, for which candidates are sorted."""


def draw(row: Floats, sampling: ResolvedSampling, random: TokenRandom | None) -> int | None:
    """The token, or None when the row holds NaN, +inf or nothing that may come.

    Args:
        row: [V] float32, contiguous, read only.
        random: set to the token's position; None: the most likely token is wanted.
    """
    if random is None:
        token = int(row.argmax())
        return token if math.isfinite(row[token]) else None
    cols = columns(row)
    if not math.isfinite(cols.peak):
        return None
    few = _few(cols, sampling)
    if few is not None:
        values, ids = few
        masses = np.cumsum(weigh(values, cols.peak, sampling.temperature))
        if sampling.top_p < 1.0:
            masses = masses[: masses.searchsorted(sampling.top_p * masses[-1]) + 1]
        return _pick(masses, ids, random)
    support = _support(cols, sampling)
    if sampling.top_p >= 1.0:
        return Darts(cols, sampling.temperature, support.bound, random).first(support)
    return draw_from_nucleus(cols, sampling, support, random)


def _pick(masses: Weights, ids: Ids, random: TokenRandom) -> int:
    """One of the tokens whose cumulated weights are given."""
    return int(ids[masses.searchsorted(random.uniform() * masses[-1], side="right")])


def _min_p_bound(cols: Columns, sampling: ResolvedSampling) -> np.float32:
    """The least logit that min-p keeps, rounded up: comparing float32 with it is comparing with the exact bound."""
    exact = cols.peak + sampling.temperature * math.log(sampling.min_p)
    rounded = np.float32(exact)
    return rounded if float(rounded) >= exact else np.nextafter(rounded, np.float32(np.inf))


def _few(cols: Columns, sampling: ResolvedSampling) -> tuple[Floats, Ids] | None:
    """What min-p and top-k leave, in rank order; None when that is too much to sort."""
    if 0 < sampling.top_k <= MAX_SORTED:
        values, ids = greatest(cols, min(sampling.top_k, len(cols.row)))
        if sampling.min_p > 0.0:
            kept = (-values).searchsorted(-_min_p_bound(cols, sampling), side="right")
            values, ids = values[:kept], ids[:kept]
        return values, ids
    if sampling.min_p > 0.0:
        bound = _min_p_bound(cols, sampling)
        if np.count_nonzero(cols.maxima >= bound) <= MAX_SORTED:
            values, ids = at_least(cols, bound)
            return (values[: sampling.top_k], ids[: sampling.top_k]) if sampling.top_k else (values, ids)
    return None


def _support(cols: Columns, sampling: ResolvedSampling) -> Support:
    """What min-p and a large top-k leave."""
    size = len(cols.row)
    support = Support(np.float32(-np.inf), size)
    if 0 < sampling.top_k < size:
        kth = np.float32(np.partition(cols.row, size - sampling.top_k)[size - sampling.top_k])
        num_ties = sampling.top_k - int(np.count_nonzero(cols.row > kth))
        support = Support(kth, int(np.flatnonzero(cols.row == kth)[num_ties - 1]))
    if sampling.min_p > 0.0:
        bound = _min_p_bound(cols, sampling)
        if bound > support.bound:
            support = Support(bound, size)
    return support
