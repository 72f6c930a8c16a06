"""Safetensors files: reads the tensors of one file as views of its memory map.

The format is described in the README of huggingface/safetensors: a length, a JSON header and the data. The
`safetensors` package is not used, because its numpy interface copies every tensor and does not support bfloat16. The
tests compare with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.artifacts.metadata import parse_object
from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.tensors import FLOAT_TYPES, MappedTensors, num_stored_bytes
from lockstep.errors import CorruptArtifactError, UnsupportedArtifactError

_MAX_HEADER_BYTES = 100_000_000
"""Maximum header size, defined by the format."""
_MAX_DIMENSIONS = 4
_ENCODINGS: Mapping[str, Encoding] = {encoding.value: encoding for encoding in FLOAT_TYPES}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file in header order, as views that keep the memory map open.

    Raises:
        ArtifactNotFoundError: the file cannot be read.
        CorruptArtifactError: the file is truncated or inconsistent.
        UnsupportedArtifactError: a dtype is not supported.
    """
    file = MappedTensors(path, 8, "a safetensors header")
    header_bytes = int.from_bytes(file.buffer[:8], "little")
    if header_bytes > min(_MAX_HEADER_BYTES, len(file.buffer) - 8):
        raise CorruptArtifactError(
            f"declares a header of {header_bytes} bytes in a file of {len(file.buffer)}; is the download complete?",
            path=path,
        )
    header = parse_object(file.buffer[8 : 8 + header_bytes], path)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        encoding, shape, begin = _entry(name, entry, path)
        file.add(name, encoding, shape, 8 + header_bytes + begin)
    return file.tensors()


def _entry(name: str, entry: object, path: Path) -> tuple[Encoding, tuple[int, ...], int]:
    """Encoding, shape and offset in the data part. The size is checked against the shape."""
    match entry:
        case {"dtype": str(dtype_name), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise CorruptArtifactError(f"the header entry of tensor {name!r} is malformed", path=path)
    if len(shape) > _MAX_DIMENSIONS or not all(type(length) is int and length > 0 for length in shape):
        raise CorruptArtifactError(f"tensor {name!r} has shape {shape}", path=path)
    if dtype_name not in _ENCODINGS:
        raise UnsupportedArtifactError(
            f"tensor {name!r} is {dtype_name}; the types that are read are {', '.join(_ENCODINGS)}", path=path
        )
    encoding = _ENCODINGS[dtype_name]
    num_bytes = num_stored_bytes(encoding, tuple(shape))
    if begin < 0 or end - begin != num_bytes:
        raise CorruptArtifactError(
            f"tensor {name!r} of shape {shape} lies at {begin}..{end}; {num_bytes} bytes are expected", path=path
        )
    return encoding, tuple(shape), begin
