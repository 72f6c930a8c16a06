"""One vector from the hidden states of a prompt: the mean over its positions, or the last one.

States come in position order, chunk by chunk, and again where a preempted prompt is recomputed; each position counts
once. Sums are float64 in position order, so a vector does not depend on how its prompt was cut into chunks.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


class Pooler:
    """Collects one sequence's hidden states.

    Args:
        num_prompt_tokens: positions that the vector is made of.
    """

    __slots__ = ("_num_positions", "_pooling", "_seen", "_sum")

    def __init__(self, pooling: Pooling, num_prompt_tokens: int) -> None:
        self._pooling = pooling
        self._num_positions = num_prompt_tokens
        self._seen = 0
        self._sum: npt.NDArray[np.float64] | None = None

    def rows_of(self, start: int, length: int) -> range:
        """Offsets in a chunk whose hidden states are still wanted."""
        end = min(start + length, self._num_positions)
        first = self._seen if self._pooling == "mean" else max(self._seen, self._num_positions - 1)
        return range(max(first, start) - start, max(end, start) - start)

    def add(self, start: int, offsets: range, states: npt.NDArray[np.float32]) -> None:
        """Take the states [len(offsets), hidden_size] that ``rows_of`` asked for."""
        for state in states.astype(np.float64):
            self._sum = state if self._sum is None else self._sum + state
        if len(offsets):
            self._seen = start + offsets.stop

    def vector(self) -> npt.NDArray[np.float32]:
        """[hidden_size].

        A pooler that has not seen the whole prompt has no vector; asking is a programming error.
        """
        assert self._sum is not None, "no hidden state was collected"
        assert self._seen == self._num_positions, f"{self._seen} of {self._num_positions} positions were collected"
        vector = self._sum / self._num_positions if self._pooling == "mean" else self._sum
        return vector.astype(np.float32)


def unit_vectors(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each row [count, size] divided by its length; a row of zeros stays."""
    wide = vectors.astype(np.float64)
    lengths = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    return (wide / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
