"""The container: equal to what the library reads, and every contradiction refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from lockstep.artifacts.model import Encoding
from lockstep.artifacts.safetensors_file import read_safetensors
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError
from tools.random_models import as_float, write_safetensors


def test_tensors_equal_those_of_the_library(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "a": rng.standard_normal((3, 5), np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
    }
    save_file(arrays, tmp_path / "m.safetensors", metadata={"format": "np"})
    found = read_safetensors(tmp_path / "m.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].data, array)
        assert not found[name].data.flags.owndata
    assert [found[name].encoding for name in ("a", "b")] == [Encoding.F32, Encoding.F16]


def test_bfloat16_is_kept_as_its_bits(tmp_path: Path) -> None:
    bits = as_float(np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4), "BF16")
    write_safetensors(tmp_path / "m.safetensors", {"a": bits})
    tensor = read_safetensors(tmp_path / "m.safetensors")["a"]
    assert (tensor.encoding, tensor.shape, tensor.data.dtype.name) == (Encoding.BF16, (3, 4), "uint16")
    np.testing.assert_array_equal(tensor.data, bits)


def test_written_safetensors_are_read_by_the_library(tmp_path: Path) -> None:
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(4, dtype=np.float16),
    }
    write_safetensors(tmp_path / "m.safetensors", arrays)
    loaded = load_file(tmp_path / "m.safetensors")
    assert all(np.array_equal(loaded[name], arrays[name]) for name in arrays)


def write(path: Path, header: Mapping[str, object] | bytes, data: bytes, declared: int | None = None) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(content) if declared is None else declared
    path.write_bytes(length.to_bytes(8, "little") + content + data)
    return path


def entry(shape: object = (2,), begin: object = 0, end: object = 8, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


CORRUPT: dict[str, tuple[Mapping[str, object] | bytes, str]] = {
    "not JSON": (b"{]", "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', "not valid JSON"),
    "deeply nested": (b"[" * 100_000, "not valid JSON"),
    "a list": (b"[]", "an object is expected"),
    "a name twice": (b'{"a": 1, "a": 2}', "appears twice"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, "'a' is malformed"),
    "not an object": ({"a": 3}, "'a' is malformed"),
    "offset is a float": ({"a": entry(begin=0.0)}, "malformed"),
    "negative length": ({"a": entry(shape=[-2])}, r"shape \[-2\]"),
    "boolean length": ({"a": entry(shape=[True])}, "shape"),
    "five dimensions": ({"a": entry(shape=[1, 1, 1, 1, 2])}, "shape"),
    "too short for its shape": ({"a": entry(shape=[3])}, "12 bytes are expected"),
    "huge shape": ({"a": entry(shape=[1 << 62, 1 << 62])}, "bytes are expected"),
    "negative begin": ({"a": entry(begin=-8, end=0)}, "-8..0"),
    "beyond the end": ({"a": entry(begin=16, end=24)}, "of a file of"),
    "overlap": ({"a": entry(), "b": entry(begin=4, end=12)}, "overlap"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_file_that_contradicts_itself_is_corrupt(case: str, tmp_path: Path) -> None:
    header, message = CORRUPT[case]
    path = write(tmp_path / "m.safetensors", header, b"\0" * 16)
    with pytest.raises(CorruptArtifactError, match=message) as caught:
        read_safetensors(path)
    assert caught.value.path == path


@pytest.mark.parametrize("size", [0, 7, 8, 20, 60, -1])
def test_a_truncated_file_is_corrupt(size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"a": entry()}, b"\0" * 8)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CorruptArtifactError, match=r"m\.safetensors"):
        read_safetensors(path)


def test_a_huge_header_is_corrupt(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"a": entry()}, b"", declared=1 << 63)
    with pytest.raises(CorruptArtifactError, match="declares a header of 9223372036854775808 bytes"):
        read_safetensors(path)


def test_another_dtype_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"a": entry(dtype="F8_E4M3")}, b"\0" * 8)
    with pytest.raises(UnsupportedArtifactError, match="'a' is F8_E4M3; the types that are read are F32, F16, BF16"):
        read_safetensors(path)


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="No such file"):
        read_safetensors(tmp_path / "m.safetensors")
