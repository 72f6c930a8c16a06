"""Quantisation of weights: checks stored tensors, and rounds float weights to int8 and int4. Pure numpy.

Scales are float16, and integers are chosen for the scale as it is stored, so that the rounding of the scale adds no
error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Tensor
from lockstep.artifacts.tensors import BLOCKS, FLOAT_TYPES, GROUP_SIZE, dequantise, stored_as
from lockstep.errors import CorruptArtifactError

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
INT4_ZERO_POINT = 8
_REFITS = 2
"""Rounds of scale refitting for int4. The second gains a tenth of the first one's gain, and a third gains nothing."""
MAX_CHUNK_VALUES = 1 << 22
"""Number of values that are dequantised at a time, so that a large matrix is never completely in float32."""


def check_tensor(tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Check that a tensor has the shape, buffer and element type that the model needs.

    Raises:
        CorruptArtifactError: it does not; the message names the tensor, the actual and the expected value.
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


def vector(tensor: Tensor, shape: int | tuple[int, ...]) -> npt.NDArray[np.float32]:
    """A norm weight, a bias or the kernel of a convolution as f32, of this size or shape. Every format stores these as
    plain floats."""
    check_tensor(tensor, (shape,) if isinstance(shape, int) else shape)
    if tensor.encoding not in FLOAT_TYPES:
        raise CorruptArtifactError(
            f"tensor {tensor.name} is {tensor.encoding.value}; a vector must be F32, F16 or BF16"
        )
    values = dequantise(tensor)
    check_finite(tensor, bool(np.isfinite(values).all()))
    return values


def int8_channels(tensor: Tensor, max_chunk_values: int = MAX_CHUNK_VALUES) -> tuple[npt.NDArray[np.int8], Halves]:
    """Quantise symmetrically with one scale per row: values ``[rows, columns]``, scales ``[rows, 1]``."""
    values, scales = np.empty(tensor.shape, np.int8), np.empty((tensor.shape[0], 1), np.float16)
    for rows, weights in row_chunks(tensor, max_chunk_values):
        largest = np.abs(weights).max(axis=-1, keepdims=True)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller rejects scales that are not finite
            scales[rows] = np.maximum((largest / 127).astype(np.float16), np.float16(2**-24))  # never 0
            values[rows] = np.rint(weights / scales[rows].astype(np.float32)).clip(-127, 127).astype(np.int8)
    return values, scales


def int4_groups(tensor: Tensor, max_chunk_values: int = MAX_CHUNK_VALUES) -> tuple[npt.NDArray[np.uint8], Halves]:
    """Quantise with zero point 8 and one scale per 32 values: values 0..15 ``[rows, groups, 32]``, scales ``[rows,
    groups, 1]``.

    The initial scale maps the largest number (with its sign) to -8. Then the scale is refitted to the integers by least
    squares, and the integers are rounded again. Each group keeps the result with the smallest squared error.
    """
    shape = (tensor.shape[0], tensor.shape[-1] // GROUP_SIZE, GROUP_SIZE)
    values, scales = np.empty(shape, np.uint8), np.empty((*shape[:-1], 1), np.float16)
    for rows, weights in row_chunks(tensor, max_chunk_values):
        grouped = weights.reshape(len(weights), *shape[1:])
        with np.errstate(over="ignore", invalid="ignore"):  # the caller rejects scales that are not finite
            values[rows], scales[rows] = _round_int4(grouped)
    return values, scales


def check_finite(tensor: Tensor, finite: bool) -> None:
    """Check the result of a finiteness test.

    Raises:
        CorruptArtifactError: not all numbers of the tensor are finite.
    """
    if not finite:
        raise CorruptArtifactError(f"tensor {tensor.name} ({tensor.encoding.value}) holds NaN or infinity")


def _round_int4(weights: Floats) -> tuple[npt.NDArray[np.uint8], Halves]:
    extreme = np.take_along_axis(weights, np.abs(weights).argmax(axis=-1)[..., None], axis=-1)
    best_scale = _without_zeros((extreme / -INT4_ZERO_POINT).astype(np.float16))
    best, best_error = _nearest(weights, best_scale)
    scale, integers = best_scale, best
    for _ in range(_REFITS):
        norm = np.maximum(_sums(np.square(integers)), 1)
        scale = _without_zeros((_sums(weights * integers) / norm).astype(np.float16))
        integers, error = _nearest(weights, scale)
        better = error < best_error
        best, best_error = np.where(better, integers, best), np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
    return (best + INT4_ZERO_POINT).astype(np.uint8), best_scale


def _nearest(weights: Floats, scale: Halves) -> tuple[Floats, Floats]:
    """The nearest integers in -8..7, and the squared error of each group."""
    wide = scale.astype(np.float32)
    integers = np.rint(weights / wide).clip(-INT4_ZERO_POINT, INT4_ZERO_POINT - 1)
    return integers, _sums(np.square(integers * wide - weights))


def _sums(groups: Floats) -> Floats:
    """Sums [..., 1] over groups [..., 32] in a fixed order, lower half to upper half, independent of NumPy's order."""
    while groups.shape[-1] > 1:
        half = groups.shape[-1] // 2
        groups = groups[..., :half] + groups[..., half:]
    return groups


def _without_zeros(scale: Halves) -> Halves:
    """Replace scales of zero, which groups of zeros would have, since zero cannot be divided by."""
    return np.where(scale == 0, np.float16(2**-24), scale)


def row_chunks(tensor: Tensor, max_values: int) -> Iterator[tuple[slice, Floats]]:
    """Yield rows and their weights in float32, some at a time."""
    step = max(1, max_values // tensor.shape[-1])
    for start in range(0, tensor.shape[0], step):
        rows = slice(start, min(start + step, tensor.shape[0]))
        part = replace(tensor, shape=(rows.stop - start, tensor.shape[-1]), data=tensor.data[rows])
        yield rows, dequantise(part)
