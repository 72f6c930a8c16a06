"""Block pools: no block is allocated twice or lost, and the order is exact."""

from __future__ import annotations

import random
from collections.abc import Container

import pytest

from lockstep.core.blocks import NULL_BLOCK, BlockPool, HostPool


def allocate(pool: BlockPool, count: int) -> tuple[int, ...]:
    allocation = pool.allocate(count)
    assert allocation is not None
    return allocation.blocks


def hashes_of(pool: BlockPool, blocks: Container[int]) -> list[bytes | None]:
    """Hashes of blocks that have one."""
    return [b"hash" if block in blocks else None for block in range(pool.num_blocks + 1)]


def test_free_order_is_unhashed_then_never_used_then_cached_deepest_first() -> None:
    """Two prompts share three hashed blocks and have a partial one each; exact ids and exact order of reuse."""
    pool = BlockPool(10)
    first = allocate(pool, 4)
    assert first == (1, 2, 3, 4)
    hashed = hashes_of(pool, {1, 2, 3})
    pool.take((1, 2, 3))
    second = (1, 2, 3, *allocate(pool, 1))
    assert second == (1, 2, 3, 5)
    assert pool.refs(1) == 2
    pool.release(first, hashed, ())
    pool.release(second, hashed, ())
    assert pool.free_order() == (5, 4, 6, 7, 8, 9, 10, 3, 2, 1)
    allocation = pool.allocate(10)
    assert allocation is not None
    assert allocation.blocks == (5, 4, 6, 7, 8, 9, 10, 3, 2, 1)
    assert allocation.evicted == (3, 2, 1)
    assert pool.num_allocated == 15


def test_pinned_blocks_are_handed_out_last() -> None:
    pool = BlockPool(4)
    blocks = allocate(pool, 4)
    pool.release(blocks[:3], hashes_of(pool, {1, 2, 3}), {3})
    pool.release(blocks[3:], hashes_of(pool, ()), ())
    assert pool.free_order() == (4, 2, 1, 3)
    pool.pin_cached([2])
    assert pool.free_order() == (4, 1, 3, 2)
    pool.take([3])
    pool.free_cached([2])
    assert pool.free_order() == (2, 4, 1)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (2, 1, 3)
    pool.check({3: 1})


def test_a_failed_allocation_leaves_everything_untouched() -> None:
    pool = BlockPool(3)
    pool.release(allocate(pool, 2), hashes_of(pool, {1}), ())
    before = pool.free_order()
    assert pool.allocate(4) is None
    assert pool.free_order() == before
    assert pool.num_allocated == 2
    pool.check({})


def test_a_cached_block_in_the_middle_of_the_free_list_can_be_held() -> None:
    pool = BlockPool(5)
    pool.release(allocate(pool, 5), hashes_of(pool, range(1, 6)), ())
    pool.take([3])
    assert pool.free_order() == (5, 4, 2, 1)
    pool.release([3], hashes_of(pool, {3}), ())
    assert pool.free_order() == (5, 4, 2, 1, 3)


def test_releasing_a_block_without_a_holder_fails() -> None:
    with pytest.raises(AssertionError, match="has no holder"):
        BlockPool(2).release([1], [None] * 3, ())


def test_fuzz_100k_operations_keep_every_block_in_one_place() -> None:
    """Random operations with a seed; prompts over a vocabulary of two share prefixes, and runs free all or a random
    fifth."""
    seed = 20_260_101
    print(f"seed {seed}")
    rng = random.Random(seed)
    pool = BlockPool(64)
    block_of: dict[tuple[int, ...], int] = {}
    key_of: dict[int, tuple[int, ...]] = {}
    live: list[tuple[int, ...]] = []
    for operation in range(100_000):
        kind = rng.random()
        if kind < 0.5:
            key = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 9)))
            hits = []
            for depth in range(1, len(key)):
                if key[:depth] not in block_of:
                    break
                hits.append(block_of[key[:depth]])
            idle = sum(pool.refs(block) == 0 for block in hits)
            order = pool.free_order()
            if len(key) - len(hits) + idle > pool.num_available:
                assert pool.free_order() == order
                continue
            pool.take(hits)
            allocation = pool.allocate(len(key) - len(hits))
            assert allocation is not None
            for block in allocation.evicted:
                del block_of[key_of.pop(block)]
            table = (*hits, *allocation.blocks)
            assert NULL_BLOCK not in table
            assert len(set(table)) == len(table)
            for other in live:
                assert not set(allocation.blocks) & set(other), "a fresh block belongs to somebody"
            for depth in range(len(hits) + 1, len(key)):
                if key[:depth] not in block_of:
                    block_of[key[:depth]] = table[depth - 1]
                    key_of[table[depth - 1]] = key[:depth]
            live.append(table)
        elif live and kind < 0.98:
            pool.release(live.pop(rng.randrange(len(live))), hashes_of(pool, key_of), ())
        else:
            share = 1.0 if kind > 0.99 else 0.2
            for table in [table for table in live if rng.random() < share]:
                live.remove(table)
                pool.release(table, hashes_of(pool, key_of), ())
        if operation % 50 == 0:
            held: dict[int, int] = {}
            for table in live:
                for block in table:
                    held[block] = held.get(block, 0) + 1
            pool.check(held)
    for table in live:
        pool.release(table, hashes_of(pool, key_of), ())
    assert pool.num_available == 64


def test_check_detects_inconsistent_counts() -> None:
    pool = BlockPool(2)
    blocks = allocate(pool, 1)
    with pytest.raises(AssertionError, match="total"):
        pool.check({})
    with pytest.raises(AssertionError, match="references"):
        pool.check({blocks[0]: 2})


def test_a_host_block_that_a_plan_reads_is_not_reused_within_that_plan() -> None:
    host = HostPool(3)
    assert host.allocate(2) == (0, 1)
    host.release_after_plan((0,))
    assert host.num_free == 1
    host.check([1])
    assert host.allocate(1) == (2,)
    host.settle()
    host.settle()
    assert host.allocate(1) == (0,)
    host.release((1,))
    assert host.num_free == 1
    with pytest.raises(AssertionError, match="wanted"):
        host.allocate(2)
    with pytest.raises(AssertionError, match="add up"):
        host.check([])
