"""The container: what is right is read as stored, what is wrong is refused with its name."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from lockstep.artifacts.gguf_file import read_gguf
from lockstep.errors import ArtifactNotFoundError, CorruptArtifactError, UnsupportedArtifactError
from tests.artifacts.support import F32, LLAMA, HandMadeGguf, boolean, f32, floats, string, strings, text, u32
from tools.random_models import ENCODINGS, write_gguf


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_tensors_and_values_equal_those_of_the_reference_reader(encoding: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "small-llama", encoding)
    ours, reference = read_gguf(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        found = ours.tensors[tensor.name]
        assert found.encoding.value == tensor.tensor_type.name
        assert found.shape == tuple(int(length) for length in reversed(tensor.shape))
        assert found.data.tobytes() == tensor.data.tobytes()
    for key, entry in reference.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata.values[key]
            value = value.tolist() if isinstance(value, np.ndarray) else value
            assert (ours.metadata.strings(key) if callable(value) else value) == entry.contents()


def test_tensors_are_views_that_outlive_the_file_object(tmp_path: Path) -> None:
    tensor = read_gguf(write_gguf(tmp_path / "m.gguf", "tiny-llama", "F32")).tensors["output_norm.weight"]
    assert not tensor.data.flags.owndata
    assert not tensor.data.flags.writeable
    assert np.isfinite(tensor.data).all()


def test_each_kind_of_value_is_read(tmp_path: Path) -> None:
    made = HandMadeGguf(
        {
            "u8": struct.pack("<IB", 0, 200),
            "i8": struct.pack("<Ib", 1, -5),
            "u16": struct.pack("<IH", 2, 60000),
            "i16": struct.pack("<Ih", 3, -300),
            "u64": struct.pack("<IQ", 10, 1 << 40),
            "i64": struct.pack("<Iq", 11, -(1 << 40)),
            "f64": struct.pack("<Id", 12, 0.1),
            "flag": boolean(True),
            "text": text("naïve"),
            "list": strings(["a", "", "ü"]),
            "numbers": floats([1.5, -2.0]),
        }
    )
    metadata = read_gguf(made.write(tmp_path)).metadata
    keys = ("u8", "i8", "u16", "i16", "u64", "i64")
    assert [metadata.integer(key) for key in keys] == [200, -5, 60000, -300, 1 << 40, -(1 << 40)]
    assert metadata.real("f64") == 0.1
    assert metadata.flag("flag", False)
    assert metadata.text("text") == "naïve"
    assert metadata.strings("list") == ["a", "", "ü"]
    assert metadata.numbers("numbers").tolist() == [1.5, -2.0]


def test_alignment_is_the_files_own(tmp_path: Path) -> None:
    """The data begin at a multiple of 8 that is none of the default 32."""
    made = HandMadeGguf(
        {"general.alignment": u32(8)}, tensors={"a": ((2,), F32), "a longer name": ((3,), F32)}, alignment=8
    )
    made.arrays = {"a": np.array([1, 2], np.float32), "a longer name": np.array([3, 4, 5], np.float32)}
    content = made.content()
    assert (len(content) - 24) % 32 != 0
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tensors = read_gguf(path).tensors
    assert [tensors[name].data.tolist() for name in ("a", "a longer name")] == [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize("keep", [0, 3, 4, 12, 23, 24, 30, 100, 0.2, 0.5, 0.9, -1])
def test_a_truncated_file_is_corrupt(keep: float, tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "m.gguf", "tiny-llama", "Q8_0").read_bytes()
    size = int(len(content) * keep) if isinstance(keep, float) else keep % len(content)
    path = tmp_path / "cut.gguf"
    # The last tensor ends at the end but for padding: cut more than that.
    path.write_bytes(content[:size] if keep != -1 else content[:-33])
    with pytest.raises(CorruptArtifactError, match=r"cut\.gguf"):
        read_gguf(path)


CORRUPT = {
    "magic": (HandMadeGguf(magic=b"GGML"), "b'GGML'"),
    "huge number of values": (HandMadeGguf(num_values=1 << 60), "metadata values"),
    "huge number of tensors": (HandMadeGguf(num_tensors=1 << 60), "tensors; at most"),
    "one value too many": (HandMadeGguf(num_values=len(LLAMA) + 1), "made.gguf"),
    "unknown value type": (HandMadeGguf({"key": struct.pack("<II", 77, 0)}), "value type 77"),
    "nested list": (HandMadeGguf({"key": struct.pack("<IIQ", 9, 9, 1)}), "value type 9"),
    "huge list of strings": (HandMadeGguf({"key": struct.pack("<IIQ", 9, 8, 1 << 62)}), "strings, more than"),
    "huge list of numbers": (HandMadeGguf({"key": struct.pack("<IIQ", 9, 4, 1 << 62)}), "ends inside 'key'"),
    "huge string": (HandMadeGguf({"key": struct.pack("<IQ", 8, 1 << 62)}), "ends inside 'key'"),
    "huge string in a list": (HandMadeGguf({"key": struct.pack("<IIQQ", 9, 8, 1, 1 << 62)}), "ends inside 'key'"),
    "string is not UTF-8": (HandMadeGguf({"key": struct.pack("<I", 8) + string(b"\xff")}), "'key' is not UTF-8"),
    "list is not UTF-8": (HandMadeGguf({"key": struct.pack("<IIQ", 9, 8, 1) + string(b"\xc3")}), "not UTF-8"),
    "alignment": (HandMadeGguf({"general.alignment": u32(24)}), "alignment 24"),
    "alignment of zero": (HandMadeGguf({"general.alignment": u32(0)}), "alignment 0"),
    "offset out of bounds": (HandMadeGguf(offsets={"output_norm.weight": 1 << 40}), "output_norm.weight"),
    "offset that wraps": (HandMadeGguf(offsets={"output_norm.weight": (1 << 64) - 32}), "output_norm.weight"),
    "offset not aligned": (HandMadeGguf(offsets={"token_embd.weight": 4}), "token_embd.weight"),
    "overlap": (HandMadeGguf(offsets={"blk.0.attn_norm.weight": 32}), "overlap"),
    "no dimension": (HandMadeGguf(tensors={"a": ((), F32)}), "0 dimensions"),
    "five dimensions": (HandMadeGguf(tensors={"a": ((1,) * 5, F32)}), "5 dimensions"),
    "length of zero": (HandMadeGguf(tensors={"a": ((2, 0), F32)}), r"\[2, 0\]"),
    "half a block": (HandMadeGguf(tensors={"a": ((2, 48), 8)}), r"\[2, 48\]"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_a_file_that_contradicts_itself_is_corrupt(case: str, tmp_path: Path) -> None:
    made, message = CORRUPT[case]
    with pytest.raises(CorruptArtifactError, match=message):
        read_gguf(made.write(tmp_path)).metadata.strings("key")


def test_a_name_that_appears_twice_is_corrupt(tmp_path: Path) -> None:
    path = HandMadeGguf({"key": u32(1), "kez": u32(2)}, tensors={}).write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"kez", b"key"))
    with pytest.raises(CorruptArtifactError, match="'key' appears twice"):
        read_gguf(path)
    path = HandMadeGguf({}, tensors={"aa": ((8,), F32), "ab": ((8,), F32)}).write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"ab", b"aa"))
    with pytest.raises(CorruptArtifactError, match="'aa' appears twice"):
        read_gguf(path)


UNSUPPORTED = {
    "Q2_K": (HandMadeGguf(tensors={"a": ((8, 256), 10)}), "'a' is Q2_K; .* F32, F16, BF16, Q8_0, Q4_0, .* Q6_K"),
    "unknown type": (HandMadeGguf(tensors={"a": ((8, 256), 999)}), "of ggml type 999"),
    "version 1": (HandMadeGguf(version=1), "version 1"),
    "big-endian": (HandMadeGguf(version=3 << 24), "big-endian"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_kind_that_is_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    made, message = UNSUPPORTED[case]
    with pytest.raises(UnsupportedArtifactError, match=message):
        read_gguf(made.write(tmp_path))


def test_a_file_that_cannot_be_read_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="No such file"):
        read_gguf(tmp_path / "none.gguf")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_corrupt(value: float, tmp_path: Path) -> None:
    metadata = read_gguf(HandMadeGguf({"key": f32(value)}).write(tmp_path)).metadata
    with pytest.raises(CorruptArtifactError, match=r"'key' is (nan|inf); a finite number is expected"):
        metadata.real("key")
