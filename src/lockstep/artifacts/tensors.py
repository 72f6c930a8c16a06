"""Stored tensors: maps tensors from files, and unpacks and dequantizes them exactly.

Formats: ggml's `ggml-common.h`; bfloat16 is the upper half of a float32.

There is no rounding beyond the format's own definition: every stored number has one float32 value, which `dequantise`
returns.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.model import Encoding, Tensor
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

GROUP_SIZE = 32
"""Number of values that share a scale, along the last axis, in every block format but Q3_K and Q6_K (16)."""
BLOCKS: Mapping[Encoding, tuple[int, int]] = {
    Encoding.Q8_0: (32, 34),
    Encoding.Q4_0: (32, 18),
    Encoding.Q4_1: (32, 20),
    Encoding.Q5_0: (32, 22),
    Encoding.Q5_1: (32, 24),
    Encoding.Q4_K: (256, 144),
    Encoding.Q5_K: (256, 176),
    Encoding.Q6_K: (256, 210),
    Encoding.Q3_K: (256, 110),
    Encoding.IQ4_NL: (32, 18),
    Encoding.IQ4_XS: (256, 136),
}
"""Number of values and of bytes of one block."""
IQ4_VALUES: npt.NDArray[np.int8] = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
"""Integers that the codes of IQ4_NL and IQ4_XS stand for."""
FLOAT_TYPES: Mapping[Encoding, np.dtype[np.generic]] = {
    Encoding.F32: np.dtype("<f4"),
    Encoding.F16: np.dtype("<f2"),
    Encoding.BF16: np.dtype("<u2"),
}


def stored_as(encoding: Encoding, shape: tuple[int, ...]) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    """Element type and shape of the array that stores a tensor. Block formats are stored as bytes, in whole rows."""
    if encoding in FLOAT_TYPES:
        return FLOAT_TYPES[encoding], shape
    num_values, num_bytes = BLOCKS[encoding]
    return np.dtype(np.uint8), (*shape[:-1], shape[-1] // num_values * num_bytes)


def num_stored_bytes(encoding: Encoding, shape: tuple[int, ...]) -> int:
    """Size of a stored tensor in bytes."""
    dtype, stored = stored_as(encoding, shape)
    return dtype.itemsize * math.prod(stored)


def bytes_by_encoding(tensors: Iterable[Tensor]) -> dict[Encoding, int]:
    """Return the stored bytes of tensors, by encoding."""
    found: Counter[Encoding] = Counter()
    for tensor in tensors:
        found[tensor.encoding] += tensor.data.nbytes
    return dict(found)


class MappedTensors:
    """Tensors of one memory-mapped file, as views that keep the map open. Checks that they are in bounds and do not
    overlap.

    Args:
        header_bytes: minimum size of a file in the format.
        header: name of this minimum in error messages.

    Raises:
        ArtifactNotFoundError: the file cannot be read.
        CorruptArtifactError: the file is smaller than the minimum.
    """

    def __init__(self, path: Path, header_bytes: int, header: str) -> None:
        self.path = path
        self._tensors: dict[str, Tensor] = {}
        self._extents: list[tuple[int, int, str]] = []
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size < header_bytes:
                    raise CorruptArtifactError(f"{size} bytes are too few for {header}", path=path)
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ArtifactNotFoundError(f"cannot be read ({error.strerror})", path=path) from error

    def add(self, name: str, encoding: Encoding, shape: tuple[int, ...], start: int, alignment: int = 1) -> None:
        """Check the location of a tensor, and create its view."""
        if name in self._tensors:
            raise CorruptArtifactError(f"tensor {name!r} appears twice", path=self.path)
        dtype, stored = stored_as(encoding, shape)
        stop = start + num_stored_bytes(encoding, shape)
        if start % alignment or stop > len(self.buffer):
            raise CorruptArtifactError(
                f"tensor {name!r} lies at bytes {start}..{stop} of a file of {len(self.buffer)}; "
                "is the download complete?",
                path=self.path,
            )
        self._extents.append((start, stop, name))
        data = np.frombuffer(self.buffer, np.uint8, stop - start, start).view(dtype).reshape(stored)
        self._tensors[name] = Tensor(name, encoding, shape, data)

    def tensors(self) -> dict[str, Tensor]:
        """Return all added tensors, in order. Raises CorruptArtifactError if two of them overlap."""
        for (_, stop, first), (start, _, second) in pairwise(sorted(self._extents)):
            if start < stop:
                raise CorruptArtifactError(f"tensors {first!r} and {second!r} overlap", path=self.path)
        return self._tensors


@dataclass(frozen=True, slots=True)
class Groups:
    """Integers in element order, with the values to dequantize them: (value - zero_point) * scale + offset."""

    values: npt.NDArray[np.uint8] | npt.NDArray[np.int8]
    """``[*rows, groups, size]``; int8 if the format is signed, otherwise uint8."""
    scales: Floats
    """``[*rows, groups]``; exact products of the stored scales."""
    zero_point: int = 0
    offsets: Floats | None = None
    """``[*rows, groups]``; None if the format has none."""


def unpack(tensor: Tensor) -> Groups:
    """Return the integers and scales of a tensor in a block encoding."""
    num_values, num_bytes = BLOCKS[tensor.encoding]
    num_blocks = tensor.shape[-1] // num_values
    blocks = tensor.data.view(np.uint8).reshape(*tensor.shape[:-1], num_blocks, num_bytes)
    return _UNPACKERS[tensor.encoding](blocks)


def bfloat16_to_float32(bits: npt.NDArray[np.uint16]) -> Floats:
    """Convert bfloat16 bit patterns to float32 (exact)."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def dequantise(tensor: Tensor) -> Floats:
    """Return a tensor's values as float32 in its logical shape; a view if they are stored in this form.

    A scale that is not finite produces values that are not finite. This function does not check for damaged files.
    """
    if tensor.encoding in (Encoding.F32, Encoding.F16):
        return tensor.data.astype(np.float32, copy=False)
    if tensor.encoding is Encoding.BF16:
        return bfloat16_to_float32(tensor.data.view(np.uint16))
    groups = unpack(tensor)
    values = groups.values.astype(np.float32)
    with np.errstate(invalid="ignore"):
        if groups.zero_point:
            values -= np.float32(groups.zero_point)
        values *= groups.scales[..., None]
        if groups.offsets is not None:
            values += groups.offsets[..., None]
    return values.reshape(tensor.shape)


