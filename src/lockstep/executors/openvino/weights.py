"""Stored tensors as the constant sub-graphs that OpenVINO's CPU plugin keeps compressed.

Every check happens here, on our side: a constant whose buffer is shorter than its shape says crashes the process, and
one NaN scale would turn a whole model into NaN without a word.

Float weights, and block encodings that the plugin has no operators for, are rounded to int8 and int4 (quantise.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.tensors import GROUP_SIZE, dequantise, unpack
from lockstep.executors.openvino.precision import Precision
from lockstep.executors.openvino.runtime import ElementType, Node, op, ov
from lockstep.executors.quantise import (
    INT4_ZERO_POINT,
    Halves,
    check_tensor,
    int4_groups,
    int8_channels,
    int8_groups,
    refuse_non_finite,
)

Floats = npt.NDArray[np.float32]


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of checked tensors of one encoding as one tensor's, as they are stored."""
    if len(tensors) == 1:
        return tensors[0]
    first, num_rows = tensors[0], sum(tensor.shape[0] for tensor in tensors)
    names = ", ".join(tensor.name for tensor in tensors)
    rows = np.concatenate([tensor.data for tensor in tensors])
    return Tensor(names, first.encoding, (num_rows, *first.shape[1:]), rows)


def matrix(tensor: Tensor, shape: tuple[int, int], precision: Precision) -> Node:
    """Output of the sub-graph that yields the tensor as f32 [out, in]; it is fused into the MatMul or Gather using it.

    Args:
        precision: any that `precision_of` gives for this encoding, but INT4_OFFSETS, which `product` knows.

    Raises:
        CorruptArtifactError: wrong size, NaN or infinity; naming the tensor.
    """
    check_tensor(tensor, shape)
    match precision:
        case Precision.F32:
            return _floats(tensor)
        case Precision.INT8_CHANNELS:
            return op.convert(_int8(tensor, *int8_channels(tensor)), np.float32)
        case Precision.INT8_GROUPS:
            return _ungrouped(_int8(tensor, *_exact_int8(tensor)), shape)
        case Precision.INT4_GROUPS:
            return _ungrouped(_int4(tensor, *_exact_int4(tensor)), shape)
        case Precision.INT4_OFFSETS:
            raise AssertionError("offsets are part of a product, not of a matrix")


class GroupSums:
    """Sums of an activation over groups of 32, made once for the projections that share it."""

    def __init__(self) -> None:
        self._x: Node = None
        self._sums: Node = None

    def of(self, x: Node) -> Node:
        """[B, S, in] -> [B, S, in / 32]; the latest is remembered."""
        if self._x is not x:
            num_groups = x.get_output_partial_shape(0)[2].get_length() // GROUP_SIZE
            grouped = op.reshape(x, op.constant(np.array([0, 0, num_groups, GROUP_SIZE], np.int64)), True)
            self._x, self._sums = x, op.reduce_sum(grouped, op.constant(np.array([-1], np.int64)), False)
        return self._sums


def product(x: Node, tensor: Tensor, shape: tuple[int, int], precision: Precision, sums: GroupSums) -> Node:
    """x [B, S, in] times the transposed tensor: [B, S, out].

    A group of Q4_1 and Q4_K has a scale s and an offset o of its own: w = s q + o. Four-bit products are fast with an
    integer zero point only, so w = s (q - 8) + (o + 8 s): the second part is the same for a whole group, and its
    product is that of the group's sum of x, a thirty-second of the work. The weights stay exact, and the zero point in
    the middle keeps what the rounding of x in the first product costs small.

    Raises:
        CorruptArtifactError: see `matrix`.
    """
    if precision is not Precision.INT4_OFFSETS:
        return op.matmul(x, matrix(tensor, shape, precision), False, True)
    check_tensor(tensor, shape)
    groups = unpack(tensor)
    assert groups.offsets is not None, f"{tensor.encoding.value} has no offsets"
    scales = _halves(tensor, groups.scales)[..., None]
    rest = groups.offsets + np.float32(INT4_ZERO_POINT) * groups.scales
    refuse_non_finite(tensor, bool(np.isfinite(rest).all()))
    values = groups.values.view(np.uint8)
    centred = _ungrouped(_int4(tensor, values, scales), shape)
    rest_product = op.matmul(sums.of(x), _constant(rest, ov.Type.f32), False, True)
    return op.add(op.matmul(x, centred, False, True), rest_product)


def _constant(array: npt.NDArray[np.generic], element_type: ElementType, shape: tuple[int, ...] | None = None) -> Node:
    """A constant that owns its bytes: OpenVINO keeps no reference to a numpy array that it shares memory with.

    Args:
        shape: the logical shape where it is not the array's own (packed types).
    """
    tensor = ov.Tensor(element_type, ov.Shape(array.shape if shape is None else shape))
    np.copyto(tensor.data.view(np.uint8).reshape(-1), np.ascontiguousarray(array).view(np.uint8).reshape(-1))
    return op.constant(tensor, shared_memory=True)


def _floats(tensor: Tensor) -> Node:
    """F16 and BF16 are widened: the plugin would do so itself when it compiles, and then hold both copies."""
    values = dequantise(tensor)
    refuse_non_finite(tensor, bool(np.isfinite(values).all()))
    return _constant(values, ov.Type.f32)


def _exact_int8(tensor: Tensor) -> tuple[npt.NDArray[np.int8], Halves]:
    """Q8_0 and Q5_0 as they are, anything else rounded."""
    if tensor.encoding not in (Encoding.Q8_0, Encoding.Q5_0):
        return int8_groups(tensor)
    groups = unpack(tensor)
    values = groups.values.view(np.int8) - np.int8(groups.zero_point)
    return values, _halves(tensor, groups.scales)[..., None]


def _exact_int4(tensor: Tensor) -> tuple[npt.NDArray[np.uint8], Halves]:
    """Q4_0 as it is, floats rounded."""
    if tensor.encoding is not Encoding.Q4_0:
        return int4_groups(tensor)
    groups = unpack(tensor)
    return groups.values.view(np.uint8), _halves(tensor, groups.scales)[..., None]


def _halves(tensor: Tensor, values: npt.NDArray[np.float32]) -> Halves:
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    refuse_non_finite(tensor, bool(np.isfinite(halves).all()))
    return halves


def _int8(tensor: Tensor, values: npt.NDArray[np.int8], scales: Halves) -> Node:
    refuse_non_finite(tensor, bool(np.isfinite(scales).all()))
    return op.multiply(op.convert(_constant(values, ov.Type.i8), np.float16), _constant(scales, ov.Type.f16))


def _int4(tensor: Tensor, values: npt.NDArray[np.uint8], scales: Halves) -> Node:
    """u4 in groups of 32 with an integer zero point of 8: on the plugin's fast path."""
    refuse_non_finite(tensor, bool(np.isfinite(scales).all()))
    pairs = values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
    nibbles = _constant(pairs, ov.Type.u4, values.shape)
    zero_point = op.convert(op.constant(np.array(INT4_ZERO_POINT, np.uint8)), np.float16)
    shifted = op.subtract(op.convert(nibbles, np.float16), zero_point)
    return op.multiply(shifted, _constant(scales, ov.Type.f16))


def _ungrouped(grouped: Node, shape: tuple[int, ...]) -> Node:
    flat = op.reshape(grouped, op.constant(np.array(shape, np.int64)), False)
    return op.convert(flat, np.float32)
