"""Exact unpacking of the stored encodings. Formats: ggml's `ggml-common.h`; bfloat16 is the upper half of a float32.

Nothing here rounds: every stored number has one float32 value, and `dequantise` returns it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Encoding, Tensor

GROUP_SIZE = 32
"""Values that share one scale, in both block formats, along the last axis."""
Q4_0_ZERO_POINT = 8


def unpack_q8_0(tensor: Tensor) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """Values int8 ``[*rows, groups, 32]`` and scales float16 ``[*rows, groups]``; a weight is value * scale."""
    blocks = _blocks(tensor, Encoding.Q8_0, 2 + GROUP_SIZE)
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _scales(blocks)


def unpack_q4_0(tensor: Tensor) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16]]:
    """Values 0..15 as uint8 ``[*rows, groups, 32]`` in element order and scales float16 ``[*rows, groups]``.

    A weight is (value - 8) * scale. In the file, byte i of a block holds element i below and element i + 16 above.
    """
    blocks = _blocks(tensor, Encoding.Q4_0, 2 + GROUP_SIZE // 2)
    packed = blocks[..., 2:]
    return np.concatenate((packed & 0x0F, packed >> 4), axis=-1), _scales(blocks)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Widen bfloat16 bit patterns; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def dequantise(tensor: Tensor) -> npt.NDArray[np.float32]:
    """The tensor's numbers as float32 in its logical shape; a view when they are stored so."""
    match tensor.encoding:
        case Encoding.F32 | Encoding.F16:
            return tensor.data.astype(np.float32, copy=False)
        case Encoding.BF16:
            return bfloat16_to_float32(tensor.data.view(np.uint16))
        case Encoding.Q8_0:
            values, scales = unpack_q8_0(tensor)
            return _scaled(values.astype(np.float32), scales).reshape(tensor.shape)
        case Encoding.Q4_0:
            nibbles, scales = unpack_q4_0(tensor)
            return _scaled(nibbles.astype(np.float32) - np.float32(Q4_0_ZERO_POINT), scales).reshape(tensor.shape)


def _scaled(values: npt.NDArray[np.float32], scales: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    """A scale that is not finite makes values that are not: what a damaged file says is not judged here."""
    with np.errstate(invalid="ignore"):
        return values * scales[..., None].astype(np.float32)


def _blocks(tensor: Tensor, encoding: Encoding, block_bytes: int) -> npt.NDArray[np.uint8]:
    assert tensor.encoding is encoding, f"{tensor.name} is {tensor.encoding.value}, not {encoding.value}"
    groups = tensor.shape[-1] // GROUP_SIZE
    return tensor.data.view(np.uint8).reshape(*tensor.shape[:-1], groups, block_bytes)


def _scales(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
