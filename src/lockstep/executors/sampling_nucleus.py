"""A draw from a nucleus (top-p) too wide to sort: draw from all tokens until one is in the nucleus.

Where the weight is at the top, the head alone mostly tells (sampling_head.py). Otherwise everything is weighed. That a
token is in the nucleus needs no sorting: the tokens before it in rank must weigh less than top_p of all. Weights
and sums are taken in float32 first; where its error could matter, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.executors.sampling_darts import EXP_MARGIN, Support, weigh, weigh_lightly
from lockstep.executors.sampling_head import Head
from lockstep.executors.sampling_params import ResolvedSampling
from lockstep.executors.sampling_random import TokenRandom
from lockstep.executors.sampling_rows import Columns, Floats

_SUMMANDS = 64
"""Terms that are added up in float32 before float64 takes over; EXP_MARGIN counts on it."""
_SMALL_TOP_P = 0.5
"""Below it what is surely outside of the nucleus is taken out before drawing, else 1 / top_p draws were needed."""
_MAX_DRAWS = 4_096
"""At least one draw in 1 / _SMALL_TOP_P is in the nucleus, or about one in _SUMMANDS: so many never fail."""

Rank = tuple[float, int]
"""(-logit, id): ascending is most likely first."""


class _Shares:
    """Sums of light weights, and draws in proportion to them."""

    __slots__ = ("_masses", "_rest", "_weights", "_width", "total")

    def __init__(self, weights: Floats) -> None:
        self._weights = weights
        self._width = len(weights) // _SUMMANDS
        self._rest = weights[_SUMMANDS * self._width :]
        self._masses = np.cumsum(np.concatenate((self._grid.sum(axis=0), self._rest)), dtype=np.float64)
        self.total = float(self._masses[-1])

    @property
    def _grid(self) -> Floats:
        return self._weights[: _SUMMANDS * self._width].reshape(_SUMMANDS, self._width)

    def draw(self, random: TokenRandom) -> int:
        column = int(self._masses.searchsorted(random.uniform() * self.total, side="right"))
        if column >= self._width:
            return column + (_SUMMANDS - 1) * self._width
        masses = np.cumsum(self._grid[:, column], dtype=np.float64)
        return int(masses.searchsorted(random.uniform() * masses[-1], side="right")) * self._width + column


@dataclass(slots=True)
class _Nucleus:
    """Answers whether a token is in the nucleus, and remembers what that says of others."""

    row: Floats
    peak: float
    sampling: ResolvedSampling
    weights: Floats
    """[V] light weights, 0 for tokens that do not count."""
    total: float
    in_until: Rank = (-np.inf, -1)
    """Ranks up to it are in."""
    out_from: Rank = (np.inf, 0)
    """Ranks from it are out."""

    def holds(self, token: int) -> bool:
        rank = (-float(self.row[token]), token)
        if rank <= self.in_until:
            return True
        if rank >= self.out_from:
            return False
        inside = self._is_before_end(token)
        if inside:
            self.in_until = rank
        else:
            self.out_from = rank
        return inside

    def _is_before_end(self, token: int) -> bool:
        value = self.row[token]
        num_ties = int(np.count_nonzero(self.row[:token] == value))
        before, slack = self._weight_above(token)
        before += num_ties * float(self.weights[token])
        end = self.sampling.top_p * self.total
        if abs(before - end) > slack + EXP_MARGIN * (before + 2.0 * end):
            return before < end
        exact = weigh(self.row, self.peak, self.sampling.temperature)
        exact[self.weights == 0.0] = 0.0
        above = float(np.sum(exact[self.row > value]))
        return above + num_ties * float(exact[token]) < self.sampling.top_p * float(np.sum(exact))

    def _weight_above(self, token: int) -> tuple[float, float]:
        """What weighs more than the token in all, and the error of that.

        The sum of max(weight, w) less w for each that is no heavier: cheaper than picking the heavier ones. Equal light
        weights of unequal logits are in the error: their number times a rounding.
        """
        own = self.weights[token]
        total = _sum(np.maximum(self.weights, own))
        num_lighter = len(self.row) - int(np.count_nonzero(self.row > self.row[token]))
        return total - num_lighter * float(own), EXP_MARGIN * total


def draw_from_nucleus(cols: Columns, sampling: ResolvedSampling, support: Support, random: TokenRandom) -> int:
    """A token of the nucleus of those in the support."""
    row = cols.row
    uncertain: int | None = None
    if support.bound == -np.inf:
        uncertain, is_in = Head(cols, sampling).draw(random)
        if uncertain is not None and is_in:
            return uncertain
    weights = weigh_lightly(row, cols.peak, sampling.temperature)
    if support.bound > -np.inf:
        weights *= row >= support.bound
        ties = np.flatnonzero(row == support.bound)
        weights[ties[ties > support.last_id]] = 0.0
    shares = _Shares(weights)
    nucleus = _Nucleus(row, cols.peak, sampling, weights, shares.total)
    if uncertain is not None and nucleus.holds(uncertain):
        return uncertain
    if sampling.top_p < _SMALL_TOP_P:
        bound = _surely_out_below(cols, sampling, shares.total)
        shares = _Shares(weights * (row >= bound))
    for _ in range(_MAX_DRAWS):
        token = shares.draw(random)
        if nucleus.holds(token):
            return token
    return int(row.argmax())


def _surely_out_below(cols: Columns, sampling: ResolvedSampling, total: float) -> np.float32:
    """A logit below which nothing is in the nucleus: the column maxima above weigh enough. -inf: none is known."""
    maxima = np.sort(cols.maxima)[::-1]
    masses = np.cumsum(weigh(maxima, cols.peak, sampling.temperature))
    needed = int(masses.searchsorted(sampling.top_p * total * (1.0 + 2.0 * EXP_MARGIN)))
    return np.float32(maxima[needed]) if needed < len(maxima) else np.float32(-np.inf)


def _sum(weights: npt.NDArray[np.float32]) -> float:
    """The sum of a row in float64, after adding up a few terms in float32."""
    body = len(weights) // _SUMMANDS * _SUMMANDS
    partial = np.add.reduce(weights[:body].reshape(_SUMMANDS, -1))
    return float(np.add.reduce(partial, dtype=np.float64) + np.add.reduce(weights[body:], dtype=np.float64))
