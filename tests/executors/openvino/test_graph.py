"""The patterns of the graph are still the ones that OpenVINO fuses: when one is not, only speed would tell."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from lockstep.executors.openvino.loading import compile_artifact
from lockstep.executors.openvino.options import OpenVINOOptions
from tests.executors.openvino.support import OPERATORS, TINY, random_artifact
from tools.random_models import tensor_shapes

SHAPES = {**TINY, "partial rope": replace(TINY["tiny-phi3"], rotary_dim=24)}


@pytest.mark.parametrize(
    ("name", "encoding"), [*((name, "Q8_0") for name in SHAPES), ("tiny-llama", "Q4_0"), ("tiny-qwen3", "Q4_0")]
)
@pytest.mark.parametrize("attention", OPERATORS)
def test_norms_rotations_attention_and_compressed_weights_are_fused(name: str, encoding: str, attention: str) -> None:
    shape, options = SHAPES[name], OpenVINOOptions(attention=attention)
    compiled = compile_artifact(random_artifact(shape, encoding), options, lambda stage, fraction: None)
    kinds: Counter[str] = Counter()
    weight_types = set()
    for node in compiled.model.get_runtime_model().get_ops():
        kind = str(node.get_rt_info()["layerType"].astype(str))
        kinds[kind] += 1
        if kind == "FullyConnected":
            weight_types.add(node.input(1).get_element_type().get_type_name())
    layers, rotated = shape.num_layers, shape.num_layers - len(shape.unrotated_layers)
    norms = sum("norm" in tensor for tensor in tensor_shapes(shape))
    assert kinds["PagedAttention" if attention == "openvino" else "Reference"] == layers
    assert kinds["RoPE"] == 2 * rotated
    assert kinds["RMS"] == norms
    assert kinds["FullyConnected"] == 7 * layers + 1
    assert kinds["Gather"] == 3, (
        "the embedding, read from compressed weights, the rows before the head, and hidden states"
    )
    assert kinds["MatMul"] == kinds["Softmax"] == kinds["Transpose"] == 0
    assert weight_types == ({"i8"} if encoding == "Q8_0" else {"i8", "u4"})
