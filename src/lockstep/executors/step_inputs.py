"""Step inputs: converts a step's chunks to arrays and checks them before anything runs. Pure numpy.

A forward pass does not check its block tables, so a wrong entry would crash the process or read another request's
memory. Therefore every table, row and token is checked here, and a plan that fails has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.core.step import StepPlan
from lockstep.errors import InvalidPlanError
from lockstep.executors.base import StepBatch

NO_ROWS = np.zeros(0, np.int64)
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a plan must observe."""

    block_size: int
    num_blocks: int
    """Number of blocks without the null block: blocks are 1..num_blocks."""
    num_host_blocks: int
    max_model_len: int
    vocab_size: int


class TableRows:
    """Cache of block tables as arrays, kept from one step to the next.

    A sequence's table is the same tuple until it grows, so almost all conversions are avoided. Only the tables of the
    latest step are kept.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tuple[int, ...], Ints]] = {}

    def of(self, tables: tuple[tuple[int, ...], ...]) -> list[Ints]:
        """One array per table.

        Raises:
            OverflowError: an entry does not fit 32 bits.
        """
        before, kept, rows = self._kept, {}, []
        for table in tables:
            entry = before.get(id(table))
            if entry is None or entry[0] is not table:
                entry = (table, np.array(table, np.int32))
            kept[id(table)] = entry
            rows.append(entry[1])
        self._kept = kept
        return rows


@dataclass(frozen=True, slots=True)
class Chunks:
    """The checked chunks of a step, one for each sequence."""

    starts: Longs
    """[B]: number of tokens of each sequence that are already in its blocks."""
    lengths: Longs
    """[B]: number of tokens of each chunk."""
    needed: Longs
    """[B]: number of blocks of each table."""
    blocks: Ints
    """All block tables, one after the other."""

    @property
    def plan(self) -> Ints:
        """The number of sequences, their past lengths, offsets and tables in one array, in the format of the native
        attention."""
        parts = ([len(self.starts)], self.starts, begins_of(self.lengths), begins_of(self.needed), self.blocks)
        return np.concatenate(parts).astype(np.int32)


def checked_chunks(batch: StepBatch, limits: Limits, table_rows: TableRows) -> Chunks:
    """Check the chunks of a plan that has work and convert them.

    Args:
        table_rows: the caller's cache, so that tables of its last step are not converted again.

    Raises:
        InvalidPlanError: a chunk is invalid; the message names the sequence and the error.
    """
    plan = batch.plan
    num_seqs = len(plan.seq_ids)
    if not len(plan.starts) == len(plan.lengths) == len(plan.tables) == num_seqs:
        raise InvalidPlanError(f"step {plan.step}: the plan's columns have different lengths")
    starts = np.fromiter(plan.starts, np.int64, num_seqs)
    lengths = np.fromiter(plan.lengths, np.int64, num_seqs)
    _check_spans(plan, starts, lengths, limits)
    needed = -(-(starts + lengths) // limits.block_size)
    blocks = _flat_tables(plan, needed, table_rows)
    _check_blocks(plan, starts, needed, blocks, limits)
    _check_tokens(batch, int(lengths.sum()), limits)
    return Chunks(starts, lengths, needed, blocks)


def check_moves(plan: StepPlan, limits: Limits) -> None:
    """Check swaps and copies, even if nothing is computed.

    Raises:
        InvalidPlanError: a block is outside the pool or the null block, or two moves have the same destination.
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
                    f"step {plan.step}: {what} {pair[0]} -> {pair[1]} is outside the pool of device blocks 1..{last} "
                    f"and host blocks 0..{last_host}"
                )
        if len({pair[1] for pair in pairs}) != len(pairs):
            raise InvalidPlanError(f"step {plan.step}: two moves of {what} write the same block")


def begins_of(sizes: Longs) -> Longs:
    """[B + 1]: start of each of several consecutive parts, and the end of the last."""
    begins = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=begins[1:])
    return begins


def _check_spans(plan: StepPlan, starts: Longs, lengths: Longs, limits: Limits) -> None:
    wrong = (starts < 0) | (lengths < 1) | (starts + lengths > limits.max_model_len)
    if wrong.any():
        index = int(wrong.argmax())
        raise InvalidPlanError(
            f"step {plan.step}, sequence {plan.seq_ids[index]}: {lengths[index]} tokens from position {starts[index]}; "
            f"a chunk must have at least one token and end at {limits.max_model_len} at most"
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
    """Check that every block is in the pool, and that no other row uses a block that is written."""
    if blocks.min() < 1 or blocks.max() > limits.num_blocks:
        index = int(((blocks < 1) | (blocks > limits.num_blocks)).argmax())
        raise InvalidPlanError(
            f"step {plan.step}, sequence {_owner(plan, needed, index)}: "
            f"block {int(blocks[index])} is not one of 1..{limits.num_blocks}"
        )
    first_written = starts // limits.block_size
    num_written = needed - first_written
    begins = begins_of(num_written)
    offsets = begins_of(needed)[:-1] + first_written - begins[:-1]
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
    for rows in (batch.rows, batch.hidden_rows, batch.prompt_rows):
        if rows is None:
            continue
        if rows.ndim != 1 or (len(rows) and (rows.min() < 0 or rows.max() >= num_tokens)):
            raise InvalidPlanError(f"step {step}: a row is outside the step's {num_tokens} tokens")
