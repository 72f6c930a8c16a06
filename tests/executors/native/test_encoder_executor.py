"""The executor of encoders: its geometry, the plans that it refuses, and its head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace as replace_field
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.errors import ExecutorError, InvalidPlanError
from lockstep.executors.base import Executor, HiddenStates, SequenceObserver, VectorHead
from lockstep.executors.native.encoder import EncoderExecutor
from lockstep.executors.native.encoder_steps import STEP_OPERATIONS, Text, checked_stages, step_positions
from tests.executors.native.encoder_models import Chunk, loaded_encoder, open_encoder, states_of, step_of
from tools.golden.encoder_cases import text

TABLES = {0: (3, 1), 1: (5,)}
TEXTS = {0: text(40), 1: text(10)}
NUM_STAGES = 4


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncoderExecutor]:
    with loaded_encoder(open_encoder(tmp_path_factory.mktemp("encoders"), "bert-classifier")) as found:
        yield found


def test_a_block_has_room_for_32_tokens_of_every_stage(executor: EncoderExecutor) -> None:
    geometry = executor.geometry
    assert geometry.num_stages == NUM_STAGES
    assert geometry.block_size == 32 * NUM_STAGES
    keys_and_values = 2 * 2 * 64 * 32 * 2  # two layers of keys and values in f16
    assert geometry.bytes_per_block == keys_and_values + 4 * 32 * (64 + 64)
    assert geometry.max_model_len == 256 * NUM_STAGES + 1
    assert geometry.step_positions == STEP_OPERATIONS // (2 * (4 * 64 * 64 + 2 * 64 * 128) + 5 * 4 * 256 * 64)
    for protocol in (HiddenStates, SequenceObserver, VectorHead):
        assert isinstance(executor, protocol)
    checked: Executor = executor
    assert checked.environment["bits"] == "1"


def test_the_longer_a_models_texts_and_the_larger_its_layers_the_fewer_positions_has_a_step(tmp_path: Path) -> None:
    config = open_encoder(tmp_path, "bert-classifier").config
    plain = step_positions(config)
    assert step_positions(replace_field(config, max_model_len=512)) < plain
    assert step_positions(replace_field(config, intermediate_size=512)) < plain
    assert step_positions(replace_field(config, gated=True)) < plain
    assert step_positions(replace_field(config, max_model_len=1 << 40)) == 1
    heads = replace_field(config, num_heads=16, num_kv_heads=16, head_dim=64)
    bge_m3 = replace_field(heads, max_model_len=8_192, hidden_size=1_024, intermediate_size=4_096)
    assert step_positions(bge_m3) == 1_326


def test_a_step_is_divided_into_stages_in_ascending_order() -> None:
    """The first text ends stage 1 and has all of stage 2; the second one is in stages 0 and 1."""
    plan = step_of([Chunk(0, 75, 45), Chunk(1, 5, 8)], TABLES).plan
    texts = {index: Text(ids, np.full(len(ids), index, np.int32)) for index, ids in TEXTS.items()}
    first, second, third = checked_stages(plan, texts, NUM_STAGES, 9)
    assert second.types.tolist() == [0] * 5 + [1] * 3
    assert [each.stage for each in (first, second, third)] == [0, 1, 2]
    assert first.parts.tolist() == [45, 46, 47, 48, 49]
    assert second.parts.tolist() == [0, 1, 2, 3, 4, 50, 51, 52]
    assert third.parts.tolist() == list(range(5, 45))
    assert second.totals.tolist() == [40, 10]
    assert second.plan.tolist() == [2, 35, 0, 0, 5, 8, 0, 2, 3, 3, 1, 5]
    assert np.array_equal(third.token_ids, TEXTS[0])


@pytest.mark.parametrize(
    ("chunks", "tables", "message"),
    [
        ([Chunk(2, 0, 1)], {2: (1,)}, "text is not known"),
        ([Chunk(0, 0, 0)], TABLES, "at least one position"),
        ([Chunk(0, -1, 5)], TABLES, "at least one position"),
        ([Chunk(0, 150, 11)], TABLES, "end at 160"),
        ([Chunk(0, 0, 5)], {0: (3,)}, "table of 1 blocks; its text needs 2"),
        ([Chunk(0, 0, 5)], {0: (3, 0)}, "block 0 is not one of 1..40"),
        ([Chunk(0, 0, 5)], {0: (3, 41)}, "block 41 is not one of 1..40"),
        ([Chunk(0, 0, 5)], {0: (3, 3)}, "occurs twice"),
        ([Chunk(0, 0, 5), Chunk(1, 0, 5)], {0: (3, 1), 1: (1,)}, "occurs twice"),
    ],
)
def test_invalid_plans_are_refused_untouched(
    executor: EncoderExecutor, chunks: Sequence[Chunk], tables: dict[int, tuple[int, ...]], message: str
) -> None:
    for seq_id, ids in TEXTS.items():
        executor.begin(seq_id, ids.tolist(), 0)
    before = executor.read_blocks(range(1, 41))
    with pytest.raises(InvalidPlanError, match=message):
        executor.execute(step_of(chunks, tables))
    assert np.array_equal(executor.read_blocks(range(1, 41)), before)


@pytest.mark.parametrize("row", [-1, 0, 119, 160])
def test_hidden_rows_are_positions_of_the_last_stage(executor: EncoderExecutor, row: int) -> None:
    executor.begin(0, TEXTS[0].tolist(), 0)
    with pytest.raises(InvalidPlanError, match="hidden row"):
        executor.execute(step_of([Chunk(0, 0, 160)], TABLES, [row]))


def test_rows_are_returned_in_the_order_of_the_request(executor: EncoderExecutor) -> None:
    [states] = states_of(executor, [TEXTS[0]])
    executor.begin(0, TEXTS[0].tolist(), 0)
    executor.execute(step_of([Chunk(0, 0, 160)], TABLES, [159, 120, 120, 131]))
    assert np.array_equal(executor.hidden_states, states[[39, 0, 0, 11]])
    executor.execute(replace(step_of([Chunk(0, 0, 9)], TABLES), rows=np.array([8])))
    assert executor.hidden_states.shape == (0, 64)


def test_an_encoder_has_no_logits(executor: EncoderExecutor) -> None:
    executor.begin(0, TEXTS[0].tolist(), 0)
    logits = executor.execute(replace(step_of([Chunk(0, 0, 160)], TABLES), rows=np.array([159])))
    assert logits.shape == (1, 1)
    assert not logits.any()
    with pytest.raises(ExecutorError, match="no logits"):
        executor.prompt_logits(0, 1)


@pytest.mark.parametrize("ids", [[], [320], [-1], [2] * 257])
def test_texts_outside_the_limits_are_refused(executor: EncoderExecutor, ids: list[int]) -> None:
    with pytest.raises(InvalidPlanError):
        executor.begin(7, ids, 0)


def test_an_ended_text_is_forgotten(executor: EncoderExecutor) -> None:
    executor.begin(0, TEXTS[0].tolist(), 0)
    executor.end(0)
    executor.end(0)
    with pytest.raises(InvalidPlanError, match="not known"):
        executor.execute(step_of([Chunk(0, 0, 5)], TABLES))


def test_vectors_of_another_size_are_refused(executor: EncoderExecutor, tmp_path: Path) -> None:
    assert executor.head_size == 3
    assert executor.project(np.zeros((0, 64), np.float32)).shape == (0, 3)
    with pytest.raises(ExecutorError, match=r"\[n, 64\]"):
        executor.project(np.zeros((2, 63), np.float32))
    with loaded_encoder(open_encoder(tmp_path, "bert")) as plain:
        assert plain.head_size is None
        with pytest.raises(ExecutorError, match="no dense layers"):
            plain.project(np.zeros((2, 64), np.float32))


def test_a_closed_executor_refuses_steps(tmp_path: Path) -> None:
    with loaded_encoder(open_encoder(tmp_path, "bert")) as executor:
        executor.close()
        with pytest.raises(ExecutorError, match="closed"):
            executor.execute(step_of([], {}))
        with pytest.raises(ExecutorError, match="closed"):
            executor.allocate(3, 0)
