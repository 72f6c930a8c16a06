"""Stored tensors as the constant sub-graphs that OpenVINO's CPU plugin keeps compressed.

Every check happens here, on our side: a constant whose buffer is shorter than its shape says crashes the process, and
one NaN scale would turn a whole model into NaN without a word.

Float weights, and block encodings that the plugin has no operators for, are rounded to int8 and int4. Scales are
float16, and integers are chosen for the scale as it is stored, so its own rounding costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.tensors import BLOCKS, FLOAT_TYPES, GROUP_SIZE, dequantise, stored_as, unpack
from lockstep.errors import CorruptArtifactError
from lockstep.executors.openvino.precision import Precision
from lockstep.executors.openvino.runtime import ElementType, Node, op, ov

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
INT4_ZERO_POINT = 8
_REFITS = 2
"""Rounds of scale refitting for int4; the second gains a tenth of what the first does, a third nothing."""
_MAX_CHUNK_VALUES = 1 << 22
"""Rows are dequantised this many values at a time, so that a large matrix is never whole in float32."""


def check_tensor(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor whose shape, buffer or element type is not what the model needs.

    Raises:
        CorruptArtifactError: naming the tensor, what it is and what it should be.
    """
    if tensor.shape != shape:
        raise CorruptArtifactError(f"tensor {tensor.name} has shape {list(tensor.shape)}; it should be {list(shape)}")
    num_values, _ = BLOCKS.get(tensor.encoding, (1, 0))
    if shape[-1] % num_values:
        raise CorruptArtifactError(
            f"tensor {tensor.name} ({tensor.encoding.value}) has rows of {shape[-1]} values; "
            f"they should be a multiple of {num_values}"
        )
    dtype, stored = stored_as(tensor.encoding, shape)
    if tensor.data.dtype != dtype or tensor.data.shape != stored:
        raise CorruptArtifactError(
            f"tensor {tensor.name} ({tensor.encoding.value}) is stored as "
            f"{tensor.data.dtype} {list(tensor.data.shape)}; it should be {dtype} {list(stored)}"
        )


def vector(tensor: Tensor, size: int) -> npt.NDArray[np.float32]:
    """A norm weight or a bias as f32 [size]; these are stored as plain floats in every format."""
    check_tensor(tensor, (size,))
    if tensor.encoding not in FLOAT_TYPES:
        raise CorruptArtifactError(
            f"tensor {tensor.name} is {tensor.encoding.value}; a vector must be F32, F16 or BF16"
        )
    values = dequantise(tensor)
    _refuse_non_finite(tensor, bool(np.isfinite(values).all()))
    return values


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
    _refuse_non_finite(tensor, bool(np.isfinite(rest).all()))
    values = groups.values.view(np.uint8)
    centred = _ungrouped(_int4(tensor, values, scales), shape)
    rest_product = op.matmul(sums.of(x), _constant(rest, ov.Type.f32), False, True)
    return op.add(op.matmul(x, centred, False, True), rest_product)


def int8_channels(tensor: Tensor) -> tuple[npt.NDArray[np.int8], Halves]:
    """Symmetric, one scale per row: values ``[rows, columns]``, scales ``[rows, 1]``."""
    return _round_int8(tensor, (1, tensor.shape[-1]), tensor.shape, (tensor.shape[0], 1))


def int8_groups(tensor: Tensor) -> tuple[npt.NDArray[np.int8], Halves]:
    """Symmetric, one scale per 32 values: values ``[rows, groups, 32]``, scales ``[rows, groups, 1]``."""
    groups = tensor.shape[-1] // GROUP_SIZE
    shape = (tensor.shape[0], groups, GROUP_SIZE)
    return _round_int8(tensor, (groups, GROUP_SIZE), shape, (*shape[:-1], 1))


