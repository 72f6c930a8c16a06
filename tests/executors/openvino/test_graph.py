"""The patterns of the graph are still the ones that OpenVINO fuses: when one is not, only speed would tell."""

from __future__ import annotations

from collections import Counter

import pytest

from lockstep.executors.openvino.loading import compile_artifact
from lockstep.executors.openvino.options import OpenVINOOptions
from tests.executors.openvino.support import TINY_LLAMA, TINY_QWEN3, random_artifact
from tools.random_models import Shape


@pytest.mark.parametrize("shape", [TINY_LLAMA, TINY_QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0"])
def test_norms_rotations_attention_and_compressed_weights_are_fused(shape: Shape, encoding: str) -> None:
    compiled = compile_artifact(random_artifact(shape, encoding), OpenVINOOptions(), lambda stage, fraction: None)
    kinds: Counter[str] = Counter()
    weight_types = set()
    for node in compiled.get_runtime_model().get_ops():
        kind = str(node.get_rt_info()["layerType"].astype(str))
        kinds[kind] += 1
        if kind == "FullyConnected":
            weight_types.add(node.input(1).get_element_type().get_type_name())
    layers, head_norms = shape.num_layers, 2 * shape.num_layers if shape.architecture == "qwen3" else 0
    assert kinds["PagedAttention"] == layers
    assert kinds["RoPE"] == 2 * layers
    assert kinds["RMS"] == 2 * layers + 1 + head_norms
    assert kinds["FullyConnected"] == 7 * layers + 1
    assert kinds["Gather"] == 3, (
        "the embedding, read from compressed weights, the rows before the head, and hidden states"
    )
    assert kinds["MatMul"] == kinds["Softmax"] == kinds["Transpose"] == 0
    assert weight_types == ({"i8"} if encoding == "Q8_0" else {"i8", "u4"})
