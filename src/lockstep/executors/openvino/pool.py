"""The KV pool: one tensor of keys and one of values per layer on the device, and host blocks to swap to.

Blocks are moved as bytes, so a block comes back bit for bit whatever its precision. A host block holds all layers of
one device block, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.executors.openvino.runtime import ElementType, ov

Bytes = npt.NDArray[np.uint8]


class KVPool:
    """Blocks 0..num_blocks (0 is the null block) and host blocks 0..num_host_blocks - 1, all zero at first."""

    def __init__(
        self, shapes: Sequence[tuple[ElementType, tuple[int, ...]]], num_blocks: int, num_host_blocks: int
    ) -> None:
        """Allocate.

        Args:
            shapes: per cache input in plan order (keys, values of layer 0, ...): its element type and the shape of one
                block.
        """
        self.tensors: list[Any] = []
        self._rows: list[Bytes] = []
        for element_type, shape in shapes:
            tensor = ov.Tensor(element_type, ov.Shape([num_blocks + 1, *shape]))
            rows = tensor.data.view(np.uint8).reshape(num_blocks + 1, -1)
            rows.fill(0)
            self.tensors.append(tensor)
            self._rows.append(rows)
        edges = np.cumsum([0, *(rows.shape[1] for rows in self._rows)])
        self._spans = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
        self._host: Bytes = np.zeros((num_host_blocks, int(edges[-1])), np.uint8)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (device block, host block) pairs to host memory."""
        device, host = _columns(pairs)
        for rows, (begin, end) in zip(self._rows, self._spans, strict=True):
            self._host[host, begin:end] = rows[device]

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs back."""
        host, device = _columns(pairs)
        for rows, (begin, end) in zip(self._rows, self._spans, strict=True):
            rows[device] = self._host[host, begin:end]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) device blocks, one pair after the other: a later pair sees what an earlier did."""
        for source, destination in pairs:
            for rows in self._rows:
                rows[destination] = rows[source]


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    table = np.array(pairs, np.int64)
    return table[:, 0], table[:, 1]
