"""Each precision computes what its file says, as near as stated, and keeps the promise of the same bytes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.artifacts.layout import EMBEDDING, LM_HEAD
from lockstep.artifacts.model import Artifact, Encoding
from lockstep.errors import UsageError
from lockstep.executors.openvino.executor import load_executor
from lockstep.executors.openvino.precision import Precision, PrecisionChoice, precision_of, precision_summary
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.probe import quick_probe
from tests.executors.openvino.support import (
    SMALL_LLAMA,
    TINY_LLAMA,
    TINY_QWEN3,
    Floats,
    random_artifact,
    reference_logits,
    run,
)
from tools.random_models import ENCODINGS, FLOATS, Shape

EXACT = ExecutorOptions(kv_cache_precision="f32", dynamic_quantization_group_size=0)
SERVED = ExecutorOptions()
IDS = np.random.default_rng(7).integers(0, 512, 70).tolist()
WEIGHT = "model.layers.0.mlp.up_proj.weight"

# Relative error of a row of logits against a float64 decoder on the exact weights, at most. Seen: 2e-6 where every
# weight is exact, 9e-4 for Q4_K (a product of scales is rounded to float16), 2.3e-2 where weights are rounded again.
BOUNDS = {
    "F32": 1e-5, "F16": 1e-5, "BF16": 1e-5, "Q8_0": 1e-5, "Q4_0": 1e-5, "Q4_1": 1e-5, "Q5_0": 1e-5,
    "Q4_K": 3e-3,
    "Q5_1": 6e-2, "Q5_K": 6e-2, "Q6_K": 6e-2, "Q4_K_M": 6e-2,
}  # fmt: skip
SERVED_BOUND = 8e-2
"""With activations rounded to int8 in groups of 32; seen up to 3.8e-2, and of llama.cpp up to 4.4e-2."""


def shape_for(encoding: str) -> Shape:
    return SMALL_LLAMA if "_K" in encoding else TINY_LLAMA


def error(artifact: Artifact, options: ExecutorOptions, expected: Floats) -> float:
    executor = load_executor(artifact, options)
    executor.allocate(4, 0)
    logits = run(executor, (IDS, 0, (1, 2, 3)), all_rows=True)
    executor.close()
    return float((np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())


@pytest.mark.parametrize("encoding", BOUNDS)
def test_logits_are_those_of_the_exact_weights(encoding: str) -> None:
    artifact = random_artifact(shape_for(encoding), encoding)
    expected = reference_logits(artifact, IDS)
    assert error(artifact, EXACT, expected) <= BOUNDS[encoding]
    assert error(artifact, SERVED, expected) <= SERVED_BOUND


@pytest.mark.parametrize(("quantize", "bound"), [("int8", 9e-2), ("int4", 0.5)])
@pytest.mark.parametrize("shape", [TINY_LLAMA, TINY_QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("encoding", FLOATS)
def test_quantising_at_load_costs_no_more_than_stated(encoding: str, shape: Shape, quantize: str, bound: float) -> None:
    """Gaussian weights without any structure are the worst case: seen 6e-2 and 0.38."""
    artifact = random_artifact(shape, encoding)
    assert error(artifact, replace(SERVED, quantize=quantize), reference_logits(artifact, IDS)) <= bound


@pytest.mark.parametrize("encoding", ["Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M"])
def test_every_block_encoding_is_batch_invariant(encoding: str) -> None:
    check_invariance(random_artifact(shape_for(encoding), encoding), SERVED)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_so_is_a_model_that_was_quantised_at_load(quantize: str) -> None:
    check_invariance(random_artifact(TINY_QWEN3, "BF16"), replace(SERVED, quantize=quantize))


def check_invariance(artifact: Artifact, options: ExecutorOptions) -> None:
    executor = load_executor(artifact, options)
    executor.allocate(40, 4)
    report = quick_probe(executor, 40)
    executor.close()
    assert report.deterministic, [case for case in report.cases if not case.passed]


def test_what_the_plugin_has_no_operator_for_is_rounded_to_int8_groups() -> None:
    rounded = PrecisionChoice(Precision.INT8_GROUPS, is_requantised=True)
    for encoding in (Encoding.Q5_1, Encoding.Q5_K, Encoding.Q6_K):
        assert precision_of(WEIGHT, encoding, 256, None) == rounded
    for encoding in (Encoding.Q4_1, Encoding.Q4_K):
        assert precision_of(WEIGHT, encoding, 256, None) == PrecisionChoice(Precision.INT4_OFFSETS)
        assert precision_of(EMBEDDING, encoding, 256, None) == precision_of(LM_HEAD, encoding, 256, None) == rounded


def test_quantising_touches_float_weights_only_and_spares_the_tables() -> None:
    rounded = PrecisionChoice(Precision.INT8_CHANNELS, is_requantised=True)
    for encoding in (Encoding.F32, Encoding.F16, Encoding.BF16):
        assert precision_of(WEIGHT, encoding, 64, "int8") == rounded
        assert precision_of(WEIGHT, encoding, 64, "int4") == PrecisionChoice(Precision.INT4_GROUPS, is_requantised=True)
        assert precision_of(WEIGHT, encoding, 72, "int4") == precision_of(LM_HEAD, encoding, 64, "int4") == rounded
        assert not precision_of(WEIGHT, encoding, 64, None).is_requantised
    for name in ENCODINGS[len(FLOATS) :]:
        assert precision_of(WEIGHT, Encoding(name), 256, "int4") == precision_of(WEIGHT, Encoding(name), 256, None)


def test_nothing_to_quantise_is_said() -> None:
    with pytest.raises(UsageError, match="has no float weights to quantise; leave it out"):
        load_executor(random_artifact(encoding="Q8_0"), ExecutorOptions(quantize="int8"))


def test_loading_logs_what_becomes_of_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    artifact = random_artifact(SMALL_LLAMA, "Q4_K_M")
    with caplog.at_level(logging.INFO, logger="lockstep"):
        load_executor(artifact).close()
    assert [record.getMessage() for record in caplog.records] == [
        "random: 12 matrices Q4_K -> int4 in groups of 32 with offsets",
        "random: 1 matrices Q4_K -> int8 in groups of 32 (requantised)",
        "random: 3 matrices Q6_K -> int8 in groups of 32 (requantised)",
    ]
    assert precision_summary(artifact.weights, None)["Q6_K -> int8 in groups of 32 (requantised)"] == 3


def test_a_quantised_graph_has_a_cache_entry_of_its_own(tmp_path: Path) -> None:
    artifact = random_artifact(TINY_LLAMA, "BF16")
    for quantize in (None, "int8", "int4", "int8"):
        load_executor(artifact, ExecutorOptions(cache_dir=tmp_path, quantize=quantize)).close()
    sizes = sorted((entry / "model.bin").stat().st_size for entry in (tmp_path / "ir").iterdir())
    assert len(sizes) == 3
    assert sizes[0] < sizes[1] < sizes[2]