def _q8_0(blocks: Bytes) -> Groups:
    return Groups(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks, 0))


def _q4_0(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[..., 2:]), _half(blocks, 0), zero_point=8)


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[..., 4:]), _half(blocks, 0), offsets=_half(blocks, 2))


def _q5_0(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]), _half(blocks, 0), zero_point=16)


def _q5_1(blocks: Bytes) -> Groups:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Groups(values, _half(blocks, 0), offsets=_half(blocks, 2))


def _q4_k(blocks: Bytes) -> Groups:
    return _grouped(blocks, _nibble_chunks(blocks[..., 16:]))


def _q5_k(blocks: Bytes) -> Groups:
    """Unpack Q5_K. Bit g of the 32 high bytes belongs to group g: byte i to its element i."""
    high = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _grouped(blocks, _nibble_chunks(blocks[..., 48:]) | (high << np.uint8(4)))


def _q6_k(blocks: Bytes) -> Groups:
    """Unpack Q6_K. Per half of 128 values, four runs of 32 share 64 low bytes (nibbles) and 32 high bytes (bit
    pairs)."""
    rows, num_blocks = blocks.shape[:-2], blocks.shape[-2]
    low = blocks[..., :128].reshape(*rows, num_blocks, 2, 64)
    low = np.concatenate((low & np.uint8(15), low >> np.uint8(4)), axis=-1).reshape(*rows, num_blocks, 2, 4, 32)
    high = blocks[..., 128:192].reshape(*rows, num_blocks, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    values = low | ((high & np.uint8(3)) << np.uint8(4))
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32) * _half(blocks, 208)[..., None]
    return Groups(values.reshape(*rows, num_blocks * 16, 16), scales.reshape(*rows, -1), zero_point=32)


