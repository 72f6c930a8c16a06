"""GGUF container reader: memory-maps a file and reads its metadata and tensors; every length is checked first.

Source of the format: ggml's `docs/gguf.md`, versions 2 and 3. Independent of architectures and tokenizers.

`gguf.GGUFReader` is not used, because it creates an array object for each list element (measured: 12.9 s instead of 0.1
s for a vocabulary of 151,936 tokens with merges), and reports corrupt files as `ValueError`, `KeyError` or
`MemoryError` from inside numpy. The tests compare with its types and its dequantization.
"""

from __future__ import annotations

import functools
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.metadata import Metadata
from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.tensors import BLOCKS, MappedTensors
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError

Value = bool | int | float | str | Callable[[], list[str]] | npt.NDArray[np.generic]

_MAX_ENTRIES = 1 << 16
"""Maximum number of metadata keys or tensors. No model has more; a corrupt count is rejected before the loop."""
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Mapping[int, np.dtype[np.generic]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

# Supported encodings by ggml type number.
_ENCODINGS: Mapping[int, Encoding] = {
    0: Encoding.F32,
    1: Encoding.F16,
    30: Encoding.BF16,
    8: Encoding.Q8_0,
    2: Encoding.Q4_0,
    3: Encoding.Q4_1,
    6: Encoding.Q5_0,
    7: Encoding.Q5_1,
    12: Encoding.Q4_K,
    13: Encoding.Q5_K,
    14: Encoding.Q6_K,
    11: Encoding.Q3_K,
    20: Encoding.IQ4_NL,
    23: Encoding.IQ4_XS,
}

# Other ggml types, which errors name.
_OTHER_TYPES: Mapping[int, str] = {
    9: "Q8_1", 10: "Q2_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened file. The tensors are views of the memory map and keep it open."""

    path: Path
    metadata: Metadata
    tensors: Mapping[str, Tensor] = field(repr=False)
    """Tensors by name, with the names and order of the file."""


def read_gguf(path: Path) -> GgufFile:
    """Map a file and check its whole structure.

    Raises:
        ArtifactNotFoundError: the file cannot be read.
        CorruptArtifactError: the file is truncated or inconsistent.
        UnsupportedArtifactError: the version, byte order or a tensor type is not supported.
    """
    return _Reader(MappedTensors(path, 24, "a GGUF header (24)")).read()


class _Reader:
    """Reads sequentially from the mapped file, and never beyond its end."""

    def __init__(self, file: MappedTensors) -> None:
        self._file = file
        self._path = file.path
        self._buffer = file.buffer
        self._end = len(file.buffer)
        self._position = 0

    def read(self) -> GgufFile:
        num_tensors, num_values = self._header()
        values: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._string("a metadata key")
            if key in values:
                self._corrupt(f"metadata {key!r} appears twice")
            values[key] = self._value(key)
        metadata = Metadata(self._path, values)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.integer("general.alignment", _DEFAULT_ALIGNMENT)
        if not (1 <= alignment <= _MAX_ALIGNMENT and alignment & (alignment - 1) == 0):
            self._corrupt(f"alignment {alignment}; a power of two up to {_MAX_ALIGNMENT} is expected")
        data_start = -(-self._position // alignment) * alignment
        return GgufFile(self._path, metadata, self._tensors(infos, data_start, alignment))

    def _header(self) -> tuple[int, int]:
        magic, version = struct.unpack("<4sI", self._take(8, "the header"))
        if magic != b"GGUF":
            self._corrupt(f"is no GGUF file: it starts with {magic!r}")
        if version & 0xFFFF == 0:
            raise UnsupportedArtifactError("a big-endian GGUF file; little-endian ones are read", path=self._path)
        if version not in (2, 3):
            raise UnsupportedArtifactError(f"GGUF version {version}; versions 2 and 3 are read", path=self._path)
        num_tensors, num_values = struct.unpack("<QQ", self._take(16, "the header"))
        for count, what in ((num_tensors, "tensors"), (num_values, "metadata values")):
            if count > _MAX_ENTRIES:
                self._corrupt(f"declares {count} {what}; at most {_MAX_ENTRIES} are read")
        return num_tensors, num_values

    def _value(self, key: str) -> Value:
        kind = self._u32(key)
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        scalar = self._numbers(key, kind, 1)[0]
        return bool(scalar) if kind == _BOOL else scalar.item()

    def _array(self, key: str) -> Value:
        kind, count = self._u32(key), self._u64(key)
        if kind == _STRING:
            return self._strings(key, count)
        return self._numbers(key, kind, count)

    def _numbers(self, key: str, kind: int, count: int) -> npt.NDArray[np.generic]:
        dtype = _SCALARS.get(kind)
        if dtype is None:
            self._corrupt(f"metadata {key!r} has value type {kind}, which GGUF does not define here")
        return np.frombuffer(self._take(count * dtype.itemsize, key), dtype)

    def _strings(self, key: str, count: int) -> Callable[[], list[str]]:
        """Check the extent of a list of strings. The strings are decoded later, by the returned function.

        This is the only hot loop: a vocabulary with its merges has about 300,000 strings, which are not always needed.
        """
        if count * 8 > self._end - self._position:
            self._corrupt(f"metadata {key!r} declares {count} strings, more than the file holds")
        start = position = self._position
        length_at = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                position += 8 + length_at(self._buffer, position)[0]
        except (struct.error, OverflowError):
            self._truncated(key)
        if position > self._end:
            self._truncated(key)
        self._position = position
        return functools.partial(_read_strings, self._path, key, self._buffer, start, count)

    def _string(self, what: str) -> str:
        try:
            return str(self._take(self._u64(what), what), "utf-8")
        except UnicodeDecodeError:
            self._corrupt(f"{what!r} is not UTF-8")

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        """Read name, ggml type, shape (row-major) and offset in the data part."""
        name = self._string("a tensor name")
        num_dimensions = self._u32(name)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._corrupt(f"tensor {name!r} has {num_dimensions} dimensions; 1 to {_MAX_DIMENSIONS} are expected")
        shape = tuple(self._u64(name) for _ in range(num_dimensions))[::-1]
        return name, self._u32(name), shape, self._u64(name)

    def _tensors(
        self, infos: list[tuple[str, int, tuple[int, ...], int]], data_start: int, alignment: int
    ) -> dict[str, Tensor]:
        for name, kind, shape, offset in infos:
            encoding = self._encoding(name, kind)
            block_values, _ = BLOCKS.get(encoding, (1, 0))
            if 0 in shape or shape[-1] % block_values:
                self._corrupt(f"tensor {name!r} has shape {list(shape)}; rows of {block_values}n values are expected")
            self._file.add(name, encoding, shape, data_start + offset, alignment)
        return self._file.tensors()

    def _encoding(self, name: str, kind: int) -> Encoding:
        known = _ENCODINGS.get(kind)
        if known is None:
            found = _OTHER_TYPES.get(kind, f"of ggml type {kind}")
            names = ", ".join(encoding.value for encoding in _ENCODINGS.values())
            raise UnsupportedArtifactError(
                f"tensor {name!r} is {found}; the types that are read are {names}", path=self._path
            )
        return known

    def _take(self, num_bytes: int, what: str) -> bytes:
        stop = self._position + num_bytes
        if stop > self._end:
            self._truncated(what)
        taken = self._buffer[self._position : stop]
        self._position = stop
        return taken

    def _u32(self, what: str) -> int:
        return int.from_bytes(self._take(4, what), "little")

    def _u64(self, what: str) -> int:
        return int.from_bytes(self._take(8, what), "little")

    def _truncated(self, what: str) -> NoReturn:
        self._corrupt(f"ends inside {what!r}; is the download complete?")

    def _corrupt(self, problem: str) -> NoReturn:
        raise CorruptArtifactError(problem, path=self._path)


def _read_strings(path: Path, key: str, buffer: mmap.mmap, position: int, count: int) -> list[str]:
    """Decode a list of strings whose extent has been checked."""
    strings = []
    length_at = struct.Struct("<Q").unpack_from
    try:
        for _ in range(count):
            start = position + 8
            position = start + length_at(buffer, position)[0]
            strings.append(str(buffer[start:position], "utf-8"))
    except UnicodeDecodeError as error:
        raise CorruptArtifactError(f"string {len(strings)} of {key!r} is not UTF-8", path=path) from error
    return strings
