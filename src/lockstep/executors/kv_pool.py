"""The KV pool of a loaded model: blocks in memory that is taken as it is used, and host blocks to swap to.

Blocks are moved as bytes, so a block comes back bit for bit whatever its precision.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from lockstep.core.step import StepPlan
from lockstep.errors import ExecutorError, InvalidPlanError
from lockstep.executors.base import Blocks


class KVPool:
    """Blocks 0..num_blocks (0 is the null block), and host blocks 0..num_host_blocks - 1; all are zero at first.

    All layers of a block lie together: a few sequences then touch a few huge pages, and not some of each layer.
    """

    def __init__(self, block_bytes: int, num_blocks: int, num_host_blocks: int) -> None:
        """Allocate.

        Args:
            block_bytes: of a block with all layers.

        Raises:
            ExecutorError: no such pool, or not on this machine.
        """
        if num_blocks < 1 or num_host_blocks < 0:
            raise ExecutorError(f"a pool of {num_blocks} blocks and {num_host_blocks} host blocks; at least 1 and 0")
        self.num_blocks = num_blocks
        try:
            self.blocks: Blocks = _zeros(num_blocks + 1, block_bytes)
            self._host: Blocks = np.zeros((num_host_blocks, block_bytes), np.uint8)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            gigabytes = (num_blocks + 1 + num_host_blocks) * block_bytes / 1e9
            raise ExecutorError(f"a KV pool of {gigabytes:.1f} GB cannot be allocated: {error}") from error

    def move(self, plan: StepPlan) -> None:
        """Swap out, swap in and copy, as a plan that was checked asks for."""
        if plan.swap_out:
            device, host = _columns(plan.swap_out)
            self._host[host] = self.blocks[device]
        if plan.swap_in:
            host, device = _columns(plan.swap_in)
            self.blocks[device] = self._host[host]
        for source, destination in plan.copies:  # a later pair sees what an earlier one did
            self.blocks[destination] = self.blocks[source]

    def read(self, blocks: Sequence[int]) -> Blocks:
        """Copy blocks, one a row; InvalidPlanError where one is not of this pool."""
        self._check(blocks)
        return self.blocks[list(blocks)]

    def write(self, blocks: Sequence[int], content: Blocks) -> None:
        """Overwrite blocks, one a row.

        Raises:
            InvalidPlanError: blocks or shape are not of this pool; nothing was written.
        """
        self._check(blocks)
        expected = (len(blocks), self.blocks.shape[1])
        if content.dtype != np.uint8 or content.shape != expected:
            raise InvalidPlanError(f"content of {len(blocks)} blocks is {content.shape}, not {expected} bytes")
        self.blocks[list(blocks)] = content

    def _check(self, blocks: Sequence[int]) -> None:
        outside = [block for block in blocks if not 1 <= block <= self.num_blocks]
        if outside:
            raise InvalidPlanError(f"block {outside[0]} is not of this pool, which has 1 to {self.num_blocks}")


def _zeros(num_rows: int, size: int) -> Blocks:
    """Memory of ``num_rows`` times ``size`` bytes, in huge pages where the system has them; it is taken as it is used.

    A step reads blocks all over it, and with small pages each access would miss the processor's table of pages.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros((num_rows, size), np.uint8)
    memory = mmap.mmap(-1, num_rows * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(num_rows, size)


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    table = np.array(pairs, np.int64)
    return table[:, 0], table[:, 1]
