"""Steps of encoders: divides the chunks of a plan into stages, and checks them before anything runs. Pure numpy.

A text of T tokens is a prompt of T * num_stages positions. Position p is stage p // T of row p % T, so that a chunk may
have rows of several stages. A stage needs the whole stage before it. So stages run in ascending order, each with the
rows of all texts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import ModelConfig
from lockstep.core.step import StepPlan
from lockstep.errors import InvalidPlanError
from lockstep.executors.base import StepBatch
from lockstep.executors.native.forward import BLOCK_TOKENS
from lockstep.executors.step_inputs import begins_of

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
STEP_OPERATIONS = 256 * 2 * 500_000_000
"""Operations of a step: those of the products of 256 tokens in a decoder of half a billion parameters. So a decoder
beside an encoder waits for a step about as long as for a chunk of a prompt of its own."""
FLOAT_COST = 5
"""Duration of an operation on floats, which attention has, in operations on int8, which products have."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text, or a pair of texts as one."""

    ids: Longs
    """[T] token ids."""
    types: Ints
    """[T] token types: 0, and 1 in the second text of a pair."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class StageRows:
    """The rows of one stage in a step."""

    stage: int
    token_ids: Longs
    """[T]: tokens of the rows."""
    types: Ints
    """[T]: their token types."""
    plan: Ints
    """Sequences, first rows, offsets and block tables, in the format of the native attention."""
    totals: Ints
    """[S]: length of each text."""
    parts: Longs
    """[T]: index of each row among the positions of the step, ascending."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one text in one stage."""

    seq_id: int
    first: int
    end: int
    part: int
    """Index of the first row among the positions of the step."""
    table: tuple[int, ...]


def step_positions(config: ModelConfig) -> int:
    """Number of positions, rows times stages, of a step of `STEP_OPERATIONS` in the model's longest text."""
    hidden, width = config.hidden_size, config.num_heads * config.head_dim
    attention = 2 * hidden * (width + config.num_kv_heads * config.head_dim)
    feed_forward = (3 if config.gated else 2) * hidden * config.intermediate_size
    row = 2 * (attention + feed_forward) + FLOAT_COST * 4 * config.max_model_len * width
    return max(1, STEP_OPERATIONS // row)


def checked_stages(plan: StepPlan, texts: Mapping[int, Text], num_stages: int, num_blocks: int) -> list[StageRows]:
    """Check the chunks of a plan and divide them into stages, in ascending order.

    Args:
        texts: the texts by sequence.
        num_blocks: number of blocks without the null block: blocks are 1..num_blocks.

    Raises:
        InvalidPlanError: a chunk is invalid; the message names the sequence and the error.
    """
    if not len(plan.starts) == len(plan.lengths) == len(plan.tables) == len(plan.seq_ids):
        raise InvalidPlanError(f"step {plan.step}: the plan's columns have different lengths")
    tables = [_checked_table(plan, index, texts, num_stages, num_blocks) for index in range(len(plan.seq_ids))]
    blocks = [block for table in tables for block in table]
    if len(set(blocks)) != len(blocks):
        raise InvalidPlanError(f"step {plan.step}: a block occurs twice in this step's tables")
    pieces: dict[int, list[_Piece]] = {}
    at = 0
    for seq_id, start, length, table in zip(plan.seq_ids, plan.starts, plan.lengths, tables, strict=True):
        num_rows = len(texts[seq_id])
        for stage in range(start // num_rows, (start + length - 1) // num_rows + 1):
            first = max(start - stage * num_rows, 0)
            end = min(start + length - stage * num_rows, num_rows)
            part = at + stage * num_rows + first - start
            pieces.setdefault(stage, []).append(_Piece(seq_id, first, end, part, table))
        at += length
    return [_stage_rows(stage, pieces[stage], texts) for stage in sorted(pieces)]


def rows_of_parts(batch: StepBatch, stages: Sequence[StageRows], last_stage: int) -> Longs:
    """Rows of the last stage that belong to the requested positions, in the order of the request.

    Raises:
        InvalidPlanError: a position is not one of the last stage.
    """
    requested = np.zeros(0, np.int64) if batch.hidden_rows is None else np.asarray(batch.hidden_rows, np.int64)
    if not len(requested):
        return requested
    has_last = bool(stages) and stages[-1].stage == last_stage
    parts = stages[-1].parts if has_last else np.zeros(0, np.int64)
    rows: Longs = np.searchsorted(parts, requested)
    found = rows < len(parts)
    if not found.all() or (parts[rows] != requested).any():
        raise InvalidPlanError(
            f"step {batch.plan.step}: a hidden row is not one of the {len(parts)} positions of the last stage"
        )
    return rows


def _checked_table(
    plan: StepPlan, index: int, texts: Mapping[int, Text], num_stages: int, num_blocks: int
) -> tuple[int, ...]:
    """The blocks of the whole text of a chunk."""
    seq_id, start, length = plan.seq_ids[index], plan.starts[index], plan.lengths[index]
    where = f"step {plan.step}, sequence {seq_id}"
    text = texts.get(seq_id)
    if text is None:
        raise InvalidPlanError(f"{where}: its text is not known; `begin` was not called")
    num_positions = len(text) * num_stages
    if start < 0 or length < 1 or start + length > num_positions:
        raise InvalidPlanError(
            f"{where}: {length} positions from position {start}; a chunk must have at least one position, and end at "
            f"{num_positions} at most, for its text has {len(text)} tokens"
        )
    needed = -(-len(text) // BLOCK_TOKENS)
    table = plan.tables[index][:needed]
    if len(table) < needed:
        raise InvalidPlanError(f"{where}: a table of {len(table)} blocks; its text needs {needed}")
    wrong = [block for block in table if not 1 <= block <= num_blocks]
    if wrong:
        raise InvalidPlanError(f"{where}: block {wrong[0]} is not one of 1..{num_blocks}")
    return table


def _stage_rows(stage: int, pieces: Sequence[_Piece], texts: Mapping[int, Text]) -> StageRows:
    lengths = np.array([piece.end - piece.first for piece in pieces], np.int64)
    sizes = np.array([len(piece.table) for piece in pieces], np.int64)
    parts = (
        [len(pieces)],
        [piece.first for piece in pieces],
        begins_of(lengths),
        begins_of(sizes),
        [block for piece in pieces for block in piece.table],
    )
    return StageRows(
        stage=stage,
        token_ids=np.concatenate([texts[piece.seq_id].ids[piece.first : piece.end] for piece in pieces]),
        types=np.concatenate([texts[piece.seq_id].types[piece.first : piece.end] for piece in pieces]),
        plan=np.concatenate([np.asarray(part, np.int32) for part in parts]),
        totals=np.array([len(texts[piece.seq_id]) for piece in pieces], np.int32),
        parts=np.concatenate([np.arange(piece.part, piece.part + piece.end - piece.first) for piece in pieces]),
    )
