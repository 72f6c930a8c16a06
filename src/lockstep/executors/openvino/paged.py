"""Paged form of an OpenVINO model: KV blocks as inputs, by a transformation that is internal to OpenVINO.

``to_paged`` turns the stateful graph of graph.py into one whose state is a pool of KV blocks handed in as inputs, and
puts a row gather before the LM head, so that logits are computed only where somebody samples. No other file may
import the transformation (`tests/test_tidy.py`); when an OpenVINO release changes it, this is the one to mend.

The constants are names of the paged graph's inputs and outputs; `ForwardInputs` of inputs.py has their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from lockstep.artifacts.model import ModelConfig
from lockstep.errors import ExecutorError, UnsupportedArtifactError
from lockstep.executors.openvino.graph import attention_name, rotary_name
from lockstep.executors.openvino.ops import LIBRARY, OPERATOR, STORAGES, OwnAttention
from lockstep.executors.openvino.products import split_below
from lockstep.executors.openvino.runtime import Model, Node, op, ov, the_core

TOKEN_IDS = "input_ids"
POSITIONS = "position_ids"
PAST_LENS = "past_lens"
SUBSEQUENCE_BEGINS = "subsequence_begins"
BLOCK_INDICES = "block_indices"
BLOCK_INDICES_BEGINS = "block_indices_begins"
MAX_CONTEXT_LEN = "max_context_len"
PLAN = "plan"
SAMPLED_ROWS = "sampled_rows"
HIDDEN_ROWS = "hidden_rows"
LOGITS = "logits"
HIDDEN = "hidden_states"
_STEP_INPUTS = (
    TOKEN_IDS, POSITIONS, PAST_LENS, SUBSEQUENCE_BEGINS, BLOCK_INDICES, BLOCK_INDICES_BEGINS, MAX_CONTEXT_LEN,
    SAMPLED_ROWS, HIDDEN_ROWS
)  # fmt: skip
_CACHE_NAMES = ("key_cache.", "value_cache.", "kv_cache.")
_ROW_WISE = frozenset({"Add", "Clamp", "Convert", "Divide", "Multiply", "Subtract", "Tanh"})

_ATTENTION = "PagedAttentionExtension"
_KEY_CACHE_INPUT = 3
_PROJECTED_PORTS = (0, 1, 2)
"""Query, key, value."""
_SCALE_INPUT = 9
_WINDOW_INPUT = 10
_MAX_CONTEXT_INPUT = 12
"""Ports of the attention operator, as OpenVINO numbers them."""


def cache_inputs(num_layers: int, own: OwnAttention | None = None) -> tuple[str, ...]:
    """Names of the KV cache inputs, by layers: keys and values, or one for both where the operator is ours."""
    kinds = ("key", "value") if own is None else ("kv",)
    return tuple(f"{kind}_cache.{layer}" for layer in range(num_layers) for kind in kinds)


def to_paged(model: Model, windows: Sequence[int] = ()) -> None:
    """Replace the KV state of a stateful ``ov.Model`` by KV block inputs, in place, and add the row gather.

    Args:
        windows: sliding window per layer: how many tokens a query sees, itself included; 0: all. Empty: all, in
            every layer.

    Raises:
        ExecutorError: the attention operator does not take its window where we know it to.
        UnsupportedArtifactError: an exported graph that is not built like a decoder with one head.
    """
    from openvino._offline_transformations import paged_attention_transformation  # internal: kept here

    paged_attention_transformation(model)
    if any(windows):
        _set_windows(model, windows)
    _gather_rows(model)
    _check_inputs(model)


def _set_windows(model: Model, windows: Sequence[int]) -> None:
    """Write each layer's sliding window where the transformation has put a zero.

    It recognises windows in the masks of a few exporters, by patterns that differ from release to release; our mask
    says nothing of windows, so that there is one place for them.
    """
    remaining = dict(zip(cache_inputs(len(windows))[::2], windows, strict=True))
    for node in model.get_ops():
        if node.get_type_name() != _ATTENTION:
            continue
        window = remaining.pop(node.input_value(_KEY_CACHE_INPUT).get_node().get_friendly_name(), None)
        port = node.input(_WINDOW_INPUT)
        before = port.get_source_output().get_node()
        if window is None or before.get_type_name() != "Constant" or before.data.shape != () or before.data != 0:
            raise ExecutorError(f"OpenVINO's {_ATTENTION} has changed: its input {_WINDOW_INPUT} is not a window")
        port.replace_source_output(op.constant(np.array(window, np.int32)).output(0))
    if remaining:
        raise ExecutorError(f"OpenVINO's transformation left no {_ATTENTION} for {', '.join(remaining)}")


def use_own_attention(model: Model, own: OwnAttention, config: ModelConfig) -> None:
    """Put our operator in the place of each of OpenVINO's in a paged model.

    It takes what is before normalisation and rotation where graph.py's names say what that is, else queries, keys and
    values as OpenVINO's has them; one plan for all layers; and one cache a layer in the place of two.

    Raises:
        UnsupportedArtifactError: the graph asks for more than ours can; nothing was changed.
    """
    theirs = [node for node in model.get_ordered_ops() if node.get_type_name() == _ATTENTION]
    wanted = [_scale_and_window(node) for node in theirs]
    sources = _Sources(model, config)
    common = {"heads": own.heads, "kv_heads": own.kv_heads, "head_dim": own.head_dim, "kernel": own.kernel}
    common |= {"storage": STORAGES.index(own.storage), "epsilon": config.rms_norm_eps}
    plan, caches = _parameter(PLAN, [-1], np.int32), []
    for node, numbers in zip(theirs, wanted, strict=True):
        layer = int(node.input_value(_KEY_CACHE_INPUT).get_node().get_friendly_name().removeprefix("key_cache."))
        caches.append(_parameter(f"kv_cache.{layer}", [-1, own.block_bytes], np.uint8))
        projected, *others = sources.of(layer) or (op.concat([node.input_value(port) for port in _PROJECTED_PORTS], 1),)
        rotary_dim = others[0].get_output_partial_shape(0)[-1].get_length() if others else 0
        inputs = [each.output(0) for each in (projected, plan, caches[-1], *others)]
        ours = _node_factory().create(OPERATOR, inputs, {**common, **numbers, "rotary_dim": rotary_dim})
        for target in list(_in_rows(node).output(0).get_target_inputs()):
            target.replace_source_output(ours.output(0))
    for parameter in list(model.get_parameters()):
        readers = parameter.output(0).get_target_inputs()
        if all(reader.get_node().get_type_name() == _ATTENTION for reader in readers):
            model.remove_parameter(parameter)
    model.add_parameters([plan, *caches])
    model.validate_nodes_and_infer_types()


class _Sources:
    """Inputs of our operator that graph.py has named."""

    def __init__(self, model: Model, config: ModelConfig) -> None:
        self._named = {node.get_friendly_name(): node for node in model.get_ops()}
        self._config = config
        self._tables: dict[str, Node] = {}

    def of(self, layer: int) -> list[Node] | None:
        """Queries, keys and values; how they are rotated; weights of their norms. None: the graph is not ours."""
        named, prefix = self._named, attention_name(layer)
        projected = named.get(f"{prefix}qkv")
        if projected is None:
            parts = [named.get(prefix + each) for each in "qkv"]
            if None in parts:
                return None
            projected = op.concat(parts, 2)
        sources = [projected, self._table(rotary_name(self._config, layer))]
        if self._config.qk_norm and not self._config.qk_norm_whole:
            weights = [named[f"{prefix}{each}_norm"].data.reshape(-1) for each in "qk"]
            sources.append(op.constant(np.concatenate(weights)))
        return sources

    def _table(self, name: str | None) -> Node:
        """Cosines and sines of each pair, one after the other: [T, 1, rotary_dim]."""
        if name is None:
            return op.constant(np.zeros(0, np.float32))
        if name not in self._tables:
            self._tables[name] = op.concat([self._named[f"{name}.cos"], self._named[f"{name}.sin"]], 2)
        return self._tables[name]


def _in_rows(node: Node) -> Node:
    """The last of the nodes that only give an attention another shape: [T, 1, heads * head_dim]."""
    while True:
        targets = list(node.output(0).get_target_inputs())
        if len(targets) != 1 or targets[0].get_node().get_type_name() not in ("Reshape", "Transpose"):
            return node
        node = targets[0].get_node()


@cache
def _node_factory() -> Any:
    """OpenVINO's maker of nodes, which knows our operator; its core does too from now on."""
    from openvino.utils.node_factory import NodeFactory

    factory = NodeFactory()
    factory.add_extension(str(LIBRARY))
    the_core().add_extension(str(LIBRARY))
    return factory


