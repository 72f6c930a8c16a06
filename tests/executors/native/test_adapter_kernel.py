"""The kernel of adapters: the same bits with every instruction set and compiler, and other ones if a rule is broken.

The kernel's headers are compiled as they are, with other flags, and with a line changed (twins).
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hatch_build import AVX2, ISA_FLAGS, NATIVE_FLAGS, cpp_compiler
from tests.executors.native.loading import USABLE
from tests.executors.native.native_products import CPP

pytestmark = pytest.mark.skipif(shutil.which(cpp_compiler()[0]) is None, reason="there is no compiler")
Floats = npt.NDArray[np.float32]
ROWS, RANK, COLUMNS = 4, 6, 80
PADDED = 96
PROGRAM = """
#include <type_traits>
#include "adapter_kernel.hpp"
#include "lanes_%s.hpp"
using namespace lockstep::native;
extern "C" void down(const AdapterWeight* w, std::int64_t columns, int is_quantised, const void* const* x, int rows,
                     float* const* h) {
    const FloatMode mode;
    AdapterLanes<%s>::down(*w, columns, is_quantised, x, rows, h);
}
extern "C" void up(const AdapterWeight* w, const float* const* h, int rows, float* const* y) {
    const FloatMode mode;
    AdapterLanes<%s>::up(*w, 0, h, rows, y);
}
"""
Library = Callable[..., ctypes.CDLL]


class _Weight(ctypes.Structure):
    """``AdapterWeight`` of ``adapters.hpp``."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("weight", "rank", "a_type", "b_type")), ("scale", ctypes.c_float),
        ("unused", ctypes.c_int32), ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("a_bytes", ctypes.c_int64),
        ("b_bytes", ctypes.c_int64),
    )  # fmt: skip


