"""One stored tensor -> the constant sub-graph that OpenVINO's CPU plugin keeps compressed.

Every check happens here, on our side: a constant whose buffer is shorter than its shape says crashes the process, and
one NaN scale would turn a whole model into NaN without a word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.quantisation import (
    GROUP_SIZE,
    Q4_0_ZERO_POINT,
    dequantise,
    unpack_q4_0,
    unpack_q8_0,
)
from lockstep.errors import CorruptArtifactError
from lockstep.executors.openvino.runtime import ElementType, Node, op, ov

_BLOCK_BYTES = {Encoding.Q8_0: 2 + GROUP_SIZE, Encoding.Q4_0: 2 + GROUP_SIZE // 2}
_FLOAT_DTYPES = {Encoding.F32: np.float32, Encoding.F16: np.float16, Encoding.BF16: np.uint16}


def check_tensor(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor whose shape, buffer or element type is not what the model needs.

    Raises:
        CorruptArtifactError: naming the tensor, what it is and what it should be.
    """
    if tensor.shape != shape:
        raise CorruptArtifactError(f"tensor {tensor.name} has shape {list(tensor.shape)}; it should be {list(shape)}")
    if tensor.encoding in _FLOAT_DTYPES:
        dtype, stored = np.dtype(_FLOAT_DTYPES[tensor.encoding]), shape
    else:
        if shape[-1] % GROUP_SIZE:
            raise CorruptArtifactError(
                f"tensor {tensor.name} ({tensor.encoding.value}) has rows of {shape[-1]} values; "
                f"they should be a multiple of {GROUP_SIZE}"
            )
        row_bytes = shape[-1] // GROUP_SIZE * _BLOCK_BYTES[tensor.encoding]
        dtype, stored = np.dtype(np.uint8), (*shape[:-1], row_bytes)
    if tensor.data.dtype != dtype or tensor.data.shape != stored:
        raise CorruptArtifactError(
            f"tensor {tensor.name} ({tensor.encoding.value}) is stored as "
            f"{tensor.data.dtype} {list(tensor.data.shape)}; it should be {dtype} {list(stored)}"
        )


def vector(tensor: Tensor, size: int) -> npt.NDArray[np.float32]:
    """A norm weight or a bias as f32 [size]; these are stored as plain floats in every format."""
    check_tensor(tensor, (size,))
    if tensor.encoding not in _FLOAT_DTYPES:
        raise CorruptArtifactError(
            f"tensor {tensor.name} is {tensor.encoding.value}; a vector must be F32, F16 or BF16"
        )
    values = dequantise(tensor)
    _refuse_non_finite(tensor, bool(np.isfinite(values).all()))
    return values


def matrix(tensor: Tensor, shape: tuple[int, int]) -> Node:
    """Output of the sub-graph that yields the tensor as f32 [out, in]; it is fused into the MatMul or Gather using it.

    Raises:
        CorruptArtifactError: wrong size, NaN or infinity; naming the tensor.
    """
    check_tensor(tensor, shape)
    if tensor.encoding is Encoding.Q8_0:
        return _q8_0(tensor)
    if tensor.encoding is Encoding.Q4_0:
        return _q4_0(tensor)
    # F16 and BF16 are widened: the plugin would do so itself when it compiles, and then hold both copies.
    values = dequantise(tensor)
    _refuse_non_finite(tensor, bool(np.isfinite(values).all()))
    return _constant(values, ov.Type.f32)


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


def _q8_0(tensor: Tensor) -> Node:
    values, scales = unpack_q8_0(tensor)
    _refuse_non_finite(tensor, bool(np.isfinite(scales).all()))
    integers = op.convert(_constant(values, ov.Type.i8), np.float16)
    return _ungrouped(op.multiply(integers, _constant(scales[..., None], ov.Type.f16)), tensor.shape)


def _q4_0(tensor: Tensor) -> Node:
    """u4 in groups of 32 with an integer zero point of 8: exact, and on the plugin's fast path."""
    values, scales = unpack_q4_0(tensor)
    _refuse_non_finite(tensor, bool(np.isfinite(scales).all()))
    pairs = values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
    nibbles = _constant(pairs, ov.Type.u4, values.shape)
    zero_point = op.convert(op.constant(np.array(Q4_0_ZERO_POINT, np.uint8)), np.float16)
    shifted = op.subtract(op.convert(nibbles, np.float16), zero_point)
    return _ungrouped(op.multiply(shifted, _constant(scales[..., None], ov.Type.f16)), tensor.shape)


def _ungrouped(grouped: Node, shape: tuple[int, ...]) -> Node:
    flat = op.reshape(grouped, op.constant(np.array(shape, np.int64)), False)
    return op.convert(flat, np.float32)
