"""Stored numbers are read exactly: as ggml's C code does, and as its Python package does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.tensors import BLOCKS, bfloat16_to_float32, dequantise, unpack
from tools.random_models import random_tensor

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "dequantised.npz")
VIEWS = {Encoding.F16: "<f2", Encoding.BF16: "<u2"}


@pytest.mark.parametrize("encoding", [Encoding.F16, Encoding.BF16, *BLOCKS])
def test_dequantised_bits_equal_those_of_ggml(encoding: Encoding) -> None:
    """Zeros of both signs, subnormal and largest scales included; the sign of a zero counts."""
    stored, values = GOLDEN[f"{encoding.value} stored"], GOLDEN[f"{encoding.value} values"]
    data = stored.view(VIEWS.get(encoding, "u1"))
    found = dequantise(Tensor("t", encoding, values.shape, data))
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("encoding", ["F16", "BF16", *(encoding.value for encoding in BLOCKS)])
def test_random_tensors_equal_the_reference_package(encoding: str) -> None:
    data = random_tensor("t", (96, 512), encoding, seed=2)
    raw = data if encoding == "F16" else data.view(np.uint8)
    reference = dequantize(raw, gguf.GGMLQuantizationType[encoding])
    np.testing.assert_array_equal(dequantise(Tensor("t", Encoding(encoding), (96, 512), data)), reference)


def test_float32_is_not_copied() -> None:
    data = np.ones((4, 32), np.float32)
    assert np.shares_memory(dequantise(Tensor("t", Encoding.F32, data.shape, data)), data)


def test_unpacked_values_are_in_element_order() -> None:
    """Element i of a Q4_0 block is the low half of byte i, element i + 16 the high half."""
    block = np.zeros((1, 18), np.uint8)
    block[0, :2] = np.float16(2.0).tobytes()[0], np.float16(2.0).tobytes()[1]
    block[0, 2:] = np.arange(16) | ((15 - np.arange(16)) << 4)
    groups = unpack(Tensor("t", Encoding.Q4_0, (1, 32), block))
    assert groups.values.shape == (1, 1, 32)
    assert groups.values.dtype == np.uint8
    assert groups.values[0, 0].tolist() == [*range(16), *range(15, -1, -1)]
    assert groups.scales.tolist() == [[2.0]]
    assert groups.zero_point == 8


@pytest.mark.parametrize("encoding", BLOCKS)
def test_unpacked_groups_have_the_documented_shapes_and_ranges(encoding: Encoding) -> None:
    groups = unpack(Tensor("t", encoding, (6, 512), random_tensor("t", (6, 512), encoding.value, seed=0)))
    size = 16 if encoding in (Encoding.Q3_K, Encoding.Q6_K) else 32
    assert groups.values.shape == (6, 512 // size, size)
    assert groups.scales.shape == (6, 512 // size)
    assert (groups.offsets is not None) == (encoding.value in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"))
    ranges = {Encoding.Q8_0: (-128, 127), Encoding.IQ4_NL: (-127, 113), Encoding.IQ4_XS: (-127, 113)}
    low, high = ranges.get(encoding) or (0, 2 ** int(encoding.value[1]) - 1)
    assert (int(groups.values.min()), int(groups.values.max())) == (low, high)


def test_bfloat16_of_any_shape_widens() -> None:
    bits = np.array([[0x3F80, 0xC000], [0x0000, 0x8000]], np.uint16)
    assert bfloat16_to_float32(bits).tolist() == [[1.0, -2.0], [0.0, -0.0]]


def test_a_damaged_scale_shows_as_numbers_that_are_not_finite() -> None:
    for encoding, (num_values, _) in BLOCKS.items():
        data = random_tensor("t", (1, num_values), encoding.value, seed=0)
        place = {Encoding.Q6_K: 208, Encoding.Q3_K: 108}.get(encoding, 0)
        data[0, place : place + 2] = np.array([0x00, 0x7C], np.uint8)
        values = dequantise(Tensor("t", encoding, (1, num_values), data))
        assert not np.isfinite(values).all()
