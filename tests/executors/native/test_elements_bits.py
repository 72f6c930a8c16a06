"""Row operations have the same bits with every instruction set, in any company, whatever modes the caller has."""

from __future__ import annotations

import ctypes
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.executors.native.native_elements import (
    GATES,
    Elements,
    Floats,
    changed_sources,
    compile_library,
)

CANONICAL, CANONICAL_64 = 0x7FC00000, 0x7FF8000000000000
SPECIAL_BITS = (
    *(0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000),
    *(0x7FC00000, 0xFFC00001, 0x7F812345, 0x3F800000, 0x3F7FFFFF, 0xBF800001, 0x4B400001, 0x42B17218, 0xC2CE8ED0),
)
SPECIAL = np.array(SPECIAL_BITS, np.uint32).view(np.float32)
"""Zeros, denormals, the least and greatest normal numbers, infinities, NaN of several payloads, neighbours of 1."""
COLUMNS = (1, 15, 16, 17, 40, 576, 1001)

# Factors are exact floats: ctypes would round others in the mode of the caller.
Operation = Callable[[Elements, Floats, Floats], npt.NDArray[Any]]
OPERATIONS: Mapping[str, Operation] = {
    "norm": lambda e, x, y: e.norm(x, y[0], epsilon=2.0**-16),
    "norm with an offset": lambda e, x, y: e.norm(x, y[0], offset=1.0, epsilon=2.0**-20),
    "layer norm": lambda e, x, y: e.layer_norm(x, np.ascontiguousarray(y[:2]), epsilon=2.0**-16),
    "add": lambda e, x, y: e.add(x, y),
    "add a multiple": lambda e, x, y: e.add(x, y, 0.21875),
    **{name: lambda e, x, y, name=name: e.gate(name, x, y) for name in GATES},  # type: ignore[misc]
    **{f"{name} alone": lambda e, x, y, name=name: e.activate(name, x) for name in GATES},  # type: ignore[misc]
    "cap": lambda e, x, y: e.cap(x, 30.0),
    "divide": lambda e, x, y: e.divide(x, 8.0),
    "embed f32": lambda e, x, y: e.embed("f32", x, range(len(x)), x.shape[1], 5.25),
    "embed f16": lambda e, x, y: e.embed("f16", _bits_16(x), range(len(x)), x.shape[1], 5.25),
    "embed bf16": lambda e, x, y: e.embed("bf16", _bits_16(x), range(len(x)), x.shape[1], 5.25),
    "softmax": lambda e, x, y: e.softmax(x, 0.7),
    "log-softmax": lambda e, x, y: e.log_softmax(x),
    "log-probabilities": lambda e, x, y: np.concatenate(
        [each.ravel().astype(np.float64) for each in e.logprobs(x, [0] * len(x), min(3, x.shape[1]))]
    ),
    "weights": lambda e, x, y: np.stack([e.weigh(row, 1.25, 0.7) for row in x]),
    "light weights": lambda e, x, y: np.stack([e.weigh_lightly(row, 1.25, 0.7) for row in x]),
    "sums": lambda e, x, y: np.array([e.total(row) for row in (*x, *_doubles(x))]),
    "unit vectors": lambda e, x, y: e.unit(x),
    "inner products": lambda e, x, y: e.dot(x, y[0]),
}


def _bits_16(x: Floats) -> npt.NDArray[np.uint16]:
    """Bits of 16-bit floats, of every kind."""
    return np.ascontiguousarray(x.view(np.uint32) >> np.uint32(13)).astype(np.uint16)


def _doubles(x: Floats) -> npt.NDArray[np.float64]:
    """Doubles of every kind, of the bits of floats; arithmetic is left to the operations."""
    return np.concatenate([x, x], axis=1).view(np.float64)


