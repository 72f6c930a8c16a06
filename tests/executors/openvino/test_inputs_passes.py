"""A step cut into several passes computes the same: the same tokens, tables and rows, and no single token left over."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from lockstep.executors.openvino.executor import OpenVINOExecutor
from lockstep.executors.openvino.inputs import MIN_PASS_TOKENS, ForwardInputs, build_inputs, cuts, split_inputs
from lockstep.executors.openvino.loading import compile_artifact
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.step_inputs import Limits
from tests.executors.openvino.support import batch_of, random_artifact

BLOCK_SIZE = 4
LIMITS = Limits(block_size=BLOCK_SIZE, num_blocks=2000, num_host_blocks=0, max_model_len=400, vocab_size=50)
CHUNKS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 30)), min_size=1, max_size=12)
"""Lengths and starts."""


def inputs_of(chunks: list[tuple[int, int]]) -> ForwardInputs:
    items, free = [], iter(range(1, 2000))
    for length, start in chunks:
        table = tuple(next(free) for _ in range(-(-(start + length) // BLOCK_SIZE)))
        items.append(([start % 50] * length, start, table))
    return build_inputs(batch_of(*items, all_rows=True), LIMITS)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20), limit=st.integers(MIN_PASS_TOKENS, 80))
def test_passes_keep_the_limit_and_no_chunk_is_left_with_a_single_token(lengths: list[int], limit: int) -> None:
    begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    edges = cuts(begins, limit)
    assert edges[0] == 0
    assert edges[-1] == begins[-1]
    sizes = [after - before for before, after in pairwise(edges)]
    assert max(sizes) <= limit
    assert len(sizes) == 1 or min(sizes) > 1, "a pass of one token would need padding"
    for before, after in pairwise(begins.tolist()):
        inside = [before, *(edge for edge in edges if before < edge < after), after]
        assert after - before == 1 or min(b - a for a, b in pairwise(inside)) > 1


@given(chunks=CHUNKS, limit=st.integers(MIN_PASS_TOKENS, 80))
def test_every_token_is_computed_once_at_its_position_in_its_blocks(chunks: list[tuple[int, int]], limit: int) -> None:
    whole = inputs_of(chunks)
    parts = [piece.inputs for piece in split_inputs(whole, limit, BLOCK_SIZE)]
    assert np.array_equal(np.concatenate([part.token_ids for part in parts]), whole.token_ids)
    assert np.array_equal(np.concatenate([part.positions for part in parts]), whole.positions)
    assert [place for part in parts for place in places(part)] == list(places(whole))
    for part in parts:
        contexts = part.past_lens + np.diff(part.subsequence_begins)
        assert np.array_equal(np.diff(part.block_indices_begins), -(-contexts // BLOCK_SIZE))
        assert part.max_context_len == contexts.max()


def places(inputs: ForwardInputs) -> list[tuple[int, int]]:
    """Block and offset that each token is written to."""
    found = []
    for index, past in enumerate(inputs.past_lens.tolist()):
        table = inputs.block_indices[inputs.block_indices_begins[index] :]
        length = int(inputs.subsequence_begins[index + 1] - inputs.subsequence_begins[index])
        found += [(int(table[at // BLOCK_SIZE]), at % BLOCK_SIZE) for at in range(past, past + length)]
    return found


@given(chunks=CHUNKS, seed=st.integers(0, 99))
def test_rows_find_their_places_in_any_order(chunks: list[tuple[int, int]], seed: int) -> None:
    whole = inputs_of(chunks)
    rows = np.random.default_rng(seed).permutation(whole.rows)
    found, begin = np.full(len(rows), -1), 0
    for piece in split_inputs(replace(whole, rows=rows), MIN_PASS_TOKENS, BLOCK_SIZE):
        num = len(piece.row_places)
        assert len(piece.inputs.rows) == (2 if num == 1 else num)
        found[piece.row_places] = piece.inputs.rows[:num] + begin
        begin += len(piece.inputs.token_ids)
    assert np.array_equal(found, rows)


def test_an_executor_with_short_passes_says_the_same_bits() -> None:
    """Prompts and decodes in one step, logits of some rows and hidden states of others."""
    artifact, options = random_artifact(encoding="Q8_0"), ExecutorOptions()
    compiled = compile_artifact(artifact, options, lambda stage, fraction: None)
    prompts = batch_of((range(70), 0, (1, 2, 3)), (range(33), 0, (4, 5)), ([3, 4], 0, (6,)))
    decodes = batch_of(*(([index], 0, (index,)) for index in range(6, 20)), (range(20), 33, (4, 5)))
    said = []
    for limit in (None, MIN_PASS_TOKENS, 80):
        executor = OpenVINOExecutor(artifact, replace(compiled, max_pass_tokens=limit))
        executor.allocate(20, 0)
        said.append(executor.execute(prompts).copy())
        said.append(executor.execute(structs.replace(decodes, hidden_rows=np.array([33, 2, 21]))).copy())
        said.append(executor.hidden_states.copy())
    whole = said[:3]
    assert whole[2].shape == (3, artifact.config.hidden_size)
    for part, expected in zip(said[3:], whole * 2, strict=True):
        assert np.array_equal(part, expected)
