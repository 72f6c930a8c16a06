"""The only contact with OpenVINO's paged attention transformation, an internal interface of that library.

``to_paged`` turns the stateful graph of graph.py into one whose state is a pool of KV blocks handed in as inputs, and
puts a row gather before the LM head, so that logits are computed only where somebody samples. When a new OpenVINO
release moves this interface, this is the file to mend.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.errors import ExecutorError
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
    """
    from openvino._offline_transformations import paged_attention_transformation  # internal: kept here

    paged_attention_transformation(model)
    if any(windows):
        _set_windows(model, windows)
    _gather_rows(model)


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
    head = model.get_results()[0].input_value(0).get_node()
    while head.get_type_name() != "MatMul":
        head = head.input_value(0).get_node()
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
