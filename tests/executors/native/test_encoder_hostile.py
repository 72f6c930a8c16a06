"""Programs and stages of encoders that no caller of ours would give: they are refused, or stay in their memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.artifacts.model import Artifact, ModelConfig
from lockstep.errors import ExecutorError
from lockstep.executors.native.forward import Forward
from lockstep.executors.native.operations import GATES, Action, Buffer, Program
from lockstep.executors.native.packs import load_weights
from lockstep.executors.native.products import ThreadPool
from lockstep.executors.native.program import build_program
from lockstep.executors.quantise import vector
from tests.executors.native.encoder_models import open_encoder
from tests.executors.native.test_hostile import NUMBERS, change_op
from tests.executors.native.test_packs import library
from tools.random_encoders import ENCODERS

HOSTILE = (-(2**31), -2, -1, 0, 1, 2, 7, 64, 2**16, 2**31 - 1)
NAMES = ("bert-classifier", "modern-bert", "gemma-embedding")
TOTAL = 40
PLAN = np.array([1, 0, 0, TOTAL, 0, 2, 2, 1], np.int32)
"""All tokens of one text in two blocks."""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("encoders")
    return {name: open_encoder(folder, name) for name in NAMES}


def program_of(artifact: Artifact, quantize: str | None = None) -> Program:
    weights = load_weights(artifact, library(), quantize, None, 0, lambda stage, share: None)
    turns = [(np.ones(artifact.config.head_dim // 2, np.float32), 1.0)] * 2
    return build_program(
        artifact.config, weights.matrices, lambda name, size: vector(artifact.weights[name], size),
        artifact.weights.__contains__, turns, "f16",
    )  # fmt: skip


def run(pool: ThreadPool, program: Program, config: ModelConfig) -> bytes:
    """All stages of one text between guarded blocks, and the head; the states."""
    guarded = np.full((5, program.layout.block_bytes), 0x55, np.uint8)
    guarded[1:4] = 0
    forward = Forward(library(), pool, program, config, "f16")
    try:
        for stage in range(config.num_layers + 1):
            rows = np.arange(TOTAL if stage == config.num_layers else 0)
            totals = np.array([TOTAL], np.int32)
            states = forward.step(np.arange(TOTAL) + 2, PLAN, guarded[1:4], rows, totals, stage)
        if program.logits >= 0:
            forward.project(states, config.head[-1].size)
    finally:
        forward.close()
        assert (guarded[[0, 4]] == 0x55).all()
    return states.tobytes()


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with ThreadPool(library(), 2) as found:
        yield found


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_the_programs_themselves_are_taken(
    artifacts: dict[str, Artifact], pool: ThreadPool, name: str, quantize: str | None
) -> None:
    run(pool, program_of(artifacts[name], quantize), artifacts[name].config)


@given(name=st.sampled_from(NAMES), quantize=st.sampled_from([None, "int8"]), seed=st.integers(0, 10**9))
def test_a_changed_operation_is_refused_or_harmless(
    artifacts: dict[str, Artifact], name: str, quantize: str | None, seed: int
) -> None:
    """Harmless: it reads and writes the program's own memory only."""
    rng = random.Random(seed)
    program = program_of(artifacts[name], quantize)
    for _ in range(rng.choice((1, 1, 3))):
        index = rng.randrange(len(program.ops))
        changes: dict[str, Any] = {rng.choice(NUMBERS): rng.choice(HOSTILE)}
        change_op(program, index, changes)
    with ThreadPool(library(), 2) as own, suppress(ExecutorError):
        run(own, program, artifacts[name].config)


CHANGES: dict[str, tuple[Action, dict[str, int]]] = {
    "kept columns": (Action.SAVE, {"out_at": 2**31 - 1}),
    "kept columns ": (Action.LOAD, {"in_at": 65}),
    "kept columns  ": (Action.LOAD, {"in_at": -1}),
    "output has no room": (Action.SAVE, {"out": 0}),
    "norm's weights": (Action.NORM, {"vector": 2**31 - 1}),
    "queries are not kept": (Action.ATTENTION, {"part": 2, "out": 1, "in_at": 2**31 - 1}),
    "output has other heads": (Action.ATTENTION, {"part": 2, "out": 1, "in_at": 64}),
    "parts of another kind": (Action.ATTENTION, {"part": 0, "out": 1}),
    "parts of another kind ": (Action.ATTENTION, {"part": 3, "out": 1}),
    "no such part": (Action.ATTENTION, {"part": 4, "out": 1}),
    "input has other heads": (Action.ATTENTION, {"in_at": -1}),
    "no table of these columns": (Action.EMBED, {"offset": -1}),
    "embedding's numbers": (Action.EMBED, {"vector": 2**31 - 1}),
    "columns of its weights": (Action.GATE, {"num_weights": 3}),
    "gate's biases": (Action.GATE, {"vector": 2**31 - 1}),
    "no such function": (Action.GATE, {"function": len(GATES)}),
}


@pytest.mark.parametrize("message", CHANGES)
def test_an_operation_outside_its_memory_is_refused(
    artifacts: dict[str, Artifact], pool: ThreadPool, message: str
) -> None:
    action, changes = CHANGES[message]
    program = program_of(artifacts["bert-classifier"])
    index = next(i for i, op in enumerate(program.ops) if op.action is action)
    change_op(program, index, changes)
    with pytest.raises(ExecutorError, match=message.strip()):
        run(pool, program, artifacts["bert-classifier"].config)


