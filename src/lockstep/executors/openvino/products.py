"""Products of compressed weights, kept where a CPU's kernel sums a row in the same order whatever rows are beside it.

The kernel for AVX2 without AVX-512 (brgemm in oneDNN) sums up to 512 columns in one go. With more columns it depends
on the number of rows: in one go up to 80 of them (up to 64, 32 or 16 where the output features are no multiple of 32),
in pieces of up to 512 above. So a pass there has at most 80 tokens (inputs.py), a product with uneven features is
cut into a sum of products of at most 512 columns, and one with very many columns as well. That is no matter of bits:
in one go its unpacked weights fall out of the cache. Products of float weights are another kernel's and need no help.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lockstep.executors.openvino.runtime import Model, Node, op, ov

MAX_PASS_TOKENS = 80
"""The most rows for which the kernel sums any number of columns in one go."""
INDIFFERENT_COLUMNS = 512
"""Columns that the kernel sums in one go, however many rows there are: 64 blocks of 8."""
MAX_COLUMNS = 2048
"""Wider products are cut for speed: 5632 columns of int8 take 0.37 to 0.48 of the time at 8 to 80 rows."""
_EVEN_FEATURES = 32
"""With a multiple of this many output features, up to 80 rows are one class."""
_UNIT_COLUMNS = 32
"""Parts of weights without groups begin at multiples of this: whole vectors, and whole bytes of packed values."""
_BINARY: dict[str, Callable[[Node, Node], Node]] = {"Multiply": op.multiply, "Subtract": op.subtract}


def parts(num_columns: int, group_size: int, max_columns: int) -> tuple[int, ...]:
    """Widths of as few and as equal parts as possible, each of whole groups (but for the rest of an uneven weight).

    Empty where one group alone is wider than a part may be.
    """
    unit = group_size if group_size > 1 else _UNIT_COLUMNS
    widest = max_columns // unit * unit
    if widest == 0:
        return ()
    num_parts = -(-num_columns // widest)
    width = -(-num_columns // (num_parts * unit)) * unit
    whole, rest = divmod(num_columns, width)
    return (width,) * whole + ((rest,) if rest else ())


def needs_short_passes(model: Model) -> bool:
    """True if some product's bits would depend on whether a pass has more than ``MAX_PASS_TOKENS``."""
    return any(_compressed_columns(node) > INDIFFERENT_COLUMNS for node in model.get_ops())


def split_products(model: Model) -> int:
    """Cut every product of integer weights that is wider than its kernel can bear, in place.

    Weights are known by how they are unpacked: a constant of integers behind Convert, Subtract, Multiply and Reshape,
    as graph.py and the exporters write it.

    Returns:
        How many were cut.
    """
    products = [node for node in model.get_ops() if node.get_type_name() == "MatMul"]
    splits: dict[tuple[str, int, tuple[int, ...]], Node] = {}
    num_cut = 0
    while products:
        product = products.pop()  # nothing here keeps a weight alive that the graph no longer needs
        total = _split_product(product, splits)
        if total is not None:
            total.set_friendly_name(product.get_friendly_name())
            ov.utils.replace_node(product, total)
            num_cut += 1
    model.validate_nodes_and_infer_types()
    return num_cut


def split_below(node: Node) -> Node | None:
    """The node that cuts the activations of a product, given the last sum of its parts; None for any other node."""
    found = None
    while node.get_type_name() == "Add":
        found = _split_of_part(node.input_value(1).get_node())
        node = node.input_value(0).get_node()
        if found is None:
            return None
    first = _split_of_part(node)
    return found if found is not None and first is not None and first.get_name() == found.get_name() else None


def _split_of_part(node: Node) -> Node | None:
    if node.get_type_name() != "MatMul":
        return None
    source = node.input_value(0).get_node()
    return source if source.get_type_name() == "VariadicSplit" else None


def _compressed_columns(node: Node) -> int:
    """Columns of the weights of a product that is computed with compressed ones; 0 for any other node."""
    if node.get_type_name() != "MatMul":
        return 0
    attributes, shape = node.get_attributes(), node.input_value(1).get_partial_shape()
    if shape.is_dynamic or len(shape) != 2 or not attributes["transpose_b"] or attributes["transpose_a"]:
        return 0
    return 0 if _group_size(node.input_value(1).get_node()) is None else int(shape[1].get_length())


