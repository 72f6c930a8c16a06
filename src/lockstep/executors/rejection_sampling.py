"""Rejection sampling: draws exactly from many tokens without sorting them, or even weighing them all.

**Under an envelope** (`first_hit`): above every token of a column is a bar as high as the weight of the column's
maximum. A point that is uniform over the bars lies within a token's own weight with a probability in proportion to that
weight; a point above it is rejected and drawn again (J. von Neumann, "Various techniques used in connection with random
digits", 1951). The method is exact: the envelope affects how many points are needed, but not the distribution. With a
column of 64, at least one point in 64 is accepted.

**From a nucleus** (top-p) too wide to sort (`draw_from_nucleus`): draw from all tokens until one is in the nucleus.
Testing a token needs no sorting: the tokens before it in rank must weigh less than top_p of all. If most of the weight
is at the top, the head alone usually decides this (`Head`): the columns with the greatest maxima are weighed element by
element, the others are bounded by bars, and the weight of all tokens is at least the part that was weighed. Otherwise
everything is weighed. Weights and sums are computed in float32 first, and in float64 where the error could matter.

**Randomness** (`TokenRandom`) is counter-based: a pure function of a seed and a position, so that there is no state to
keep. The generator is Philox4x64-10 (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in
numpy's implementation; numpy guarantees that its raw words never change (NEP 19). The key is the seed, the counter is
(block, position, 0, 0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lockstep.executors.logits import GRID_ROWS, Columns, Floats, Ids, bound_of_greatest
from lockstep.executors.row_math import Weights, row_math
from lockstep.executors.sampling_params import ResolvedSampling

Number = TypeVar("Number", np.float32, np.float64)
EXP_MARGIN = 2.0**-15
"""Bound of the relative error of a sum of float32 weights. A float32 argument of exp is off by at most two roundings of
a number below 64, 2**-24 * 64 * 2 (smaller weights are negligible in a sum of at least 1), the function by a few
2**-24, and the sum of 64 terms by 2**-18: together below 2**-16."""
_FIRST_POINTS = 128
_MAX_POINTS = 4_096
_MAX_ROUNDS = 64
Words = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_NUM_COLUMNS = 32
_HOPELESS = 4.0
"""Ratio of the bars' total height to the certain weight of the head, above which most throws would miss."""
_MAX_THROWS = 32
_SMALL_TOP_P = 0.5
"""Value of top_p below which tokens that are certainly outside of the nucleus are removed before drawing. Otherwise
1 / top_p draws would be needed."""
_MAX_DRAWS = 4_096
"""At least one draw in 1 / _SMALL_TOP_P is in the nucleus, or about one in GRID_ROWS, so that this many never fail."""
Rank = tuple[float, int]
"""(-logit, id): in ascending order, the most likely token is first."""


class TokenRandom:
    """Random words for the tokens of one sequence. `at` must be called before each token.

    Keeps numpy's generator only because setting its counter is ten times cheaper than creating a new one.
    """

    __slots__ = ("_counter", "_generator", "_state")

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Philox(key=seed & _MASK, counter=0)
        self._state = self._generator.state
        self._counter = self._state["state"]["counter"]

    def at(self, position: int) -> None:
        """Start the words of the token at this position."""
        self._counter[1] = position
        self._generator.state = self._state

    def words(self, count: int) -> Words:
        """The next words of this token, uniform over 64 bits."""
        return self._generator.random_raw(count)

    def uniform(self) -> float:
        """The next number in [0, 1). It has 52 bits, so that for a positive finite `total`, uniform * total < total."""
        return (self._generator.random_raw() >> 12) * 2.0**-52


def first_hit(cols: Columns, temperature: float, support: Support, random: TokenRandom) -> int:
    """Draw a token of the support: the first hit within it."""
    for values, ids in hits(cols, temperature, support.bound, random):
        inside = support.holds(values, ids)
        if inside.any():
            return int(ids[inside.argmax()])
    return int(cols.row.argmax())


def hits(cols: Columns, temperature: float, bound: np.float32, random: TokenRandom) -> Iterator[tuple[Floats, Ids]]:
    """Yield batches of hits in the order of the throws, each distributed as the weights. Ends after many empty rounds.

    Points are thrown at the columns whose maximum reaches ``bound``; at least the tokens with that logit may be hit.
    Every round has a hit with a probability of at least 1 - (63 / 64) ** 128, later ones of nearly 1.
    """
    bars = row_math().weigh(cols.maxima, cols.peak, temperature)
    if bound > -np.inf:
        bars[cols.maxima < bound] = 0.0
    masses = np.cumsum(bars)
    count = _FIRST_POINTS
    for _ in range(_MAX_ROUNDS):
        words = random.words(2 * count)
        across = (words[:count] >> np.uint64(12)) * 2.0**-52
        column = masses.searchsorted(across * masses[-1], side="right")
        # The other word: six bits for the element of the column, 52 for the height.
        element = (words[count:] >> np.uint64(58)).astype(np.int64)
        height = ((words[count:] >> np.uint64(6)) & np.uint64(2**52 - 1)) * 2.0**-52
        ids = column
        thrown = height * bars[column]
        if cols.height > 1:
            assert cols.height == GRID_ROWS
            single = column >= cols.width
            ids = column + cols.width * np.where(single, cols.height - 1, element)
            thrown[single & (element > 0)] = np.inf
        values = cols.row[ids]
        hit = (thrown < row_math().weigh(values, cols.peak, temperature)).nonzero()[0]
        yield values[hit], ids[hit]
        count = min(2 * count, _MAX_POINTS)


