"""Models with several KV groups: their blocks, windows whose earlier blocks are gone, and steps that are refused."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from lockstep.core.groups import KVGroup
from lockstep.errors import ExecutorError, InvalidPlanError
from lockstep.executors.base import Logits
from lockstep.executors.fixed_plans import Regions
from lockstep.executors.kv_layout import Place, kv_bytes
from lockstep.executors.native.executor import NativeExecutor
from lockstep.executors.native.forward import STORAGES, Forward
from lockstep.executors.native.operations import Program
from lockstep.executors.native.products import ThreadPool
from lockstep.executors.step_inputs import WindowTables
from tests.executors.native.loading import EACH_ISA, loaded, threads_with
from tests.executors.native.support import TINY, batch_of, config_of, random_artifact, regions_of, run
from tests.executors.native.test_packs import library
from tests.executors.native.test_program import program_of

TWO_WINDOWS = replace(TINY["tiny-gemma3"], windows=(16, 40, 16, 16, 40, 0))
"""Three groups. Blocks have room for one layer, so that columns have several."""
LENGTH = 150
TABLE = (3, 1, 4, 2, 5)


def tokens_of(length: int = LENGTH, seed: int = 5) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, TWO_WINDOWS.vocab_size, length).tolist()
    return drawn


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 8), (2, 64), (3, 72), (1, 512), (16, 256)])
def test_python_and_library_agree_about_the_size_of_a_layer(storage: str, kv_heads: int, head_dim: int) -> None:
    function = library().handle.native_block_bytes
    function.restype = ctypes.c_size_t
    assert kv_bytes(kv_heads, head_dim, storage) == function(kv_heads, head_dim, STORAGES.index(storage))


def test_geometry_has_the_groups_of_the_layout() -> None:
    with loaded(random_artifact(TWO_WINDOWS)) as executor:
        size = kv_bytes(TWO_WINDOWS.num_kv_heads, TWO_WINDOWS.head_dim, "f16")
        assert executor.geometry.bytes_per_block == size
        assert executor.geometry.groups == (KVGroup(), KVGroup(3, 16), KVGroup(2, 40))
    with loaded(random_artifact(TINY["tiny-mistral"])) as executor:
        assert executor.geometry.groups == (KVGroup(),), "a model with windows only keeps all positions of the largest"
        assert executor.geometry.bytes_per_block == 2 * size


def decoded(executor: NativeExecutor, tokens: list[int], table: tuple[int, ...], *, spoils: bool = False) -> Logits:
    """Logits of every token, one by one.

    Args:
        spoils: blocks of the columns that no later token sees are filled with NaN before each step.
    """
    rows = []
    for position, token in enumerate(tokens):
        if spoils:
            spoil_before(executor, table, position)
        rows.append(run(executor, ([token], position, table)))
    return np.concatenate(rows)


def spoil_before(executor: NativeExecutor, table: tuple[int, ...], position: int, columns_more: int = 0) -> None:
    """Fill the blocks of window groups that lie before what a token at the position sees, with NaN."""
    regions = regions_of(executor)
    gone: list[int] = []
    for index, group in enumerate(regions.groups[1:]):
        first = group.first_column(position, regions.block_size) + columns_more
        whole = regions.other_tables(table, 0, len(table) * regions.block_size)[index][1:]
        gone += whole[: first * group.num_parts]
    executor.write_blocks(gone, np.full((len(gone), executor.geometry.bytes_per_block), 0xFF, np.uint8))


@pytest.mark.parametrize("isa", EACH_ISA)
@pytest.mark.parametrize("storage", STORAGES)
def test_blocks_behind_a_window_are_not_read(storage: str, isa: str) -> None:
    tokens, artifact = tokens_of(), random_artifact(TWO_WINDOWS, "Q8_0")
    with loaded(artifact, 20, kv_cache_precision=storage, isa=isa, threads=threads_with(isa)) as executor:
        expected = run(executor, (tokens, 0, TABLE), all_rows=True)
        assert np.array_equal(decoded(executor, tokens, TABLE), expected)
        assert np.array_equal(decoded(executor, tokens, TABLE, spoils=True), expected)
        chunks = ((0, 33), (33, 90), (90, 91), (91, 150))
        for begin, end in chunks:
            spoil_before(executor, (6, 7, 8, 9, 10), begin)
            part = run(executor, (tokens[begin:end], begin, (6, 7, 8, 9, 10)), all_rows=True)
            assert np.array_equal(part, expected[begin:end])


def test_a_damaged_column_that_a_token_sees_is_noticed() -> None:
    """The negative twin: with one column more gone, the answer is not a number."""
    tokens = tokens_of()
    with loaded(random_artifact(TWO_WINDOWS, "Q8_0"), 20) as executor:
        run(executor, (tokens, 0, TABLE))
        spoil_before(executor, TABLE, 140)
        assert np.isfinite(run(executor, (tokens[140:141], 140, TABLE))).all()
        spoil_before(executor, TABLE, 140, columns_more=1)
        assert np.isnan(run(executor, (tokens[140:141], 140, TABLE))).all()


def test_rows_of_different_ages_are_computed_together() -> None:
    tokens, others = tokens_of(), tokens_of(seed=6)
    with loaded(random_artifact(TWO_WINDOWS, "Q8_0"), 20) as executor:
        expected = run(executor, (tokens, 0, TABLE), all_rows=True)
        first = run(executor, (others[:70], 0, (6, 7, 8)), all_rows=True)
        run(executor, (tokens[:140], 0, (9, 10, 11, 12, 13)))
        beside = [(others[69:70], 69, (6, 7, 8)), (tokens[140:], 140, (9, 10, 11, 12, 13)), (others[:3], 0, (14,))]
        together = run(executor, *beside, all_rows=True)
        assert np.array_equal(together, np.concatenate([first[69:], expected[140:], first[:3]]))


def test_a_plan_for_other_groups_has_no_effect() -> None:
    tokens = tokens_of()
    with loaded(random_artifact(TWO_WINDOWS), 20) as executor:
        regions = regions_of(executor)
        expected = run(executor, (tokens, 0, TABLE))
        for groups in (regions.groups[:1], regions.groups[:2], (*regions.groups, KVGroup(1, is_state=True))):
            other = Regions(groups, regions.block_size, regions.num_blocks)
            with pytest.raises(InvalidPlanError):
                executor.execute(batch_of((tokens[:9], 0, TABLE), regions=other))
        assert np.array_equal(run(executor, (tokens[-1:], LENGTH - 1, TABLE)), expected)


# -- steps that Python never passes -----------------------------------------------------------------------------------

PLAN = np.array([1, 64, 0, 1, 0, 3, 1, 2, 3], np.int32)
"""One token at position 64, with three blocks."""
STATES = np.array([4, 5, 6, 7], np.int32)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with ThreadPool(library(), 1) as found:
        yield found


def grouped_program() -> Program:
    """A program of one layer with a window of 16, in the second block of each column of its group, and a group of
    states that no layer has."""
    program = program_of(replace(TINY["tiny-gemma3"], windows=(16,)))
    program.layout = program.layout._replace(groups=(KVGroup(), KVGroup(2, 16), KVGroup(2, is_state=True)))
    program.places[0] = Place(1, 1, 0)
    return program


def step(
    pool: ThreadPool,
    windows: list[WindowTables],
    states: npt.NDArray[np.int32] | None = STATES,
    program: Program | None = None,
) -> None:
    program = program or grouped_program()
    config = replace(config_of(TINY["tiny-gemma3"]), num_layers=1)
    cache = np.full((12, program.layout.block_bytes), 0x55, np.uint8)
    forward = Forward(library(), pool, program, config, "f16")
    try:
        forward.step(np.array([1]), PLAN, cache[1:11], np.array([0]), windows=windows, states=states)
    finally:
        forward.close()
        assert (cache[[0, 11]] == 0x55).all()


def tables(first: int, *blocks: int, **changes: list[int]) -> WindowTables:
    spans = [1, *changes.get("past", [64]), *changes.get("begins", [0, 1]), *changes.get("table", [0, len(blocks)])]
    return WindowTables(np.array([*spans, *blocks], np.int32), np.array([first], np.int32))


def test_a_table_that_begins_behind_the_first_column_is_taken(pool: ThreadPool) -> None:
    step(pool, [tables(1, 8, 9, 5, 6)])
    step(pool, [tables(0, 3, 3, 8, 9, 5, 6)])
    step(pool, [tables(1, 8, 9, 5, 6)], np.array([-1, -1, 3, 4], np.int32))


BAD_TABLES: dict[str, tuple[list[WindowTables], str]] = {
    "none": ([], "no block tables"),
    "too many": ([tables(1, 8, 9, 5, 6)] * 2, "no block tables"),
    "part of a column": ([tables(1, 8, 9, 5)], "without some of its blocks"),
    "a column too few": ([tables(1, 8, 9)], "too short"),
    "a column that is seen is missing": ([tables(2, 8, 9)], "behind a position"),
    "before the first column": ([tables(-1, 8, 9, 5, 6, 1, 2, 3, 4)], "behind a position"),
    "a column far away": ([tables(2**31 - 1, 8, 9, 5, 6)], "behind a position"),
    "a block beyond the pool": ([tables(1, 8, 10, 5, 6)], "not of this pool"),
    "a negative block": ([tables(1, 8, -1, 5, 6)], "not of this pool"),
    "another past": ([tables(1, 8, 9, 5, 6, past=[65])], "other tokens"),
    "other beginnings": ([tables(1, 8, 9, 5, 6, begins=[0, 2])], "other tokens"),
    "tables beyond the plan": ([tables(1, 8, 9, 5, 6, table=[0, 6])], "do not cover"),
}


@pytest.mark.parametrize("what", BAD_TABLES)
def test_window_tables_that_would_leave_the_pool_are_refused(pool: ThreadPool, what: str) -> None:
    windows, message = BAD_TABLES[what]
    with pytest.raises(ExecutorError, match=message):
        step(pool, windows)


@pytest.mark.parametrize(
    "states",
    [None, [4, 5, 6], [4, 5, 6, 7, 8], [4, 5, 6, 10], [4, 5, 6, -1], [4, -1, 6, 7], [-1, 5, 6, 7], [-2, -2, 6, 7]],
)
def test_states_that_would_leave_the_pool_are_refused(pool: ThreadPool, states: list[int] | None) -> None:
    with pytest.raises(ExecutorError, match="state"):
        step(pool, [tables(1, 8, 9, 5, 6)], None if states is None else np.array(states, np.int32))


def test_a_layer_with_another_window_than_its_group_is_refused(pool: ThreadPool) -> None:
    for window in (0, 15, 17, -1):
        program = grouped_program()
        index = next(i for i, op in enumerate(program.ops) if op.kv_heads)
        program.ops[index] = program.ops[index]._replace(window=window)
        with pytest.raises(ExecutorError, match="another window"):
            step(pool, [tables(1, 8, 9, 5, 6)], program=program)
