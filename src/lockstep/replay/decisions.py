"""A record of the fingerprint, read back: what a step decided, what it brought, and the plan that this was."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.core.request import FinishReason
from lockstep.core.step import StepPlan

_REASONS = tuple(FinishReason)
_FAILED = 2
Pair = tuple[int, int]


class Row(NamedTuple):
    """A row that does not continue the step before."""

    position: int
    seq_id: int
    start: int
    length: int
    samples: bool
    num_kept: int
    """Leading blocks that it had in the step before."""
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """One record: a step and its repeats. Layout: `lockstep.core.fingerprint`."""

    is_failed: bool
    evicted: tuple[int, ...]
    swap_out: tuple[Pair, ...]
    swap_in: tuple[Pair, ...]
    copies: tuple[Pair, ...]
    admitted: tuple[int, ...]
    resumed: tuple[int, ...]
    preempted: tuple[int, ...]
    gone: tuple[int, ...]
    rows: tuple[Row, ...]
    got: dict[int, int]
    """Sequences that got more than one token."""
    ends: dict[int, FinishReason]
    repeats: int

    def plan(self, step: int, before: StepPlan | None, ended: Collection[int]) -> StepPlan:
        """The plan of the record's first step.

        Args:
            before: of the step before; None after a failed one.
            ended: who ended with that.

        Raises:
            ValueError: no plan follows from it.
        """
        rows = {row.position: row for row in self.rows}
        left = {*ended, *self.gone, *(row.seq_id for row in self.rows)}
        known = {} if before is None else {chunk.seq_id: chunk for chunk in before.chunks()}
        going_on = [chunk for chunk in known.values() if chunk.seq_id not in left]
        following = iter(going_on)
        columns: list[tuple[int, int, int, tuple[int, ...], bool]] = []
        for position in range(len(rows) + len(going_on)):
            row = rows.get(position)
            if row is None:
                chunk = next(following, None)
                if chunk is None:
                    raise ValueError(f"nobody continues at row {position}")
                columns.append((chunk.seq_id, chunk.start + chunk.length, 1, chunk.table, True))
                continue
            old = known[row.seq_id].table if row.seq_id in known else ()
            if row.num_kept > len(old):
                raise ValueError(f"sequence {row.seq_id} keeps {row.num_kept} blocks of {len(old)}")
            columns.append((row.seq_id, row.start, row.length, old[: row.num_kept] + row.blocks, row.samples))
        ids, starts, lengths, tables, samples = zip(*columns, strict=True) if columns else ((),) * 5
        return StepPlan(
            step,
            self.evicted,
            self.swap_out,
            self.swap_in,
            self.copies,
            ids,
            starts,
            lengths,
            tables,
            samples,
            self.admitted,
            self.resumed,
            self.preempted,
        )


def decode_record(record: bytes) -> Decision:
    """Read a record.

    Raises:
        ValueError: it is none.
    """
    numbers = _numbers(record)
    try:
        tag = next(numbers)
        if tag not in (1, _FAILED):
            raise ValueError(f"a record begins with 1 or 2, not {tag}")
        evicted = _ids(numbers)
        swap_out, swap_in, copies = _pairs(numbers), _pairs(numbers), _pairs(numbers)
        admitted, resumed, preempted, gone = _ids(numbers), _ids(numbers), _ids(numbers), _ids(numbers)
        rows = tuple(_row(numbers) for _ in range(next(numbers)))
        got = dict(_pairs(numbers))
        ends = {seq_id: _REASONS[reason] for seq_id, reason in _pairs(numbers)}
        repeats = next(numbers)
    except (StopIteration, RuntimeError, IndexError) as error:
        raise ValueError("it ends too early, or ends somebody for no known reason") from error
    if next(numbers, None) is not None:
        raise ValueError("it goes on behind its end")
    return Decision(
        tag == _FAILED,
        evicted,
        swap_out,
        swap_in,
        copies,
        admitted,
        resumed,
        preempted,
        gone,
        rows,
        got,
        ends,
        repeats,
    )


def _numbers(data: bytes) -> Iterator[int]:
    value = shift = 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value = shift = 0
    if shift:
        raise ValueError("it ends within a number")


def _ids(numbers: Iterator[int]) -> tuple[int, ...]:
    return tuple([next(numbers) for _ in range(next(numbers))])


def _pairs(numbers: Iterator[int]) -> tuple[Pair, ...]:
    return tuple([(next(numbers), next(numbers)) for _ in range(next(numbers))])


def _row(numbers: Iterator[int]) -> Row:
    position, seq_id, start, both, kept = (next(numbers) for _ in range(5))
    return Row(position, seq_id, start, both >> 1, bool(both & 1), kept, _ids(numbers))
