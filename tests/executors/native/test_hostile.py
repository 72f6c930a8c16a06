"""Programs, steps and arguments that no caller of ours would give: the library refuses them in a sentence."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.artifacts.model import Encoding, ModelConfig
from lockstep.core.groups import KVGroup
from lockstep.errors import ExecutorError
from lockstep.executors.kv_layout import Place
from lockstep.executors.native.forward import Forward
from lockstep.executors.native.operations import Action, Buffer, Op, Program
from lockstep.executors.native.packs import Matrix
from lockstep.executors.native.products import ThreadPool
from tests.executors.native.support import TINY, config_of
from tests.executors.native.test_packs import library
from tests.executors.native.test_program import program_of

CONFIG: ModelConfig = replace(config_of(TINY["tiny-qwen3"]), num_layers=1)
HOSTILE = (-(2**31), -2, -1, 0, 1, 7, 2**16, 2**31 - 1)
NUMBERS = [name for name in Op._fields if name not in ("action", "epsilon", "factor", "divisor", "scale", "adds")]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with ThreadPool(library(), 2) as found:
        yield found


def run(pool: ThreadPool, program: Program, config: ModelConfig = CONFIG) -> None:
    """Two tokens, if the program is taken."""
    forward = Forward(library(), pool, program, config, "f16")
    cache = np.zeros((2, program.layout.block_bytes), np.uint8)
    try:
        forward.step(np.array([1, 2]), np.array([1, 0, 0, 2, 0, 1, 1], np.int32), cache, np.array([0]))
        forward.logits(np.array([1]), np.empty((1, config.vocab_size), np.float32))
    finally:
        forward.close()


def change_op(program: Program, index: int, changes: Mapping[str, Any]) -> None:
    """Replace fields of an operation of a program."""
    program.ops[index] = program.ops[index]._replace(**changes)


def test_the_program_itself_is_taken(pool: ThreadPool) -> None:
    for encoding in ("F32", "Q8_0"):
        run(pool, program_of(TINY["tiny-qwen3"], encoding))


@given(st.sampled_from(["F32", "Q8_0"]), st.integers(0, 10**9))
def test_a_changed_operation_is_refused_or_harmless(encoding: str, seed: int) -> None:
    """Harmless: it reads and writes the program's own memory only."""
    rng = random.Random(seed)
    program = program_of(TINY["tiny-qwen3"], encoding)
    for _ in range(rng.choice((1, 1, 3))):
        index = rng.randrange(len(program.ops))
        changes: dict[str, Any] = {rng.choice(NUMBERS): rng.choice(HOSTILE)}
        change_op(program, index, changes)
    with ThreadPool(library(), 2) as pool, suppress(ExecutorError):
        run(pool, program)


@pytest.mark.parametrize("field", ["in_", "in_groups"])
def test_an_input_that_an_operation_does_not_read_is_refused_too(pool: ThreadPool, field: str) -> None:
    """The rules for parts of a program look at its buffer all the same."""
    program = program_of(TINY["tiny-qwen3"], "Q8_0")
    index = next(i for i, op in enumerate(program.ops) if op.action is Action.PRODUCT)
    for value in (-2, 2**31 - 1):
        changes: dict[str, Any] = {field: value}
        change_op(program, index, changes)
        with pytest.raises(ExecutorError, match="input"):
            run(pool, program)


@pytest.mark.parametrize("field", ["state", "gathered", "hidden", "logits", "final_begin", "head_begin"])
@pytest.mark.parametrize("value", [-1, 99, 2**20])
def test_results_that_are_nowhere_are_refused(pool: ThreadPool, field: str, value: int) -> None:
    program = program_of(TINY["tiny-qwen3"])
    setattr(program, field, value)
    with pytest.raises(ExecutorError):
        run(pool, program)


def test_cut_weights_and_buffers_are_refused(pool: ThreadPool) -> None:
    for encoding in ("F32", "Q8_0", "F16"):
        program = program_of(TINY["tiny-qwen3"], encoding)
        for index, matrix in enumerate(program.weights):
            cut = replace(matrix, data=matrix.data[:-1])
            wide = replace(matrix, columns=matrix.columns + 256)
            for wrong in (cut, wide, replace(matrix, features=0), replace(matrix, features=2**25)):
                weights = [*program.weights[:index], wrong, *program.weights[index + 1 :]]
                with pytest.raises(ExecutorError):
                    run(pool, replace_in(program, weights=weights))
        for index in range(len(program.buffers)):
            for buffer in (Buffer(0, False, True), Buffer(2**25, False, True), Buffer(3, False, True)):
                buffers = [*program.buffers[:index], buffer, *program.buffers[index + 1 :]]
                with pytest.raises(ExecutorError):
                    run(pool, replace_in(program, buffers=buffers))


