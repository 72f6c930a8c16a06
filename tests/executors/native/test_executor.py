"""The executor protocol as the executor keeps it: rows, plans, refusals, hidden states, prompts, closing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.artifacts.tensors import dequantise
from lockstep.errors import ExecutorError, InvalidPlanError, UsageError
from lockstep.executors.base import HiddenStates
from lockstep.executors.native.executor import NativeExecutor, environment_of, load_executor
from lockstep.executors.options import ExecutorOptions
from tests.executors.native.loading import loaded
from tests.executors.native.support import TINY_LLAMA, batch_of, random_artifact, run

PROMPT = np.random.default_rng(1).integers(0, 512, 70).tolist()
TABLE = (1, 2, 3)


@pytest.fixture
def executor() -> Iterator[NativeExecutor]:
    with loaded(random_artifact(), 8, 2) as found:
        yield found


def test_geometry(executor: NativeExecutor) -> None:
    geometry = executor.geometry
    assert (geometry.block_size, geometry.num_layers, geometry.vocab_size) == (32, 2, 512)
    f16, keys_and_values, layers, kv_heads, head_dim = 2, 2, 2, 2, 32
    assert geometry.bytes_per_block == f16 * keys_and_values * layers * kv_heads * 32 * head_dim
    assert geometry.max_model_len == TINY_LLAMA.max_model_len
    matrices = [random_artifact().weights[name] for name in random_artifact().weights.names()]
    assert geometry.weights_bytes == sum(each.data.nbytes for each in matrices if len(each.shape) == 2)


def test_environment_contains_only_what_affects_bits() -> None:
    artifact = random_artifact()
    environments = []
    for options in ({"threads": 1, "isa": "portable"}, {"threads": 2}):
        chosen = ExecutorOptions(**options)
        with loaded(artifact, **options) as executor:
            environments.append(dict(executor.environment))
        assert environments[-1] == environment_of(artifact, chosen)
    assert environments[0] == environments[1]
    assert environments[0].keys() == {"executor", "bits", "kv_cache_precision", "quantize", "artifact"}


def test_any_rows_may_be_requested(executor: NativeExecutor) -> None:
    batch = batch_of((PROMPT, 0, TABLE), all_rows=True)
    every = executor.execute(batch).copy()
    assert every.shape == (70, 512)
    assert np.array_equal(executor.execute(replace(batch, rows=np.array([69, 3, 3, 68]))), every[[69, 3, 3, 68]])
    assert executor.execute(replace(batch, rows=batch.rows[:0])).shape == (0, 512)


def test_logits_of_a_prompt_come_a_few_at_a_time(executor: NativeExecutor) -> None:
    batch = batch_of((PROMPT, 0, TABLE), all_rows=True)
    every = executor.execute(batch).copy()
    sampled = executor.execute(replace(batch, rows=np.array([69]), prompt_rows=np.arange(60)))
    parts = [executor.prompt_logits(first, min(first + 7, 60)).copy() for first in range(0, 60, 7)]
    assert np.array_equal(np.concatenate(parts), every[:60])
    assert np.array_equal(sampled, every[69:]), "they have memory of their own"
    executor.execute(batch_of(([1], 0, (4,))))
    assert executor.prompt_logits(0, 0).shape == (0, 512)


def test_head_turns_hidden_states_into_the_logits(executor: NativeExecutor) -> None:
    batch = batch_of((PROMPT, 0, TABLE), all_rows=True)
    logits = executor.execute(replace(batch, hidden_rows=batch.rows))
    assert isinstance(executor, HiddenStates)
    states = executor.hidden_states.copy()
    head = dequantise(random_artifact().weights["lm_head.weight"])
    np.testing.assert_allclose(states @ head.T, logits, atol=1e-4)
    for start, end in ((0, 2), (2, 40), (40, 70)):
        part = batch_of((PROMPT[start:end], start, TABLE), ([7, 8, 9], 0, (5,)))
        executor.execute(replace(part, hidden_rows=np.arange(end - start)))
        assert np.array_equal(executor.hidden_states, states[start:end])
    with pytest.raises(InvalidPlanError, match="a row is outside the step's 70 tokens"):
        executor.execute(replace(batch, hidden_rows=np.array([70])))


def test_a_plan_may_be_empty(executor: NativeExecutor) -> None:
    assert executor.execute(batch_of()).shape == (0, 512)
    assert executor.execute(batch_of(swap_out=((1, 0), (2, 1)))).shape == (0, 512)
    with pytest.raises(InvalidPlanError, match="without a chunk"):
        executor.execute(replace(batch_of(), rows=np.array([0])))


def test_a_refused_plan_does_nothing_not_even_its_moves(executor: NativeExecutor) -> None:
    run(executor, (PROMPT, 0, TABLE))
    expected = run(executor, ([7], 70, TABLE))
    with pytest.raises(InvalidPlanError):
        executor.execute(batch_of(([600], 0, (4,)), copies=((4, 1),), swap_in=((0, 2),)))
    assert np.array_equal(run(executor, ([7], 70, TABLE)), expected)


def test_the_library_refuses_a_step_that_does_not_fit(executor: NativeExecutor) -> None:
    """Checks of a step stand before it; these are the library's own."""
    forward, pool = executor._forward, executor._pool
    assert forward is not None
    assert pool is not None
    none = np.zeros(0, np.int64)
    for tokens, plan, match in (
        ([1, 2], [1, 0, 0, 3, 0, 1, 1], "do not cover the tokens"),
        ([1, 2], [1, 0, 0, 2, 0, 1, 9], "not of this pool"),
        ([1, 512], [1, 0, 0, 2, 0, 1, 1], "not of the vocabulary"),
        ([1, 2], [1], "too short"),
        ([1, 2], [1, 40, 0, 2, 0, 1, 1], "too short for its sequence"),
    ):
        with pytest.raises(ExecutorError, match=match):
            forward.step(np.array(tokens), np.array(plan, np.int32), pool.blocks, none)
    with pytest.raises(ExecutorError, match="not of the latest step"):
        forward.logits(np.array([0]), np.empty((1, 512), np.float32))


def test_a_pool_that_does_not_fit_the_memory_is_refused(executor: NativeExecutor) -> None:
    with pytest.raises(ExecutorError, match="cannot be allocated"):
        executor.allocate(1 << 40, 0)
    with pytest.raises(ExecutorError, match="the minimum is 1"):
        executor.allocate(0, 0)
    with pytest.raises(ExecutorError, match="no pool"):
        executor.execute(batch_of(([1], 0, (1,))))
    executor.allocate(8, 0)
    assert run(executor, ([1], 0, (1,))).shape == (1, 512)


def test_without_a_pool_or_closed_it_is_an_error() -> None:
    executor = load_executor(random_artifact(), ExecutorOptions(), lambda stage, share: None)
    with pytest.raises(ExecutorError, match="no pool"):
        executor.execute(batch_of(([1], 0, (1,))))
    executor.close()
    executor.close()
    with pytest.raises(ExecutorError, match="no pool"):
        executor.execute(batch_of(([1], 0, (1,))))
    with pytest.raises(ExecutorError, match="closed"):
        executor.allocate(1, 0)


@pytest.mark.parametrize(
    "wrong",
    [{"kv_cache_precision": "u8"}, {"isa": "neon"}, {"quantize": "int2"}, {"threads": 0}, {"max_cache_bytes": -1}],
)
def test_unknown_options_are_rejected(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} is"):
        ExecutorOptions(**wrong)  # type: ignore[arg-type]  # fields by name
