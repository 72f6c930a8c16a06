"""Fingerprint of decisions: sixteen hex digits that are equal exactly for runs whose steps all decided the same.

The caller that drives a scheduler (engine, replay, a test) adds each plan with its events. The format is defined byte
by byte, so that a recorder may store the records and a reader in another language may check them:

- ``int`` is an unsigned LEB128 number: 7 bits per byte, lowest first, the high bit set on all but the last byte.
- ``list(x)`` is an int, the number of items, followed by the items.
- A *record* is ``body + int(repeats)``. The digest starts as BLAKE2b-64 of ``b"lockstep fingerprint 1"``, and each
  record makes it BLAKE2b-64 of ``digest + record`` (8-byte digests, no key).
- A *step* is a body, unless it repeats the one before: both plain, the same ids and tables in the same order, each
  start one higher. *Plain* is a step that moves nothing, admits, resumes and preempts no sequence, in which every row
  has length 1, samples and gets 1 token, and no sequence ends. (The step before may take a new block and still be
  repeated; a step that takes one is not a repeat, because its tables differ.) A repeat only counts in ``repeats``.
- ``body = tag list(evicted) list(swap_out) list(swap_in) list(copies) list(admitted) list(resumed) list(preempted)
  list(gone) list(row) list(got) list(end)``, with pairs as two ints.
- ``tag`` is byte 1, or byte 2 for a step that failed (its ``got`` and ``end`` are empty). After a failed step there is
  no step before: every row of the next one is written. A step with drafts has byte 3, a failed one byte 4, and at the
  end of its body ``list(draft)``: ``position count accepted`` for each row with drafts, in plan order. The row's length
  includes them, whether they were accepted or not, and so does the end from which it would continue plainly.
- ``gone``: ids, in the order of the step before, that had a row there, did not end there and have none in this step.
- ``row``: each row that does not continue plainly, as ``position id start 2*length+samples kept list(block)``; position
  counts the plan's rows from 0, and the table is the first ``kept`` blocks that its row in the step before had
  (as many as agree; 0 without such a row) and then the blocks. A row continues plainly if it had a row in the step
  before, which sampled, with the same table, if it begins where that one ended, has length 1 and samples, and if every
  row above it that was in the step before was above it there.
  In a plan with several KV groups, the table is the row's table of the first group, then its tables of the other ones
  (`StepPlan.other_tables`), then the lengths of these.
- ``got``: ``id count`` for each sampling row that got more than 1 token, in plan order.
- ``end``: ``id reason`` for each that ended, in plan order; reason counts ``FinishReason`` from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from hashlib import blake2b
from itertools import accumulate, chain, compress, pairwise
from operator import add, is_, is_not, sub

from lockstep.core.request import FinishReason
from lockstep.core.state import FingerprintState
from lockstep.core.step import StepEvents, StepPlan

Tables = tuple[tuple[int, ...], ...]
"""A block table per row."""
_SEED = b"lockstep fingerprint 1"
_DIGEST_BYTES = 8
NUM_CODES = 1 << 17
"""Encodings of numbers below this are cached on first use, about 100 bytes each."""
_STEP, _FAILED_STEP = 1, 2
_WITH_DRAFTS = 2
"""Added to the tag of a step with drafts."""
_SEVEN_EMPTY_LISTS = (0,) * 7
_REASONS = {reason: index for index, reason in enumerate(FinishReason)}


class Fingerprint:
    """The running digest. Reading it does not close the open record."""

    def __init__(self) -> None:
        self._digest = _hash(_SEED)
        self._body: bytes | None = None
        self._repeats = 0
        self._keep(None, set(), False)

    def observe(self, plan: StepPlan, events: StepEvents) -> bytes | None:
        """Add a committed step. Returns the record that this closed, if any."""
        moves_nothing = _moves_nothing(plan)
        plain = moves_nothing and not events.finished and _only_decodes(plan, events)
        due, tables = self._due(), self._row_tables(plan)
        if (
            plain
            and self._before_plain
            and plan.starts == due
            and plan.seq_ids == self._ids
            and _are_same(tables, self._tables)
        ):
            self._repeats += 1
            self._shift += 1
            return None
        closed = self._open(_STEP, plan, events, tables, moves_nothing)
        ended = {finish.seq_id for finish in events.finished} if events.finished else set()
        self._keep(plan, ended, plain, tables)
        return closed

    def observe_failure(self, plan: StepPlan) -> bytes | None:
        """Add a step that failed. Returns the record that this closed, if any."""
        tables = self._row_tables(plan)
        closed = self._open(_FAILED_STEP, plan, StepEvents(plan.step, ()), tables, _moves_nothing(plan))
        self._keep(None, set(), False)
        return closed

    def repeat(self, num_steps: int) -> None:
        """Add repeats that were skipped (``Scheduler.skip``)."""
        assert self._before is not None, "nothing to repeat"
        assert self._before_plain, "the step before cannot be repeated"
        self._repeats += num_steps
        self._shift += num_steps

    def close(self) -> bytes | None:
        """Close the open record, as at the end of a recording, and return it."""
        record = self.open_record
        if record is None:
            return None
        self._digest = chained(self._digest, record)
        self._body, self._repeats, self._before_plain = None, 0, False
        return record

    @property
    def open_record(self) -> bytes | None:
        """The open record, as it would be closed now."""
        return None if self._body is None else self._body + leb128((self._repeats,))

    @property
    def num_open_steps(self) -> int:
        """Number of steps in the open record."""
        return 0 if self._body is None else 1 + self._repeats

    @property
    def step_before(self) -> StepPlan | None:
        """Plan to which the rows of the next record are relative."""
        before, shift = self._before, self._shift
        if before is None or not shift:
            return before
        return replace(before, step=before.step + shift, starts=tuple([start + shift for start in before.starts]))

    @property
    def ended_before(self) -> Set[int]:
        """Sequences that ended with that step."""
        return self._before_ended

    @property
    def chain(self) -> bytes:
        """The digest over the closed records."""
        return self._digest

    def hexdigest(self) -> str:
        """The digest over everything added so far, as 16 hex digits."""
        record = self.open_record
        return self._digest.hex() if record is None else chained(self._digest, record).hex()

    def state(self) -> FingerprintState:
        """The whole state, as a plain value."""
        ended = tuple(sorted(self._before_ended))
        return FingerprintState(self._digest, self._body, self._repeats, self.step_before, ended, self._before_plain)

    @classmethod
    def from_state(cls, state: FingerprintState) -> Fingerprint:
        """Create a fingerprint that continues from a state."""
        seen = cls()
        seen._digest, seen._body, seen._repeats = state.chain, state.body, state.repeats
        tables = () if state.before is None else row_tables(state.before)
        seen._keep(state.before, set(state.ended_before), state.is_plain, tables)
        return seen

    def _open(self, tag: int, plan: StepPlan, events: StepEvents, tables: Tables, moves_nothing: bool) -> bytes | None:
        gone, rows = self._changes(plan, tables)
        closed = self.close()
        values = [tag + _WITH_DRAFTS if plan.drafts else tag]
        if moves_nothing:
            values += _SEVEN_EMPTY_LISTS
        else:
            _add_ids(values, plan.evicted)
            for pairs in (plan.swap_out, plan.swap_in, plan.copies):
                _add_items(values, pairs)
            for ids in (plan.admitted, plan.resumed, plan.preempted):
                _add_ids(values, ids)
        _add_ids(values, gone)
        _add_items(values, rows)
        got = events.num_tokens
        if got.count(1) == len(got):
            values.append(0)
        else:
            sampling = compress(plan.seq_ids, plan.samples)
            _add_items(values, [pair for pair in zip(sampling, got, strict=True) if pair[1] > 1])
        _add_items(values, [(finish.seq_id, _REASONS[finish.reason]) for finish in events.finished])
        if plan.drafts:
            accepted = dict(zip(compress(range(len(plan.seq_ids)), plan.samples), events.num_accepted, strict=False))
            drafts = [(row, count, accepted.get(row, 0)) for row, count in enumerate(plan.drafts) if count]
            _add_items(values, drafts)
        self._body = leb128(values)
        return closed

    def _keep(self, before: StepPlan | None, ended: set[int], is_plain: bool, tables: Tables = ()) -> None:
        """Store a step, or None after a failed one, and separately its rows whose sequences continue.

        Args:
            tables: the tables of its rows.
        """
        self._before, self._before_ended, self._before_plain, self._before_tables = before, ended, is_plain, tables
        self._shift = 0
        """Repeats of that step: the number to add to its starts."""
        ids: tuple[int, ...] = ()
        ends: tuple[int, ...] = ()
        samples: tuple[bool, ...] = ()
        if before is not None:
            ids, samples = before.seq_ids, before.samples
            ends = tuple(map(add, before.starts, before.lengths))
        if ended:
            continues = [seq_id not in ended for seq_id in ids]
            ids, ends = tuple(compress(ids, continues)), tuple(compress(ends, continues))
            tables, samples = tuple(compress(tables, continues)), tuple(compress(samples, continues))
        self._ids, self._ends, self._tables, self._samples = ids, ends, tables, samples
        self._num_sampled = samples.index(False) if False in samples else len(samples)
        """Number of leading rows that sampled."""

    def _due(self) -> tuple[int, ...]:
        """Positions of the next tokens of the known rows."""
        shift = self._shift
        return tuple([end + shift for end in self._ends]) if shift else self._ends

    def _row_tables(self, plan: StepPlan) -> Tables:
        """The tables of a plan's rows. Those that did not change since the step before are the same objects."""
        before = self._before
        if before is None or not plan.other_tables or len(plan.tables) != len(before.tables):
            return row_tables(plan)
        known = zip(before.tables, before.other_tables, self._before_tables, strict=True)
        rows = zip(plan.tables, plan.other_tables, known, strict=True)
        return tuple(
            [
                same if table is first and others is further else _joined(table, others)
                for table, others, (first, further, same) in rows
            ]
        )

    def _changes(self, plan: StepPlan, tables: Tables) -> tuple[list[int], list[tuple[int, ...]]]:
        """Sequences that had a row in the step before and have none now, and rows that do not continue plainly."""
        lead, known, due = self._num_sampled, self._ids, self._due()
        if not (
            plan.seq_ids[:lead] == known[:lead]
            and plan.lengths[:lead].count(1) == plan.samples[:lead].count(True) == lead
            and plan.starts[:lead] == due[:lead]
        ):
            lead = 0
        rows: list[tuple[int, ...]] = []
        for index in compress(range(lead), map(is_not, tables, self._tables)):
            new, old = tables[index], self._tables[index]
            if len(new) != len(old) or new != old:
                rows.append(_row(index, plan, new, old))
        if lead == len(known) == len(plan.seq_ids):
            return [], rows
        gone: list[int] = []
        if lead < len(known):
            here = set(plan.seq_ids)
            gone = [seq_id for seq_id in known[lead:] if seq_id not in here]
        self._add_rows(rows, plan, tables, due, lead)
        return gone, rows

    def _add_rows(
        self, rows: list[tuple[int, ...]], plan: StepPlan, tables: Tables, due: tuple[int, ...], lead: int
    ) -> None:
        """Add the rows from index ``lead`` on. All rows above continue plainly except for their tables."""
        place_of = {self._ids[place]: place for place in range(lead, len(self._ids))}
        last = lead - 1
        for index in range(lead, len(plan.seq_ids)):
            place = place_of.get(plan.seq_ids[index], -1)
            if (
                place > last
                and plan.lengths[index] == 1
                and plan.samples[index]
                and self._samples[place]
                and plan.starts[index] == due[place]
                and tables[index] == self._tables[place]
            ):
                last = place
            else:
                last = max(last, place)
                rows.append(_row(index, plan, tables[index], self._tables[place] if place >= 0 else ()))


