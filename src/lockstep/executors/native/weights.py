"""Weights in panels: reorders the numbers of a weight file for the native products (``product.hpp``).

Block encodings of GGUF files are packed without conversion. Weights that were rounded to int8 with a scale per row, or
to int4 with a scale per group, are first written as blocks of Q8_0 and Q4_0, which is lossless.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.tensors import GROUP_SIZE
from lockstep.errors import CorruptArtifactError
from lockstep.executors.native.library import NativeLibrary

Bytes = npt.NDArray[np.uint8]
KINDS = (
    Encoding.Q8_0,
    Encoding.Q4_0,
    Encoding.Q4_1,
    Encoding.Q5_0,
    Encoding.Q5_1,
    Encoding.Q4_K,
    Encoding.Q5_K,
    Encoding.Q6_K,
    Encoding.Q3_K,
    Encoding.IQ4_NL,
    Encoding.IQ4_XS,
)
"""Encodings in the order of their numbers in ``product.hpp``."""
_GROWTH: Mapping[Encoding, float] = {Encoding.Q3_K: 36 / 110, Encoding.IQ4_XS: 10 / 136}
"""Bytes of a block in panels beyond those in a file, relative to the latter, where it is more than 3 %."""
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A matrix in panels."""

    encoding: Encoding
    features: int
    columns: int
    """Columns of the blocks: a multiple of 32, padded with zeros if the weights have fewer."""
    panels: Bytes

    @property
    def bits_per_weight(self) -> float:
        """Bits of memory for each weight, including scales and the unused part of the last panel."""
        return 8 * self.panels.nbytes / (self.features * self.columns)


def packed_growth(bytes_by_encoding: Mapping[Encoding, int]) -> int:
    """Number of bytes that weights take in panels beyond those in their file, up to 3 %."""
    return round(sum(num_bytes * _GROWTH.get(encoding, 0.0) for encoding, num_bytes in bytes_by_encoding.items()))


def packed_bytes(library: NativeLibrary, tensor: Tensor) -> int:
    """Size in bytes of a packed matrix.

    Raises:
        CorruptArtifactError: see `pack`.
    """
    if tensor.encoding not in KINDS or len(tensor.shape) != 2:
        raise CorruptArtifactError(
            f"tensor {tensor.name} ({tensor.encoding.value} {list(tensor.shape)}) cannot be packed: "
            f"a matrix of {', '.join(kind.value for kind in KINDS)} is expected"
        )
    size = int(library.handle.native_packed_bytes(KINDS.index(tensor.encoding), *_int64s(*tensor.shape)))
    if size < 0:
        raise CorruptArtifactError(
            f"tensor {tensor.name} ({tensor.encoding.value} {list(tensor.shape)}) cannot be packed: "
            "1 to 2^24 features and whole blocks of up to 2^20 columns are expected"
        )
    return size


def pack(library: NativeLibrary, tensor: Tensor, memory: Bytes | None = None) -> PackedWeights:
    """Pack a matrix in a block encoding.

    Args:
        memory: destination; None: new memory. Products are fastest in memory with huge pages.

    Raises:
        CorruptArtifactError: the tensor cannot be packed; the message names it.
    """
    size, kind, (features, columns) = packed_bytes(library, tensor), KINDS.index(tensor.encoding), tensor.shape
    blocks = np.ascontiguousarray(tensor.data).view(np.uint8)
    panels = aligned_bytes(size) if memory is None else memory[:size]
    assert panels.flags.c_contiguous
    wrong = library.handle.native_pack(
        kind, pointer(blocks), *_int64s(blocks.nbytes, features, columns), pointer(panels), *_int64s(panels.nbytes)
    )
    if wrong is not None:
        raise CorruptArtifactError(f"tensor {tensor.name} ({tensor.encoding.value}): {wrong.decode()}")
    return PackedWeights(tensor.encoding, features, columns, panels)


def int8_blocks(name: str, values: npt.NDArray[np.int8], scales: npt.NDArray[np.float16]) -> Tensor:
    """Convert integers ``[features, columns]`` with a scale ``[features, 1]`` per row, or one per group of 32, to
    Q8_0."""
    features, columns = values.shape
    groups = -(-columns // GROUP_SIZE)
    blocks = np.zeros((features, groups, 2 + GROUP_SIZE), np.uint8)
    padded = np.zeros((features, groups * GROUP_SIZE), np.int8)
    padded[:, :columns] = values
    blocks[..., :2] = np.broadcast_to(scales, (features, groups)).astype("<f2")[..., None].view(np.uint8)
    blocks[..., 2:] = padded.view(np.uint8).reshape(features, groups, GROUP_SIZE)
    return Tensor(name, Encoding.Q8_0, (features, groups * GROUP_SIZE), blocks.reshape(features, -1))


def int4_blocks(name: str, values: Bytes, scales: npt.NDArray[np.float16]) -> Tensor:
    """Convert codes 0..15 with zero point 8 ``[features, groups, 32]`` and scales ``[features, groups]`` to Q4_0."""
    features, groups, _ = values.shape
    blocks = np.empty((features, groups, 2 + GROUP_SIZE // 2), np.uint8)
    blocks[..., :2] = np.ascontiguousarray(scales.astype("<f2"))[..., None].view(np.uint8)
    blocks[..., 2:] = values[..., : GROUP_SIZE // 2] | values[..., GROUP_SIZE // 2 :] << np.uint8(4)
    return Tensor(name, Encoding.Q4_0, (features, groups * GROUP_SIZE), blocks.reshape(features, -1))


def aligned_bytes(size: int) -> Bytes:
    """Uninitialised memory that begins at a cache line."""
    memory: Bytes = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size]


def pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    """Address of an array's first element."""
    return ctypes.c_void_p(array.ctypes.data)


def _int64s(*numbers: int) -> tuple[ctypes.c_int64, ...]:
    return tuple(ctypes.c_int64(number) for number in numbers)
