"""Programs of hybrid models: which operations, and that wrong ones are refused."""

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

from lockstep.artifacts.model import DeltaNet
from lockstep.errors import ExecutorError
from lockstep.executors.kv_layout import Place
from lockstep.executors.native.forward import Forward
from lockstep.executors.native.operations import GATES, Action, Program
from lockstep.executors.native.packs import load_weights
from lockstep.executors.native.products import ThreadPool
from lockstep.executors.native.program import build_program
from lockstep.executors.native.self_check import self_check
from lockstep.executors.quantise import vector
from tests.executors.native.support import config_of, random_artifact
from tests.executors.native.test_hostile import HOSTILE, NUMBERS, change_op
from tests.executors.native.test_packs import library
from tests.executors.native.test_program import only, operations
from tools.random_models import SHAPES

QWEN, LFM2 = (replace(SHAPES[name], num_layers=2) for name in ("tiny-qwen35", "tiny-lfm2"))
QWEN, LFM2 = replace(QWEN, mixers=("delta_net", "attention")), replace(LFM2, mixers=("convolution", "attention"))
LFM3 = replace(SHAPES["tiny-lfm3"], num_layers=2, mixers=("convolution", "attention"), windows=())
HYBRIDS = {"qwen35": QWEN, "lfm2": LFM2, "lfm3": LFM3}
NUM_TOKENS = 40


