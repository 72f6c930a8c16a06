"""One step's inputs -> those of several forward passes, for kernels that must not get too many tokens. Pure numpy.

A later pass sees what an earlier one wrote, as the next step would: cutting a chunk here is chunking it. As the
scheduler does, no part of a chunk is left with a single token, for which attention would take another kernel; nor is a
pass, because the passes are as equal as that allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lockstep.executors.openvino.inputs import ForwardInputs, Ints, Longs

MIN_PASS_TOKENS = 8
"""Below this the limit could not be kept beside the rule of no single tokens."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Part of a step."""

    inputs: ForwardInputs
    """Rows padded to two where there is one."""
    row_places: Longs
    """Where its rows stand among the step's rows."""
    hidden_places: Longs
    """Where its hidden rows stand among the step's."""


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
    """Where passes begin, and the end of the last.

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
    part = ForwardInputs(
        token_ids=inputs.token_ids[begin:end].copy(),
        positions=inputs.positions[begin:end].copy(),
        past_lens=past.astype(np.int32),
        subsequence_begins=(edges - begin).astype(np.int32),
        block_indices=np.concatenate(tables),
        block_indices_begins=np.concatenate([[0], np.cumsum(needed)]).astype(np.int32),
        max_context_len=np.array((past + lengths).max(), np.int32),
        rows=np.repeat(rows, 2) if len(rows) == 1 else rows,
        hidden_rows=hidden_rows,
    )
    return Pass(part, row_places, hidden_places)


def _within(rows: Longs, begin: int, end: int) -> tuple[Longs, Longs]:
    """The rows of those tokens, counted from the first of them, and their places."""
    places = np.flatnonzero((rows >= begin) & (rows < end))
    return rows[places] - begin, places