def build(folder: Path, lanes: str, flags: tuple[str, ...], changes: Mapping[str, str] | None = None) -> ctypes.CDLL:
    header = (CPP / "adapter_kernel.hpp").read_text()
    for old, new in (changes or {}).items():
        assert header.count(old) == 1, f"{old!r} is there {header.count(old)} times"
        header = header.replace(old, new)
    (folder / "adapter_kernel.hpp").write_text(header)
    name = {"portable": "Portable", "avx2": "Avx2", "avx512": "Avx512"}[lanes]
    (folder / "kernel.cpp").write_text(PROGRAM % (lanes, name, name))
    target = folder / "kernel.so"
    command = [*cpp_compiler(), *NATIVE_FLAGS, "-fvisibility=default", *flags, "-I", str(folder), "-I", str(CPP)]
    subprocess.run([*command, "-shared", str(folder / "kernel.cpp"), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def halves(rng: np.random.Generator, count: int, kind: int, special: bool) -> npt.NDArray[np.uint16]:
    """Numbers of 16 bits: float16 (1) or bfloat16 (2)."""
    values = rng.standard_normal(count).astype(np.float32)
    if special:
        values[rng.integers(0, count, count // 8)] *= np.float32(2.0**-20)  # denormals of float16
    if kind == 1:
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def inputs(rng: np.random.Generator, is_quantised: bool, special: bool) -> list[npt.NDArray[Any]]:
    rows: list[npt.NDArray[Any]] = []
    for row in range(ROWS):
        if is_quantised:
            groups = np.zeros(PADDED // 32, np.dtype([("scale", "<f4"), ("sums", "<i2", 2), ("numbers", "i1", 32)]))
            groups["scale"] = rng.standard_normal(PADDED // 32).astype(np.float32)
            groups["numbers"] = rng.integers(-127, 128, (PADDED // 32, 32))
            if special:
                groups["scale"][row % 3] = (np.nan, np.inf, 2.0**-140, 1e38)[row]
            rows.append(groups)
        else:
            values = rng.standard_normal(COLUMNS).astype(np.float32)
            if special:
                values[7 * row + 3] = (np.nan, np.inf, 2.0**-140, 3e38)[row]
            rows.append(values)
    return rows


def results(library: ctypes.CDLL, special: bool = True) -> bytes:
    """Results of both functions for fixed numbers: all types, both kinds of inputs, one to four rows."""
    rng, found = np.random.default_rng(5), []
    for a_type in (1, 2):
        for is_quantised in (False, True):
            a, b = halves(rng, 8 * PADDED, a_type, special), halves(rng, RANK * 32, 3 - a_type, special)
            a.reshape(2, PADDED // 16, 4, 16)[:, COLUMNS // 16 :] = 0
            x = inputs(rng, is_quantised, special)
            weight = _Weight(0, RANK, a_type, 3 - a_type, 0.7, 0, a.ctypes.data, b.ctypes.data, a.nbytes, b.nbytes)
            for rows in range(1, ROWS + 1):
                h, y = np.zeros((rows, 8), np.float32), rng.standard_normal((rows, 32)).astype(np.float32)
                pointers = [(ctypes.c_void_p * rows)(*(each.ctypes.data for each in some)) for some in (x[:rows], h, y)]
                library.down(
                    ctypes.byref(weight), ctypes.c_int64(COLUMNS), int(is_quantised), pointers[0], rows, pointers[1]
                )
                library.up(ctypes.byref(weight), pointers[1], rows, pointers[2])
                found += [np.where(np.isnan(each), np.float32(np.nan), each) for each in (h, y)]
    return b"".join(each.tobytes() for each in found)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return results(build(tmp_path_factory.mktemp("portable"), "portable", ("-O2",)))


@pytest.mark.parametrize(
    ("lanes", "flags"),
    [
        ("portable", ("-O0",)), ("portable", ("-O3",)), ("portable", ("-O2", *AVX2)), ("avx2", ISA_FLAGS["avx2"]),
        ("avx512", ISA_FLAGS["avx512"]),
    ],
)  # fmt: skip
def test_lanes_and_flags_change_no_bit(lanes: str, flags: tuple[str, ...], expected: bytes, tmp_path: Path) -> None:
    if lanes not in USABLE or (AVX2[0] in flags and "avx2" not in USABLE):
        pytest.skip(f"no {lanes} here")
    assert results(build(tmp_path, lanes, flags)) == expected


STORED = "L::store(out, L::add(L::load(out), L::mul(acc[r][half], scale)));"
TWINS: Mapping[str, tuple[Mapping[str, str], tuple[str, ...]]] = {
    "ranks in descending order": (
        {
            "k < w.rank; k++, b += PANEL) {": "k < w.rank; k++, b += PANEL) {\n"
            "const std::int32_t last = w.rank - 1 - k; const std::uint16_t* c = b + (last - k) * PANEL;",
            "load<T>(b), second = load<T>(b + LANES);": "load<T>(c), second = load<T>(c + LANES);",
            "L::set(h[r][k])": "L::set(h[r][last])",
        },
        (),
    ),
    "sums that begin with the base's output": (
        {
            "acc[r][0] = acc[r][1] = L::zero();": "acc[r][0] = L::load(y[r]), acc[r][1] = L::load(y[r] + LANES);",
            "L::set(h[r][k])": "L::set(h[r][k] * w.scale)",
            STORED: "L::store(out, acc[r][half]);",
        },
        (),
    ),
    "a factor before the sum": (
        {"L::set(h[r][k])": "L::set(h[r][k] * w.scale)", STORED: "L::store(out, L::add(L::load(out), acc[r][half]));"},
        (),
    ),
    "an end by fma": ({STORED: "L::store(out, L::fma(acc[r][half], scale, L::load(out)));"}, ()),
    "columns in descending order": (
        {
            "a += RANK_UNIT * LANES) {": "a += RANK_UNIT * LANES) {\n"
            "const std::int64_t last_at = last - LANES - at; const std::uint16_t* c = a + (last_at - at) * RANK_UNIT;",
            "load<T>(a + k * LANES)": "load<T>(c + k * LANES)",
            "numbers<IS_QUANTISED>(x[r], at, columns)": "numbers<IS_QUANTISED>(x[r], last_at, columns)",
        },
        (),
    ),
    "products without fma": (
        {
            "acc[r * RANK_UNIT + k] = L::fma(weight[k], number, acc[r * RANK_UNIT + k]);": "acc[r * RANK_UNIT + k] = "
            "L::add(L::mul(weight[k], number), acc[r * RANK_UNIT + k]);"
        },
        (),
    ),
    "another tree of lanes": (
        {
            "L::fold(acc + r * RANK_UNIT, h[r] + block);": "for (int k = 0; k < RANK_UNIT; k++) { float lanes[LANES]; "
            "L::store(lanes, acc[r * RANK_UNIT + k]); float sum = 0; for (float lane : lanes) sum += lane; "
            "h[r][block + k] = sum; }"
        },
        (),
    ),
    "contraction": ({}, ("-O2", *AVX2, "-ffp-contract=fast")),
}


@pytest.mark.parametrize("name", TWINS)
def test_each_broken_rule_changes_bits(name: str, expected: bytes, tmp_path: Path) -> None:
    changes, flags = TWINS[name]
    if flags and "avx2" not in USABLE:
        pytest.skip("no avx2 here")
    assert results(build(tmp_path, "portable", flags or ("-O1",), changes)) != expected
