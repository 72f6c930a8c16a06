"""Equal decisions give equal fingerprints; any different decision gives another one."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.core.fingerprint import NUM_CODES, Fingerprint, chained, leb128, row_tables, split_tables
from lockstep.core.request import FinishReason, Request
from lockstep.core.step import Finish, StepEvents, StepPlan
from tests.core.drive import commit, scheduler


def plan_of(step: int, *chunks: tuple[int, int, int, tuple[int, ...], bool]) -> StepPlan:
    columns = list(zip(*chunks, strict=True)) or [()] * 5
    return StepPlan(step, (), (), (), (), *columns)  # type: ignore[arg-type]  # columns in order


def events_of(plan: StepPlan, *finished: Finish, got: tuple[int, ...] | None = None) -> StepEvents:
    return StepEvents(plan.step, finished, (1,) * plan.num_samples if got is None else got)


FIRST = replace(plan_of(0, (7, 0, 5, (1, 2), True), (300, 0, 4, (3,), False)), admitted=(7, 300))
SECOND = plan_of(1, (7, 5, 1, (1, 2), True), (300, 4, 2, (3, 4), True))
THIRD = plan_of(2, (7, 6, 1, (1, 2), True), (300, 6, 1, (3, 4), True))


def chain(*records: bytes) -> str:
    digest = blake2b(b"lockstep fingerprint 1", digest_size=8).digest()
    for record in records:
        digest = blake2b(digest + record, digest_size=8).digest()
    return digest.hex()


def test_records_byte_by_byte() -> None:
    """The documented encoding, derived by hand."""
    seen = Fingerprint()
    assert seen.hexdigest() == chain() == "ed1963f342ef1bdc"
    assert seen.observe(FIRST, events_of(FIRST)) is None
    # tag, evicted, out, in, copies | admitted 7 and 300, resumed, preempted, gone
    first = bytes([1, 0, 0, 0, 0, 2, 7, 0xAC, 2, 0, 0, 0])
    # two rows: position, id, start, 2*length+samples, kept, blocks | got, end, repeats
    first += bytes([2, 0, 7, 0, 11, 0, 2, 1, 2, 1, 0xAC, 2, 0, 8, 0, 1, 3, 0, 0, 0])
    assert seen.hexdigest() == chain(first)
    assert seen.observe(SECOND, events_of(SECOND)) == first
    second = bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0xAC, 2, 4, 5, 1, 1, 4, 0, 0, 0])
    assert seen.hexdigest() == chain(first, second)
    assert seen.observe(THIRD, events_of(THIRD)) == second
    third = bytes([1, *[0] * 11])
    assert seen.hexdigest() == chain(first, second, third + b"\0")
    fourth = plan_of(3, (7, 7, 1, (1, 2), True), (300, 7, 1, (3, 4), True))
    assert seen.observe(fourth, events_of(fourth)) is None
    assert seen.hexdigest() == chain(first, second, third + b"\1")
    ending = plan_of(4, (7, 8, 1, (1, 2, 9), True), (300, 8, 1, (3, 4), True))
    seen.observe(ending, events_of(ending, Finish(7, FinishReason.LENGTH), got=(1, 3)))
    fifth = bytes([1, *[0] * 8, 1, 0, 7, 8, 3, 2, 1, 9, 1, 0xAC, 2, 3, 1, 7, 1])
    assert seen.hexdigest() == chain(first, second, third + b"\1", fifth + b"\0")
    assert seen.close() == fifth + b"\0"
    assert seen.close() is None
    assert seen.hexdigest() == "979c60258d768119"


def test_moves_and_failures_byte_by_byte() -> None:
    seen = Fingerprint()
    plan = replace(
        plan_of(0, (1, 0, 2, (4,), True)),
        evicted=(4,),
        swap_out=((6, 0),),
        swap_in=((1, 5),),
        resumed=(2,),
        preempted=(3,),
    )
    seen.observe_failure(plan)
    failed = bytes([2, 1, 4, 1, 6, 0, 1, 1, 5, 0, 0, 1, 2, 1, 3, 0, 1, 0, 1, 0, 5, 0, 1, 4, 0, 0, 0])
    assert seen.hexdigest() == chain(failed)
    again = plan_of(1, (1, 0, 2, (4,), True))
    assert seen.observe(again, events_of(again)) == failed
    assert seen.hexdigest() == chain(failed, bytes([1, *[0] * 8, 1, 0, 1, 0, 5, 0, 1, 4, 0, 0, 0]))


def test_reading_a_fingerprint_does_not_change_it() -> None:
    read, unread = Fingerprint(), Fingerprint()
    plans = [FIRST, SECOND, *(plan_of(n, (7, n + 4, 1, (1, 2), True)) for n in range(2, 9))]
    for plan in plans:
        read.observe(plan, events_of(plan))
        unread.observe(plan, events_of(plan))
        read.hexdigest()
    assert read.hexdigest() == unread.hexdigest()


@given(st.lists(st.integers(0, 1 << 40)))
@example([0, 127, 128, 16_383, 16_384, NUM_CODES - 1, NUM_CODES, NUM_CODES])
def test_numbers_are_encoded_as_varints(numbers: list[int]) -> None:
    """With a cold and a warm cache of encodings."""
    for _ in range(2):
        read, value, shift = [], 0, 0
        for byte in leb128(numbers):
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                read.append(value)
                value = shift = 0
        assert read == numbers
        assert len(leb128(numbers)) == sum(max(1, -(-number.bit_length() // 7)) for number in numbers)


def test_equal_tables_need_not_be_the_same_objects() -> None:
    copied = replace(THIRD, tables=tuple((*table[:1], *table[1:]) for table in THIRD.tables))
    assert copied.tables[0] is not THIRD.tables[0]
    fourth = replace(copied, step=3, starts=(7, 7))
    seen = Fingerprint()
    for plan in (SECOND, copied, fourth):
        seen.observe(plan, events_of(plan))
    assert seen.num_open_steps == 2
    assert seen.hexdigest() == fingerprint_of(SECOND, THIRD, replace(THIRD, step=3, starts=(7, 7)))


TWINS = {
    "another start": replace(THIRD, starts=(6, 7)),
    "another order": plan_of(2, (300, 6, 1, (3, 4), True), (7, 6, 1, (1, 2), True)),
    "another table": replace(THIRD, tables=((1, 2), (3, 5))),
    "a longer table": replace(THIRD, tables=((1, 2), (3, 4, 5))),
    "a shorter table": replace(THIRD, tables=((1, 2), (3,))),
    "another length": replace(THIRD, lengths=(1, 2)),
    "no sample": replace(THIRD, samples=(True, False)),
    "one less": plan_of(2, (7, 6, 1, (1, 2), True)),
    "one more": plan_of(2, (7, 6, 1, (1, 2), True), (300, 6, 1, (3, 4), True), (301, 0, 2, (8,), True)),
    "an eviction": replace(THIRD, evicted=(9,)),
    "swapped out": replace(THIRD, swap_out=((9, 1),)),
    "swapped in": replace(THIRD, swap_in=((9, 1),)),
    "copied": replace(THIRD, copies=((9, 1),)),
    "admitted": replace(THIRD, admitted=(9,)),
    "resumed": replace(THIRD, resumed=(9,)),
    "preempted": replace(THIRD, preempted=(9,)),
}


def fingerprint_of(*plans: StepPlan) -> str:
    seen = Fingerprint()
    for plan in plans:
        seen.observe(plan, events_of(plan))
    return seen.hexdigest()


def test_every_difference_changes_the_fingerprint_differently() -> None:
    """Also if the previous step was plain, so that the step could have been a repeat."""
    for begin in ((FIRST, SECOND), (plan_of(1, (7, 5, 1, (1, 2), True), (300, 5, 1, (3, 4), True)),)):
        prints = {name: fingerprint_of(*begin, twin) for name, twin in TWINS.items()}
        prints["the same"] = fingerprint_of(*begin, THIRD)
        assert len(set(prints.values())) == len(TWINS) + 1


def test_ends_token_counts_and_failures_change_the_fingerprint() -> None:
    prints = set()
    for events in (
        events_of(THIRD),
        events_of(THIRD, Finish(7, FinishReason.STOP)),
        events_of(THIRD, Finish(7, FinishReason.ABORT)),
        events_of(THIRD, Finish(300, FinishReason.STOP)),
        events_of(THIRD, got=(1, 2)),
        events_of(THIRD, got=(2, 1)),
    ):
        seen = Fingerprint()
        seen.observe(FIRST, events_of(FIRST))
        seen.observe(SECOND, events_of(SECOND))
        seen.observe(THIRD, events)
        prints.add(seen.hexdigest())
    seen = Fingerprint()
    seen.observe(FIRST, events_of(FIRST))
    seen.observe(SECOND, events_of(SECOND))
    seen.observe_failure(THIRD)
    assert len(prints | {seen.hexdigest()}) == 7


def test_a_finished_sequence_and_an_aborted_one_give_different_records() -> None:
    last = plan_of(3, (7, 7, 1, (1, 2), True))
    ended, aborted = Fingerprint(), Fingerprint()
    for seen, events in (
        (ended, events_of(THIRD, Finish(300, FinishReason.STOP))),
        (aborted, events_of(THIRD)),
    ):
        seen.observe(THIRD, events)
        seen.observe(last, events_of(last))
    assert ended.close() == bytes([1, *[0] * 11, 0])
    assert aborted.close() == bytes([1, *[0] * 7, 1, 0xAC, 2, 0, 0, 0, 0])


def test_steady_decoding_is_one_record() -> None:
    core = scheduler(block_size=64)
    core.add(Request(5, 50))
    seen = Fingerprint()
    records = []
    while core.has_work:
        plan = core.schedule()
        records.append(seen.observe(plan, commit(core, plan)))
    records.append(seen.close())
    closed = [record for record in records if record is not None]
    assert [record[-1] for record in closed] == [0, 47, 0], "the prompt; its first decode and 47 like it; the end"


def test_only_a_plain_step_repeats() -> None:
    seen = Fingerprint()
    with pytest.raises(AssertionError, match="nothing"):
        seen.repeat(1)
    seen.observe(FIRST, events_of(FIRST))
    with pytest.raises(AssertionError, match="cannot be repeated"):
        seen.repeat(1)


def test_the_state_before_the_next_record_follows_repeats() -> None:
    """Observed or skipped repeats update the previous step; its record has their number."""
    seen = Fingerprint()
    assert (seen.step_before, seen.num_open_steps, seen.open_record) == (None, 0, None)
    seen.observe(FIRST, events_of(FIRST))
    seen.observe(SECOND, events_of(SECOND))
    seen.observe(THIRD, events_of(THIRD))
    assert (seen.step_before, seen.num_open_steps) == (THIRD, 1)
    fourth = replace(THIRD, step=3, starts=(7, 7))
    seen.observe(fourth, events_of(fourth))
    assert (seen.step_before, seen.num_open_steps) == (fourth, 2)
    seen.repeat(10)
    assert (seen.step_before, seen.num_open_steps) == (replace(THIRD, step=13, starts=(17, 17)), 12)
    last = replace(THIRD, step=14, starts=(18, 18))
    closed = seen.observe(last, events_of(last, Finish(7, FinishReason.STOP)))
    assert closed is not None
    assert closed[-1] == 11
    assert (seen.step_before, seen.ended_before, seen.num_open_steps) == (last, {7}, 1)
    seen.close()
    assert seen.chain.hex() == seen.hexdigest()


def test_the_open_record_can_be_read() -> None:
    """A reader of a recording needs the state that its next record refers to."""
    seen = Fingerprint()
    assert (seen.open_record, seen.num_open_steps, seen.step_before, seen.ended_before) == (None, 0, None, set())
    before = seen.chain
    seen.observe(FIRST, events_of(FIRST, Finish(300, FinishReason.STOP)))
    record = seen.open_record
    assert record is not None
    assert (seen.num_open_steps, seen.step_before, seen.ended_before) == (1, FIRST, {300})
    assert seen.chain == before
    assert seen.hexdigest() == chained(before, record).hex() == chain(record)
    assert seen.close() == record
    assert seen.chain.hex() == chain(record)


# -- several KV groups ------------------------------------------------------------------------------------------------

WINDOW_AND_STATE = (((0, 5, 6), (7, 8)), ((2, 9), (10, 11, 12, 13)))
"""Further tables of two rows: a window from column 0 and from column 2, and a state in place and with a source."""


def test_tables_of_several_groups_byte_by_byte() -> None:
    """Each row has one table: the first group's, the other ones', and the lengths of these."""
    seen = Fingerprint()
    plan = replace(FIRST, other_tables=WINDOW_AND_STATE)
    seen.observe(plan, events_of(plan))
    first = bytes([1, 0, 0, 0, 0, 2, 7, 0xAC, 2, 0, 0, 0])
    first += bytes([2, 0, 7, 0, 11, 0, 9, 1, 2, 0, 5, 6, 7, 8, 3, 2])
    first += bytes([1, 0xAC, 2, 0, 8, 0, 9, 3, 2, 9, 10, 11, 12, 13, 2, 4, 0, 0, 0])
    assert seen.hexdigest() == chain(first)
    second = replace(SECOND, tables=((1, 2), (3,)), other_tables=(((0, 5, 6), (7, 8)), ((2, 9, 4), (12, 13))))
    seen.observe(second, events_of(second))
    changed = bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0xAC, 2, 4, 5, 3, 5, 4, 12, 13, 3, 2, 0, 0, 0])
    assert seen.hexdigest() == chain(first, changed) == "74a2434ec65ad785"


def test_steps_of_several_groups_repeat() -> None:
    """The tables of each step are other objects with the same blocks."""
    seen = Fingerprint()
    for number in range(4):
        tables = tuple([tuple([(*table[:1], *table[1:]) for table in row]) for row in WINDOW_AND_STATE])
        plan = plan_of(number, (7, 5 + number, 1, (1, 2), True), (300, 4 + number, 1, (3,), True))
        plan = replace(plan, other_tables=tables)
        seen.observe(plan, events_of(plan))
    assert seen.num_open_steps == 4
    moved = replace(plan_of(4, (7, 9, 1, (1, 2), True), (300, 8, 1, (3,), True)), other_tables=WINDOW_AND_STATE[::-1])
    assert seen.observe(moved, events_of(moved)) is not None


Table = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(st.integers(1, 3), st.data())
def test_tables_are_split_as_they_were_combined(num_others: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(Table, st.tuples(*[Table] * num_others)), max_size=4))
    tables, others = tuple([table for table, _ in rows]), tuple([other for _, other in rows])
    plan = StepPlan(0, (), (), (), (), (), (), (), tables, (), other_tables=others)
    assert split_tables(row_tables(plan), num_others + 1) == (tables, others)
    assert split_tables(tables, 1) == (tables, ())


@given(st.integers(1, 3), st.lists(st.integers(-3, 9), max_size=8))
def test_any_numbers_are_tables_or_an_error(num_others: int, numbers: list[int]) -> None:
    """Recordings are read from files that anybody may have written."""
    try:
        (first,), (others,) = split_tables((tuple(numbers),), num_others + 1)
    except ValueError:
        lengths = numbers[-num_others:]
        assert len(lengths) < num_others or min(lengths) < 0 or sum(lengths) + num_others > len(numbers)
    else:
        assert [*first, *[each for table in others for each in table], *map(len, others)] == numbers
