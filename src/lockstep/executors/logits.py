"""Top logits of a row: finds the few greatest logits among many, without sorting the row.

A row [V] is treated as a grid of 64 rows and V // 64 columns; the remainder makes columns of one element. One pass
computes the maximum of each column. The k-th greatest of these maxima is a lower bound of the k-th greatest logit,
because k columns have an element at least that great. Every logit of at least some bound is in a column whose maximum
reaches the bound. So a few columns are enough, and the result is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.executors.row_math import row_math

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

GRID_ROWS = 64
_MIN_GRID = 4_096
"""Size of the vocabulary below which every token is a column, since a grid would cost more than it saves."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities, of the model's own distribution."""

    logprob: float
    """Log-probability of the sampled token."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the k most likely, best first; of equal ones, the lowest id first."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A row with the maxima of its columns. Column c < width has the ids c, c + width, ...; other columns have one id
    each."""

    row: Floats
    width: int
    height: int
    """Number of elements of a column of the grid."""
    maxima: Floats
    """Maximum of each column, [width + rest]."""
    peak: float
    """The greatest logit; NaN if the row contains one."""

    @property
    def grid(self) -> Floats:
        """[height, width], a view of the row's beginning."""
        return self.row[: self.height * self.width].reshape(self.height, self.width)


def columns(row: Floats) -> Columns:
    """Compute the columns in one pass over a contiguous row."""
    size = len(row)
    if size < _MIN_GRID:
        return Columns(row, size, 1, row, float(np.maximum.reduce(row)))
    width = size // GRID_ROWS
    body = width * GRID_ROWS
    maxima = np.maximum.reduce(row[:body].reshape(GRID_ROWS, width))
    if body < size:
        maxima = np.concatenate((maxima, row[body:]))
    return Columns(row, width, GRID_ROWS, maxima, float(np.maximum.reduce(maxima)))


def at_least(cols: Columns, bound: np.float32) -> tuple[Floats, Ids]:
    """All logits of at least `bound` with their ids, greatest first; of equal ones, the lowest id first."""
    values, ids, _ = top_block(cols, bound)
    return values, ids


def top_block(cols: Columns, bound: np.float32) -> tuple[Floats, Ids, Floats]:
    """Like `at_least`, and also all elements, in no order, of the columns whose maximum is at least `bound`."""
    chosen = np.flatnonzero(cols.maxima >= bound)
    in_grid = int(chosen.searchsorted(cols.width))
    singles, chosen = chosen[in_grid:] + (cols.height - 1) * cols.width, chosen[:in_grid]
    block = cols.grid.take(chosen, axis=1)
    # Row by row, so that ids ascend and a stable sort keeps the order of equal logits.
    rows, places = np.divmod(np.flatnonzero(block >= bound), max(1, in_grid))
    ids = rows * cols.width + chosen[places]
    block = block.reshape(-1)
    if len(singles):
        ids = np.concatenate((ids, singles))
        block = np.concatenate((block, cols.row[singles]))
    values = cols.row[ids]
    order = np.argsort(-values, kind="stable")
    return values[order], ids[order], block


def bound_of_greatest(cols: Columns, count: int) -> np.float32:
    """The highest bound that, judging by the columns, at least `count` logits reach."""
    kth = len(cols.maxima) - count
    if kth >= 0:
        return np.float32(np.partition(cols.maxima, kth)[kth])
    return np.float32(np.partition(cols.row, len(cols.row) - count)[len(cols.row) - count])


def greatest(cols: Columns, count: int) -> tuple[Floats, Ids]:
    """The `count` greatest logits and their ids, greatest first; of equal ones, the lowest id first."""
    values, ids = at_least(cols, bound_of_greatest(cols, count))
    return values[:count], ids[:count]


def token_logprobs(row: Floats, token: int, count: int) -> TokenLogprobs:
    """Log-probabilities of one token and of the `count` most likely ones, under the softmax of a finite row."""
    total = row_math().log_total(row)
    values, ids = greatest(columns(row), count) if count else (row[:0], np.empty(0, np.int64))
    top = tuple((key, value - total) for key, value in zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(float(row[token]) - total, top)
