"""Products have the same bits for every instruction set, number of rows and thread, and the values of the formats."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lockstep.artifacts.model import Encoding, Tensor
from lockstep.artifacts.tensors import dequantise
from lockstep.executors.native.library import NativeLibrary
from lockstep.executors.native.products import FLOAT_TYPES, ThreadPool, multiply, multiply_floats, quantise
from lockstep.executors.native.weights import KINDS, aligned_bytes, int4_blocks, int8_blocks, pack
from tests.executors.native.native_products import (
    Floats,
    build_common,
    build_portable,
    extreme_weights,
    libraries,
    product,
    weights_of,
)

LIBRARIES = libraries()
COLUMNS = 768
BEST = LIBRARIES[-1]
ONE = 0x3C00


def rows_of(count: int, columns: int = COLUMNS, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal((count, columns)).astype(np.float32)


def adversarial_rows(columns: int = COLUMNS) -> Floats:
    """Groups of zeros, denormals, one large number, extremes, ties, and rows with NaN and infinities."""
    rows = rows_of(12, columns)
    rows[0] = 0
    rows[1, ::2] = 1e-42
    rows[2, 5], rows[2, 40:60] = 3e38, 0
    rows[3] = np.where(np.arange(columns) % 3, 1.0, -1.0)
    rows[4] = -1
    rows[5] = (np.arange(columns) % 32 * 8 + 0.5) / 2
    rows[5, ::32] = 127
    rows[6, 7] = np.nan
    rows[7, 70] = -np.inf
    rows[8, 700:] = np.inf
    rows[9] *= np.float32(2.0**-99)
    rows[10, 1::2] = -0.0
    rows[11, :32] = np.array([0xFFC12345], np.uint32).view(np.float32)
    return rows


@pytest.mark.parametrize("features", [96, 33, 1])
@pytest.mark.parametrize("encoding", KINDS)
def test_instruction_sets_agree_on_random_and_adversarial_rows(encoding: Encoding, features: int) -> None:
    tensor = weights_of(encoding, features, COLUMNS)
    for x in (rows_of(7), adversarial_rows()):
        first, *others = [product(library, tensor, x) for library in LIBRARIES]
        assert all(other.tobytes() == first.tobytes() for other in others)
    is_nan = np.isnan(first).any(axis=1)
    assert list(np.flatnonzero(is_nan)) == [6, 7, 8, 11], "NaN stays in its row"
    assert set(first[is_nan].view(np.uint32).reshape(-1)) == {0x7FC00000}


@pytest.mark.parametrize("encoding", KINDS)
def test_instruction_sets_agree_at_the_extremes_of_codes(encoding: Encoding) -> None:
    x = np.repeat(np.array([[1.0], [-1.0]], np.float32), COLUMNS, axis=1)
    for byte, half in itertools.product((0x00, 0x7F, 0x80, 0xFF), (ONE, 0xBC00, 0x0001, 0x7BFF, 0x7C00, 0x7E01)):
        tensor = extreme_weights(encoding, 33, COLUMNS, byte, half)
        first, *others = [product(library, tensor, x) for library in LIBRARIES]
        assert all(other.tobytes() == first.tobytes() for other in others), (byte, half)


def test_sums_of_pairs_never_saturate() -> None:
    """All pairs of a code and a number: ``maddubs`` adds so many products in sixteen bits as product_avx2.cpp lists."""
    numbers = np.arange(-127, 128)
    for codes, pairs in ((256, None), (16, 8), (32, 4), (64, 2)):
        weights = np.abs(np.arange(-128, 128)) if pairs is None else np.arange(codes)
        products = np.multiply.outer(weights, numbers)
        count = 2 * (pairs or 1)
        assert products.min() * count >= -(2**15)
        assert products.max() * count < 2**15
    assert 2 * 255 * 127 >= 2**15, "codes of eight bits without their signs taken off would saturate"


@pytest.mark.parametrize("encoding", KINDS)
def test_a_row_has_the_same_bits_alone_and_among_others(encoding: Encoding) -> None:
    tensor, x = weights_of(encoding, 70, COLUMNS), rows_of(29)
    whole = product(BEST, tensor, x)
    order = np.random.default_rng(2).permutation(len(x))
    assert product(BEST, tensor, np.ascontiguousarray(x[order])).tobytes() == whole[order].tobytes()
    for count in (1, 2, 3, 4, 5, 6, 7, 13):
        assert product(BEST, tensor, x[:count]).tobytes() == whole[:count].tobytes()


def test_bands_of_many_rows_have_the_bits_of_one_row() -> None:
    tensor, x = weights_of(Encoding.Q4_0, 33, 4096), rows_of(150, 4096)
    assert product(BEST, tensor, x)[[0, 51, 149]].tobytes() == product(BEST, tensor, x[[0, 51, 149]]).tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 64])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    tensor, x = weights_of(Encoding.Q4_K, 330, COLUMNS), rows_of(9)
    floats = rows_of(37, seed=3)
    alone = product(BEST, tensor, x), multiply_floats(BEST, Encoding.F32, floats, x)
    with ThreadPool(BEST, threads) as pool:
        for _ in range(20):
            assert product(BEST, tensor, x, pool).tobytes() == alone[0].tobytes()
            assert multiply_floats(BEST, Encoding.F32, floats, x, pool).tobytes() == alone[1].tobytes()


@pytest.mark.parametrize("encoding", KINDS)
def test_results_are_the_products_of_the_format(encoding: Encoding) -> None:
    """Against float64, with quantised activations and, less closely, with the given ones."""
    tensor, x = weights_of(encoding, 70, COLUMNS), rows_of(5)
    found, weights = product(BEST, tensor, x), dequantise(tensor).astype(np.float64)
    groups = quantise(BEST, x)
    rounded = (groups["numbers"] * groups["scale"][..., None].astype(np.float64)).reshape(x.shape)
    for rows, share in ((rounded, 1e-6), (x.astype(np.float64), 2e-2)):
        expected = rows @ weights.T
        assert np.abs(found - expected).max() <= share * np.abs(expected).max()


def test_activations_are_quantised_by_the_largest_of_their_group() -> None:
    x = rows_of(3, 80)
    groups = quantise(BEST, x)
    padded = np.zeros((3, 96), np.float32)
    padded[:, :80] = x
    largest = np.abs(padded.reshape(3, 3, 32)).max(axis=-1)
    numbers = np.rint(padded.reshape(3, 3, 32) * (np.float32(127) / largest)[..., None]).astype(np.int8)
    assert np.array_equal(groups["numbers"], numbers)
    assert np.array_equal(groups["scale"], largest * np.float32(1 / 127))
    assert np.array_equal(groups["sums"], numbers.reshape(3, 3, 2, 16).sum(axis=-1))


def test_weights_rounded_per_row_and_per_group_are_packed_without_loss() -> None:
    rng, x = np.random.default_rng(4), rows_of(3, 80)
    values, scales = rng.integers(-127, 128, (40, 80), np.int8), rng.uniform(0.01, 1, (40, 1)).astype(np.float16)
    found = multiply(BEST, pack(BEST, int8_blocks("w", values, scales)), quantise(BEST, x))
    expected = x @ (values.astype(np.float32) * scales.astype(np.float32)).T
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()
    codes, halves = rng.integers(0, 16, (40, 3, 32), np.uint8), rng.uniform(0.01, 1, (40, 3)).astype(np.float16)
    exact = ((codes.astype(np.float32) - 8) * halves.astype(np.float32)[..., None]).reshape(40, 96)
    assert np.array_equal(dequantise(int4_blocks("w", codes, halves)), exact)


def stored_floats(wide: Floats, encoding: Encoding) -> npt.NDArray[Any]:
    if encoding is Encoding.BF16:
        return (wide.view(np.uint32) >> 16).astype(np.uint16)
    return wide.astype(np.float16 if encoding is Encoding.F16 else np.float32)


@pytest.mark.parametrize("encoding", FLOAT_TYPES)
def test_float_weights_have_the_same_bits_everywhere_and_their_values(encoding: Encoding) -> None:
    for columns in (7, 16, 77):
        x, wide = rows_of(9, columns), rows_of(37, columns, seed=5)
        x[2, 3], x[3, 1] = np.nan, np.inf
        weights = stored_floats(wide, encoding)
        first, *others = [multiply_floats(library, encoding, weights, x) for library in LIBRARIES]
        assert all(other.tobytes() == first.tobytes() for other in others)
        assert multiply_floats(BEST, encoding, weights, x[5:6]).tobytes() == first[5:6].tobytes()
        expected = x[4:].astype(np.float64) @ dequantise(Tensor("w", encoding, weights.shape, weights)).T
        assert np.abs(first[4:] - expected).max() < 1e-5
        assert set(first[2].view(np.uint32)) == {0x7FC00000}


@pytest.mark.parametrize("encoding", KINDS)
def test_packed_weights_take_no_more_bits_than_the_file(encoding: Encoding) -> None:
    packed = pack(BEST, weights_of(encoding, 64, COLUMNS))
    expected = {Encoding.Q4_K: 4.625, Encoding.Q5_K: 5.625, Encoding.Q3_K: 4.5625, Encoding.IQ4_XS: 4.5625}
    in_file = 8 * weights_of(encoding, 64, COLUMNS).data.nbytes / (64 * COLUMNS)
    assert packed.bits_per_weight == expected.get(encoding, in_file)


def test_sizes_that_do_not_agree_are_refused_and_write_nothing() -> None:
    weights, x = pack(BEST, weights_of(Encoding.Q8_0, 33, 64)), quantise(BEST, rows_of(2, 64))
    out = np.full((2, 33), 77, np.float32)
    with pytest.raises(ValueError, match="quantised rows"):
        multiply(BEST, weights, np.ascontiguousarray(x[:, :1]), out=out)
    with pytest.raises(ValueError, match="outputs"):
        multiply(BEST, weights, x, out=out[:1])
    with pytest.raises(ValueError, match="1 to 256"):
        ThreadPool(BEST, 0)
    assert (out == 77).all()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: str(library.isa))
def test_nothing_is_written_beside_the_outputs(library: NativeLibrary) -> None:
    memory = np.full((4, 33), 77, np.float32)
    multiply(
        library, pack(library, weights_of(Encoding.Q6_K, 33, 256)), quantise(library, rows_of(2, 256)), out=memory[1:3]
    )
    assert (memory[[0, 3]] == 77).all()
    assert aligned_bytes(3).ctypes.data % 64 == 0


GROUPS = "for (std::int64_t g = 0; g < groups; g++, panel += layout.group_bytes()) {"
BACKWARDS = (
    "panel += (groups - 1) * layout.group_bytes();\n"
    "    for (std::int64_t g = groups - 1; g >= 0; g--, panel -= layout.group_bytes()) {"
)
SUM = "float& acc = out[r * PANEL + feature];"
FUSED = "acc = __builtin_fmaf(float(dots[0] + dots[1]), factor * x.scale, acc);"
ZERO = "for (int i = 0; i < rows * PANEL; i++) out[i] = 0.f;"


def two_sums(condition: str) -> dict[str, str]:
    """Some groups are added to a sum of their own, which is added to the other one after the last group."""
    end = "if (g + 1 == groups) { out[r * PANEL + feature] += more[r * PANEL + feature]; }"
    step = "acc = plus_group(layout, panel, super, feature, codes, x[r * stride + g], acc);"
    return {
        ZERO: f"float more[MAX_TILE * PANEL] = {{}}; {ZERO}",
        SUM: f"float& acc = ({condition}) ? more[r * PANEL + feature] : out[r * PANEL + feature];",
        step: f"{step} {end}",
    }


TWINS = {
    "groups in another order": {GROUPS: BACKWARDS},
    "two accumulators": two_sums("g % 2"),
    "split over the columns": two_sums("g >= groups / 2"),
    "multiplied and added": {FUSED: "acc = acc + float(dots[0] + dots[1]) * (factor * x.scale);"},
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_kernels_that_break_the_contract_are_found(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The unchanged source has the installed library's bits at another level of optimisation; each twin has others."""
    folder = tmp_path_factory.mktemp("twins")
    common = build_common(folder)
    tensor, x = weights_of(Encoding.Q8_0, 33, COLUMNS), rows_of(5)
    expected = product(BEST, tensor, x).tobytes()
    assert product(build_portable(folder / "same.so", common, {}), tensor, x).tobytes() == expected
    for name, changes in TWINS.items():
        twin = build_portable(folder / f"{name.replace(' ', '_')}.so", common, changes)
        assert product(twin, tensor, x).tobytes() != expected, name
    many = np.random.default_rng(6).uniform(-1, 1, (6000, COLUMNS)).astype(np.float32)  # some are nearly ties
    contracted = build_portable(folder / "contracted.so", common, {}, ("-O2", "-mfma", "-ffp-contract=fast"))
    assert quantise(contracted, many).tobytes() != quantise(BEST, many).tobytes()