@pytest.mark.parametrize("kept", [-1, 0, 127, 2**20 + 1])
def test_too_little_kept_memory_is_refused(artifacts: dict[str, Artifact], pool: ThreadPool, kept: int) -> None:
    program = program_of(artifacts["bert-classifier"])
    program.kept = kept
    with pytest.raises(ExecutorError):
        run(pool, program, artifacts["bert-classifier"].config)


def test_results_of_whole_steps_outside_the_body_are_refused(artifacts: dict[str, Artifact], pool: ThreadPool) -> None:
    """Such buffers have room for the step's tokens only, and more rows than those may be requested."""
    program = program_of(artifacts["bert-classifier"], "int8")
    buffers = list(program.buffers)
    for index in {program.hidden, *(op.in_groups for op in program.ops[program.head_begin :] if op.in_groups >= 0)}:
        program.buffers[index] = Buffer(buffers[index].columns, buffers[index].is_groups, True)
        with pytest.raises(ExecutorError, match="whole steps"):
            run(pool, program, artifacts["bert-classifier"].config)
        program.buffers[index] = buffers[index]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": 4}, "no such stage"),
        ({"stage": -1}, "no such stage"),
        ({"totals": None}, "total lengths"),
        ({"totals": np.zeros(0, np.int32)}, "fewer total lengths"),
        ({"totals": np.array([39], np.int32)}, "more than its total length"),
        ({"totals": np.array([65], np.int32)}, "too short"),
        ({"hidden_rows": np.arange(3)}, "only the last stage"),
    ],
)
def test_stages_that_do_not_fit_are_refused(
    artifacts: dict[str, Artifact], pool: ThreadPool, changes: dict[str, Any], message: str
) -> None:
    artifact = artifacts["bert-classifier"]
    program = program_of(artifact)
    forward = Forward(library(), pool, program, artifact.config, "f16")
    cache = np.zeros((3, program.layout.block_bytes), np.uint8)
    step = {"hidden_rows": np.zeros(0, np.int64), "totals": np.array([TOTAL], np.int32), "stage": 0, **changes}
    try:
        with pytest.raises(ExecutorError, match=message):
            forward.step(np.arange(TOTAL), PLAN, cache, **step)
        with pytest.raises(ExecutorError, match="no KV blocks"):
            forward.step(np.arange(TOTAL), PLAN, cache[:, :-4], np.zeros(0, np.int64), np.array([TOTAL], np.int32))
    finally:
        forward.close()
    assert not cache.any()


def test_a_text_longer_than_the_table_of_positions_is_refused(artifacts: dict[str, Artifact], pool: ThreadPool) -> None:
    artifact = artifacts["bert-classifier"]
    program = program_of(artifact)
    index = next(i for i, op in enumerate(program.ops) if op.action is Action.EMBED)
    change_op(program, index, {"offset": 256 - TOTAL + 1})
    with pytest.raises(ExecutorError, match="table of positions"):
        run(pool, program, artifact.config)


@given(
    numbers=st.lists(st.sampled_from([*HOSTILE, 3, 4, 5]), max_size=12), total=st.sampled_from([-1, 0, 1, 3, 64, 2**30])
)
def test_any_plan_is_refused_or_within_the_pool(artifacts: dict[str, Artifact], numbers: list[int], total: int) -> None:
    artifact = artifacts["modern-bert"]
    program = program_of(artifact)
    guarded = np.full((4, program.layout.block_bytes), 0x55, np.uint8)
    with ThreadPool(library(), 1) as own:
        forward = Forward(library(), own, program, artifact.config, "f16")
        for stage in range(4):
            with suppress(ExecutorError):
                forward.step(
                    np.ones(3, np.int64), np.array(numbers, np.int32), guarded[1:3], np.zeros(0, np.int64),
                    np.array([total] * 3, np.int32), stage,
                )  # fmt: skip
        forward.close()
    assert (guarded[[0, 3]] == 0x55).all()


def test_vectors_and_scores_without_room_are_refused(artifacts: dict[str, Artifact], pool: ThreadPool) -> None:
    artifact = artifacts["bert-classifier"]
    forward = Forward(library(), pool, program_of(artifact), artifact.config, "f16")
    try:
        with pytest.raises(ExecutorError, match="fewer vectors"):
            forward.project(np.zeros((2, 63), np.float32), 3)
        with pytest.raises(ExecutorError, match="no room"):
            forward.project(np.zeros((2, 64), np.float32), 2)
    finally:
        forward.close()


def test_buffers_that_are_cut_are_refused(artifacts: dict[str, Artifact], pool: ThreadPool) -> None:
    for name in NAMES:
        program = program_of(artifacts[name], "int8")
        for index in range(len(program.buffers)):
            buffers = list(program.buffers)
            buffers[index] = Buffer(3, False, True)
            with pytest.raises(ExecutorError):
                run(pool, replace(program, buffers=buffers), artifacts[name].config)


def test_every_family_is_one_of_those_that_are_written() -> None:
    assert set(NAMES) <= set(ENCODERS)
