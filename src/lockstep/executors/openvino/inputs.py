"""Forward-pass inputs: a step's plan and token ids as arrays, checked before anything runs, split where need be.

The paged kernel trusts its block table: a wrong entry is a segmentation fault or another request's memory. So every
table, row and token is checked here, and a plan that fails touches nothing. Pure numpy.

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

from lockstep.core.step import StepPlan
from lockstep.errors import InvalidPlanError
from lockstep.executors.base import StepBatch

NULL_BLOCK = 0
"""Belongs to nobody; padding lives here."""
PAD_TOKEN = 0
_NO_ROWS = np.zeros(0, np.int64)
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
MIN_PASS_TOKENS = 8
"""Below this the limit could not be kept beside the rule of no single tokens."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a plan must stay within."""

    block_size: int
    num_blocks: int
    """Without the null block: blocks are 1..num_blocks."""
    num_host_blocks: int
    max_model_len: int
    vocab_size: int


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


class TableRows:
    """Block tables as arrays, kept from one step to the next.

    A sequence's table is the same tuple until it grows, so all but a few conversions are saved. Only the tables of the
    latest step are kept.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tuple[int, ...], Ints]] = {}

    def of(self, tables: tuple[tuple[int, ...], ...]) -> list[Ints]:
        """One array per table; OverflowError when an entry does not fit 32 bits."""
        before, kept, rows = self._kept, {}, []
        for table in tables:
            entry = before.get(id(table))
            if entry is None or entry[0] is not table:
                entry = (table, np.array(table, np.int32))
            kept[id(table)] = entry
            rows.append(entry[1])
        self._kept = kept
        return rows


def build_inputs(batch: StepBatch, limits: Limits, table_rows: TableRows | None = None) -> ForwardInputs:
    """Inputs of a plan that forwards something.

    A pass over one token, and an LM head over one row, would take a matrix-vector kernel that rounds differently from
    the one for more; both are padded to two, so that a sequence's bits do not depend on its company.

    Args:
        table_rows: the caller's, so that tables seen in its last step are not converted again.

    Raises:
        InvalidPlanError: naming the sequence and what is wrong with its chunk.
    """
    plan = batch.plan
    num_seqs = len(plan.seq_ids)
    if not len(plan.starts) == len(plan.lengths) == len(plan.tables) == num_seqs:
        raise InvalidPlanError(f"step {plan.step}: the plan's columns have different lengths")
    starts = np.fromiter(plan.starts, np.int64, num_seqs)
    lengths = np.fromiter(plan.lengths, np.int64, num_seqs)
    _check_spans(plan, starts, lengths, limits)
    needed = -(-(starts + lengths) // limits.block_size)
    blocks = _flat_tables(plan, needed, TableRows() if table_rows is None else table_rows)
    _check_blocks(plan, starts, needed, blocks, limits)
    num_tokens = int(lengths.sum())
    _check_tokens(batch, num_tokens, limits)
    hidden_rows = _NO_ROWS if batch.hidden_rows is None else batch.hidden_rows
    return _arranged(batch.token_ids, starts, lengths, needed, blocks, batch.rows, hidden_rows)


def check_moves(plan: StepPlan, limits: Limits) -> None:
    """Check swaps and copies, whether or not anything is forwarded.

    Raises:
        InvalidPlanError: a block outside the pool or the null block, or two moves into one place.
    """
    last, last_host = limits.num_blocks, limits.num_host_blocks - 1
    for what, pairs, source, target in (
        ("swap_out", plan.swap_out, (1, last), (0, last_host)),
        ("swap_in", plan.swap_in, (0, last_host), (1, last)),
        ("copy", plan.copies, (1, last), (1, last)),
    ):
        for pair in pairs:
            if not (source[0] <= pair[0] <= source[1] and target[0] <= pair[1] <= target[1]):
                raise InvalidPlanError(
                    f"step {plan.step}: {what} {pair[0]} -> {pair[1]} leaves the pool of device blocks 1..{last} "
                    f"and host blocks 0..{last_host}"
                )
        if len({pair[1] for pair in pairs}) != len(pairs):
            raise InvalidPlanError(f"step {plan.step}: two of {what} write the same block")


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
    begins, table_begins = _begins(lengths), _begins(needed)
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


def _begins(sizes: Longs) -> Longs:
    begins = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=begins[1:])
    return begins


def _check_spans(plan: StepPlan, starts: Longs, lengths: Longs, limits: Limits) -> None:
    wrong = (starts < 0) | (lengths < 1) | (starts + lengths > limits.max_model_len)
    if wrong.any():
        index = int(wrong.argmax())
        raise InvalidPlanError(
            f"step {plan.step}, sequence {plan.seq_ids[index]}: {lengths[index]} tokens from position {starts[index]}; "
            f"a chunk has at least one token and ends at {limits.max_model_len} at most"
        )


def _flat_tables(plan: StepPlan, needed: Longs, table_rows: TableRows) -> Ints:
    """The first ``needed`` entries of each table, one table after the other."""
    sizes = np.fromiter(map(len, plan.tables), np.int64, len(plan.tables))
    short = sizes < needed
    if short.any():
        index = int(short.argmax())
        raise InvalidPlanError(
            f"step {plan.step}, sequence {plan.seq_ids[index]}: a table of {sizes[index]} blocks; "
            f"its chunk needs {needed[index]}"
        )
    try:
        rows = table_rows.of(plan.tables)
    except OverflowError:
        raise InvalidPlanError(f"step {plan.step}: a block id does not fit 32 bits") from None
    if (sizes > needed).any():
        rows = [row[:num] for row, num in zip(rows, needed.tolist(), strict=True)]
    return np.concatenate(rows)


def _check_blocks(plan: StepPlan, starts: Longs, needed: Longs, blocks: Ints, limits: Limits) -> None:
    """Every block lies in the pool, and one that is written occurs once: nobody else may write or read it meanwhile."""
    if blocks.min() < 1 or blocks.max() > limits.num_blocks:
        index = int(((blocks < 1) | (blocks > limits.num_blocks)).argmax())
        raise InvalidPlanError(
            f"step {plan.step}, sequence {_owner(plan, needed, index)}: "
            f"block {int(blocks[index])} is not one of 1..{limits.num_blocks}"
        )
    first_written = starts // limits.block_size
    num_written = needed - first_written
    begins = _begins(num_written)
    offsets = _begins(needed)[:-1] + first_written - begins[:-1]
    written = np.arange(begins[-1]) + np.repeat(offsets, num_written)
    shared = np.bincount(blocks)[blocks[written]] > 1
    if shared.any():
        index = int(written[shared.argmax()])
        raise InvalidPlanError(
            f"step {plan.step}, sequence {_owner(plan, needed, index)}: writes block {int(blocks[index])}, "
            "which occurs twice in this step's tables"
        )


def _owner(plan: StepPlan, needed: Longs, index: int) -> int:
    return plan.seq_ids[int(np.searchsorted(np.cumsum(needed), index, side="right"))]


def _check_tokens(batch: StepBatch, num_tokens: int, limits: Limits) -> None:
    step, ids = batch.plan.step, batch.token_ids
    if ids.shape != (num_tokens,):
        raise InvalidPlanError(f"step {step}: token ids of shape {list(ids.shape)}; the plan has {num_tokens} tokens")
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= limits.vocab_size)][0])
        raise InvalidPlanError(f"step {step}: token id {wrong} is not in the vocabulary of {limits.vocab_size}")
    for rows in (batch.rows, _NO_ROWS if batch.hidden_rows is None else batch.hidden_rows):
        if rows.ndim != 1 or (len(rows) and (rows.min() < 0 or rows.max() >= num_tokens)):
            raise InvalidPlanError(f"step {step}: a row outside the step's {num_tokens} tokens")


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
