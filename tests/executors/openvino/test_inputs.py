"""Arrays of a step as the paged graph takes them."""

from __future__ import annotations

import numpy as np
from msgspec import structs

from lockstep.executors.openvino.inputs import NULL_BLOCK, build_inputs
from lockstep.executors.step_inputs import Limits
from tests.executors.openvino.support import batch_of

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
