"""A plan that would leave the pool, or let two sequences touch one block, is refused with nothing done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from lockstep.errors import InvalidPlanError
from lockstep.executors.base import StepBatch
from lockstep.executors.step_inputs import Chunks, Limits, TableRows, check_moves, checked_chunks
from tests.executors.native.support import Item, batch_of

LIMITS = Limits(block_size=4, num_blocks=9, num_host_blocks=3, max_model_len=20, vocab_size=50)


def checked(batch: StepBatch) -> Chunks:
    return checked_chunks(batch, LIMITS, [TableRows()])


def test_chunks_and_the_plan_that_attention_reads() -> None:
    chunks = checked(batch_of(([1, 2, 3], 0, (5, 6, 9)), ([4], 6, (7, 1)), ([8, 9], 3, (2, 3))))
    assert chunks.starts.tolist() == [0, 6, 3]
    assert chunks.lengths.tolist() == [3, 1, 2]
    assert chunks.needed.tolist() == [1, 2, 2]
    assert chunks.blocks.tolist() == [5, 7, 1, 2, 3], "only the blocks that the step needs"
    assert chunks.plan.tolist() == [3, *[0, 6, 3], *[0, 3, 4, 6], *[0, 1, 3, 5], *[5, 7, 1, 2, 3]]
    assert chunks.plan.dtype == np.int32


def test_full_blocks_may_be_shared_by_readers() -> None:
    assert checked(batch_of(([1], 4, (1, 2)), ([1], 4, (1, 3)))).blocks.tolist() == [1, 2, 1, 3]


WRONG: dict[str, tuple[tuple[Item, ...], str]] = {
    "a block beyond the pool": ((([1], 0, (10,)),), "block 10 is not one of 1..9"),
    "a negative block": ((([1], 0, (-1,)),), "block -1 is not"),
    "a block of 33 bits": ((([1], 0, (1 << 33,)),), "32 bits"),
    "the null block": ((([1], 0, (1,)), ([1], 4, (2, 0))), "sequence 1: block 0 is not"),
    "a short table": ((([1], 4, (1,)),), "a table of 1 blocks; its chunk needs 2"),
    "two writers of one block": ((([1], 0, (1,)), ([1], 2, (1,))), "writes block 1, which occurs twice"),
    "a reader of a written block": ((([1], 5, (1, 2)), ([1], 0, (1,))), "sequence 1: writes block 1"),
    "one block twice in a table": ((([1], 4, (3, 3)),), "writes block 3"),
    "an empty chunk": ((([], 0, (1,)),), "at least one token"),
    "a negative start": ((([1], -1, (1,)),), "from position -1"),
    "a chunk beyond the context": ((([1, 2], 19, (1, 2, 3, 4, 5, 6)),), "end at 20 at most"),
    "a token beyond the vocabulary": ((([1, 50], 0, (1,)),), "token id 50 is not in the vocabulary of 50"),
    "a negative token": ((([-1], 0, (1,)),), "token id -1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_chunk_is_refused_by_name(what: str) -> None:
    items, message = WRONG[what]
    with pytest.raises(InvalidPlanError, match=message.replace(".", r"\.")):
        checked(batch_of(*items))


@pytest.mark.parametrize(
    ("token_ids", "rows"), [([1], [0]), ([1, 2, 3], [0]), ([1, 2], [2]), ([1, 2], [-1]), ([1, 2], [[0]])]
)
def test_tokens_and_rows_must_fit_the_plan(token_ids: list[int], rows: list[int]) -> None:
    plan = batch_of(([1, 2], 0, (1,))).plan
    with pytest.raises(InvalidPlanError):
        checked(StepBatch(plan, np.array(token_ids), np.array(rows)))


def test_columns_must_be_aligned() -> None:
    batch = batch_of(([1, 2], 0, (1,)))
    with pytest.raises(InvalidPlanError, match="different lengths"):
        checked(structs.replace(batch, plan=replace(batch.plan, starts=())))


@pytest.mark.parametrize("pairs", [((0, 0),), ((10, 0),), ((1, 3),), ((1, -1),), ((1, 0), (2, 0))])
def test_a_swap_out_beyond_the_pool_or_onto_another_is_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidPlanError, match="swap_out"):
        check_moves(batch_of(swap_out=pairs).plan, LIMITS)


@pytest.mark.parametrize("pairs", [((3, 1),), ((0, 0),), ((0, 1), (1, 1))])
def test_swap_in_outside_the_pool_is_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidPlanError, match="swap_in"):
        check_moves(batch_of(swap_in=pairs).plan, LIMITS)


@pytest.mark.parametrize("pairs", [((1, 10),), ((0, 1),), ((1, 3), (2, 3))])
def test_copy_outside_the_pool_is_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidPlanError, match="cop"):
        check_moves(batch_of(copies=pairs).plan, LIMITS)


@given(st.data())
def test_any_table_is_either_refused_or_within_the_pool(data: st.DataObject) -> None:
    """Whatever a plan says, no index that reaches the kernel is outside the pool."""
    small = st.integers(-2, 12)
    chunk = st.tuples(st.lists(small, max_size=6), st.integers(-2, 22), st.lists(small, max_size=6).map(tuple))
    batch: StepBatch = batch_of(*data.draw(st.lists(chunk, min_size=1, max_size=4)))
    try:
        chunks = checked(batch)
    except InvalidPlanError:
        return
    assert chunks.blocks.min() >= 1
    assert chunks.blocks.max() <= LIMITS.num_blocks
    assert (chunks.needed * LIMITS.block_size >= chunks.starts + chunks.lengths).all()
    assert chunks.needed.sum() == len(chunks.blocks)
    assert chunks.lengths.sum() == len(batch.token_ids)
