"""Stored numbers are read exactly: as ggml's C code does, and as its Python package does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.quantisation import bfloat16_to_float32, dequantise, unpack_q4_0, unpack_q8_0
from tools.random_models import random_tensor

GOLDEN = np.load(Path(__file__).resolve().parents[1] / "golden" / "dequantised.npz")
VIEWS = {Encoding.F16: "<f2", Encoding.BF16: "<u2"}


@pytest.mark.parametrize("encoding", [Encoding.F16, Encoding.BF16, Encoding.Q8_0, Encoding.Q4_0])
def test_every_bit_equals_what_ggml_reads(encoding: Encoding) -> None:
    """Zeros of both signs, subnormal and largest scales included; the sign of a zero counts."""
    stored, values = GOLDEN[f"{encoding.value} stored"], GOLDEN[f"{encoding.value} values"]
    data = stored.view(VIEWS.get(encoding, "u1"))
    found = dequantise(Tensor("t", encoding, values.shape, data))
    np.testing.assert_array_equal(found.view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("encoding", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_random_tensors_equal_the_reference_package(encoding: str) -> None:
    data = random_tensor("t", (96, 160), encoding, seed=2)
    raw = data if encoding == "F16" else data.view(np.uint8)
    reference = dequantize(raw, gguf.GGMLQuantizationType[encoding])
    np.testing.assert_array_equal(dequantise(Tensor("t", Encoding(encoding), (96, 160), data)), reference)


def test_float32_is_not_copied() -> None:
    data = np.ones((4, 32), np.float32)
    assert np.shares_memory(dequantise(Tensor("t", Encoding.F32, data.shape, data)), data)


def test_unpacked_values_are_in_element_order() -> None:
    """Element i of a Q4_0 block is the low half of byte i, element i + 16 the high half."""
    block = np.zeros((1, 18), np.uint8)
    block[0, :2] = np.float16(2.0).tobytes()[0], np.float16(2.0).tobytes()[1]
    block[0, 2:] = np.arange(16) | ((15 - np.arange(16)) << 4)
    values, scales = unpack_q4_0(Tensor("t", Encoding.Q4_0, (1, 32), block))
    assert values.shape == (1, 1, 32)
    assert values.dtype == np.uint8
    assert values[0, 0].tolist() == [*range(16), *range(15, -1, -1)]
    assert scales.tolist() == [[2.0]]


def test_unpacked_shapes_and_types_of_q8_0() -> None:
    data = random_tensor("t", (6, 64), "Q8_0", seed=0)
    values, scales = unpack_q8_0(Tensor("t", Encoding.Q8_0, (6, 64), data))
    assert (values.shape, scales.shape) == ((6, 2, 32), (6, 2))
    assert (values.dtype.name, scales.dtype.name) == ("int8", "float16")


def test_bfloat16_of_any_shape_widens() -> None:
    bits = np.array([[0x3F80, 0xC000], [0x0000, 0x8000]], np.uint16)
    assert bfloat16_to_float32(bits).tolist() == [[1.0, -2.0], [0.0, -0.0]]


def test_asking_for_the_wrong_unpacking_is_a_programmers_error() -> None:
    with pytest.raises(AssertionError, match="t is F32, not Q8_0"):
        unpack_q8_0(Tensor("t", Encoding.F32, (1, 32), np.zeros((1, 32), np.float32)))


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0"])
def test_a_damaged_scale_shows_as_numbers_that_are_not_finite(encoding: str) -> None:
    data = random_tensor("t", (1, 32), encoding, seed=0)
    data[0, :2] = np.array([0x00, 0x7C], np.uint8)
    values = dequantise(Tensor("t", Encoding(encoding), (1, 32), data))
    assert not np.isfinite(values).any()
