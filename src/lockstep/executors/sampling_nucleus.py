"""A draw from a nucleus (top-p) too wide to sort: draw from all tokens until one is in the nucleus.

That a token is in it needs no sorting either: the tokens before it in rank must weigh less than top_p of all. Both sums
are taken in float32 first; where its error could matter, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.executors.sampling_darts import EXP_MARGIN, Darts, Support, weigh
from lockstep.executors.sampling_params import ResolvedSampling
from lockstep.executors.sampling_random import TokenRandom
from lockstep.executors.sampling_rows import Columns, Floats

_SUMMANDS = 64
"""Terms that are added up in float32 before float64 takes over; EXP_MARGIN counts on it."""

Rank = tuple[float, int]
"""(-logit, id): ascending is most likely first."""


@dataclass(slots=True)
class _Nucleus:
    """Answers whether a token is in the nucleus, and remembers what that says of others."""

    row: Floats
    peak: float
    temperature: float
    top_p: float
    support: Support
    weights: Floats
    """[V], 0 outside the support."""
    total: float
    in_until: Rank = (-np.inf, -1)
    """Ranks up to it are in."""
    out_from: Rank = (np.inf, 0)
    """Ranks from it are out."""

    def holds(self, value: float, token: int) -> bool:
        rank = (-value, token)
        if rank <= self.in_until:
            return True
        if rank >= self.out_from:
            return False
        inside = self._is_before_end(value, token)
        if inside:
            self.in_until = rank
        else:
            self.out_from = rank
        return inside

    def _is_before_end(self, value: float, token: int) -> bool:
        num_ties = int(np.count_nonzero(self.row[:token] == np.float32(value)))
        above = self.row > np.float32(value)
        before = _sum(self.weights * above) + num_ties * float(self.weights[token])
        end = self.top_p * self.total
        if abs(before - end) > 2.0 * EXP_MARGIN * end + EXP_MARGIN * before:
            return before < end
        exact = weigh(self.row, self.peak, self.temperature)
        exact[self.weights == 0.0] = 0.0
        weight = float(exact[token])
        return float(np.sum(exact[above])) + num_ties * weight < self.top_p * float(np.sum(exact))


def draw_from_nucleus(cols: Columns, sampling: ResolvedSampling, support: Support, random: TokenRandom) -> int:
    """A token of the nucleus of those in the support."""
    row = cols.row
    weights = np.subtract(row, np.float32(cols.peak))
    if sampling.temperature != 1.0:
        weights *= np.float32(1.0 / sampling.temperature)
    np.exp(weights, out=weights)
    if support.bound > -np.inf:
        weights *= row >= support.bound
        ties = np.flatnonzero(row == support.bound)
        weights[ties[ties > support.last_id]] = 0.0
    total = _sum(weights)
    nucleus = _Nucleus(row, cols.peak, sampling.temperature, sampling.top_p, support, weights, total)
    bound = max(support.bound, _surely_out_below(cols, sampling, total))
    for values, ids in Darts(cols, sampling.temperature, bound, random).hits():
        inside = support.holds(values, ids)
        for value, token in zip(values[inside].tolist(), ids[inside].tolist(), strict=True):
            if value >= bound and nucleus.holds(value, token):
                return int(token)
    return int(row.argmax())


def _surely_out_below(cols: Columns, sampling: ResolvedSampling, total: float) -> np.float32:
    """A logit below which nothing is in the nucleus, as the column maxima above it weigh enough; -inf: none is known.

    Without it a small top_p on a flat distribution would need as many draws as 1 / top_p.
    """
    maxima = np.sort(cols.maxima)[::-1]
    masses = np.cumsum(weigh(maxima, cols.peak, sampling.temperature))
    needed = int(masses.searchsorted(sampling.top_p * total * (1.0 + 2.0 * EXP_MARGIN)))
    return np.float32(maxima[needed]) if needed < len(maxima) else np.float32(-np.inf)


def _sum(weights: npt.NDArray[np.float32]) -> float:
    """The sum of a row in float64, after adding up a few terms in float32."""
    body = len(weights) // _SUMMANDS * _SUMMANDS
    partial = np.add.reduce(weights[:body].reshape(_SUMMANDS, -1))
    return float(np.add.reduce(partial, dtype=np.float64) + np.add.reduce(weights[body:], dtype=np.float64))