def hybrid_program(name: str, encoding: str = "F32", seed: int = 0) -> Program:
    """The program of a recurrent layer and one of attention."""
    artifact = random_artifact(HYBRIDS[name], encoding, seed)
    weights = load_weights(artifact, library(), None, None, 0, lambda stage, share: None)
    turns = [(np.ones((artifact.config.rotary_dim or artifact.config.head_dim) // 2, np.float32), 1.0)]
    return build_program(
        artifact.config, weights.matrices, lambda name, shape: vector(artifact.weights[name], shape),
        artifact.weights.__contains__, turns, "f16",
    )  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    with ThreadPool(library(), 2) as found:
        yield found


def run(pool: ThreadPool, name: str, program: Program, states: list[int] | None = None) -> None:
    """Tokens of one sequence, if the program is taken: nothing is written outside the pool and the state's blocks."""
    config = config_of(HYBRIDS[name])
    forward = Forward(library(), pool, program, config, "f16")
    num_parts = program.layout.groups[-1].num_parts
    guarded = np.full((5 + 2 * num_parts, program.layout.block_bytes), 0x55, np.uint8)
    table = [-1] * num_parts + list(range(2, 2 + num_parts)) if states is None else states
    try:
        forward.step(
            np.arange(NUM_TOKENS) % config.vocab_size, np.array([1, 0, 0, NUM_TOKENS, 0, 2, 0, 1], np.int32),
            guarded[1:-1], np.array([0]), states=np.array(table, np.int32),
        )  # fmt: skip
        forward.logits(np.array([1]), np.empty((1, config.vocab_size), np.float32))
    finally:
        forward.close()
        assert (guarded[[0, *range(3 + num_parts, len(guarded))]] == 0x55).all()


def test_a_delta_net_and_gated_attention() -> None:
    first = "norm product rates convolve norm norm delta norm multiply product norm gate product"
    second = "norm product copy copy attention multiply product norm gate product"
    program = hybrid_program("qwen35")
    assert operations(program) == f"embed {first} {second} | norm | product"
    config = config_of(QWEN)
    net = config.delta_net
    assert net is not None
    [rates], [convolution], [delta] = (only(program, each) for each in (Action.RATES, Action.CONVOLVE, Action.DELTA))
    assert (rates.columns, rates.out_at, rates.out) == (net.num_value_heads, net.num_channels, delta.in_)
    assert (convolution.columns, convolution.taps, convolution.out) == (net.num_channels, net.taps, delta.in_)
    assert convolution.function == GATES["silu"]
    assert [program.places[i] for i in range(convolution.place, delta.place + net.num_value_heads)] == list(
        program.layout.states[0]
    )
    multiply_silu, multiply_sigmoid = only(program, Action.MULTIPLY)
    assert (multiply_silu.out, multiply_silu.function) == (delta.out, GATES["silu"])
    assert (multiply_sigmoid.heads, multiply_sigmoid.stride) == (config.num_heads, 2 * config.head_dim)
    queries, others = only(program, Action.COPY)
    assert (queries.heads, queries.columns, queries.stride) == (config.num_heads, config.head_dim, 2 * config.head_dim)
    assert (others.in_at, others.out_at) == (2 * others.out_at, config.num_heads * config.head_dim)


def test_a_short_convolution() -> None:
    first = "norm product copy multiply convolve multiply product norm gate product"
    second = "norm product attention product norm gate product"
    program = hybrid_program("lfm2")
    assert operations(program) == f"embed {first} {second} | norm | product"
    [convolution] = only(program, Action.CONVOLVE)
    assert (convolution.columns, convolution.taps) == (LFM2.hidden_size, LFM2.conv_taps)
    assert {op.function for op in (convolution, *only(program, Action.MULTIPLY))} == {GATES["identity"]}
    assert list(program.layout.states[0]) == [program.places[convolution.place]]


def test_gates_of_heads_and_norms_on_both_sides() -> None:
    first = "norm product copy multiply convolve multiply product norm add norm gate product norm add"
    second = "norm product gate attention scale_parts product norm add norm gate product norm add"
    program = hybrid_program("lfm3")
    assert operations(program) == f"embed {first} {second} | norm | product"
    gates, scaled = only(program, Action.GATE)[1], only(program, Action.SCALE_PARTS)[0]
    assert (gates.function, gates.num_weights, gates.out) == (GATES["sigmoid"], 1, scaled.in_)
    assert (scaled.heads, scaled.stride, scaled.columns) == (LFM3.num_heads, 1, LFM3.head_dim)
    assert scaled.out == only(program, Action.ATTENTION)[0].out


def test_norms_are_offset_but_those_of_delta_nets_are_not() -> None:
    """Qwen3.5 stores the weights of its norms minus one in safetensors, with one exception."""
    artifact = random_artifact(QWEN)
    artifact = replace(artifact, config=replace(artifact.config, norm_offset=1.0))
    weights = load_weights(artifact, library(), None, None, 0, lambda stage, share: None)
    program = build_program(
        artifact.config, weights.matrices, lambda name, shape: vector(artifact.weights[name], shape),
        artifact.weights.__contains__, [(np.ones(4, np.float32), 1.0)], "f16",
    )  # fmt: skip
    numbers = np.concatenate(program.vectors)
    first, queries, _, gated, *_ = only(program, Action.NORM)

    def stored(name: str) -> Any:
        [size] = artifact.weights[name].shape
        return vector(artifact.weights[name], size)

    assert np.array_equal(numbers[first.vector :][: first.columns], stored("model.layers.0.input_layernorm.weight") + 1)
    assert np.array_equal(numbers[gated.vector :][: gated.columns], stored("model.layers.0.linear_attn.norm.weight"))
    assert set(numbers[queries.vector :][: queries.columns].tolist()) == {np.float32(1 / queries.columns)}


def test_rates_are_stored_or_made_from_logarithms() -> None:
    artifact = random_artifact(QWEN)
    logarithms = artifact.weights["model.layers.0.linear_attn.A_log"].data
    [rates] = only(hybrid_program("qwen35"), Action.RATES)
    numbers = np.concatenate(hybrid_program("qwen35").vectors)[rates.vector : rates.vector + rates.columns]
    assert np.allclose(numbers, -np.exp(logarithms.astype(np.float64)), rtol=1e-7)
    assert (numbers < 0).all()


def test_the_self_check_runs_the_kernels_of_states() -> None:
    assert self_check(library()) is None


@pytest.mark.parametrize("encoding", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_the_programs_themselves_are_taken(pool: ThreadPool, name: str, encoding: str) -> None:
    run(pool, name, hybrid_program(name, encoding))


@given(st.sampled_from(sorted(HYBRIDS)), st.sampled_from(["F32", "Q8_0"]), st.integers(0, 10**9))
def test_a_changed_operation_is_refused_or_harmless(name: str, encoding: str, seed: int) -> None:
    """Harmless: it reads and writes the program's own memory only."""
    rng = random.Random(seed)
    program = hybrid_program(name, encoding)
    for _ in range(rng.choice((1, 1, 3))):
        changes: dict[str, Any] = {rng.choice(NUMBERS): rng.choice(HOSTILE)}
        change_op(program, rng.randrange(len(program.ops)), changes)
    with ThreadPool(library(), 2) as own, suppress(ExecutorError):
        run(own, name, program)


WRONG: dict[str, tuple[Action, dict[str, int]]] = {
    "taps": (Action.CONVOLVE, {"taps": 65}),
    "no taps": (Action.CONVOLVE, {"taps": 1}),
    "channels": (Action.CONVOLVE, {"columns": 1 << 20}),
    "function": (Action.CONVOLVE, {"function": GATES["relu"]}),
    "weights": (Action.CONVOLVE, {"vector": 1 << 20}),
    "in place": (Action.CONVOLVE, {"out": 3, "in_": 3}),
    "no place": (Action.CONVOLVE, {"place": -1}),
    "a place of attention": (Action.CONVOLVE, {"place": 5}),
    "places behind the last one": (Action.DELTA, {"place": 3}),
    "an input that is cut": (Action.DELTA, {"in_at": 8}),
    "an output that is cut": (Action.DELTA, {"out_at": 8}),
    "too many heads": (Action.RATES, {"columns": 99}),
    "rates that are not there": (Action.RATES, {"vector": 1 << 20}),
    "no heads": (Action.MULTIPLY, {"heads": 0}),
    "a stride behind the row": (Action.COPY, {"stride": 1 << 16}),
    "a negative stride": (Action.COPY, {"stride": -8}),
    "many heads": (Action.NORM, {"heads": 1 << 16}),
    "a function": (Action.MULTIPLY, {"function": len(GATES)}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_operations_that_do_not_fit_are_refused(pool: ThreadPool, wrong: str) -> None:
    program = hybrid_program("qwen35")
    action, changes = WRONG[wrong]
    index = next(i for i, op in enumerate(program.ops) if op.action is action)
    change_op(program, index, changes)
    with pytest.raises(ExecutorError):
        run(pool, "qwen35", program)


@pytest.mark.parametrize(
    "changes",
    [{"heads": 0}, {"heads": 5}, {"stride": 2}, {"stride": -1}, {"columns": 0}, {"columns": 33}, {"in_at": 1}],
)
def test_numbers_of_parts_that_are_not_there_are_refused(pool: ThreadPool, changes: dict[str, int]) -> None:
    program = hybrid_program("lfm3")
    change_op(program, next(i for i, op in enumerate(program.ops) if op.action is Action.SCALE_PARTS), changes)
    with pytest.raises(ExecutorError, match=r"is not there|no room|part"):
        run(pool, "lfm3", program)


def test_a_multiplication_or_copy_in_place_is_refused(pool: ThreadPool) -> None:
    for action in (Action.MULTIPLY, Action.COPY):
        program = hybrid_program("qwen35")
        index, op = next((i, op) for i, op in enumerate(program.ops) if op.action is action)
        change_op(program, index, {"in_": op.out})
        with pytest.raises(ExecutorError, match="room"):
            run(pool, "qwen35", program)


@pytest.mark.parametrize("buffer", ["in_", "out"])
@pytest.mark.parametrize("action", [Action.CONVOLVE, Action.DELTA])
def test_recurrences_need_the_rows_of_a_whole_step(pool: ThreadPool, action: Action, buffer: str) -> None:
    program = hybrid_program("qwen35")
    [op] = only(program, action)
    index: int = getattr(op, buffer)
    program.buffers[index] = program.buffers[index]._replace(is_of_step=False)
    with pytest.raises(ExecutorError, match="all rows"):
        run(pool, "qwen35", program)


@pytest.mark.parametrize(
    "net",
    [
        None,
        *(DeltaNet(key_heads, 4, 32, 32, 4) for key_heads in (0, 3, 8)),
        DeltaNet(2, 1 << 11, 32, 32, 4),
        DeltaNet(2, 4, 1025, 32, 4),
        DeltaNet(2, 4, 32, 0, 4),
        DeltaNet(2, 4, 32, 33, 4),
    ],
    ids=str,
)
def test_other_shapes_of_delta_nets_are_refused(pool: ThreadPool, net: DeltaNet | None) -> None:
    program = hybrid_program("qwen35")
    program.delta_net = net
    with pytest.raises(ExecutorError):
        run(pool, "qwen35", program)


@pytest.mark.parametrize("place", [Place(0, 0, 0), Place(2, 0, 0), Place(1, 99, 0), Place(1, -1, 0), Place(1, 0, 2)])
@pytest.mark.parametrize("action", [Action.CONVOLVE, Action.DELTA])
def test_pieces_of_states_outside_their_blocks_are_refused(pool: ThreadPool, action: Action, place: Place) -> None:
    program = hybrid_program("qwen35")
    [op] = only(program, action)
    for wrong in (place, Place(1, 0, program.layout.block_bytes), Place(1, 0, -4)):
        program.places[op.place] = wrong
        with pytest.raises(ExecutorError, match="place in a block"):
            run(pool, "qwen35", program)


def test_wrong_states_of_a_step_are_refused(pool: ThreadPool) -> None:
    program = hybrid_program("qwen35")
    parts = program.layout.groups[-1].num_parts
    after = list(range(2, 2 + parts))
    last = 2 + 2 * parts
    for states in (
        [],
        [-1] * parts,
        [*([-1] * parts), *after, 1],
        [-1] * (2 * parts),
        [-1, *range(1, parts), *after],
        [*([-2] * parts), *after],
        [*([last + 1] * parts), *after],
        [*after, *after[:-1], last + 1],
    ):
        with pytest.raises(ExecutorError, match="state"):
            run(pool, "qwen35", program, states)