def chained(digest: bytes, record: bytes) -> bytes:
    """The chain after a record."""
    return _hash(digest + record)


def row_tables(plan: StepPlan) -> Tables:
    """By row, the tables of all KV groups as one."""
    if not plan.other_tables:
        return plan.tables
    rows = zip(plan.tables, plan.other_tables, strict=True)
    return tuple([_joined(table, others) for table, others in rows])


def _joined(table: tuple[int, ...], others: Tables) -> tuple[int, ...]:
    return (*table, *chain.from_iterable(others), *map(len, others))


def split_tables(tables: Tables, num_groups: int) -> tuple[Tables, tuple[tuple[tuple[int, ...], ...], ...]]:
    """The tables of the first KV group and those of the others, from what `row_tables` returned.

    Raises:
        ValueError: a table is too short for the lengths at its end.
    """
    num_others = num_groups - 1
    if num_others == 0:
        return tables, ()
    firsts: list[tuple[int, ...]] = []
    others: list[tuple[tuple[int, ...], ...]] = []
    for table in tables:
        lengths = table[-num_others:]
        begins = list(accumulate(reversed(lengths), sub, initial=len(table) - num_others))
        if begins[-1] < 0 or min(lengths) < 0:
            raise ValueError(f"a row has {len(table)} numbers for tables of {lengths}")
        begins.reverse()
        firsts.append(table[: begins[0]])
        others.append(tuple([table[begin:end] for begin, end in pairwise(begins)]))
    return tuple(firsts), tuple(others)