def _scale_and_window(node: Node) -> dict[str, float]:
    """Scale and window, as OpenVINO's operator was given them.

    Raises:
        UnsupportedArtifactError: the graph asks for more than scale and window (biases, sinks, rotated keys).
    """
    sources = [node.input_value(port).get_node() for port in range(node.get_input_size())]
    for port in (_SCALE_INPUT, _WINDOW_INPUT):
        if sources[port].get_type_name() != "Constant" or sources[port].data.size != 1:
            raise UnsupportedArtifactError(f"input {port} of {_ATTENTION} is no number; attention=openvino takes it")
    for port, source in enumerate(sources[_SCALE_INPUT:], _SCALE_INPUT):
        is_known = port in (_SCALE_INPUT, _WINDOW_INPUT, _MAX_CONTEXT_INPUT)
        if not is_known and (source.get_type_name() != "Constant" or np.any(source.data)):
            raise UnsupportedArtifactError(f"input {port} of {_ATTENTION} is in use; attention=openvino takes it")
    return {"scale": float(sources[_SCALE_INPUT].data), "window": int(sources[_WINDOW_INPUT].data)}


def _gather_rows(model: Model) -> None:
    """Compute logits only for the rows in ``sampled_rows`` ([R] i64), and hidden states for ``hidden_rows`` ([H] i64).

    Hidden states are what the LM head is given: [H, 1, hidden_size].
    """
    head = _lm_head(model)
    states = head.input_value(0)
    rows, hidden_rows = _parameter(SAMPLED_ROWS, [-1], np.int64), _parameter(HIDDEN_ROWS, [-1], np.int64)
    gathered = op.gather(states, rows, op.constant(np.int64(0)))
    head.input(0).replace_source_output(gathered.output(0))
    hidden = op.result(op.gather(states, hidden_rows, op.constant(np.int64(0))), name=HIDDEN)
    hidden.output(0).tensor.set_names({HIDDEN})
    model.add_parameters([rows, hidden_rows])
    model.add_results([hidden])
    model.validate_nodes_and_infer_types()


