"""Hidden states are what the LM head is given, and asking for them changes nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from lockstep.artifacts.model import Artifact
from lockstep.artifacts.tensors import dequantise
from lockstep.errors import InvalidPlanError
from lockstep.executors.base import HiddenStates
from lockstep.executors.openvino.executor import OpenVINOExecutor, load_executor
from lockstep.executors.options import ExecutorOptions
from tests.executors.openvino.support import batch_of, random_artifact

PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, 512, 70)]
TABLE = (1, 2, 3)


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    return random_artifact()


@pytest.fixture(scope="module")
def executor(artifact: Artifact) -> Iterator[OpenVINOExecutor]:
    exact = ExecutorOptions(kv_cache_precision="f32", dynamic_quantization_group_size=0)
    loaded = load_executor(artifact, exact)
    loaded.allocate(8, 0)
    yield loaded
    loaded.close()


def test_the_head_turns_them_into_the_logits(artifact: Artifact, executor: OpenVINOExecutor) -> None:
    """The logits are compared with other engines elsewhere; so this pins every hidden state down."""
    batch = batch_of((PROMPT, 0, TABLE), all_rows=True)
    logits = executor.execute(replace(batch, hidden_rows=batch.rows))
    assert isinstance(executor, HiddenStates)
    head = dequantise(artifact.weights["lm_head.weight"])
    assert executor.hidden_states.shape == (len(PROMPT), artifact.config.hidden_size)
    np.testing.assert_allclose(executor.hidden_states @ head.T, logits, atol=1e-4)


def test_asking_for_them_changes_no_logit(executor: OpenVINOExecutor) -> None:
    batch = batch_of((PROMPT, 0, TABLE))
    without = executor.execute(batch).copy()
    assert executor.hidden_states.shape[0] == 0
    with_them = executor.execute(replace(batch, hidden_rows=np.array([3, 5])))
    assert np.array_equal(without, with_them)


def test_they_do_not_depend_on_chunks_or_company(executor: OpenVINOExecutor) -> None:
    whole = batch_of((PROMPT, 0, TABLE))
    executor.execute(replace(whole, hidden_rows=np.arange(len(PROMPT))))
    expected = executor.hidden_states.copy()
    rows = []
    for start, end in ((0, 2), (2, 40), (40, 70)):
        batch = batch_of((PROMPT[start:end], start, TABLE), ([7, 8, 9], 0, (5,)))
        executor.execute(replace(batch, hidden_rows=np.arange(end - start)))
        rows.append(executor.hidden_states.copy())
    assert np.array_equal(np.concatenate(rows), expected)


def test_a_row_outside_the_step_is_refused(executor: OpenVINOExecutor) -> None:
    batch = batch_of((PROMPT, 0, TABLE))
    with pytest.raises(InvalidPlanError, match="a row outside the step's 70 tokens"):
        executor.execute(replace(batch, hidden_rows=np.array([70])))