def _split_product(product: Node, splits: dict[tuple[str, int, tuple[int, ...]], Node]) -> Node | None:
    """The sum that replaces a product, or None where it stays as it is."""
    num_columns = _compressed_columns(product)
    weight = product.input_value(1).get_node()
    num_features = product.input_value(1).get_partial_shape()[0].get_length() if num_columns else 0
    max_columns = INDIFFERENT_COLUMNS if num_features % _EVEN_FEATURES else MAX_COLUMNS
    group_size = _group_size(weight)
    if num_columns <= max_columns or group_size is None:
        return None
    widths = parts(num_columns, group_size, max_columns)
    if not widths:
        return None
    source = product.input_value(0)
    key = (source.get_node().get_name(), source.get_index(), widths)
    if key not in splits:
        splits[key] = op.variadic_split(source, op.constant(np.int64(-1)), op.constant(np.array(widths, np.int64)))
    total, begin = None, 0
    for index, width in enumerate(widths):
        part = op.matmul(splits[key].output(index), _columns(weight, begin, width, num_columns), False, True)
        total = part if total is None else op.add(total, part)
        begin += width
    return total


def _group_size(weight: Node) -> int | None:
    """Columns per group (1: no groups) of weights that are unpacked in the way we know; None for anything else."""
    node, group_size = weight, 1
    while node.get_type_name() != "Constant":
        kind = node.get_type_name()
        if kind == "Reshape":
            grouped = node.input_value(0).get_partial_shape()
            if grouped.is_dynamic or len(grouped) != 3 or group_size != 1:
                return None
            group_size = grouped[2].get_length()
        elif kind in _BINARY:
            if not _is_parameter(node.input_value(1).get_node()):
                return None
        elif kind != "Convert":
            return None
        node = node.input_value(0).get_node()
    return None if node.get_element_type().is_real() else group_size


def _is_parameter(node: Node) -> bool:
    """True if this is a constant scale or zero point."""
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")


def _columns(node: Node, begin: int, width: int, num_columns: int) -> Node:
    """A copy of the sub-graph of a weight that yields only some of its columns."""
    kind = node.get_type_name()
    if kind == "Constant":
        return _constant_columns(node, begin, width, num_columns)
    first = _columns(node.input_value(0).get_node(), begin, width, num_columns)
    if kind == "Convert":
        return op.convert(first, node.get_output_element_type(0))
    if kind == "Reshape":
        rows = node.get_output_partial_shape(0)[0].get_length()
        return op.reshape(first, op.constant(np.array([rows, width], np.int64)), False)
    return _BINARY[kind](first, _columns(node.input_value(1).get_node(), begin, width, num_columns))


def _constant_columns(node: Node, begin: int, width: int, num_columns: int) -> Node:
    """The second axis counts columns or groups of them; a constant without one, or with one entry, is shared by all."""
    shape, kind = tuple(node.shape), node.get_element_type()
    if len(shape) < 2 or shape[1] == 1:
        return node
    length = shape[1]
    chosen = slice(begin * length // num_columns, (begin + width) * length // num_columns)
    is_packed = kind.bitwidth == 4
    values = _unpacked(node.data, shape) if is_packed else node.data
    kept = values[:, chosen]
    tensor = ov.Tensor(kind, ov.Shape(kept.shape))
    flat = _packed(kept) if is_packed else np.ascontiguousarray(kept)
    np.copyto(tensor.data.view(np.uint8).reshape(-1), flat.view(np.uint8).reshape(-1))
    return op.constant(tensor, shared_memory=True)


def _unpacked(packed: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Values of four bits, one per byte; the low half of a byte comes first."""
    flat = packed.reshape(-1)
    values = np.stack([flat & 15, flat >> 4], axis=-1).reshape(-1)
    return values[: int(np.prod(shape))].reshape(shape)


def _packed(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    flat = values.reshape(-1)
    if len(flat) % 2:
        flat = np.append(flat, np.uint8(0))
    packed: npt.NDArray[np.uint8] = flat[0::2] | (flat[1::2] << np.uint8(4))
    return packed