def replace_in(program: Program, **changes: object) -> Program:
    return replace(program, **changes)  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize("changes", [{}, {"columns": 12}, {"columns": 1024}, {"kv_heads": 0}, {"kv_heads": 3}])
def test_other_heads_are_refused(pool: ThreadPool, changes: dict[str, int]) -> None:
    program = program_of(TINY["tiny-qwen3"])
    index = next(i for i, op in enumerate(program.ops) if op.action is Action.ATTENTION)
    change_op(program, index, changes)
    with pytest.raises(ExecutorError, match=r"heads|head's"):
        run(pool, program, replace(CONFIG, num_heads=3) if not changes else CONFIG)


@pytest.mark.parametrize(
    "place", [Place(1, 0, 0), Place(-1, 0, 0), Place(0, 1, 0), Place(0, -1, 0), Place(0, 0, -4), Place(0, 0, 2)]
)
def test_a_place_outside_a_block_is_refused(pool: ThreadPool, place: Place) -> None:
    program = program_of(TINY["tiny-qwen3"])
    [inside] = program.places
    for wrong in (place, Place(0, 0, inside.offset + 4)):
        program.places[0] = wrong
        with pytest.raises(ExecutorError, match="no place in a block"):
            run(pool, program)


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (KVGroup(0),),
        (KVGroup(1, 8),),
        (KVGroup(1, is_state=True),),
        (KVGroup(), KVGroup()),
        (KVGroup(), KVGroup(1, -1)),
        (KVGroup(), KVGroup(1, 8, is_state=True)),
        (KVGroup(), KVGroup(1, is_state=True), KVGroup(1, 8)),
        (KVGroup(), KVGroup((1 << 16) + 1, 8)),
    ],
)
def test_groups_of_no_known_kind_are_refused(pool: ThreadPool, groups: tuple[KVGroup, ...]) -> None:
    program = program_of(TINY["tiny-qwen3"])
    program.layout = program.layout._replace(groups=groups)
    with pytest.raises(ExecutorError, match="group"):
        run(pool, program)


@pytest.mark.parametrize("block_bytes", [-1, 0, 64, (1 << 30) + 1, 1 << 62])
def test_blocks_of_no_possible_size_are_refused(pool: ThreadPool, block_bytes: int) -> None:
    program = program_of(TINY["tiny-qwen3"])
    program.layout = program.layout._replace(block_bytes=block_bytes)
    with pytest.raises(ExecutorError, match="block"):
        Forward(library(), pool, program, CONFIG, "f16")


@given(st.lists(st.sampled_from([*HOSTILE, 2, 3, 4, 5]), max_size=12), st.integers(0, 3))
def test_any_plan_is_refused_or_within_the_pool(plan: list[int], num_tokens: int) -> None:
    program = program_of(TINY["tiny-qwen3"])
    with ThreadPool(library(), 1) as pool:
        forward = Forward(library(), pool, program, CONFIG, "f16")
        guarded = np.full((4, program.layout.block_bytes), 0x55, np.uint8)
        try:
            forward.step(np.ones(num_tokens, np.int64), np.array(plan, np.int32), guarded[1:3], np.zeros(0, np.int64))
        except ExecutorError:
            pass
        finally:
            forward.close()
    assert (guarded[[0, 3]] == 0x55).all()


def test_nothing_in_the_place_of_pointers_is_refused() -> None:
    handle = library().handle
    for name in ("make", "step", "logits", "project"):
        function = handle[f"native_forward_{name}"]
        function.restype = ctypes.c_char_p
        assert function(None, None, None, None, None)
    handle.native_forward_free(None)


def test_a_matrix_of_no_known_type_is_refused(pool: ThreadPool) -> None:
    program = program_of(TINY["tiny-qwen3"])
    first = program.weights[0]
    program.weights[0] = Matrix(Encoding.Q4_K, first.features, first.columns + 32, first.data)
    with pytest.raises(ExecutorError, match=r"whole blocks|cut"):
        run(pool, program)
