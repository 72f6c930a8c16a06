"""The patterns of the graph are still the ones that OpenVINO fuses: when one is not, only speed would tell."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.artifacts.model import Artifact
from lockstep.executors.openvino.executor import load_executor
from lockstep.executors.openvino.loading import compile_artifact
from lockstep.executors.options import ExecutorOptions
from tests.executors.openvino.support import (
    OPERATORS,
    TINY,
    config_of,
    needs_operator,
    random_artifact,
    reference_logits,
    run,
    with_tensor,
)
from tools.random_models import tensor_shapes

SHAPES = {**TINY, "partial rope": replace(TINY["tiny-phi3"], rotary_dim=24)}


def nodes_of(artifact: Artifact, options: ExecutorOptions) -> list[tuple[str, Any]]:
    """What the compiled graph executes, each with its kind."""
    compiled = compile_artifact(artifact, options, lambda stage, fraction: None)
    nodes = compiled.model.get_runtime_model().get_ops()
    return [(str(node.get_rt_info()["layerType"].astype(str)), node) for node in nodes]


@pytest.mark.parametrize(
    ("name", "encoding"), [*((name, "Q8_0") for name in SHAPES), ("tiny-llama", "Q4_0"), ("tiny-qwen3", "Q4_0")]
)
@pytest.mark.parametrize("attention", OPERATORS)
def test_norms_rotations_attention_and_compressed_weights_are_fused(name: str, encoding: str, attention: str) -> None:
    shape, options = SHAPES[name], ExecutorOptions(attention=attention)
    nodes = nodes_of(random_artifact(shape, encoding), options)
    kinds = Counter(kind for kind, _ in nodes)
    products = [node for kind, node in nodes if kind == "FullyConnected"]
    weight_types = {node.input(1).get_element_type().get_type_name() for node in products}
    config = config_of(shape)
    layers, rotated = shape.num_layers, shape.num_layers - len(shape.unrotated_layers)
    norms = sum("norm" in tensor for tensor in tensor_shapes(shape))
    norms_of_heads = 2 * layers if config.qk_norm and not config.qk_norm_whole else 0
    is_theirs = attention == "openvino"
    assert kinds["PagedAttention" if is_theirs else "Reference"] == layers
    assert kinds["RoPE"] == (2 * rotated if is_theirs else 0), "our operator rotates by itself"
    assert kinds["RMS"] == (norms if is_theirs else norms - norms_of_heads), "and normalises each head"
    assert kinds["FullyConnected"] == (7 if config.qk_norm_whole else 5) * layers + 1, "one for queries, keys, values"
    assert is_theirs or (kinds["Split"], kinds["Reshape"]) == (0, 2), "two of positions"
    assert kinds["Gather"] == 3, (
        "the embedding, read from compressed weights, the rows before the head, and hidden states"
    )
    assert kinds["MatMul"] == kinds["Softmax"] == kinds["Transpose"] == 0
    assert weight_types == ({"i8"} if encoding == "Q8_0" else {"i8", "u4"})


@needs_operator
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_values_stored_otherwise_have_a_product_of_their_own_and_our_operator_all_the_same(name: str) -> None:
    """As in files of mixed precision: queries, keys and values are put together for it, before they are rotated."""
    plain, others = (random_artifact(SHAPES[name], encoding) for encoding in ("F32", "Q8_0"))
    mixed = plain
    for layer in range(SHAPES[name].num_layers):
        mixed = with_tensor(mixed, others.weights[f"model.layers.{layer}.self_attn.v_proj.weight"])
    options = ExecutorOptions(attention="lockstep", kv_cache_precision="f32", dynamic_quantization_group_size=0)
    kinds = Counter(kind for kind, _ in nodes_of(mixed, options))
    assert kinds["Reference"] == SHAPES[name].num_layers
    assert kinds["RoPE"] == kinds["Split"] == 0
    executor = load_executor(mixed, options)
    executor.allocate(4, 0)
    tokens = list(range(1, 40))
    found = run(executor, (tokens, 0, (2, 1)), all_rows=True)
    assert np.abs(found - reference_logits(mixed, tokens)).max() < 1e-4
