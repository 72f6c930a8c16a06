"""Twins of the recurrent kernels that break a rule: the comparisons of test_recurrent.py would find each of them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.executors.native.native_elements import CPP, Elements, Floats, compile_library
from tests.executors.native.recurrent_step import Chunk, ConvolutionLayer, DeltaLayer, Layer, pool_of, run
from tests.executors.native.test_recurrent import state, tables, whole

SOURCES = ("recurrent.cpp", "api_recurrent.cpp", "recurrent_kernel_portable.cpp")
STUB = """
#include "recurrent.hpp"
namespace lockstep::native {
const Elements elements_portable{}, elements_avx2{}, elements_avx512{};
const RecurrentKernel recurrent_avx2{}, recurrent_avx512{};
const Elements* find_elements(const char*) { return &elements_portable; }
}
"""
DELTA, CONVOLUTION = DeltaLayer(1, 2, 24, 40), ConvolutionLayer(40, 4, "silu")
SUM = "L::fma(key, L::load(state + n * LANES), sum[n])"
BEGIN = "for (int d = 0; d < key_dim; d++, state += stride) {"
TWINS: Mapping[str, tuple[Layer, Mapping[str, str]]] = {
    "the first row sums the other way round": (
        DELTA,
        {BEGIN: "state += (key_dim - 1) * stride;\nfor (int d = key_dim - 1; d >= 0; d--, state -= stride) {"},
    ),
    "the first row rounds products": (
        DELTA,
        {SUM: "L::add(sum[n], L::mul(key, L::load(state + n * LANES)))"},
    ),
    "a state in place is written too early": (
        CONVOLUTION,
        {"for (int i = 0; i < taps - 1; i++)": "for (int i = taps - 2; i >= 0; i--)"},
    ),
}
"""Layer, and pieces of its kernel that are replaced: chunks have other bits than the whole."""
OTHERS: Mapping[str, tuple[Layer, Mapping[str, str]]] = {
    "the newest input first": (
        CONVOLUTION,
        {
            "L::fma(lanes.load(weights), lanes.load(x[i] + c), y)": "L::fma(lanes.load(tile.weights + c + "
            "(taps - 1 - i) * tile.weights_stride), lanes.load(x[taps - 1 - i] + c), y)"
        },
    ),
    "a decay after the change of the state": (
        DELTA,
        {
            "L::fma(key, u[n], L::mul(L::load(state + n * LANES), decay))": "L::fma(L::load(state + n * LANES), "
            "decay, L::mul(key, u[n]))"
        },
    ),
}
"""The same of twins whose chunks agree, but not with the kernels of other instruction sets."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


def twin_of(folder: Path, changes: Mapping[str, str]) -> Elements:
    """The portable kernels of changed sources."""
    copy = folder / "cpp"
    copy.mkdir()
    for source in (*CPP.glob("*.hpp"), *(CPP / name for name in SOURCES)):
        shutil.copy(source, copy)
    (copy / "stub.cpp").write_text(STUB)
    kernel = copy / "recurrent_kernel.hpp"
    text = kernel.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} is in the kernel {text.count(old)} times"
        text = text.replace(old, new)
    kernel.write_text(text)
    return Elements(compile_library(folder / "twin.so", copy, ("-O1",)), "portable")


def chunked(native: Elements, layer: Layer, x: Floats) -> tuple[Floats, bytes]:
    """Results and last state of single rows, updated in place."""
    [own] = tables(layer, 1)
    pool = pool_of(layer, 1 + layer.num_parts)
    rows = [run(layer, native, pool, Chunk(x, None, own).part(i, i + 1))[0] for i in range(len(x))]
    return np.concatenate(rows), state(layer, pool, own)


def same(one: tuple[Floats, bytes], other: tuple[Floats, bytes]) -> bool:
    return one[0].tobytes() == other[0].tobytes() and one[1] == other[1]


@pytest.mark.parametrize("name", TWINS)
def test_chunks_see_each_broken_rule(name: str, tmp_path: Path, isas: list[Elements]) -> None:
    layer, changes = TWINS[name]
    x = layer.draw(np.random.default_rng(1), 20)
    assert same(chunked(isas[0], layer, x), whole(isas[0], layer, x))
    twin = twin_of(tmp_path, changes)
    assert not same(chunked(twin, layer, x), whole(twin, layer, x))


@pytest.mark.parametrize("name", OTHERS)
def test_other_instruction_sets_see_each_other_order(name: str, tmp_path: Path, isas: list[Elements]) -> None:
    layer, changes = OTHERS[name]
    x = layer.draw(np.random.default_rng(1), 20)
    twin = twin_of(tmp_path, changes)
    assert same(chunked(twin, layer, x), whole(twin, layer, x))
    assert not same(whole(twin, layer, x), whole(isas[0], layer, x))
