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
from lockstep.executors.openvino.inputs import NULL_BLOCK, build_inputs
from lockstep.executors.step_inputs import Limits, check_moves
from tests.executors.openvino.support import Item, batch_of

LIMITS = Limits(block_size=4, num_blocks=9, num_host_blocks=3, max_model_len=20, vocab_size=50)


def test_arrays_are_laid_out_as_the_paged_operator_wants_them() -> None:
    inputs = build_inputs(batch_of(([1, 2, 3], 0, (5, 6, 9)), ([4], 6, (7, 1)), ([8, 9], 3, (2, 3))), LIMITS)
    assert inputs.token_ids.tolist() == [1, 2, 3, 4, 8, 9]
    assert inputs.positions.tolist() == [0, 1, 2, 6, 3, 4]
    assert inputs.past_lens.tolist() == [0, 6, 3]
    assert inputs.subsequence_begins.tolist() == [0, 3, 4, 6]
    assert inputs.block_indices.tolist() == [5, 7, 1, 2, 3], "only the blocks that the step needs"
    assert inputs.block_indices_begins.tolist() == [0, 1, 3, 5]
    begins = inputs.subsequence_begins.tolist()
    assert inputs.plan.tolist() == [3, *[0, 6, 3], *begins, *[0, 1, 3, 5], *[5, 7, 1, 2, 3]]
    assert inputs.plan.dtype == np.int32
    assert inputs.max_context_len == 7
    assert inputs.rows.tolist() == [2, 3, 5]


def test_one_token_is_padded_by_one_in_the_null_block_and_one_row_by_itself() -> None:
    inputs = build_inputs(batch_of(([4], 6, (7, 1))), LIMITS)
    assert inputs.token_ids.tolist() == [4, 0]
    assert inputs.positions.tolist() == [6, 0]
    assert inputs.past_lens.tolist() == [6, 0]
    assert inputs.subsequence_begins.tolist() == [0, 1, 2]
    assert inputs.block_indices.tolist() == [7, 1, NULL_BLOCK]
    assert inputs.block_indices_begins.tolist() == [0, 2, 3]
    assert inputs.max_context_len == 7
    assert inputs.rows.tolist() == [0, 0]


def test_no_row_stays_no_row() -> None:
    batch = batch_of(([1, 2], 0, (1,)))
    assert build_inputs(structs.replace(batch, rows=batch.rows[:0]), LIMITS).rows.tolist() == []


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
    "a chunk beyond the context": ((([1, 2], 19, (1, 2, 3, 4, 5, 6)),), "ends at 20 at most"),
    "a token beyond the vocabulary": ((([1, 50], 0, (1,)),), "token id 50 is not in the vocabulary of 50"),
    "a negative token": ((([-1], 0, (1,)),), "token id -1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_chunk_is_refused_by_name(what: str) -> None:
    items, message = WRONG[what]
    with pytest.raises(InvalidPlanError, match=message.replace(".", r"\.")):
        build_inputs(batch_of(*items), LIMITS)


def test_full_blocks_may_be_shared_by_readers() -> None:
    inputs = build_inputs(batch_of(([1], 4, (1, 2)), ([1], 4, (1, 3))), LIMITS)
    assert inputs.block_indices.tolist() == [1, 2, 1, 3]


@pytest.mark.parametrize(
    ("token_ids", "rows"), [([1], [0]), ([1, 2, 3], [0]), ([1, 2], [2]), ([1, 2], [-1]), ([1, 2], [[0]])]
)
def test_tokens_and_rows_must_fit_the_plan(token_ids: list[int], rows: list[int]) -> None:
    plan = batch_of(([1, 2], 0, (1,))).plan
    with pytest.raises(InvalidPlanError):
        build_inputs(StepBatch(plan, np.array(token_ids), np.array(rows)), LIMITS)


def test_columns_must_be_aligned() -> None:
    batch = batch_of(([1, 2], 0, (1,)))
    with pytest.raises(InvalidPlanError, match="different lengths"):
        build_inputs(structs.replace(batch, plan=replace(batch.plan, starts=())), LIMITS)


@pytest.mark.parametrize("pairs", [((0, 0),), ((10, 0),), ((1, 3),), ((1, -1),), ((1, 0), (2, 0))])
def test_a_swap_out_beyond_the_pool_or_onto_another_is_refused(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidPlanError, match="swap_out"):
        check_moves(batch_of(swap_out=pairs).plan, LIMITS)


@pytest.mark.parametrize("pairs", [((3, 1),), ((0, 0),), ((0, 1), (1, 1))])
def test_so_is_a_swap_in(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidPlanError, match="swap_in"):
        check_moves(batch_of(swap_in=pairs).plan, LIMITS)


@pytest.mark.parametrize("pairs", [((1, 10),), ((0, 1),), ((1, 3), (2, 3))])
def test_so_is_a_copy(pairs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidPlanError, match="cop"):
        check_moves(batch_of(copies=pairs).plan, LIMITS)


@given(st.data())
def test_any_table_is_either_refused_or_within_the_pool(data: st.DataObject) -> None:
    """Whatever a plan says, no index that reaches the kernel is outside the pool."""
    small = st.integers(-2, 12)
    chunk = st.tuples(st.lists(small, max_size=6), st.integers(-2, 22), st.lists(small, max_size=6).map(tuple))
    batch: StepBatch = batch_of(*data.draw(st.lists(chunk, min_size=1, max_size=4)))
    try:
        inputs = build_inputs(batch, LIMITS)
    except InvalidPlanError:
        return
    assert inputs.block_indices.min() >= 0
    assert inputs.block_indices.max() <= LIMITS.num_blocks
    contexts = inputs.past_lens + np.diff(inputs.subsequence_begins)
    assert (np.diff(inputs.block_indices_begins) * LIMITS.block_size >= contexts).all()
    assert inputs.block_indices_begins[-1] == len(inputs.block_indices)
    assert inputs.subsequence_begins[-1] == len(inputs.token_ids) == len(inputs.positions)
