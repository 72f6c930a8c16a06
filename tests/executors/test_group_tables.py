"""Tables of KV groups: what becomes of them, and which of them a step refuses with nothing done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from lockstep.core.groups import KVGroup
from lockstep.errors import InvalidPlanError
from lockstep.executors.base import Geometry, StepBatch
from lockstep.executors.fixed_plans import Regions, num_regions, step_of
from lockstep.executors.step_inputs import Chunks, Limits, TableRows, checked_chunks

WINDOW, STATE = KVGroup(2, 6), KVGroup(3, is_state=True)
GROUPS = (KVGroup(), WINDOW, STATE)
LIMITS = Limits(4, 40, 3, 40, 50, GROUPS)
Tables = tuple[tuple[int, ...], ...]
Row = tuple[int, int, tuple[int, ...], Tables]
"""Start and length of a chunk, its table, and its other tables."""


def checked(*rows: Row, groups: tuple[KVGroup, ...] = GROUPS, **changes: Any) -> Chunks:
    items = [(np.arange(length), start, table) for start, length, table, _ in rows]
    batch = step_of(items, Regions((KVGroup(),), 4, 0))
    plan = replace(batch.plan, other_tables=changes.get("other_tables", tuple(others for _, _, _, others in rows)))
    return checked_chunks(structs.replace(batch, plan=plan), replace(LIMITS, groups=groups), [TableRows()] * 3)


def test_tables_become_a_plan_for_each_window_and_the_blocks_of_states() -> None:
    chunks = checked(
        (0, 3, (1,), ((0, 2, 3), (4, 5, 6))),
        (9, 2, (7, 8, 9), ((1, 10, 11, 12, 13), (14, 15, 16, 17, 18, 19))),
        (12, 1, (20, 21, 22, 23), ((1, 24, 25, 26, 27, 28, 29), (30, 31, 32))),
    )
    [window] = chunks.windows
    spans = [3, *(0, 9, 12), *(0, 3, 5, 6)]
    assert chunks.plan.tolist() == [*spans, *(0, 1, 4, 8), 1, 7, 8, 9, 20, 21, 22, 23]
    assert window.plan.tolist() == [*spans, *(0, 2, 6, 12), 2, 3, *range(10, 14), *range(24, 30)]
    assert window.first_columns.tolist() == [0, 1, 1]
    assert chunks.states is not None
    assert chunks.states.tolist() == [[[-1] * 3, [4, 5, 6]], [[14, 15, 16], [17, 18, 19]], [[30, 31, 32]] * 2]


def test_a_snapshot_and_columns_that_are_only_read_may_be_shared() -> None:
    chunks = checked(
        (9, 1, (1, 2, 3), ((1, 10, 11, 12, 13), (14, 15, 16, 17, 18, 19))),
        (9, 1, (1, 2, 6), ((1, 10, 11, 7, 8), (14, 15, 16, 20, 21, 22))),
    )
    assert chunks.states is not None
    assert chunks.states.tolist() == [[[14, 15, 16], [17, 18, 19]], [[14, 15, 16], [20, 21, 22]]]


def test_a_state_that_is_listed_as_its_own_source_is_updated_in_place() -> None:
    chunks = checked((8, 1, (1, 2, 3), ((0, *range(4, 10)), (14, 15, 16, 14, 15, 16))))
    assert chunks.states is not None
    assert chunks.states.tolist() == [[[14, 15, 16]] * 2]


GOOD: Row = (8, 2, (1, 2, 3), ((0, 4, 5, 6, 7, 8, 9), (10, 11, 12, 13, 14, 15)))
WRONG: dict[str, tuple[tuple[Row, ...], str]] = {
    "no other tables": (((8, 2, (1, 2, 3), ()),), "0 other tables; the model has 2 groups"),
    "a table too many": (((8, 2, (1, 2, 3), (*GOOD[3], (16,))),), "3 other tables"),
    "a window that begins too late": (((8, 2, (1, 2, 3), ((1, 4, 5, 6, 7), GOOD[3][1])),), "reads from column 0 on"),
    "a window before the first column": (((8, 2, (1, 2, 3), ((-1, 4, 5, 6, 7), GOOD[3][1])),), "column -1"),
    "an empty window": (((8, 2, (1, 2, 3), ((), GOOD[3][1])),), "column -1"),
    "a window without a column": (((8, 2, (1, 2, 3), ((0, 4, 5, 6, 7, 8), GOOD[3][1])),), "5 blocks; its chunk"),
    "a window's block of 33 bits": (((8, 2, (1, 2, 3), ((0, 1 << 33), GOOD[3][1])),), "32 bits"),
    "a window's block beyond the pool": (((8, 2, (1, 2, 3), ((0, 4, 5, 6, 7, 8, 41), GOOD[3][1])),), "block 41 is not"),
    "the null block in a window": (((8, 2, (1, 2, 3), ((0, 0, 5, 6, 7, 8, 9), GOOD[3][1])),), "block 0 is not"),
    "a window that writes a block of another group": (
        ((8, 2, (1, 2, 3), ((0, 4, 5, 6, 7, 1, 9), GOOD[3][1])),), "writes block 1, which",
    ),
    "a window that writes a block of another row": (
        (GOOD, (0, 1, (16,), ((0, 9, 17), (18, 19, 20)))), "writes block 9, which",
    ),
    "no blocks of a state": (((8, 2, (1, 2, 3), (GOOD[3][0], ())),), "0 blocks of states"),
    "part of a state": (((8, 2, (1, 2, 3), (GOOD[3][0], (10, 11))),), "2 blocks of states; 3, or 6 with"),
    "a state and a half": (((8, 2, (1, 2, 3), (GOOD[3][0], (10, 11, 12, 13))),), "4 blocks of states"),
    "a state before the first token": (
        ((0, 2, (1,), ((0, 4, 5), GOOD[3][1])),), "6 blocks of states; 3 are expected",
    ),
    "a state beyond the pool": (((8, 2, (1, 2, 3), (GOOD[3][0], (10, 11, 41))),), "block 41 is not"),
    "a negative block of a state": (((8, 2, (1, 2, 3), (GOOD[3][0], (10, 11, -1))),), "block -1 is not"),
    "a state of two rows": ((GOOD, (0, 1, (16,), ((0, 17, 18), (13, 19, 20)))), "writes block 13, which"),
    "a target that another row reads": (
        (GOOD, (8, 1, (21, 22, 23), ((0, *range(24, 30)), (13, 14, 15, 30, 31, 32)))), "writes block 13, which",
    ),
    "a source that overlaps its target": (((8, 2, (1, 2, 3), (GOOD[3][0], (10, 11, 12, 12, 13, 14))),), "block 12"),
    "a state in another order": (((8, 2, (1, 2, 3), (GOOD[3][0], (10, 11, 12, 12, 11, 10))),), "which occurs twice"),
    "one block twice in a state": (((8, 2, (1, 2, 3), (GOOD[3][0], (10, 11, 11))),), "writes block 11, which"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_table_is_refused_by_name(what: str) -> None:
    rows, message = WRONG[what]
    with pytest.raises(InvalidPlanError, match=message.replace(".", r"\.")):
        checked(*rows)
    assert checked(GOOD).states is not None


def test_a_row_without_other_tables_is_refused() -> None:
    with pytest.raises(InvalidPlanError, match="other tables of 1 rows"):
        checked(GOOD, (0, 1, (16,), ()), other_tables=(GOOD[3],))
    with pytest.raises(InvalidPlanError, match="other tables of 0 rows"):
        checked(GOOD, other_tables=())
    with pytest.raises(InvalidPlanError, match="2 other tables; the model has 0"):
        checked(GOOD, groups=(KVGroup(),))


def test_fixed_plans_are_valid_for_any_chunks() -> None:
    geometry = Geometry(4, 64, 1, 40, 50, groups=GROUPS)
    regions = Regions.of(geometry, 60)
    assert (num_regions(geometry), regions.num_blocks) == (6, 10)
    assert regions.blocks_of((1, 7)) == (1, 7, 11, 21, 17, 27, 31, 41, 51)
    assert regions.other_tables((1, 7, 2), 9, 12) == ((1, 17, 27, 12, 22), (31, 41, 51))
    limits = replace(LIMITS, num_blocks=60)
    batch: StepBatch = step_of([(np.arange(3), 9, (1, 7, 2)), (np.arange(9), 0, (3, 4, 5))], regions)
    chunks = checked_chunks(batch, limits, [TableRows() for _ in GROUPS])
    assert chunks.states is not None
    assert chunks.states.tolist() == [[[31, 41, 51]] * 2, [[-1] * 3, [33, 43, 53]]]


@given(st.data())
def test_any_tables_are_refused_or_within_the_pool(data: st.DataObject) -> None:
    """No index that reaches the library is outside the pool, and none that is written occurs twice."""
    entry = st.integers(-1, 41)
    table = st.lists(entry, max_size=7).map(tuple)
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(0, 12), st.integers(1, 4), table, st.tuples(table, table)), min_size=1, max_size=3
        )
    )
    try:
        chunks = checked(*rows)
    except InvalidPlanError:
        return
    num_seqs = len(rows)
    [window] = chunks.windows
    blocks = window.plan[3 * num_seqs + 3 :]
    ends = window.plan[2 * num_seqs + 2 : 3 * num_seqs + 3]
    assert ends[-1] == len(blocks)
    assert (np.diff(ends) == (chunks.needed - window.first_columns) * WINDOW.num_parts).all()
    assert chunks.states is not None
    of_states = chunks.states[chunks.states != -1]
    for each in (chunks.blocks, blocks, of_states):
        assert each.min(initial=1) >= 1
        assert each.max(initial=1) <= LIMITS.num_blocks
    targets = chunks.states[:, 1].ravel()
    assert len(set(targets.tolist())) == len(targets)
