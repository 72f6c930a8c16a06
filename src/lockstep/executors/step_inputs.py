"""Step inputs: converts a step's chunks to arrays and checks them before anything runs. Pure numpy.

A forward pass does not check its block tables, so a wrong entry would crash the process or read another request's
memory. Therefore every table, row and token is checked here, and a plan that fails has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.core.groups import ONE_GROUP, KVGroup
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
    groups: tuple[KVGroup, ...] = ONE_GROUP


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
class WindowTables:
    """The block tables of a group with a window."""

    plan: Ints
    """Like `Chunks.plan`, with the tables of this group."""
    first_columns: Ints
    """[B]: number of the column with which each table begins."""


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
    windows: tuple[WindowTables, ...] = ()
    """Tables of the groups with a window, in order."""
    states: Ints | None = None
    """[B, 2, blocks of a state]: the blocks of the state before each chunk, and of the one after it. Both are the same
    if the state is updated in place. Before position 0, the state is zero, and its blocks are -1. None: no group of the
    model has states."""

    @property
    def plan(self) -> Ints:
        """The number of sequences, their past lengths, offsets and tables in one array, in the format of the native
        attention."""
        return _attention_plan(self.starts, self.lengths, self.needed, self.blocks)


@dataclass(frozen=True, slots=True)
class _Tables:
    """Tables of one group, in the order of the chunks."""

    sizes: Longs
    """[B]: number of entries of each table."""
    blocks: Ints
    """All tables, one after the other."""
    first_written: Longs
    """[B]: index of the first entry of each table that is written. All after it are written as well."""


def checked_chunks(batch: StepBatch, limits: Limits, table_rows: Sequence[TableRows]) -> Chunks:
    """Check the chunks of a plan that has work and convert them.

    Args:
        table_rows: the caller's cache for each group, so that tables of its last step are not converted again.

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
    tables = [_Tables(needed, _flat_tables(plan, needed, table_rows[0]), starts // limits.block_size)]
    windows: list[WindowTables] = []
    states = None
    for group, rows in zip(limits.groups[1:], _other_rows(plan, limits, table_rows), strict=True):
        if group.is_state:
            states, of_states = _states(plan, group, rows, starts)
            tables.append(of_states)
        else:
            first_columns, of_window = _window(plan, group, rows, starts, needed, limits.block_size)
            windows.append(
                WindowTables(_attention_plan(starts, lengths, of_window.sizes, of_window.blocks), first_columns)
            )
            tables.append(of_window)
    _check_blocks(plan, tables, limits)
    _check_tokens(batch, int(lengths.sum()), limits)
    return Chunks(starts, lengths, needed, tables[0].blocks, tuple(windows), states)


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


def _other_rows(plan: StepPlan, limits: Limits, table_rows: Sequence[TableRows]) -> list[list[Ints]]:
    """The tables of each group after the first one, as arrays."""
    num_others = len(limits.groups) - 1
    if not num_others and not plan.other_tables:
        return []
    if len(plan.other_tables) != len(plan.seq_ids):
        raise InvalidPlanError(
            f"step {plan.step}: other tables of {len(plan.other_tables)} rows; the plan has {len(plan.seq_ids)} rows, "
            f"and the model {num_others} groups after the first one"
        )
    for seq_id, tables in zip(plan.seq_ids, plan.other_tables, strict=True):
        if len(tables) != num_others:
            raise InvalidPlanError(
                f"step {plan.step}, sequence {seq_id}: {len(tables)} other tables; the model has {num_others} groups "
                "after the first one"
            )
    try:
        return [table_rows[1 + index].of(each) for index, each in enumerate(zip(*plan.other_tables, strict=True))]
    except OverflowError:
        raise InvalidPlanError(f"step {plan.step}: an entry of another table does not fit 32 bits") from None


def _window(
    plan: StepPlan, group: KVGroup, rows: list[Ints], starts: Longs, needed: Longs, block_size: int
) -> tuple[Ints, _Tables]:
    """The first columns and the tables of a group with a window."""
    first_columns = np.fromiter((row[0] if len(row) else -1 for row in rows), np.int64, len(rows))
    seen = np.maximum(starts + 1 - group.window, 0) // block_size
    wrong = (first_columns < 0) | (first_columns > seen)
    if wrong.any():
        index = int(wrong.argmax())
        raise InvalidPlanError(
            f"step {plan.step}, sequence {plan.seq_ids[index]}: its table of the window of {group.window} tokens "
            f"begins with column {first_columns[index]}; its chunk reads from column {seen[index]} on"
        )
    sizes = (needed - first_columns) * group.num_parts
    found = np.fromiter(map(len, rows), np.int64, len(rows)) - 1
    if (found < sizes).any():
        index = int((found < sizes).argmax())
        raise InvalidPlanError(
            f"step {plan.step}, sequence {plan.seq_ids[index]}: its table of the window of {group.window} tokens has "
            f"{found[index]} blocks; its chunk needs {sizes[index]}"
        )
    blocks = np.concatenate([row[1 : 1 + size] for row, size in zip(rows, sizes.tolist(), strict=True)])
    written = (starts // block_size - first_columns) * group.num_parts
    return first_columns.astype(np.int32), _Tables(sizes, blocks, written)


def _states(plan: StepPlan, group: KVGroup, rows: list[Ints], starts: Longs) -> tuple[Ints, _Tables]:
    """The blocks of states, as `Chunks.states` and as tables. A state that is updated in place is once in its table."""
    size = group.num_parts
    states = np.full((len(rows), 2, size), -1, np.int32)
    tables = []
    for index, row in enumerate(rows):
        where = f"step {plan.step}, sequence {plan.seq_ids[index]}"
        is_first = starts[index] == 0
        if len(row) != size and (is_first or len(row) != 2 * size):
            expected = (
                f"{size} are" if is_first else f"{size}, or {2 * size} with those of another state before it, are"
            )
            raise InvalidPlanError(f"{where}: {len(row)} blocks of states; {expected} expected")
        states[index, 1] = row[-size:]
        if not is_first:
            states[index, 0] = row[:size]
        is_in_place = len(row) == 2 * size and bool((row[:size] == row[size:]).all())
        tables.append(row[size:] if is_in_place else row)
    sizes = np.fromiter(map(len, tables), np.int64, len(tables))
    return states, _Tables(sizes, np.concatenate(tables), sizes - size)


def _check_blocks(plan: StepPlan, tables: Sequence[_Tables], limits: Limits) -> None:
    """Check that every block is in the pool, and that a block that is written occurs only once in the step."""
    blocks = np.concatenate([each.blocks for each in tables]) if len(tables) > 1 else tables[0].blocks
    if blocks.min() < 1 or blocks.max() > limits.num_blocks:
        index = int(((blocks < 1) | (blocks > limits.num_blocks)).argmax())
        raise InvalidPlanError(
            f"step {plan.step}, sequence {_owner(plan, tables, index)}: "
            f"block {int(blocks[index])} is not one of 1..{limits.num_blocks}"
        )
    before, parts = 0, []
    for each in tables:
        num_written = each.sizes - each.first_written
        begins = begins_of(num_written)
        offsets = before + begins_of(each.sizes)[:-1] + each.first_written - begins[:-1]
        parts.append(np.arange(begins[-1]) + np.repeat(offsets, num_written))
        before += len(each.blocks)
    written = np.concatenate(parts) if len(parts) > 1 else parts[0]
    shared = np.bincount(blocks)[blocks[written]] > 1
    if shared.any():
        index = int(written[shared.argmax()])
        raise InvalidPlanError(
            f"step {plan.step}, sequence {_owner(plan, tables, index)}: writes block {int(blocks[index])}, "
            "which occurs twice in this step's tables"
        )


def _owner(plan: StepPlan, tables: Sequence[_Tables], index: int) -> int:
    """The sequence in whose table a block is, by the index of the block in all tables."""
    ends = np.cumsum(np.concatenate([each.sizes for each in tables]))
    return plan.seq_ids[int(np.searchsorted(ends, index, side="right")) % len(plan.seq_ids)]


def _attention_plan(starts: Longs, lengths: Longs, sizes: Longs, blocks: Ints) -> Ints:
    parts = ([len(starts)], starts, begins_of(lengths), begins_of(sizes), blocks)
    return np.concatenate(parts).astype(np.int32)


def _check_tokens(batch: StepBatch, num_tokens: int, limits: Limits) -> None:
    step, ids = batch.plan.step, batch.token_ids
    if ids.shape != (num_tokens,):
        raise InvalidPlanError(f"step {step}: token ids of shape {list(ids.shape)}; the plan has {num_tokens} tokens")
    if ids.min() < 0 or ids.max() >= limits.vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= limits.vocab_size)][0])
        raise InvalidPlanError(f"step {step}: token id {wrong} is not in the vocabulary of {limits.vocab_size}")
    if batch.adapters is not None and batch.adapters.shape != (num_tokens,):
        raise InvalidPlanError(
            f"step {step}: adapters of shape {list(batch.adapters.shape)}; the plan has {num_tokens} tokens"
        )
    for rows in (batch.rows, batch.hidden_rows, batch.prompt_rows):
        if rows is None:
            continue
        if rows.ndim != 1 or (len(rows) and (rows.min() < 0 or rows.max() >= num_tokens)):
            raise InvalidPlanError(f"step {step}: a row is outside the step's {num_tokens} tokens")
