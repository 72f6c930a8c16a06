"""Run of repeating steps: counts steps in which the same sequences decode one token each, instead of planning each row.

The only decision of such a step is which blocks the growing tables get. The effect on the sequences is written back
when they are read, or when the run ends. The plans are the same, byte by byte, as those of the planner.
"""

from __future__ import annotations

from lockstep.core.kv import KVCache
from lockstep.core.request import FinishReason
from lockstep.core.sequence import Sequence
from lockstep.core.step import Finish, StepPlan, StepResult


class DecodeRun:
    """A run of repeating steps.

    Args:
        seqs: all running sequences, by rank, each with one known token to compute.
    """

    def __init__(self, seqs: list[Sequence], kv: KVCache, block_size: int) -> None:
        self.seqs = seqs
        self._kv = kv
        self._block_size = block_size
        count = len(seqs)
        self._ids = tuple([seq.seq_id for seq in seqs])
        self._starts = tuple([seq.num_computed for seq in seqs])
        self._tables = [seq.table for seq in seqs]
        self._frozen_tables = tuple(self._tables)
        self._ones = (1,) * count
        self._trues = (True,) * count
        self._nones = (None,) * count
        self._due: dict[int, list[int]] = {}
        """Step of the run to the rows that need a block in it, by rank. Rows that once need a block in the same step
        always do."""
        for row, seq in enumerate(seqs):
            self._due.setdefault(len(seq.table) * block_size - seq.num_computed, []).append(row)
        self._num_steps = 0
        self._num_unwritten = 0
        """Number of committed steps, and of those that are not written back to the sequences yet."""
        self._is_plain = False
        """True if the last step belongs to this run and moved nothing, so that the next may be its repeat."""
        self._last = min([seq.max_known - seq.num_known for seq in seqs]) - 1
        """Step of the run in which the first sequence reaches its limit: the last one."""
        self._quiet_until = min(self._last, *self._due)
        """Step of the run in which the first sequence reaches its limit or needs a block."""

    @property
    def num_unwritten_tokens(self) -> int:
        """Number of generated tokens that are not written back to the sequences yet."""
        return self._num_unwritten * len(self.seqs)

    @property
    def num_quiet_steps(self) -> int:
        """Number of next steps in which no block is needed."""
        return max(0, self._quiet_until - self._num_steps) if self._is_plain else 0

    def plan(self, step: int) -> StepPlan | None:
        """The next step; None: there are too few blocks for it."""
        due = self._due.get(self._num_steps, ())
        if len(due) > self._kv.pool.num_available:
            return None
        if due:
            self._grow(self._due.pop(self._num_steps))
        moves = self._kv.take_moves()
        self._is_plain = not moves.evicted
        return StepPlan(
            step, moves.evicted, (), (), (), self._ids, self._starts, self._ones, self._frozen_tables, self._trues
        )

    def commit(self, result: StepResult) -> bool:
        """Count a step; False, with nothing changed: a sequence got more than one token."""
        if result.num_tokens != self._ones:
            return False
        self.advance(1)
        return True

    def is_over(self, result: StepResult) -> bool:
        """True if a sequence ends with the step that was counted last."""
        return self._num_steps > self._last or result.finishes != self._nones

    def finishes(self, result: StepResult) -> tuple[Finish, ...]:
        """The sequences that end with the last step, by rank. The run must be written back first."""
        reasons = [
            FinishReason.LENGTH if reason is None and seq.num_known == seq.max_known else reason
            for seq, reason in zip(self.seqs, result.finishes, strict=True)
        ]
        pairs = zip(self._ids, reasons, strict=True)
        return tuple([Finish(seq_id, reason) for seq_id, reason in pairs if reason is not None])

    def advance(self, num_steps: int) -> None:
        """Count steps."""
        self._num_steps += num_steps
        self._num_unwritten += num_steps
        self._starts = tuple([start + num_steps for start in self._starts])

    def write_back(self) -> int:
        """Write the counted steps back to the sequences. Returns the number of new tokens of each."""
        count, self._num_unwritten = self._num_unwritten, 0
        if count:
            for seq in self.seqs:
                seq.num_computed += count
                seq.num_known += count
                seq.last_sampled_step += count
        return count

    def _grow(self, rows: list[int]) -> None:
        for row in rows:
            seq = self.seqs[row]
            positions = (len(seq.table) + 1) * self._block_size
            self._kv.hold_row(seq, positions)
            self._tables[row] = seq.table
        self._due[self._num_steps + self._block_size] = rows
        self._quiet_until = min(self._last, *self._due)
        self._frozen_tables = tuple(self._tables)