def _parameter(name: str, shape: Sequence[int], dtype: type[np.generic]) -> Node:
    parameter = op.parameter(ov.PartialShape(list(shape)), dtype, name=name)
    parameter.output(0).tensor.set_names({name})
    return parameter


def _lm_head(model: Model) -> Node:
    """LM head: the last MatMul before the logits, or the split before it where products.py has cut it into parts.

    Between it and the logits only operators that treat each row by itself are allowed (scales, caps, precisions).
    """
    node = model.output(LOGITS).get_node().input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        split = split_below(node)
        if split is not None:
            return split
        computed = [value.get_node() for value in node.input_values() if not _is_constant(value.get_node())]
        if node.get_type_name() not in _ROW_WISE or len(computed) != 1:
            raise UnsupportedArtifactError(
                f"operator {node.get_type_name()} between head and logits; a MatMul with at most "
                f"{', '.join(sorted(_ROW_WISE))} after it is expected"
            )
        node = computed[0]
    return node


def _is_constant(node: Node) -> bool:
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


def _check_inputs(model: Model) -> None:
    found = {port.get_any_name() for port in model.inputs}
    unknown = sorted(name for name in found - {*_STEP_INPUTS} if not name.startswith(_CACHE_NAMES))
    if unknown:
        raise UnsupportedArtifactError(f"the paged graph has inputs that nobody feeds: {', '.join(unknown)}")
