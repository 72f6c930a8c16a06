"""Programs that configurations become: which operations, in which order, and within the memory that they name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.artifacts.model import ModelConfig, QueryScaling
from lockstep.executors.native.operations import Action, AttentionPart, Op, Program
from lockstep.executors.native.packs import ModelWeights, load_weights
from lockstep.executors.native.program import build_program
from lockstep.executors.quantise import vector
from tests.executors.native.loading import loaded
from tests.executors.native.support import TINY, config_of, random_artifact, run
from tests.executors.native.test_packs import library
from tools.random_models import Shape

NAMES = {action: action.name.lower() for action in Action}
ATTENTION = "attention"


def program_of(shape: Shape, encoding: str = "F32", **changes: object) -> Program:
    """The program of one layer of a random model."""
    one = replace(
        shape, num_layers=1, mixers=(), windows=shape.windows[:1], unrotated_layers=(), kv_owners=(),
        intermediate_sizes=(),
    )  # fmt: skip
    artifact = random_artifact(one, encoding)
    config: ModelConfig = replace(artifact.config, **changes)  # type: ignore[arg-type]  # fields by name
    weights: ModelWeights = load_weights(artifact, library(), None, None, 0, lambda stage, share: None)
    half = (config.head_dim if config.rotary_dim is None else config.rotary_dim) // 2
    turns = [(np.ones(half, np.float32), 1.0)] * (1 if config.local_rope_theta is None else 2)
    return build_program(
        config, weights.matrices, lambda name, size: vector(artifact.weights[name], size),
        artifact.weights.__contains__, turns, "f16",
    )  # fmt: skip


def operations(program: Program) -> str:
    """Names of the operations, with a bar before the final part and before the head."""
    names = [NAMES[op.action] for op in program.ops]
    parts = names[: program.final_begin], names[program.final_begin : program.head_begin], names[program.head_begin :]
    return " | ".join(" ".join(part) for part in parts)


def only(program: Program, action: Action) -> list[Op]:
    return [op for op in program.ops if op.action is action]


def test_a_plain_decoder() -> None:
    body = "embed norm product attention product norm gate product"
    assert operations(program_of(TINY["tiny-llama"])) == f"{body} | norm | product"


def test_weights_in_panels_take_quantised_rows() -> None:
    body = "embed norm quantise product attention quantise product norm quantise gate product"
    program = program_of(TINY["tiny-llama"], "Q8_0")
    assert operations(program) == f"{body} | norm | quantise product"
    assert program.buffers[only(program, Action.GATE)[0].out].is_groups, "what a gate gives is quantised by itself"


def test_norms_of_heads_are_part_of_attention_and_those_of_whole_rows_are_not() -> None:
    program = program_of(TINY["tiny-qwen3"])
    assert operations(program) == operations(program_of(TINY["tiny-llama"]))
    assert only(program, Action.ATTENTION)[0].vector >= 0
    olmo2 = program_of(TINY["tiny-olmo2"])
    body = "embed product norm norm attention product norm add gate product norm add"
    assert operations(olmo2) == f"{body} | norm | product"
    queries, keys = only(olmo2, Action.NORM)[:2]
    shape = TINY["tiny-olmo2"]
    assert (queries.in_at, queries.columns) == (0, shape.num_heads * shape.head_dim)
    assert (keys.in_at, keys.columns) == (queries.columns, shape.num_kv_heads * shape.head_dim)
    assert only(olmo2, Action.ATTENTION)[0].vector == -1


def test_norms_before_and_after() -> None:
    body = "embed norm product attention product norm add norm gate product norm add"
    program = program_of(TINY["tiny-gemma3"])
    assert operations(program) == f"{body} | norm | product"
    config = config_of(TINY["tiny-gemma3"])
    assert only(program, Action.EMBED)[0].factor == config.embedding_scale
    assert only(program, Action.GATE)[0].function == 1
    first = only(program, Action.NORM)[0]
    plain = random_artifact(replace(TINY["tiny-gemma3"], num_layers=1, windows=(16,)), "F32")
    stored = vector(plain.weights["model.layers.0.input_layernorm.weight"], config.hidden_size)
    numbers = np.concatenate(program.vectors)[first.vector : first.vector + config.hidden_size]
    assert np.array_equal(numbers, stored + np.float32(config.norm_offset))


def test_embeddings_of_layers_shared_keys_and_a_cap() -> None:
    shape = replace(TINY["tiny-gemma4"], num_layers=2, windows=(0, 0), kv_owners=(0, 0), intermediate_sizes=())
    artifact = random_artifact(shape)
    weights = load_weights(artifact, library(), None, None, 0, lambda stage, share: None)
    turns = [(np.ones(32, np.float32), 1.0), (np.ones(16, np.float32), 1.0)]
    program = build_program(
        artifact.config, weights.matrices, lambda name, size: vector(artifact.weights[name], size),
        artifact.weights.__contains__, turns, "f16",
    )  # fmt: skip
    attention = "norm product attention product norm add"
    layer = f"{attention} norm gate product norm add product copy multiply product norm add scale"
    assert operations(program) == f"embed embed product norm add {layer} {layer} | norm | product cap"
    own, shared = only(program, Action.ATTENTION)
    assert [(op.part, op.num_norms) for op in (own, shared)] == [(AttentionPart.WHOLE, 3), (AttentionPart.READ, 1)]
    assert program.places[own.place] == program.places[shared.place]
    assert program.buffers[shared.in_].columns == shape.num_heads * 64, "queries only"


def test_biases_scales_windows_and_rotations_are_numbers() -> None:
    qwen2 = only(program_of(TINY["tiny-qwen2"]), Action.PRODUCT)
    assert [op.vector >= 0 for op in qwen2] == [True, False, False, False]
    granite = program_of(TINY["tiny-granite"], attention_scale=0.25, residual_scale=0.5, logits_divisor=4.0)
    assert only(granite, Action.ATTENTION)[0].scale == 0.25
    assert [(op.factor, op.adds, op.divisor) for op in only(granite, Action.PRODUCT)] == [
        (1.0, False, 1.0), (0.5, True, 1.0), (0.5, True, 1.0), (1.0, False, 4.0)
    ]  # fmt: skip
    llama = TINY["tiny-llama"]
    for changes, expected in (
        ({}, (0, 0)),
        ({"windows": (16,)}, (16, 0)),
        ({"windows": (16,), "local_rope_theta": 1e4}, (16, 1)),
        ({"windows": (0,), "local_rope_theta": 1e4}, (0, 0)),
        ({"unrotated_layers": (0,)}, (0, -1)),
    ):
        [attention] = only(program_of(llama, **changes), Action.ATTENTION)
        assert (attention.window, attention.rotary) == expected, changes


def test_sinks_and_the_scaling_of_queries_are_numbers_of_attention() -> None:
    program = program_of(TINY["tiny-granite_swa"])
    [attention] = only(program, Action.ATTENTION)
    stored = random_artifact(TINY["tiny-granite_swa"]).weights["model.layers.0.self_attn.sinks"]
    assert np.array_equal(np.concatenate(program.vectors)[attention.sinks :][: len(stored.data)], stored.data)
    [attention] = only(program_of(TINY["tiny-llama"], query_scaling=QueryScaling(0.1, 64)), Action.ATTENTION)
    assert (attention.query_period, attention.query_beta, attention.sinks) == (64, 0.1, -1)


def test_a_tied_table_is_embedding_and_head() -> None:
    program = program_of(replace(TINY["tiny-llama"], tied_embeddings=True))
    first, last = only(program, Action.EMBED)[0], only(program, Action.PRODUCT)[-1]
    assert program.weights[first.first_weight] is program.weights[last.first_weight]


@given(
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3), (8, 1)]), head_dim=st.sampled_from([8, 24, 64]),
    hidden=st.integers(1, 7), inner=st.integers(1, 9), vocab=st.integers(20, 80), name=st.sampled_from(sorted(TINY)),
    quantize=st.sampled_from([None, "int8", "int4"]), tied=st.booleans(), length=st.integers(1, 70),
)  # fmt: skip
def test_any_configuration_is_a_program_that_runs(
    heads: tuple[int, int], head_dim: int, hidden: int, inner: int, vocab: int, name: str, quantize: str | None,
    tied: bool, length: int,
) -> None:  # fmt: skip
    kinds = TINY[name].mixers
    mixers = (kinds[0], "attention") if kinds else ()
    shape = replace(
        TINY[name], num_layers=len(mixers) or 1, hidden_size=16 * hidden, intermediate_size=24 * inner,
        vocab_size=vocab, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, tied_embeddings=tied,
        windows=(), rotary_dim=None, unrotated_layers=(), mixers=mixers, full_head_dim=None, kv_owners=(),
        intermediate_sizes=(),
    )  # fmt: skip
    tokens = (np.arange(length) % vocab).tolist()
    with loaded(random_artifact(shape, "F32"), 4, 0, quantize=quantize) as executor:
        logits = run(executor, (tokens, 0, (1, 2, 3)), all_rows=True)
        assert np.isfinite(logits).all()
        if mixers and length > 1:  # the state is already that of all tokens
            run(executor, (tokens[:-1], 0, (1, 2, 3)))
        assert np.array_equal(logits[-1:], run(executor, (tokens[-1:], length - 1, (1, 2, 3))))


@pytest.mark.parametrize("name", sorted(TINY))
def test_every_operation_stays_within_its_memory(name: str) -> None:
    program = program_of(TINY[name], "Q8_0")
    num_numbers = sum(map(len, program.vectors))
    for op in program.ops:
        assert -1 <= op.vector < num_numbers
        assert 0 <= op.out < len(program.buffers)
        assert op.first_weight + op.num_weights <= len(program.weights)