def _row(index: int, plan: StepPlan, table: tuple[int, ...], known: tuple[int, ...]) -> tuple[int, ...]:
    kept = len(known)
    if table[:kept] != known:
        kept = next(at for at, (old, new) in enumerate(zip(known, (*table, -1), strict=False)) if old != new)
    new = table[kept:]
    length_and_samples = 2 * plan.lengths[index] + plan.samples[index]
    return (index, plan.seq_ids[index], plan.starts[index], length_and_samples, kept, len(new), *new)


def _are_same(tables: Sequence[tuple[int, ...]], known: Sequence[tuple[int, ...]]) -> bool:
    """True if two steps with the same number of rows have equal tables. Most are the same object, and one that grew is
    longer, so that the blocks of a long table are not compared one by one."""
    return all(map(is_, tables, known)) or (list(map(len, tables)) == list(map(len, known)) and tables == known)


def _moves_nothing(plan: StepPlan) -> bool:
    """True if the plan moves no block and lists no sequence."""
    return not (
        plan.evicted or plan.swap_out or plan.swap_in or plan.copies or plan.admitted or plan.resumed or plan.preempted
    )


def _only_decodes(plan: StepPlan, events: StepEvents) -> bool:
    """True if each row computes one token and got one."""
    count = len(plan.seq_ids)
    return plan.lengths.count(1) == plan.samples.count(True) == events.num_tokens.count(1) == count


def _add_ids(values: list[int], ids: Sequence[int]) -> None:
    values.append(len(ids))
    values.extend(ids)


def _add_items(values: list[int], items: Sequence[tuple[int, ...]]) -> None:
    values.append(len(items))
    for item in items:
        values.extend(item)


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


class _Codes(dict[int, bytes]):
    """LEB128 encoding of each number. Small ones are cached, since the same block ids repeat."""

    def __missing__(self, number: int) -> bytes:
        out, left = [], number
        while left > 127:
            out.append(left & 127 | 128)
            left >>= 7
        code = bytes((*out, left))
        if number < NUM_CODES:
            self[number] = code
        return code


_code_of = _Codes().__getitem__


def leb128(values: Iterable[int]) -> bytes:
    """Concatenated LEB128 numbers."""
    return b"".join(map(_code_of, values))
