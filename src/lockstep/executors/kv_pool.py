"""KV pool of a loaded model: holds device blocks in memory that is allocated on first use, and host blocks for
swapping.

Blocks are moved as bytes, so a block is restored bit for bit at any precision.
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
    """Blocks 0..num_blocks (0 is the null block), and host blocks 0..num_host_blocks - 1, initially zero.

    All layers of a block are adjacent, so that a few sequences use a few huge pages, instead of some in each layer.
    """

    def __init__(self, block_bytes: int, num_blocks: int, num_host_blocks: int) -> None:
        """Allocate the pool.

        Args:
            block_bytes: size of a block with all layers.

        Raises:
            ExecutorError: the sizes are invalid, or this machine cannot allocate the pool.
        """
        if num_blocks < 1 or num_host_blocks < 0:
            raise ExecutorError(
                f"the pool has {num_blocks} blocks and {num_host_blocks} host blocks; the minimum is 1 and 0"
            )
        self.num_blocks = num_blocks
        try:
            self.blocks: Blocks = _zeros(num_blocks + 1, block_bytes)
            self._host: Blocks = np.zeros((num_host_blocks, block_bytes), np.uint8)
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            gigabytes = (num_blocks + 1 + num_host_blocks) * block_bytes / 1e9
            raise ExecutorError(f"a KV pool of {gigabytes:.1f} GB cannot be allocated: {error}") from error

    def move(self, plan: StepPlan) -> None:
        """Swap out, swap in and copy as a checked plan requires."""
        if plan.swap_out:
            device, host = _columns(plan.swap_out)
            self._host[host] = self.blocks[device]
        if plan.swap_in:
            host, device = _columns(plan.swap_in)
            self.blocks[device] = self._host[host]
        for source, destination in plan.copies:  # a later pair reads the result of an earlier one
            self.blocks[destination] = self.blocks[source]

    def read(self, blocks: Sequence[int]) -> Blocks:
        """Copy blocks, one per row.

        Raises:
            InvalidPlanError: a block is not in this pool.
        """
        self._check(blocks)
        return self.blocks[list(blocks)]

    def write(self, blocks: Sequence[int], content: Blocks) -> None:
        """Overwrite blocks, one per row.

        Raises:
            InvalidPlanError: blocks or shape do not fit this pool; nothing was written.
        """
        self._check(blocks)
        expected = (len(blocks), self.blocks.shape[1])
        if content.dtype != np.uint8 or content.shape != expected:
            raise InvalidPlanError(f"content of {len(blocks)} blocks is {content.shape}, not {expected} bytes")
        self.blocks[list(blocks)] = content

    def _check(self, blocks: Sequence[int]) -> None:
        outside = [block for block in blocks if not 1 <= block <= self.num_blocks]
        if outside:
            raise InvalidPlanError(f"block {outside[0]} is not in this pool of blocks 1 to {self.num_blocks}")


def _zeros(num_rows: int, size: int) -> Blocks:
    """Memory of ``num_rows`` times ``size`` bytes, in huge pages if the system has them, allocated on first use.

    A step reads blocks all over the pool, and with small pages each access would miss the processor's TLB.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros((num_rows, size), np.uint8)
    memory = mmap.mmap(-1, num_rows * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # not every kernel supports it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(num_rows, size)


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    table = np.array(pairs, np.int64)
    return table[:, 0], table[:, 1]


class PoolOwner:
    """Part of an executor that owns a pool."""

    _pool: KVPool | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the pool, without the null block."""
        return self._allocated().num_blocks

    def read_blocks(self, blocks: Sequence[int]) -> Blocks:
        """See `base.Executor`."""
        return self._allocated().read(blocks)

    def write_blocks(self, blocks: Sequence[int], content: Blocks) -> None:
        """See `base.Executor`."""
        self._allocated().write(blocks, content)

    def _allocated(self) -> KVPool:
        if self._pool is None:
            raise ExecutorError("the executor has no pool: it is closed, or allocate() was not called")
        return self._pool
