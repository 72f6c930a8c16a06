"""The only contact with OpenVINO's paged attention transformation, an internal interface of that library.

``to_paged`` turns the stateful graph of graph.py into one whose state is a pool of KV blocks handed in as inputs, and
puts a row gather before the LM head, so that logits are computed only where somebody samples. When a new OpenVINO
release moves this interface, this is the file to mend.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.errors import ExecutorError, UnsupportedArtifactError
from lockstep.executors.openvino.products import split_below
from lockstep.executors.openvino.runtime import Model, Node, op, ov

TOKEN_IDS = "input_ids"
POSITIONS = "position_ids"
PAST_LENS = "past_lens"
SUBSEQUENCE_BEGINS = "subsequence_begins"
BLOCK_INDICES = "block_indices"
BLOCK_INDICES_BEGINS = "block_indices_begins"
MAX_CONTEXT_LEN = "max_context_len"
ROWS = "sampled_rows"
HIDDEN_ROWS = "hidden_rows"
LOGITS = "logits"
HIDDEN = "hidden_states"
_STEP_INPUTS = (
    TOKEN_IDS, POSITIONS, PAST_LENS, SUBSEQUENCE_BEGINS, BLOCK_INDICES, BLOCK_INDICES_BEGINS, MAX_CONTEXT_LEN, ROWS,
    HIDDEN_ROWS
)  # fmt: skip
_ROW_WISE = frozenset({"Add", "Clamp", "Convert", "Divide", "Multiply", "Subtract", "Tanh"})

_ATTENTION = "PagedAttentionExtension"
_KEY_CACHE_INPUT = 3
_WINDOW_INPUT = 10


def cache_inputs(num_layers: int) -> tuple[str, ...]:
    """Names of the KV inputs: keys and values of layer 0, then of layer 1, and so on."""
    return tuple(f"{kind}_cache.{layer}" for layer in range(num_layers) for kind in ("key", "value"))


def to_paged(model: Model, windows: Sequence[int] = ()) -> None:
    """Replace the state of ``model`` (a stateful ``ov.Model``) by block inputs, in place, and add the row gather.

    Args:
        windows: per layer, how many tokens a query sees, itself included; 0: all. Empty: all, in every layer.

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
    """Write each layer's window where the transformation has put a zero.

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


def _gather_rows(model: Model) -> None:
    """Logits and hidden states only for the rows named in ``sampled_rows`` and ``hidden_rows`` ([R] i64 each).

    Hidden states are what the LM head is given: [R, 1, hidden_size].
    """
    head = _head(model)
    states = head.input_value(0)
    rows, hidden_rows = _rows_parameter(ROWS), _rows_parameter(HIDDEN_ROWS)
    gathered = op.gather(states, rows, op.constant(np.int64(0)))
    head.input(0).replace_source_output(gathered.output(0))
    hidden = op.result(op.gather(states, hidden_rows, op.constant(np.int64(0))), name=HIDDEN)
    hidden.output(0).tensor.set_names({HIDDEN})
    model.add_parameters([rows, hidden_rows])
    model.add_results([hidden])
    model.validate_nodes_and_infer_types()


def _rows_parameter(name: str) -> Node:
    parameter = op.parameter(ov.PartialShape([-1]), np.int64, name=name)
    parameter.output(0).tensor.set_names({name})
    return parameter


def _head(model: Model) -> Node:
    """Head of the model: the last MatMul before the logits, or the node that cuts the hidden states for its parts.

    What lies between works on each row for itself (scales, caps, precisions).
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
    num_layers = sum(port.get_any_name().startswith("key_cache.") for port in model.inputs)
    found = {port.get_any_name() for port in model.inputs}
    unknown = sorted(found - {*_STEP_INPUTS, *cache_inputs(num_layers)})
    if unknown:
        raise UnsupportedArtifactError(f"the paged graph has inputs that nobody feeds: {', '.join(unknown)}")