def draw_from_nucleus(cols: Columns, sampling: ResolvedSampling, support: Support, random: TokenRandom) -> int:
    """Draw a token of the nucleus of those in the support."""
    row = cols.row
    uncertain: int | None = None
    if support.bound == -np.inf:
        uncertain, is_in = Head(cols, sampling).draw(random)
        if uncertain is not None and is_in:
            return uncertain
    weights = row_math().weigh_lightly(row, cols.peak, sampling.temperature)
    if support.bound > -np.inf:
        weights *= row >= support.bound
        ties = np.flatnonzero(row == support.bound)
        weights[ties[ties > support.last_id]] = 0.0
    shares = _Shares(weights)
    nucleus = _Nucleus(row, cols.peak, sampling, weights, shares.total)
    if uncertain is not None and nucleus.holds(uncertain):
        return uncertain
    if sampling.top_p < _SMALL_TOP_P:
        bound = _exclusion_bound(cols, sampling, shares.total)
        shares = _Shares(weights * (row >= bound))
    for _ in range(_MAX_DRAWS):
        token = shares.draw(random)
        if nucleus.holds(token):
            return token
    return int(row.argmax())


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens up to some rank: logits above the bound, and those at the bound up to an id."""

    bound: np.float32
    last_id: int

    def holds(self, values: Floats, ids: Ids) -> npt.NDArray[np.bool_]:
        inside: npt.NDArray[np.bool_] = (values > self.bound) | ((values == self.bound) & (ids <= self.last_id))
        return inside


class Head:
    """The columns with the greatest maxima, and bounds of the weight of all tokens."""

    def __init__(self, cols: Columns, sampling: ResolvedSampling) -> None:
        self._cols = cols
        self._sampling = sampling
        self._bound = bound_of_greatest(cols, min(_NUM_COLUMNS, len(cols.maxima)))
        math = row_math()
        light = math.weigh_lightly(cols.maxima, cols.peak, sampling.temperature)
        self._places = (cols.maxima >= self._bound).nonzero()[0]
        heads = math.total(light[self._places])
        outside = math.total(light) - heads
        self._is_near = outside * cols.height <= _HOPELESS * heads
        """True if most throws will hit."""
        if not self._is_near:
            return
        num_grid = int(self._places.searchsorted(cols.width))
        self._block = cols.grid.take(self._places[:num_grid], axis=1)
        self._weights = math.weigh_lightly(self._block, cols.peak, sampling.temperature)
        sums = _column_sums(self._weights.astype(np.float64))
        bars: Weights = light.astype(np.float64)
        singles = bars[self._places[num_grid:]]
        inside = math.total(sums) + math.total(singles)
        self._least = (inside + outside) * (1.0 - EXP_MARGIN)
        self._most = (inside + outside * cols.height) * (1.0 + EXP_MARGIN)
        bars *= cols.height
        bars[self._places[:num_grid]] = sums
        bars[self._places[num_grid:]] = singles
        self.bars = bars
        """Weight of each column's tokens, or a bound of it."""

    def draw(self, random: TokenRandom) -> tuple[int | None, bool]:
        """Draw a token. Returns a token of the nucleus and True; a token that may be in it and False; or None if
        nothing was hit.

        In the second case, the token must be taken if and only if it is in the nucleus; otherwise a new draw is needed.
        """
        if not self._is_near:
            return None, False
        masses = np.cumsum(self.bars)
        for _ in range(_MAX_THROWS):
            token = self.throw(masses, random)
            if token is None:
                continue
            least, most = self._weight_before(token)
            if most * (1.0 + EXP_MARGIN) < self._sampling.top_p * self._least:
                return token, True
            if least * (1.0 - EXP_MARGIN) < self._sampling.top_p * self._most:
                return token, False
        return None, False

    def _weight_before(self, token: int) -> tuple[float, float]:
        """Bounds of the weight of all tokens before it in rank. Equal tokens count only in the upper bound."""
        cols = self._cols
        value = cols.row[token]
        least = row_math().total(self._weights[self._block > value])
        num_equal = int(np.count_nonzero(self._block == value))
        singles = cols.row[cols.width * cols.height :]
        if len(singles):
            above = row_math().weigh_lightly(singles[singles > value], cols.peak, self._sampling.temperature)
            least += row_math().total(above)
            num_equal += int(np.count_nonzero(singles == value))
        if value < self._bound:
            return least, np.inf
        return least, least + (num_equal - 1) * self._weight(token)

    def throw(self, masses: Weights, random: TokenRandom) -> int | None:
        """Draw a token in proportion to its weight; None: the throw was above the weights."""
        cols = self._cols
        place = int(masses.searchsorted(random.uniform() * masses[-1], side="right"))
        chosen = int(self._places.searchsorted(place))
        is_weighed = chosen < len(self._places) and int(self._places[chosen]) == place
        if place >= cols.width:
            token = place + (cols.height - 1) * cols.width
            return token if is_weighed or random.uniform() * cols.height < 1.0 else None
        if is_weighed:
            masses = np.cumsum(self._weights[:, chosen], dtype=np.float64)
            return int(masses.searchsorted(random.uniform() * masses[-1], side="right")) * cols.width + place
        token = int(random.uniform() * cols.height) * cols.width + place
        bar = self.bars[place] / cols.height
        return token if random.uniform() * bar < self._weight(token) else None

    def _weight(self, token: int) -> float:
        value = self._cols.row[token : token + 1]
        return float(row_math().weigh_lightly(value, self._cols.peak, self._sampling.temperature)[0])


