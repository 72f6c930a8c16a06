"""Steps of one sequence of a hybrid, with the blocks of its positions and of its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lockstep.executors.base import Logits
from lockstep.executors.native.executor import NativeExecutor
from lockstep.executors.probe import step_of


@dataclass(slots=True)
class HybridSequence:
    """A sequence alone in a pool: blocks of all positions first, then those of two states."""

    executor: NativeExecutor
    max_tokens: int
    length: int = 0
    updates_in_place: bool = False
    """Whether steps overwrite the state. Otherwise they read one state and write the other one in turn."""
    _states: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Blocks that the pool must have."""
        groups = self.executor.geometry.groups
        return self._num_positional + 2 * sum(group.num_parts for group in groups if group.is_state)

    @property
    def _num_positional(self) -> int:
        geometry = self.executor.geometry
        return -(-self.max_tokens // geometry.block_size) * geometry.groups[0].num_parts

    def compute(self, token_ids: Sequence[int], *, all_rows: bool = True) -> Logits:
        """Logits of the next tokens, in one step."""
        first, parts = self._num_positional + 1, self.executor.geometry.groups[1].num_parts
        self._states = self._states or [
            tuple(range(first + half * parts, first + (half + 1) * parts)) for half in (0, 1)
        ]
        old, new = self._states
        if self.updates_in_place:
            state = old
        else:
            state = new if not self.length else (*old, *new)
            self._states = [new, old]
        step = step_of([(token_ids, self.length, tuple(range(1, first)))], all_rows=all_rows)
        step = replace(step, plan=replace(step.plan, other_tables=((state,),)))
        self.length += len(token_ids)
        return self.executor.execute(step).copy()


def in_chunks(sequence: HybridSequence, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
    """Logits of all tokens, computed in chunks; the rest in one more."""
    rows, at = [], 0
    for length in (*lengths, len(token_ids)):
        part = token_ids[at : at + length]
        rows += [sequence.compute(part)] if part else []
        at += length
    return np.concatenate(rows)
