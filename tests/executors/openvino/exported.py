"""Exported OpenVINO models as optimum-intel lays them out, made from our own stateful graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from lockstep.artifacts.source import open_artifact
from lockstep.executors.openvino.graph import build_decoder
from lockstep.executors.openvino.runtime import Model, Node, op, ov
from tools.random_models import write_huggingface


def export(directory: Path, change: Callable[[Model], Model] = lambda model: model, shape: str = "tiny-llama") -> Path:
    """A directory with openvino_model.xml and .bin (float16 weights), config.json and the tokenizer.

    Args:
        change: what becomes of the graph before it is saved.
    """
    write_huggingface(directory, shape, "F16")
    artifact = open_artifact(str(directory), cache_dir=directory.parent)
    model = change(build_decoder(artifact.config, artifact.weights))
    (directory / "model.safetensors").unlink()
    # The weights are float16 already; compressing the rest would round the rotary frequencies too.
    ov.save_model(model, str(directory / "openvino_model.xml"), compress_to_fp16=False)
    return directory


def with_ops_after_the_head(model: Model) -> Model:
    """Logits are scaled, capped and converted, as exports of some architectures do."""
    result = model.get_results()[0]

    def scaled(logits: Node) -> Node:
        capped = op.tanh(op.divide(op.multiply(op.constant(np.float32(0.5)), logits), op.constant(np.float32(30))))
        return op.convert(op.convert(op.multiply(capped, op.constant(np.float32(30))), np.float64), np.float32)

    last = scaled(result.input_value(0).get_node())
    result.input_value(0).tensor.set_names(set())
    result.input(0).replace_source_output(last.output(0))
    result.output(0).tensor.set_names({"logits"})
    model.validate_nodes_and_infer_types()
    return model
