"""The executor computes the model's logits, from every encoding, and refuses what would leave its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.artifacts.source import open_artifact
from lockstep.errors import ExecutorError, InvalidPlanError
from lockstep.executors.base import Executor
from lockstep.executors.openvino.executor import OpenVINOExecutor, load_executor
from lockstep.executors.options import ExecutorOptions
from tests.executors.openvino.support import TINY_LLAMA, TINY_QWEN3, batch_of, random_artifact, reference_logits, run
from tools.random_models import Shape, write_huggingface

EXACT = ExecutorOptions(kv_cache_precision="f32", dynamic_quantization_group_size=0)
PROMPT = np.random.default_rng(0).integers(0, 512, 70).tolist()


@pytest.mark.parametrize("shape", [TINY_LLAMA, TINY_QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_logits_of_every_position_follow_the_definition(shape: Shape, encoding: str) -> None:
    artifact = random_artifact(shape, encoding)
    executor = load_executor(artifact, EXACT)
    executor.allocate(8, 0)
    logits = run(executor, (PROMPT, 0, (5, 2, 7)), all_rows=True)
    assert np.abs(logits - reference_logits(artifact, PROMPT)).max() < 5e-5
    executor.close()


@pytest.mark.parametrize("encoding", ["F16", "BF16"])
def test_so_do_those_of_a_hugging_face_directory(encoding: str, tmp_path: Path) -> None:
    """Whose norms are stored like the matrices, unlike a GGUF file's."""
    source = write_huggingface(tmp_path / "model", TINY_QWEN3, encoding)
    artifact = open_artifact(str(source), cache_dir=tmp_path)
    executor = load_executor(artifact, EXACT)
    executor.allocate(8, 0)
    logits = run(executor, (PROMPT, 0, (5, 2, 7)), all_rows=True)
    assert np.abs(logits - reference_logits(artifact, PROMPT)).max() < 5e-5
    executor.close()


@pytest.fixture(scope="module")
def executor() -> Iterator[OpenVINOExecutor]:
    executor = load_executor(random_artifact(TINY_LLAMA, "Q8_0"))
    yield executor
    executor.close()


def test_decoding_continues_from_the_blocks(executor: OpenVINOExecutor) -> None:
    executor.allocate(8, 0)
    whole = run(executor, (PROMPT, 0, (1, 2, 3)))
    run(executor, (PROMPT[:40], 0, (6, 4)))
    assert np.array_equal(run(executor, (PROMPT[40:], 40, (6, 4, 5))), whole)


def test_geometry_is_what_was_compiled(executor: OpenVINOExecutor) -> None:
    geometry = executor.geometry
    assert (geometry.block_size, geometry.num_layers, geometry.vocab_size) == (32, 2, 512)
    f16, keys_and_values, layers, kv_heads, head_dim = 2, 2, 2, 2, 32
    assert geometry.bytes_per_block == f16 * keys_and_values * layers * kv_heads * 32 * head_dim
    assert geometry.max_model_len == TINY_LLAMA.max_model_len


def test_any_rows_may_be_asked_for(executor: OpenVINOExecutor) -> None:
    executor.allocate(8, 0)
    batch = batch_of((PROMPT, 0, (1, 2, 3)), all_rows=True)
    every = executor.execute(batch).copy()
    assert every.shape == (70, 512)
    some = executor.execute(replace(batch, rows=np.array([69, 3, 3, 68])))
    assert np.array_equal(some, every[[69, 3, 3, 68]])
    assert executor.execute(replace(batch, rows=batch.rows[:0])).shape == (0, 512)


def test_a_plan_may_be_empty(executor: OpenVINOExecutor) -> None:
    executor.allocate(8, 2)
    assert executor.execute(batch_of()).shape == (0, 512)
    assert executor.execute(batch_of(swap_out=((1, 0), (2, 1)))).shape == (0, 512)
    with pytest.raises(InvalidPlanError, match="without a chunk"):
        executor.execute(replace(batch_of(), rows=np.array([0])))


def test_a_refused_plan_does_nothing_not_even_its_moves(executor: OpenVINOExecutor) -> None:
    executor.allocate(8, 1)
    run(executor, (PROMPT, 0, (1, 2, 3)))
    expected = run(executor, ([7], 70, (1, 2, 3)))
    with pytest.raises(InvalidPlanError):
        executor.execute(batch_of(([600], 0, (4,)), copies=((4, 1),), swap_in=((0, 2),)))
    assert np.array_equal(run(executor, ([7], 70, (1, 2, 3))), expected)


class _BrokenOnce:
    """An infer request that fails in its first pass."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self._failed = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def infer(self) -> None:
        if not self._failed:
            self._failed = True
            raise RuntimeError("no luck")
        self._inner.infer()  # type: ignore[attr-defined]  # an untyped library's


def test_a_failing_pass_is_an_executor_error_and_the_executor_stays_usable(executor: OpenVINOExecutor) -> None:
    executor.allocate(8, 0)
    expected = run(executor, (PROMPT, 0, (1, 2, 3)))
    executor._request = _BrokenOnce(executor._request)
    with pytest.raises(ExecutorError, match="no luck"):
        run(executor, (PROMPT, 0, (1, 2, 3)))
    assert np.array_equal(run(executor, (PROMPT, 0, (1, 2, 3))), expected)


def test_a_pool_that_does_not_fit_the_memory_is_refused(executor: OpenVINOExecutor) -> None:
    with pytest.raises(ExecutorError, match="cannot be allocated"):
        executor.allocate(1 << 40, 0)
    with pytest.raises(ExecutorError, match="at least 1"):
        executor.allocate(0, 0)
    executor.allocate(8, 0)
    assert run(executor, ([1], 0, (1,))).shape == (1, 512)


def test_without_a_pool_or_closed_it_says_so() -> None:
    executor: Executor = load_executor(random_artifact())
    with pytest.raises(ExecutorError, match="no pool"):
        run(executor, ([1], 0, (1,)))
    executor.allocate(1, 0)
    assert run(executor, ([1], 0, (1,))).shape == (1, 512)
    executor.close()
    executor.close()
    with pytest.raises(ExecutorError, match="closed"):
        run(executor, ([1], 0, (1,)))
    with pytest.raises(ExecutorError, match="closed"):
        executor.allocate(1, 0)