def inputs(rng: np.random.Generator, columns: int) -> tuple[Floats, Floats]:
    """Rows that are random, wide in magnitude, nearly all special, random bits, ties in rounding, and all equal."""
    wide = rng.normal(0, 1, columns) * 10.0 ** rng.integers(-38, 39, columns)
    rows = [
        rng.normal(0, 1, columns),
        rng.normal(0, 20, columns),
        wide,
        rng.choice(SPECIAL, columns),
        rng.choice(SPECIAL[:6], columns),
        rng.integers(0, 2**32, columns, dtype=np.uint32).view(np.float32),
        rng.integers(-(2**23), 2**23, columns) + 0.5,
        np.full(columns, 0.1),
        np.full(columns, -np.inf),
    ]
    with np.errstate(over="ignore", invalid="ignore"):
        x = np.stack([np.asarray(row, np.float32) for row in rows])
    y = x[::-1].copy()
    y[0] = rng.normal(1, 0.1, columns)
    return x, y


def same(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.tobytes() == b.tobytes()


def differing(elements: list[Elements]) -> set[tuple[str, str]]:
    """Instruction sets and operations whose bits are not those of the first one."""
    found = set()
    for columns in COLUMNS:
        x, y = inputs(np.random.default_rng(columns), columns)
        for name, operation in OPERATIONS.items():
            expected = operation(elements[0], x, y)
            found |= {(each.isa, name) for each in elements[1:] if not same(operation(each, x, y), expected)}
    return found


def test_all_instruction_sets_give_the_same_bits(isas: list[Elements]) -> None:
    assert isas[0].isa == "portable"
    assert differing(isas) == set()


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"log-probabilities", "sums"}))
def test_a_row_has_its_bits_beside_any_others(name: str, best: Elements) -> None:
    x, y = inputs(np.random.default_rng(3), 100)
    together = OPERATIONS[name](best, x, y).reshape(-1)
    vectors = {"norm": 1, "norm with an offset": 1, "inner products": 1, "layer norm": 2}
    of_rows = [y[: vectors[name]] if name in vectors else y[i : i + 1] for i in range(len(x))]
    alone = [OPERATIONS[name](best, x[i : i + 1], of_rows[i]) for i in range(len(x))]
    assert same(np.concatenate(alone).reshape(-1), together)


@pytest.mark.parametrize("name", ["norm", "add", "silu", "cap", "softmax", "unit vectors"])
def test_rows_may_lie_apart_and_be_written_in_place(name: str, best: Elements) -> None:
    x, y = inputs(np.random.default_rng(4), 41)
    wide = np.full((len(x), 64), np.nan, np.float32)
    wide[:, 3:44] = x
    expected = OPERATIONS[name](best, x, y)
    assert same(OPERATIONS[name](best, wide[:, 3:44], y), expected)
    in_place: Mapping[str, tuple[str, list[Any]]] = {
        "cap": ("cap", [ctypes.c_float(30.0)]),
        "unit vectors": ("unit", []),
        "softmax": ("softmax", [ctypes.c_double(0.7)]),
    }
    if name in in_place:
        operation, numbers = in_place[name]
        best.map(operation, wide[:, 3:44], *numbers, out=wide[:, 3:44])
        assert same(np.ascontiguousarray(wide[:, 3:44]), expected)
        assert np.isnan(wide[:, :3]).all()
        assert np.isnan(wide[:, 44:]).all()


def test_every_nan_that_leaves_an_operation_is_canonical(isas: list[Elements]) -> None:
    x, y = inputs(np.random.default_rng(5), 300)
    num_nan = 0
    for elements in isas:
        for name, operation in OPERATIONS.items():
            result = operation(elements, x, y)
            bits = result.view(np.uint32 if result.itemsize == 4 else np.uint64)[np.isnan(result)]
            assert (bits == (CANONICAL if result.itemsize == 4 else CANONICAL_64)).all(), name
            num_nan += len(bits)
    assert num_nan > 1000


