"""Finding the few logits that matter in a row of many, without sorting the row.

A row [V] is seen as a grid of 32 rows and V // 32 columns (and a rest of fewer than 32). One pass gives the maximum of
each column. The k-th greatest column maximum is a lower bound of the k-th greatest logit, because k columns hold an
element at least that great; and whatever is at least as great as some bound lies in a column whose maximum is. So a few
columns are enough, and nothing is ever approximate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

GRID_ROWS = 32
_MIN_GRID = 2_048
"""Smaller vocabularies are handled whole: the grid would cost more than it saves."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities, of the model's own distribution."""

    logprob: float
    """Of the sampled token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the k most likely, best first; of equals the lowest id first."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A row with the maxima of its columns."""

    row: Floats
    grid: Floats
    """[32, W] view of the row's beginning; W is 0 for a small vocabulary."""
    rest: Floats
    """View of what does not fill the grid."""
    maxima: Floats
    """[W]."""
    peak: float
    """The greatest logit; NaN when there is one."""


def columns(row: Floats) -> Columns:
    """One pass over a contiguous row."""
    width = len(row) // GRID_ROWS if len(row) >= _MIN_GRID else 0
    grid = row[: GRID_ROWS * width].reshape(GRID_ROWS, width)
    rest = row[GRID_ROWS * width :]
    maxima = np.maximum.reduce(grid) if width else np.empty(0, np.float32)
    peak = max(float(part.max()) if not np.isnan(part).any() else np.nan for part in (maxima, rest) if len(part))
    return Columns(row, grid, rest, maxima, peak)


def at_least(cols: Columns, bound: np.float32) -> tuple[Floats, Ids]:
    """All logits of at least `bound` with their ids, greatest first and of equals the lowest id first."""
    width = len(cols.maxima)
    chosen = np.flatnonzero(cols.maxima >= bound)
    block = cols.grid.take(chosen, axis=1)
    hits = np.flatnonzero(block >= bound)
    values, ids = block.reshape(-1)[hits], (hits // max(1, len(chosen))) * width + chosen[hits % max(1, len(chosen))]
    if len(cols.rest):
        hits = np.flatnonzero(cols.rest >= bound)
        values = np.concatenate([values, cols.rest[hits]])
        ids = np.concatenate([ids, hits + GRID_ROWS * width])
    order = np.lexsort((ids, -values))
    return values[order], ids[order]


def bound_of_greatest(cols: Columns, count: int) -> np.float32:
    """A bound that at least `count` logits reach (-inf: all, when the columns cannot tell)."""
    width = len(cols.maxima)
    if count > width:
        return np.float32(-np.inf)
    return np.float32(np.partition(cols.maxima, width - count)[width - count])


def greatest(cols: Columns, count: int) -> tuple[Floats, Ids]:
    """The `count` greatest logits and their ids, greatest first and of equals the lowest id first."""
    values, ids = at_least(cols, bound_of_greatest(cols, count))
    return values[:count], ids[:count]


def token_logprobs(row: Floats, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of one token and of the `count` most likely, under the softmax of a finite row."""
    cols = columns(row)
    weights = np.subtract(row, np.float32(cols.peak))
    total = float(np.log(np.exp(weights, out=weights).sum(dtype=np.float64))) + cols.peak
    values, ids = greatest(cols, count) if count else (row[:0], np.empty(0, np.int64))
    top = tuple((key, value - total) for key, value in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(row[token]) - total, top)
