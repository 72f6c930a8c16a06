"""Merging of LoRA adapters: adds them to the weights of a model while it is loaded.

A weight w becomes w + scale * d, where d is its element of B A. The library computes B A as a product of float weights
(docs/native.md), so that its sums have the same order on every machine. The product with the scale and the sum are
rounded to float32, and the result to the encoding of the tensor: floats to the nearest one, ties to even; Q8_0 to a
scale per 32 values, with which the largest becomes 127, and the nearest integers for that scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Adapter, AdapterTarget, Artifact, Encoding, Tensor
from lockstep.artifacts.tensors import GROUP_SIZE, dequantise
from lockstep.errors import CorruptArtifactError
from lockstep.executors.native.library import NativeLibrary
from lockstep.executors.native.products import multiply_floats
from lockstep.executors.native.weights import int8_blocks
from lockstep.executors.quantise import check_tensor, row_chunks

Floats = npt.NDArray[np.float32]
_CHUNK_VALUES = 1 << 16
"""Number of values that are merged at a time, few enough for a core's cache."""
_LIMITS: Mapping[Encoding, float] = {
    Encoding.F32: float("inf"),
    Encoding.F16: 65520.0,
    Encoding.BF16: (2 - 2.0**-8) * 2.0**127,
    Encoding.Q8_0: 127 * 65520.0,
}
"""The smallest number of each encoding that is rounded to infinity."""


def loaded_tensor(library: NativeLibrary, artifact: Artifact, name: str) -> Tensor:
    """A tensor of an artifact with the artifact's adapters merged into it, in the encoding that it is stored in.

    Raises:
        CorruptArtifactError: the tensor is missing or has the wrong size, or a result is not finite.
    """
    tensor = artifact.weights[name]
    for adapter in artifact.adapters:
        if (target := adapter.targets.get(name)) is not None:
            tensor = _merged(library, tensor, target, adapter)
    return tensor


def _merged(library: NativeLibrary, tensor: Tensor, target: AdapterTarget, adapter: Adapter) -> Tensor:
    check_tensor(tensor, tensor.shape)
    columns_of_a = np.ascontiguousarray(dequantise(target.a).T)
    b, scale, encode = dequantise(target.b), np.float32(target.scale), _ENCODERS[tensor.encoding]
    data = np.empty_like(tensor.data)
    for rows, weights in row_chunks(tensor, _CHUNK_VALUES):
        with np.errstate(over="ignore", invalid="ignore"):  # results that are not finite are refused below
            change = multiply_floats(library, Encoding.F32, columns_of_a, np.ascontiguousarray(b[rows]))
            changed = weights + scale * change
            is_finite = np.abs(changed).max() < _LIMITS[tensor.encoding]
        if not is_finite:
            raise CorruptArtifactError(
                f"tensor {tensor.name} ({tensor.encoding.value}) would hold NaN or infinity with adapter "
                f"{adapter.name!r} merged into it; load the adapter beside its base"
            )
        data[rows] = encode(changed)
    return replace(tensor, data=data)


def _brain_floats(values: Floats) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    is_odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16)).astype(np.uint16)


def _groups_of_int8(values: Floats) -> npt.NDArray[np.uint8]:
    groups = values.reshape(len(values), -1, GROUP_SIZE)
    scales = (np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
    scales = np.maximum(scales, np.float16(2**-24))  # never 0
    integers = np.rint(groups / scales.astype(np.float32)).clip(-127, 127).astype(np.int8)
    return int8_blocks("merged", integers.reshape(values.shape), scales[..., 0]).data.view(np.uint8)


_ENCODERS: Mapping[Encoding, Callable[[Floats], npt.NDArray[Any]]] = {
    Encoding.F32: lambda values: values,
    Encoding.F16: lambda values: values.astype(np.float16),
    Encoding.BF16: _brain_floats,
    Encoding.Q8_0: _groups_of_int8,
}
