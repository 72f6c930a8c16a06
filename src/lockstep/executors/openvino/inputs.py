"""Inputs of OpenVINO's paged graph: a step's checked chunks as its arrays, padded, and split where need be.

Some kernels must not get too many tokens (products.py), so a step may take several passes. A later pass sees what an
earlier one wrote, as the next step would: cutting a chunk here is chunking it. As the scheduler does, no part of a
chunk is left with a single token, for which attention would take another kernel; nor is a pass, because the passes are
as equal as that allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lockstep.executors.base import StepBatch
from lockstep.executors.step_inputs import NO_ROWS, Ints, Limits, Longs, TableRows, begins_of, checked_chunks

NULL_BLOCK = 0
"""Belongs to nobody; padding lives here."""
PAD_TOKEN = 0
MIN_PASS_TOKENS = 8
"""Below this the limit could not be kept beside the rule of no single tokens."""


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The arrays of one forward pass over T tokens of B sequences, padding included."""

    token_ids: Longs
    """[T]"""
    positions: Longs
    """[T]"""
    past_lens: Ints
    """[B]: tokens of each sequence that are already in its blocks."""
    subsequence_begins: Ints
    """[B + 1]: where each sequence's tokens begin."""
    block_indices: Ints
    """All block tables, one after the other."""
    block_indices_begins: Ints
    """[B + 1]: where each table begins."""
    max_context_len: npt.NDArray[np.int32]
    """Scalar: the longest context after this step."""
    rows: Longs
    """[R]: tokens whose logits are computed."""
    hidden_rows: Longs
    """[H]: tokens whose hidden states are wanted."""

    @property
    def plan(self) -> Ints:
        """Sequences, their past lengths, beginnings and tables in one array, as our attention operator has them."""
        num_sequences = np.array([len(self.past_lens)], np.int32)
        parts = (self.past_lens, self.subsequence_begins, self.block_indices_begins, self.block_indices)
        return np.concatenate([num_sequences, *parts])


def build_inputs(batch: StepBatch, limits: Limits, table_rows: TableRows | None = None) -> ForwardInputs:
    """Inputs of a plan that forwards something.

    A pass over one token, and an LM head over one row, would take a matrix-vector kernel that rounds differently from
    the one for more; both are padded to two, so that a sequence's bits do not depend on its company.

    Args:
        table_rows: the caller's, so that tables seen in its last step are not converted again.

    Raises:
        InvalidPlanError: naming the sequence and what is wrong with its chunk.
    """
    chunks = checked_chunks(batch, limits, TableRows() if table_rows is None else table_rows)
    hidden_rows = NO_ROWS if batch.hidden_rows is None else batch.hidden_rows
    rows = batch.rows if batch.prompt_rows is None else np.concatenate((batch.rows, batch.prompt_rows))
    return _arranged(batch.token_ids, chunks.starts, chunks.lengths, chunks.needed, chunks.blocks, rows, hidden_rows)


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass of a step that takes several."""

    inputs: ForwardInputs
    """Rows padded to two where there is one."""
    row_places: Longs
    """Places of its rows among the step's rows."""
    hidden_places: Longs
    """Places of its hidden rows among the step's."""


def split_inputs(inputs: ForwardInputs, max_tokens: int, block_size: int) -> Iterator[Pass]:
    """Passes of at most ``max_tokens`` each, in order, which together compute what the step does.

    Args:
        inputs: checked ones; of padding only a repeated row.
        max_tokens: at least ``MIN_PASS_TOKENS``.
    """
    edges = cuts(inputs.subsequence_begins, max_tokens)
    for begin, end in pairwise(edges):
        yield _pass(inputs, begin, end, block_size)


def cuts(begins: Ints, max_tokens: int) -> list[int]:
    """Beginnings of passes, and the end of the last.

    Args:
        begins: [B + 1], where each sequence's tokens begin.
    """
    assert max_tokens >= MIN_PASS_TOKENS, f"passes of {max_tokens} tokens; at least {MIN_PASS_TOKENS}"
    total, edges = int(begins[-1]), [0]
    while total - edges[-1] > max_tokens:
        remaining = total - edges[-1]
        num_passes = -(-remaining // max_tokens)
        edges.append(_whole_enough(begins, edges[-1] + -(-remaining // num_passes)))
    return [*edges, total]


def _arranged(
    token_ids: Longs, starts: Longs, lengths: Longs, needed: Longs, blocks: Ints, rows: Longs, hidden_rows: Longs
) -> ForwardInputs:
    """The arrays of chunks by their starts and lengths, each with ``needed`` entries of ``blocks``; padded."""
    begins, table_begins = begins_of(lengths), begins_of(needed)
    max_context_len = (starts + lengths).max()
    positions = np.arange(len(token_ids)) + np.repeat(starts - begins[:-1], lengths)
    if len(token_ids) == 1:
        token_ids = np.append(token_ids, PAD_TOKEN)
        positions = np.append(positions, 0)
        starts = np.append(starts, 0)
        begins = np.append(begins, 2)
        blocks = np.append(blocks, NULL_BLOCK)
        table_begins = np.append(table_begins, table_begins[-1] + 1)
    return ForwardInputs(
        token_ids=np.ascontiguousarray(token_ids, np.int64),
        positions=positions.astype(np.int64, copy=False),
        past_lens=starts.astype(np.int32),
        subsequence_begins=begins.astype(np.int32),
        block_indices=blocks.astype(np.int32, copy=False),
        block_indices_begins=table_begins.astype(np.int32),
        max_context_len=np.array(max_context_len, np.int32),
        rows=np.ascontiguousarray(np.repeat(rows, 2) if len(rows) == 1 else rows, np.int64),
        hidden_rows=np.ascontiguousarray(hidden_rows, np.int64),
    )


def _whole_enough(begins: Ints, cut: int) -> int:
    """The nearest place not behind ``cut`` where no chunk of several tokens would lose or keep a single one."""
    index = int(np.searchsorted(begins, cut, side="right")) - 1
    first, last = int(begins[index]), int(begins[index + 1])
    if cut == last - 1:
        cut -= 1
    return first if cut <= first + 1 else cut


def _pass(inputs: ForwardInputs, begin: int, end: int, block_size: int) -> Pass:
    begins = inputs.subsequence_begins
    first = int(np.searchsorted(begins, begin, side="right")) - 1
    last = int(np.searchsorted(begins, end, side="left"))
    edges = np.clip(begins[first : last + 1], begin, end).astype(np.int64)
    lengths = np.diff(edges)
    past = inputs.past_lens[first:last].astype(np.int64) + (edges[:-1] - begins[first:last])
    needed = -(-(past + lengths) // block_size)
    table_begins = inputs.block_indices_begins[first:last]
    tables = [inputs.block_indices[at : at + num] for at, num in zip(table_begins, needed, strict=True)]
    rows, row_places = _within(inputs.rows, begin, end)
    hidden_rows, hidden_places = _within(inputs.hidden_rows, begin, end)
    token_ids = inputs.token_ids[begin:end].copy()
    part = _arranged(token_ids, past, lengths, needed, np.concatenate(tables), rows, hidden_rows)
    return Pass(part, row_places, hidden_places)


def _within(rows: Longs, begin: int, end: int) -> tuple[Longs, Longs]:
    """The rows of those tokens, counted from the first of them, and their places."""
    places = np.flatnonzero((rows >= begin) & (rows < end))
    return rows[places] - begin, places