def _q3_k(blocks: Bytes) -> Groups:
    """Unpack Q3_K. Per half of 128 values, four runs of 32 share 32 bytes of low bits (pairs). Bit r of the 32 high
    bytes belongs to run r of the block. Scales of 6 bits have the zero point 32."""
    rows, num_blocks = blocks.shape[:-2], blocks.shape[-2]
    low = blocks[..., 32:96].reshape(*rows, num_blocks, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    values = (low & np.uint8(3)) | (high.reshape(*rows, num_blocks, 2, 4, 32) << np.uint8(2))
    scales = _half(blocks, 108)[..., None] * _q3_k_scales(blocks[..., 96:108]).astype(np.float32)
    return Groups(values.reshape(*rows, num_blocks * 16, 16), scales.reshape(*rows, -1), zero_point=4)


def _q3_k_scales(packed: Bytes) -> npt.NDArray[np.int8]:
    """Unpack 16 scales from 12 bytes: low four bits of 0..7 and 8..15 in the halves of bytes 0..7, upper two bits of
    scale i in bit pair i / 4 of byte 8 + i % 4."""
    low = np.concatenate((packed[..., :8] & np.uint8(15), packed[..., :8] >> np.uint8(4)), axis=-1)
    high = (packed[..., None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & np.uint8(3)
    whole: Bytes = low | (high.reshape(low.shape) << np.uint8(4))
    return whole.view(np.int8) - np.int8(32)


def _iq4_nl(blocks: Bytes) -> Groups:
    return Groups(IQ4_VALUES[_nibbles(blocks[..., 2:])], _half(blocks, 0))


def _iq4_xs(blocks: Bytes) -> Groups:
    """Unpack IQ4_XS. Scales of 6 bits with the zero point 32: low four bits in nibbles, upper two in a number of 16
    bits."""
    rows, num_blocks = blocks.shape[:-2], blocks.shape[-2]
    values = IQ4_VALUES[_nibbles(blocks[..., 8:].reshape(*rows, num_blocks * 8, 16))]
    low = (blocks[..., 4:8, None] >> np.array([0, 4], np.uint8)) & np.uint8(15)
    high = (blocks[..., 2:4, None] >> np.array([0, 2, 4, 6], np.uint8)) & np.uint8(3)
    small = low.reshape(*rows, num_blocks, 8) | (high.reshape(*rows, num_blocks, 8) << np.uint8(4))
    scales = _half(blocks, 0)[..., None] * (small.view(np.int8) - np.int8(32)).astype(np.float32)
    return Groups(values, scales.reshape(*rows, -1))


_UNPACKERS: Mapping[Encoding, Callable[[Bytes], Groups]] = {
    Encoding.Q8_0: _q8_0,
    Encoding.Q4_0: _q4_0,
    Encoding.Q4_1: _q4_1,
    Encoding.Q5_0: _q5_0,
    Encoding.Q5_1: _q5_1,
    Encoding.Q4_K: _q4_k,
    Encoding.Q5_K: _q5_k,
    Encoding.Q6_K: _q6_k,
    Encoding.Q3_K: _q3_k,
    Encoding.IQ4_NL: _iq4_nl,
    Encoding.IQ4_XS: _iq4_xs,
}


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 value at a byte offset of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Unpack nibbles. Byte i of a block has element i in its low and element i + 16 in its high half."""
    return np.concatenate((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Unpack fifth bits: bit i of four little-endian bytes becomes 16 or 0 for element i."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _nibble_chunks(packed: Bytes) -> Bytes:
    """Unpack 128 bytes to 8 groups. Each 32 bytes have one group in their low and the next one in their high halves."""
    chunks = packed.reshape(*packed.shape[:-1], 4, 1, 32)
    both = np.concatenate((chunks & np.uint8(15), chunks >> np.uint8(4)), axis=-2)
    return both.reshape(*packed.shape[:-1], 8, 32)


def _grouped(blocks: Bytes, values: Bytes) -> Groups:
    """Dequantize groups of Q4_K and Q5_K: each has a 6-bit scale of `d` and a 6-bit minimum of `dmin`, packed in 12
    bytes.

    Bytes 0..3 and 4..7 contain the scales and minima of groups 0..3 in their low six bits. Groups 4..7 have their low
    four bits in bytes 8..11 (scale in the low, minimum in the high half) and their upper two bits in the upper bits of
    bytes 0..7.
    """
    rows, num_groups = blocks.shape[:-2], blocks.shape[-2] * 8
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    low, high, top = np.uint8(63), np.uint8(15), np.uint8(6)
    scales = np.concatenate((first & low, (third & high) | ((first >> top) << np.uint8(4))), axis=-1)
    minima = np.concatenate((second & low, (third >> np.uint8(4)) | ((second >> top) << np.uint8(4))), axis=-1)
    with np.errstate(invalid="ignore"):
        return Groups(
            values.reshape(*rows, num_groups, 32),
            (_half(blocks, 0)[..., None] * scales.astype(np.float32)).reshape(*rows, num_groups),
            offsets=-(_half(blocks, 2)[..., None] * minima.astype(np.float32)).reshape(*rows, num_groups),
        )