class _Shares:
    """Sums of light weights, and draws in proportion to them."""

    __slots__ = ("_masses", "_rest", "_weights", "_width", "total")

    def __init__(self, weights: Floats) -> None:
        self._weights = weights
        self._width = len(weights) // GRID_ROWS
        self._rest = weights[GRID_ROWS * self._width :]
        self._masses = np.cumsum(np.concatenate((_column_sums(self._grid), self._rest)), dtype=np.float64)
        self.total = float(self._masses[-1])

    @property
    def _grid(self) -> Floats:
        return self._weights[: GRID_ROWS * self._width].reshape(GRID_ROWS, self._width)

    def draw(self, random: TokenRandom) -> int:
        column = int(self._masses.searchsorted(random.uniform() * self.total, side="right"))
        if column >= self._width:
            return column + (GRID_ROWS - 1) * self._width
        masses = np.cumsum(self._grid[:, column], dtype=np.float64)
        return int(masses.searchsorted(random.uniform() * masses[-1], side="right")) * self._width + column


@dataclass(slots=True)
class _Nucleus:
    """Tests tokens for the nucleus, and stores the ranks that earlier results decide."""

    row: Floats
    peak: float
    sampling: ResolvedSampling
    weights: Floats
    """[V] light weights, 0 for tokens that do not count."""
    total: float
    in_until: Rank = (-np.inf, -1)
    """Ranks up to this one are in the nucleus."""
    out_from: Rank = (np.inf, 0)
    """Ranks from this one are outside."""

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
        math = row_math()
        exact = math.weigh(self.row, self.peak, self.sampling.temperature)
        exact[self.weights == 0.0] = 0.0
        above = math.total(exact[self.row > value])
        return above + num_ties * float(exact[token]) < self.sampling.top_p * math.total(exact)

    def _weight_above(self, token: int) -> tuple[float, float]:
        """Total weight of the tokens that weigh more than this one, and its error.

        Computed as the sum of max(weight, w) minus w for each token that is no heavier, which is cheaper than selecting
        the heavier ones. Equal light weights of unequal logits are part of the error: their number times a rounding.
        """
        own = self.weights[token]
        total = row_math().total(np.maximum(self.weights, own))
        num_lighter = len(self.row) - int(np.count_nonzero(self.row > self.row[token]))
        return total - num_lighter * float(own), EXP_MARGIN * total


def _exclusion_bound(cols: Columns, sampling: ResolvedSampling, total: float) -> np.float32:
    """A logit below which no token is in the nucleus, since the column maxima above it weigh enough. -inf: none is
    known."""
    maxima = np.sort(cols.maxima)[::-1]
    masses = np.cumsum(row_math().weigh(maxima, cols.peak, sampling.temperature))
    needed = int(masses.searchsorted(sampling.top_p * total * (1.0 + 2.0 * EXP_MARGIN)))
    return np.float32(maxima[needed]) if needed < len(maxima) else np.float32(-np.inf)


def _column_sums(grid: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """Sums of the columns of a grid of `GRID_ROWS`, in a fixed order: its lower half is added to the upper one."""
    while len(grid) > 1:
        half = len(grid) // 2
        grid = grid[:half] + grid[half:]
    folded: npt.NDArray[Number] = grid[0]
    return folded