def int4_groups(tensor: Tensor) -> tuple[npt.NDArray[np.uint8], Halves]:
    """Zero point 8, one scale per 32 values: values 0..15 ``[rows, groups, 32]``, scales ``[rows, groups, 1]``.

    The scale begins where the largest number (with its sign) becomes -8 and is then refitted to the integers by least
    squares, which are rounded again; of all of these each group keeps the one with the smallest squared error.
    """
    shape = (tensor.shape[0], tensor.shape[-1] // GROUP_SIZE, GROUP_SIZE)
    values, scales = np.empty(shape, np.uint8), np.empty((*shape[:-1], 1), np.float16)
    for rows, weights in _chunks(tensor):
        grouped = weights.reshape(len(weights), *shape[1:])
        with np.errstate(over="ignore", invalid="ignore"):  # the scale tells: it is not finite either
            values[rows], scales[rows] = _round_int4(grouped)
    return values, scales


def _constant(array: npt.NDArray[np.generic], element_type: ElementType, shape: tuple[int, ...] | None = None) -> Node:
    """A constant that owns its bytes: OpenVINO keeps no reference to a numpy array that it shares memory with.

    Args:
        shape: the logical shape where it is not the array's own (packed types).
    """
    tensor = ov.Tensor(element_type, ov.Shape(array.shape if shape is None else shape))
    np.copyto(tensor.data.view(np.uint8).reshape(-1), np.ascontiguousarray(array).view(np.uint8).reshape(-1))
    return op.constant(tensor, shared_memory=True)


def _refuse_non_finite(tensor: Tensor, finite: bool) -> None:
    if not finite:
        raise CorruptArtifactError(f"tensor {tensor.name} ({tensor.encoding.value}) holds NaN or infinity")


def _floats(tensor: Tensor) -> Node:
    """F16 and BF16 are widened: the plugin would do so itself when it compiles, and then hold both copies."""
    values = dequantise(tensor)
    _refuse_non_finite(tensor, bool(np.isfinite(values).all()))
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
    _refuse_non_finite(tensor, bool(np.isfinite(halves).all()))
    return halves


def _int8(tensor: Tensor, values: npt.NDArray[np.int8], scales: Halves) -> Node:
    _refuse_non_finite(tensor, bool(np.isfinite(scales).all()))
    return op.multiply(op.convert(_constant(values, ov.Type.i8), np.float16), _constant(scales, ov.Type.f16))


def _int4(tensor: Tensor, values: npt.NDArray[np.uint8], scales: Halves) -> Node:
    """u4 in groups of 32 with an integer zero point of 8: on the plugin's fast path."""
    _refuse_non_finite(tensor, bool(np.isfinite(scales).all()))
    pairs = values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
    nibbles = _constant(pairs, ov.Type.u4, values.shape)
    zero_point = op.convert(op.constant(np.array(INT4_ZERO_POINT, np.uint8)), np.float16)
    shifted = op.subtract(op.convert(nibbles, np.float16), zero_point)
    return op.multiply(shifted, _constant(scales, ov.Type.f16))


def _ungrouped(grouped: Node, shape: tuple[int, ...]) -> Node:
    flat = op.reshape(grouped, op.constant(np.array(shape, np.int64)), False)
    return op.convert(flat, np.float32)


def _round_int8(
    tensor: Tensor, grouping: tuple[int, int], shape: tuple[int, ...], scales_shape: tuple[int, ...]
) -> tuple[npt.NDArray[np.int8], Halves]:
    values, scales = np.empty(shape, np.int8), np.empty(scales_shape, np.float16)
    for rows, weights in _chunks(tensor):
        grouped = weights.reshape(len(weights), *grouping)
        largest = np.abs(grouped).max(axis=-1, keepdims=True)
        with np.errstate(over="ignore", invalid="ignore"):  # the scale tells: it is not finite either
            scale = _at_least_tiny((largest / 127).astype(np.float16))
            rounded = np.rint(grouped / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
        values[rows], scales[rows] = rounded.reshape(-1, *shape[1:]), scale.reshape(-1, *scales_shape[1:])
    return values, scales


def _round_int4(weights: Floats) -> tuple[npt.NDArray[np.uint8], Halves]:
    extreme = np.take_along_axis(weights, np.abs(weights).argmax(axis=-1)[..., None], axis=-1)
    best_scale = _signed_tiny((extreme / -INT4_ZERO_POINT).astype(np.float16))
    best, best_error = _nearest(weights, best_scale)
    scale, integers = best_scale, best
    for _ in range(_REFITS):
        norm = np.maximum(np.square(integers).sum(axis=-1, keepdims=True), 1)
        scale = _signed_tiny(((weights * integers).sum(axis=-1, keepdims=True) / norm).astype(np.float16))
        integers, error = _nearest(weights, scale)
        better = error < best_error
        best, best_error = np.where(better, integers, best), np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
    return (best + INT4_ZERO_POINT).astype(np.uint8), best_scale


def _nearest(weights: Floats, scale: Halves) -> tuple[Floats, Floats]:
    """The nearest integers in -8..7, and the squared error of each group."""
    wide = scale.astype(np.float32)
    integers = np.rint(weights / wide).clip(-INT4_ZERO_POINT, INT4_ZERO_POINT - 1)
    return integers, np.square(integers * wide - weights).sum(axis=-1, keepdims=True)


def _at_least_tiny(scale: Halves) -> Halves:
    """A group of zeros has a scale too: any will do, but not zero, by which nothing can be divided."""
    return np.maximum(scale, np.float16(2**-24))


def _signed_tiny(scale: Halves) -> Halves:
    return np.where(scale == 0, np.float16(2**-24), scale)


def _chunks(tensor: Tensor) -> Iterator[tuple[slice, Floats]]:
    """Rows and their weights in float32, some at a time."""
    step = max(1, _MAX_CHUNK_VALUES // tensor.shape[-1])
    for start in range(0, tensor.shape[0], step):
        rows = slice(start, min(start + step, tensor.shape[0]))
        part = replace(tensor, shape=(rows.stop - start, tensor.shape[-1]), data=tensor.data[rows])
        yield rows, dequantise(part)
