"""A draw from a nucleus (top-p) of which only the head is looked at.

The columns with the greatest maxima are weighed element by element; over the others stand bars, as in
sampling_darts.py. A throw at both gives a token in proportion to its weight, or nothing. Of a token near the top it is
then certain that it is in the nucleus, because the weight of all tokens is at least what is seen here; only for the
others must everything be weighed.
"""

from __future__ import annotations

import numpy as np

from lockstep.executors.sampling_darts import EXP_MARGIN, Weights, weigh_lightly
from lockstep.executors.sampling_params import ResolvedSampling
from lockstep.executors.sampling_random import TokenRandom
from lockstep.executors.sampling_rows import Columns, bound_of_greatest

_NUM_COLUMNS = 32
_HOPELESS = 4.0
"""Height of the bars relative to what surely lies below the head's, from which on throws would mostly miss."""
_MAX_THROWS = 32


class Head:
    """The columns with the greatest maxima, and bounds of the weight of all tokens."""

    __slots__ = (
        "_block",
        "_bound",
        "_cols",
        "_is_near",
        "_least",
        "_most",
        "_places",
        "_sampling",
        "_weights",
        "bars",
    )

    def __init__(self, cols: Columns, sampling: ResolvedSampling) -> None:
        self._cols = cols
        self._sampling = sampling
        self._bound = bound_of_greatest(cols, min(_NUM_COLUMNS, len(cols.maxima)))
        light = weigh_lightly(cols.maxima, cols.peak, sampling.temperature)
        self._places = (cols.maxima >= self._bound).nonzero()[0]
        heads = float(light[self._places].sum(dtype=np.float64))
        outside = float(light.sum(dtype=np.float64)) - heads
        self._is_near = outside * cols.height <= _HOPELESS * heads
        """Whether most throws will hit."""
        if not self._is_near:
            return
        num_grid = int(self._places.searchsorted(cols.width))
        self._block = cols.grid.take(self._places[:num_grid], axis=1)
        self._weights = weigh_lightly(self._block, cols.peak, sampling.temperature)
        sums = self._weights.sum(axis=0, dtype=np.float64)
        bars: Weights = light.astype(np.float64)
        singles = bars[self._places[num_grid:]]
        inside = float(sums.sum()) + float(singles.sum())
        self._least = (inside + outside) * (1.0 - EXP_MARGIN)
        self._most = (inside + outside * cols.height) * (1.0 + EXP_MARGIN)
        bars *= cols.height
        bars[self._places[:num_grid]] = sums
        bars[self._places[num_grid:]] = singles
        self.bars = bars
        """Per column: what its tokens weigh, or a bound of it."""

    def draw(self, random: TokenRandom) -> tuple[int | None, bool]:
        """A token of the nucleus and True; or a token of which that is not certain and False; or None: nothing was hit.

        After the second, the token must be taken if and only if it is in the nucleus; otherwise a new draw is due.
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
        """Between what the tokens before it in rank weigh: which of its equals are before it is not asked."""
        cols = self._cols
        value = cols.row[token]
        least = float(self._weights[self._block > value].sum(dtype=np.float64))
        num_equal = int(np.count_nonzero(self._block == value))
        singles = cols.row[cols.width * cols.height :]
        if len(singles):
            above = weigh_lightly(singles[singles > value], cols.peak, self._sampling.temperature)
            least += float(above.sum(dtype=np.float64))
            num_equal += int(np.count_nonzero(singles == value))
        if value < self._bound:
            return least, np.inf
        return least, least + (num_equal - 1) * self._weight(token)

    def throw(self, masses: Weights, random: TokenRandom) -> int | None:
        """A token in proportion to its weight, or None: the throw went above the weights."""
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
        return float(weigh_lightly(self._cols.row[token : token + 1], self._cols.peak, self._sampling.temperature)[0])
