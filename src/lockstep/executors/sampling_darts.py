"""Drawing from many tokens without weighing them all: rejection under an envelope made of column maxima.

Over every token of a column stands a bar as high as the weight of the column's maximum. A dart thrown evenly at the
bars hits the part that is the token's own weight with a probability in proportion to that weight; a dart above it is
thrown again (J. von Neumann, "Various techniques used in connection with random digits", 1951). Nothing is
approximate: the envelope decides how many darts are needed, never what they hit. Of a column of 64 at least one dart
    in 64 counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.executors.sampling_random import TokenRandom
from lockstep.executors.sampling_rows import GRID_ROWS, Columns, Floats, Ids

Weights = npt.NDArray[np.float64]

EXP_MARGIN = 2.0**-15
"""Bound of the relative error of a sum of float32 weights. A float32 argument of exp is off by at most two roundings
of a number below 64, 2**-24 * 64 * 2 (smaller weights do not count in a sum of at least 1), the function by a few
2**-24, and the sum of 64 terms by 2**-18: together below 2**-16."""

_FIRST_DARTS = 128
_MAX_DARTS = 4_096
_MAX_ROUNDS = 64


def weigh(values: Floats, peak: float, temperature: float) -> Weights:
    """Unnormalised probabilities; the peak's is 1."""
    weights = values.astype(np.float64)
    weights -= peak
    if temperature != 1.0:
        weights /= temperature
    return np.exp(weights, out=weights)


def weigh_lightly(values: Floats, peak: float, temperature: float) -> Floats:
    """As `weigh` in float32, for sums of many: EXP_MARGIN bounds their error."""
    weights = np.subtract(values, np.float32(peak))
    if temperature != 1.0:
        weights *= np.float32(1.0 / temperature)
    return np.exp(weights, out=weights)


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens before some rank: logits above the bound, and those at the bound up to an id."""

    bound: np.float32
    last_id: int

    def holds(self, values: Floats, ids: Ids) -> npt.NDArray[np.bool_]:
        inside: npt.NDArray[np.bool_] = (values > self.bound) | ((values == self.bound) & (ids <= self.last_id))
        return inside


class Darts:
    """Throws at the tokens of the columns whose maximum reaches `bound`; at least those of that logit may be hit."""

    __slots__ = ("_bars", "_cols", "_masses", "_random", "_temperature")

    def __init__(self, cols: Columns, temperature: float, bound: np.float32, random: TokenRandom) -> None:
        self._cols = cols
        self._temperature = temperature
        self._random = random
        self._bars = weigh(cols.maxima, cols.peak, temperature)
        if bound > -np.inf:
            self._bars[cols.maxima < bound] = 0.0
        self._masses = np.cumsum(self._bars)

    def first(self, support: Support) -> int:
        """The first hit within the support."""
        for values, ids in self.hits():
            inside = support.holds(values, ids)
            if inside.any():
                return int(ids[inside.argmax()])
        return int(self._cols.row.argmax())

    def hits(self) -> Iterator[tuple[Floats, Ids]]:
        """Batches of hits in the order of the throws, each distributed as the weights; ends after many empty rounds.

        Every round counts with a probability of at least 1 - (63 / 64) ** 128, later ones of nearly 1.
        """
        count = _FIRST_DARTS
        for _ in range(_MAX_ROUNDS):
            yield self._throw(count)
            count = min(2 * count, _MAX_DARTS)

    def _throw(self, count: int) -> tuple[Floats, Ids]:
        cols = self._cols
        words = self._random.words(2 * count)
        across = (words[:count] >> np.uint64(12)) * 2.0**-52
        column = self._masses.searchsorted(across * self._masses[-1], side="right")
        # The other word: six bits for the element of the column, 52 for the height.
        element = (words[count:] >> np.uint64(58)).astype(np.int64)
        height = ((words[count:] >> np.uint64(6)) & np.uint64(2**52 - 1)) * 2.0**-52
        ids = column
        thrown = height * self._bars[column]
        if cols.height > 1:
            assert cols.height == GRID_ROWS
            single = column >= cols.width
            ids = column + cols.width * np.where(single, cols.height - 1, element)
            thrown[single & (element > 0)] = np.inf
        values = cols.row[ids]
        hit = (thrown < weigh(values, cols.peak, self._temperature)).nonzero()[0]
        return values[hit], ids[hit]
