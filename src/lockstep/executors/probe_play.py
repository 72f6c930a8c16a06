"""What the determinism probe plays: one subject, a fixed prompt and then fixed tokens one by one, under circumstances.

The logits of every row that would be sampled are kept. Works on the Executor protocol and knows no implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from lockstep.core.step import StepPlan
from lockstep.errors import ConfigError
from lockstep.executors.base import Executor, Geometry, Logits, StepBatch

BESIDE_TOKENS = 64
"""A companion that only prefills begins anew after this many tokens."""
_NUM_DECODES = 4
_MOVE_AFTER_DECODES = 2

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Circumstances under which the subject is played."""

    chunks: tuple[int, ...]
    """Lengths in which the prompt is computed."""
    decodes: int = _NUM_DECODES
    company: tuple[int, ...] = ()
    """Prompt lengths of sequences that are prefilled with the subject's first chunk and then decode beside it."""
    beside: tuple[int, ...] = ()
    """Chunk lengths of sequences that prefill in every step, beside prompt and decodes alike."""
    blocks: str = "ascending"
    """Order in which blocks are taken from the pool: ``ascending``, ``descending`` or ``scattered``."""
    move: str = ""
    """While it decodes, ``swap``: out to the host, over its old blocks, into others; ``copy``: to others directly."""
    all_rows: bool = False
    """Whether logits of every token are asked for, not only of the sampled ones."""


@dataclass(slots=True)
class _Row:
    """One sequence while a scenario is played."""

    tokens: Tokens
    table: tuple[int, ...]
    position: int = 0

    def chunk(self, length: int) -> tuple[Tokens, int, tuple[int, ...]]:
        begin, self.position = self.position, self.position + length
        return self.tokens[begin : self.position], begin, self.table


@dataclass(slots=True)
class _Play:
    """A pool from which blocks are dealt."""

    executor: Executor
    num_blocks: int
    scenario: Scenario
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        blocks = list(range(1, self.num_blocks + 1))
        if self.scenario.blocks == "descending":
            blocks.reverse()
        elif self.scenario.blocks == "scattered":
            blocks = [int(block) for block in np.random.default_rng(7).permutation(blocks)]
        self.free = blocks

    def deal(self, num_tokens: int) -> tuple[int, ...]:
        needed = num_blocks_for(num_tokens, self.executor.geometry)
        if needed > len(self.free):
            raise ConfigError(f"a pool of {self.num_blocks} blocks is too small for this scenario")
        dealt, self.free = tuple(self.free[:needed]), self.free[needed:]
        return dealt

    def run(self) -> Logits:
        """Logits [1 + decodes, vocab] of the subject's sampled rows."""
        scenario, vocab = self.scenario, self.executor.geometry.vocab_size
        steps = (*scenario.chunks, *(1,) * scenario.decodes)
        length = sum(steps)
        subject = _Row(_tokens(0, length, vocab), self.deal(length))
        company = [
            _Row(_tokens(1 + i, n + len(steps), vocab), self.deal(n + len(steps)))
            for i, n in enumerate(scenario.company)
        ]
        beside = [_Row(_tokens(99 + i, 2048, vocab), self.deal(BESIDE_TOKENS)) for i in range(len(scenario.beside))]
        kept: list[Logits] = []
        for index, step in enumerate(steps):
            items = [row.chunk(n if index == 0 else 1) for row, n in zip(company, scenario.company, strict=True)]
            for row, n in zip(beside, scenario.beside, strict=True):
                row.position = 0 if row.position + n > BESIDE_TOKENS else row.position
                items.append(row.chunk(n))
            place = len(items) // 2
            items.insert(place, subject.chunk(step))
            samples = index >= len(scenario.chunks) - 1
            batch = _batch(items, {} if samples else {place}, scenario.all_rows)
            logits = self.executor.execute(batch)
            if samples:
                last_token = sum(len(tokens) for tokens, _, _ in items[: place + 1]) - 1
                kept.append(logits[int(np.searchsorted(batch.rows, last_token))].copy())
            if scenario.move and index == len(scenario.chunks) - 1 + _MOVE_AFTER_DECODES:
                subject.table = self._move(subject.table)
        return np.stack(kept)

    def _move(self, table: tuple[int, ...]) -> tuple[int, ...]:
        """Take the subject's blocks elsewhere and let somebody else write where they were."""
        geometry = self.executor.geometry
        target = self.deal(len(table) * geometry.block_size)
        vandal = (_tokens(55, len(table) * geometry.block_size, geometry.vocab_size), 0, table)
        if self.scenario.move == "swap":
            out = tuple(zip(table, range(len(table)), strict=True))
            back = tuple(zip(range(len(table)), target, strict=True))
            self.executor.execute(_batch([], swap_out=out))
            self.executor.execute(_batch([vandal]))
            self.executor.execute(_batch([], swap_in=back))
        else:
            self.executor.execute(_batch([], copies=tuple(zip(table, target, strict=True))))
            self.executor.execute(_batch([vandal]))
        return target


def play(executor: Executor, num_blocks: int, scenario: Scenario) -> Logits:
    """Play a scenario on an allocated executor.

    Returns:
        Logits [1 + decodes, vocab]: after the prompt, and after each token fed.

    Raises:
        ConfigError: the pool is too small for it.
        ExecutorError: a step failed.
    """
    return _Play(executor, num_blocks, scenario).run()


def split_prompt(length: int, size: int) -> tuple[int, ...]:
    """Chunks of ``size`` such that none has exactly one token: attention over a single query is another kernel."""
    chunks = [size] * (length // size)
    rest = length % size
    if rest == 1:
        if size > 2:
            chunks[-1:] = [size - 1, 2]
        else:
            chunks[-1] += 1
    elif rest:
        chunks.append(rest)
    return tuple(chunks)


def num_blocks_for(num_tokens: int, geometry: Geometry) -> int:
    return -(-num_tokens // geometry.block_size)


def _tokens(salt: int, length: int, vocab_size: int) -> Tokens:
    return np.random.default_rng(salt).integers(0, vocab_size, length)


def _batch(
    items: Sequence[tuple[Tokens, int, tuple[int, ...]]],
    unsampled: set[int] | dict[int, int] | None = None,
    all_rows: bool = False,
    *,
    swap_out: tuple[tuple[int, int], ...] = (),
    swap_in: tuple[tuple[int, int], ...] = (),
    copies: tuple[tuple[int, int], ...] = (),
) -> StepBatch:
    lengths = tuple(len(tokens) for tokens, _, _ in items)
    samples = tuple(index not in (unsampled or {}) for index in range(len(items)))
    plan = StepPlan(
        step=0,
        evicted=(),
        swap_out=swap_out,
        swap_in=swap_in,
        copies=copies,
        seq_ids=tuple(range(len(items))),
        starts=tuple(start for _, start, _ in items),
        lengths=lengths,
        tables=tuple(table for _, _, table in items),
        samples=samples,
    )
    token_ids = np.fromiter(chain.from_iterable(tokens for tokens, _, _ in items), np.int64, sum(lengths))
    ends = np.cumsum(np.array(lengths, np.int64)) - 1
    rows = np.arange(len(token_ids)) if all_rows else ends[np.array(samples, bool)]
    return StepBatch(plan, token_ids, rows.astype(np.int64))
