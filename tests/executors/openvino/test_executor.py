"""The executor computes the model's logits, from every encoding, and refuses what would leave its memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.executors.openvino.support import TINY_LLAMA, TINY_QWEN3, random_artifact, reference_logits, run
from tools.random_models import Shape

from lockstep.executors.openvino.executor import OpenVINOExecutor, load_executor
from lockstep.executors.openvino.options import OpenVINOOptions

EXACT = OpenVINOOptions(kv_cache_precision="f32", dynamic_quantization_group_size=0)
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
