"""Blocks move as bytes, and only within the pool."""

from __future__ import annotations

import numpy as np
import pytest

from lockstep.errors import ExecutorError, InvalidPlanError
from lockstep.executors.kv_pool import KVPool
from tests.executors.native.support import batch_of

SIZE = 64


def filled(num_blocks: int = 6, num_host_blocks: int = 3) -> tuple[KVPool, np.ndarray]:
    """A pool of random blocks, and what blocks 1 and up have."""
    pool = KVPool(SIZE, num_blocks, num_host_blocks)
    content = np.random.default_rng(0).integers(0, 256, (num_blocks, SIZE), np.uint8)
    pool.write(range(1, num_blocks + 1), content)
    return pool, content


def test_a_block_is_a_row() -> None:
    pool, content = filled()
    assert pool.blocks.shape == (7, SIZE)
    assert np.array_equal(pool.blocks[3], content[2])
    assert not pool.blocks[0].any(), "the null block"
    assert np.array_equal(pool.read([6, 1]), content[[5, 0]])


def test_moves_are_out_then_in_then_copies_each_of_which_sees_the_one_before() -> None:
    pool, content = filled()
    pool.move(batch_of(swap_out=((1, 2), (2, 0))).plan)
    pool.write([1, 2], np.zeros((2, 64), np.uint8))
    pool.move(batch_of(swap_in=((2, 5), (0, 6)), copies=((5, 3), (3, 4))).plan)
    assert np.array_equal(
        pool.read([1, 2, 3, 4, 5, 6]), np.stack([*np.zeros((2, 64), np.uint8), *content[[0, 0, 0, 1]]])
    )


@pytest.mark.parametrize("block", [0, -1, 7])
def test_blocks_of_another_pool_are_refused(block: int) -> None:
    pool, content = filled()
    with pytest.raises(InvalidPlanError, match=f"block {block} is not in this pool of blocks 1 to 6"):
        pool.read([1, block])
    with pytest.raises(InvalidPlanError, match="not in this pool"):
        pool.write([block], content[:1])
    for wrong in (content[:1, 1:], content[:2], content[:1].astype(np.int8)):
        with pytest.raises(InvalidPlanError, match="content of 1 blocks"):
            pool.write([1], wrong)  # type: ignore[arg-type]  # one is of signed bytes
    assert np.array_equal(pool.read([1]), content[:1])


def test_a_pool_that_cannot_be_is_refused() -> None:
    with pytest.raises(ExecutorError, match="the minimum is 1 and 0"):
        KVPool(SIZE, 0, 0)
    with pytest.raises(ExecutorError, match="GB cannot be allocated"):
        KVPool(SIZE, 1 << 50, 0)
