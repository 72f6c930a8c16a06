"""Stored tensors checked, and float weights rounded to int8 and int4. Pure numpy.

Scales are float16, and integers are chosen for the scale as it is stored, so its own rounding costs nothing.
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
    refuse_non_finite(tensor, bool(np.isfinite(values).all()))
    return values


def int8_channels(tensor: Tensor) -> tuple[npt.NDArray[np.int8], Halves]:
    """Symmetric, one scale per row: values ``[rows, columns]``, scales ``[rows, 1]``."""
    values, scales = np.empty(tensor.shape, np.int8), np.empty((tensor.shape[0], 1), np.float16)
    for rows, weights in _chunks(tensor):
        largest = np.abs(weights).max(axis=-1, keepdims=True)
        with np.errstate(over="ignore", invalid="ignore"):  # a scale that is not finite shows the fault
            scales[rows] = np.maximum((largest / 127).astype(np.float16), np.float16(2**-24))  # of zeros, any but 0
            values[rows] = np.rint(weights / scales[rows].astype(np.float32)).clip(-127, 127).astype(np.int8)
    return values, scales


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


def refuse_non_finite(tensor: Tensor, finite: bool) -> None:
    """CorruptArtifactError where not all numbers of a tensor are finite."""
    if not finite:
        raise CorruptArtifactError(f"tensor {tensor.name} ({tensor.encoding.value}) holds NaN or infinity")


def _round_int4(weights: Floats) -> tuple[npt.NDArray[np.uint8], Halves]:
    extreme = np.take_along_axis(weights, np.abs(weights).argmax(axis=-1)[..., None], axis=-1)
    best_scale = _signed_tiny((extreme / -INT4_ZERO_POINT).astype(np.float16))
    best, best_error = _nearest(weights, best_scale)
    scale, integers = best_scale, best
    for _ in range(_REFITS):
        norm = np.maximum(_sums(np.square(integers)), 1)
        scale = _signed_tiny((_sums(weights * integers) / norm).astype(np.float16))
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
    """Sums [..., 1] over groups [..., 32] in a fixed order, lower half to upper half, which is no matter of NumPy's."""
    while groups.shape[-1] > 1:
        half = groups.shape[-1] // 2
        groups = groups[..., :half] + groups[..., half:]
    return groups


def _signed_tiny(scale: Halves) -> Halves:
    """A group of zeros has a scale too: any but zero, by which nothing can be divided."""
    return np.where(scale == 0, np.float16(2**-24), scale)


def _chunks(tensor: Tensor) -> Iterator[tuple[slice, Floats]]:
    """Rows and their weights in float32, some at a time."""
    step = max(1, _MAX_CHUNK_VALUES // tensor.shape[-1])
    for start in range(0, tensor.shape[0], step):
        rows = slice(start, min(start + step, tensor.shape[0]))
        part = replace(tensor, shape=(rows.stop - start, tensor.shape[-1]), data=tensor.data[rows])
        yield rows, dequantise(part)
