"""The safetensors container, memory-mapped. Source of the format: the README of huggingface/safetensors.

Why not the `safetensors` package: its numpy side copies every tensor and has no bfloat16. The format is a length, a
JSON header and the data; the tests compare with the package.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from lockstep.artifacts.json_file import parse_object
from lockstep.artifacts.model import Encoding, Tensor
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError

_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_MAX_DIMENSIONS = 4

_DTYPES: Mapping[str, tuple[Encoding, np.dtype[np.generic]]] = {
    "F32": (Encoding.F32, np.dtype("<f4")),
    "F16": (Encoding.F16, np.dtype("<f2")),
    "BF16": (Encoding.BF16, np.dtype("<u2")),
}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file in header order, as views that keep the map alive.

    Raises:
        ArtifactNotFoundError: the file cannot be read.
        CorruptArtifactError: it is truncated or contradicts itself.
        UnsupportedArtifactError: a dtype that we do not know.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 8:
                raise CorruptArtifactError(f"{size} bytes are too few for a safetensors header", path=path)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ArtifactNotFoundError(f"cannot be read ({error.strerror})", path=path) from error
    header_bytes = int.from_bytes(mapped[:8], "little")
    if header_bytes > min(_MAX_HEADER_BYTES, len(mapped) - 8):
        raise CorruptArtifactError(
            f"declares a header of {header_bytes} bytes in a file of {len(mapped)}; is the download complete?",
            path=path,
        )
    header = parse_object(mapped[8 : 8 + header_bytes], path)
    header.pop("__metadata__", None)
    tensors: dict[str, Tensor] = {}
    extents: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        encoding, dtype, shape, begin, end = _entry(name, entry, path)
        start, stop = 8 + header_bytes + begin, 8 + header_bytes + end
        if stop > len(mapped):
            raise CorruptArtifactError(
                f"tensor {name!r} lies at bytes {start}..{stop} of a file of {len(mapped)}; is the download complete?",
                path=path,
            )
        extents.append((start, stop, name))
        data = np.frombuffer(mapped, np.uint8, stop - start, start).view(dtype).reshape(shape)
        tensors[name] = Tensor(name, encoding, shape, data)
    extents.sort()
    for (_, stop, first), (start, _, second) in pairwise(extents):
        if start < stop:
            raise CorruptArtifactError(f"tensors {first!r} and {second!r} overlap", path=path)
    return tensors


def _entry(name: str, entry: object, path: Path) -> tuple[Encoding, np.dtype[np.generic], tuple[int, ...], int, int]:
    """Encoding, dtype, shape and extent in the data part; the extent is what the shape needs."""
    match entry:
        case {"dtype": str(dtype_name), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise CorruptArtifactError(f"the header entry of tensor {name!r} is malformed", path=path)
    if len(shape) > _MAX_DIMENSIONS or not all(type(length) is int and length > 0 for length in shape):
        raise CorruptArtifactError(f"tensor {name!r} has shape {shape}", path=path)
    if dtype_name not in _DTYPES:
        raise UnsupportedArtifactError(
            f"tensor {name!r} is {dtype_name}; the types that are read are {', '.join(_DTYPES)}", path=path
        )
    encoding, dtype = _DTYPES[dtype_name]
    num_bytes = dtype.itemsize
    for length in shape:
        num_bytes *= length
    if begin < 0 or end - begin != num_bytes:
        raise CorruptArtifactError(
            f"tensor {name!r} of shape {shape} lies at {begin}..{end}; {num_bytes} bytes are expected", path=path
        )
    return encoding, dtype, tuple(shape), begin, end