@contextmanager
def float_environment(rounding: int, flush: int) -> Iterator[Callable[[], tuple[int, int]]]:
    """Other modes of MXCSR, as a caller may have them: rounding, and denormals as zeros; yields what they are now."""
    libm = ctypes.CDLL("libm.so.6")
    before, changed, now = (ctypes.create_string_buffer(64) for _ in range(3))
    libm.fegetenv(before)
    ctypes.memmove(changed, before, 64)
    control = int.from_bytes(before.raw[28:32], "little") & ~0x6000 | rounding << 13 | flush
    ctypes.memmove(ctypes.addressof(changed) + 28, control.to_bytes(4, "little"), 4)

    def modes() -> tuple[int, int]:
        libm.fegetenv(now)
        found = int.from_bytes(now.raw[28:32], "little")
        return found >> 13 & 3, found & 0x8040

    libm.fesetenv(changed)
    try:
        yield modes
    finally:
        libm.fesetenv(before)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="MXCSR is a register of x86-64")
@pytest.mark.parametrize(("rounding", "flush"), [(1, 0), (2, 0), (3, 0), (0, 0x8040)])
def test_the_callers_modes_change_nothing_and_are_restored(isas: list[Elements], rounding: int, flush: int) -> None:
    x, y = inputs(np.random.default_rng(6), 100)
    for elements in (isas[0], isas[-1]):
        expected = {name: operation(elements, x, y) for name, operation in OPERATIONS.items()}
        for name, operation in OPERATIONS.items():
            with float_environment(rounding, flush) as modes:
                found = operation(elements, x, y)
                after = modes()
            assert after == (rounding, flush)
            assert same(found, expected[name]), name


TWIN_CHANGES = {
    "elementwise.hpp": {
        "V squares = L::zero();": "V squares = L::zero(), odd = L::zero();",
        "squares = L::fma(each, each, squares);": "(i / LANES % 2 ? odd : squares) = "
        "L::fma(each, each, i / LANES % 2 ? odd : squares);",
        "L::store(sums, squares);": "L::store(sums, L::add(squares, odd));",
        "const V mean = L::set(sum_of(sums) / float(n));": "float all = 0; "
        "for (int i = 0; i < LANES; i++) all += sums[i]; const V mean = L::set(all / float(n));",
    },
    "sample.hpp": {"return sum_of(lanes);": "for (int l = 1; l < LANES; l++) lanes[0] += lanes[l]; return lanes[0];"},
    "math.hpp": {"return L::select(L::is_nan(x), L::set(with_bits<float>(NAN_BITS)), x);": "return x;"},
}
"""Two accumulators for a norm, a mean of lanes and lanes of doubles summed one after the other, and NaN as the
processor leaves it."""


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(
    ("changes", "flags", "found"),
    [
        (TWIN_CHANGES, ("-O1",), {"norm", "layer norm", "sums", "add"}),
        ({}, ("-O2", "-ffp-contract=fast"), {"add a multiple"}),
    ],
    ids=["order", "contraction"],
)
def test_another_order_or_contraction_is_found(
    tmp_path: Path,
    isas: list[Elements],
    changes: Mapping[str, Mapping[str, str]],
    flags: tuple[str, ...],
    found: set[str],
) -> None:
    """The comparison of bits fails where it should: only the best instruction set is built of the changed sources."""
    sources = changed_sources(tmp_path, changes)
    for each in isas[:-1]:
        table = f"const Elements elements_{each.isa}{{}};"
        (sources / f"elements_{each.isa}.cpp").write_text(
            f'#include "elements.hpp"\nnamespace lockstep::native {{\n{table}\n}}\n'
        )
    twin = Elements(compile_library(tmp_path / "twin.so", sources, flags), isas[-1].isa)
    names = {name for _, name in differing([isas[0], twin])}
    assert found <= names
    assert "divide" not in names or "add" in found, "one operation has no order to change"
