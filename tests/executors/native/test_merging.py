"""Adapters that a load merges into the weights: values, rounding, order of additions, and the same bits everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lockstep.artifacts.adapter import MERGED_ENCODINGS, merged
from lockstep.artifacts.model import Adapter, AdapterTarget, Artifact, Encoding, Tensor
from lockstep.artifacts.tensors import GROUP_SIZE, dequantise, unpack
from lockstep.errors import CorruptArtifactError
from lockstep.executors.native.library import NativeLibrary, native_library
from lockstep.executors.native.merging import loaded_tensor
from tests.executors.native.adapter_models import SCALE, random_adapter, run_with
from tests.executors.native.loading import EACH_ISA, loaded
from tests.executors.native.support import TINY, TINY_LLAMA, artifact_of, random_artifact, run
from tests.executors.native.test_adapters import TABLE, TOKENS, relative_error
from tools.random_models import as_float

NAME = "model.layers.0.mlp.up_proj.weight"
HALF_STEP = {"F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
"""Rounding error of a number, relative to its size."""
Floats = npt.NDArray[np.float32]


def adapter_of(a: Floats, b: Floats, scale: float = SCALE) -> Adapter:
    """An adapter of one tensor."""
    stored = [Tensor(f"{NAME} ({part})", Encoding.F32, each.shape, each) for part, each in (("A", a), ("B", b))]
    targets = {NAME: AdapterTarget(stored[0], stored[1], scale)}
    return Adapter("tuned", Path("memory"), f"{7:032x}", len(a), scale, targets, 2 * (a.size + b.size))


def one_tensor(data: npt.NDArray[Any], encoding: Encoding, shape: tuple[int, ...] | None = None) -> Artifact:
    return artifact_of(random_artifact().config, {NAME: Tensor(NAME, encoding, shape or data.shape, data)}, "one")


def random_case(rank: int, rows: int = 48, columns: int = 96) -> tuple[Floats, Floats, Floats]:
    """Weights, A and B."""
    rng = np.random.default_rng(rank)
    shapes = ((rows, columns), (rank, columns), (rows, rank))
    weights, a, b = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return weights, a, b


def tensor_of(artifact: Artifact) -> Tensor:
    library = native_library()
    assert isinstance(library, NativeLibrary)
    return loaded_tensor(library, artifact, NAME)


@pytest.mark.parametrize("rank", [1, 9, 16])
def test_sums_have_the_order_of_products_of_float_weights(rank: int) -> None:
    """Up to 16 ranks, each lane has one product. The lanes are added as a tree."""
    weights, a, b = random_case(rank)
    found = tensor_of(merged(one_tensor(weights, Encoding.F32), adapter_of(a, b, 0.3))).data
    lanes = np.zeros((16, *weights.shape), np.float32)
    lanes[:rank] = b.T[:, :, None] * a[:, None]
    plain = lanes[0].copy()
    for each in lanes[1:]:
        plain += each
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    assert np.array_equal(found, weights + np.float32(0.3) * lanes[0])
    if rank > 2:
        assert not np.array_equal(found, weights + np.float32(0.3) * plain), "another order has other bits"


@pytest.mark.parametrize("rank", [1, 16])
@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_floats_are_rounded_to_the_nearest(encoding: str, rank: int) -> None:
    """The tensor is larger than the part of it that is merged at a time."""
    weights, a, b = random_case(rank, 500, 160)
    stored = as_float(weights, encoding)
    base = one_tensor(stored, Encoding(encoding))
    exact = dequantise(base.weights[NAME]).astype(np.float64) + SCALE * b.astype(np.float64) @ a.astype(np.float64)
    found = tensor_of(merged(base, adapter_of(a, b)))
    assert (found.encoding, found.shape, found.data.dtype) == (Encoding(encoding), weights.shape, stored.dtype)
    errors = np.abs(dequantise(found) - exact)
    assert (errors <= HALF_STEP[encoding] * np.abs(exact) + 4e-6 * rank).all()


@pytest.mark.parametrize("encoding", ["F16", "BF16"])
def test_ties_are_rounded_to_even(encoding: str) -> None:
    ones, halves = np.ones((1, GROUP_SIZE), np.float32), np.arange(GROUP_SIZE, dtype=np.float32)[None]
    half_step = np.float32(HALF_STEP[encoding])  # between 1 and 2
    base = one_tensor(as_float(ones, encoding), Encoding(encoding))
    found = dequantise(tensor_of(merged(base, adapter_of(half_step * halves, ones[:, :1], 1.0))))
    assert np.array_equal(found, 1 + 2 * half_step * np.rint(halves / 2))


@pytest.mark.parametrize("rank", [1, 16])
def test_q8_0_is_quantised_again_with_the_smallest_scale_of_each_group(rank: int) -> None:
    base = random_artifact(encoding="Q8_0")
    stored = base.weights[NAME]
    rows, columns = stored.shape
    _, a, b = random_case(rank, rows, columns)
    exact = dequantise(stored).astype(np.float64) + SCALE * b.astype(np.float64) @ a.astype(np.float64)
    found = tensor_of(merged(base, adapter_of(a, b)))
    assert (found.encoding, found.shape, found.data.shape) == (Encoding.Q8_0, stored.shape, stored.data.shape)
    groups, parts = unpack(found), exact.reshape(rows, -1, GROUP_SIZE)
    assert np.allclose(groups.scales, np.abs(parts).max(-1) / 127, rtol=2**-10)
    assert (np.abs(groups.values).max(-1) == 127).all()
    assert (np.abs(dequantise(found).reshape(parts.shape) - parts).max(-1) <= 0.501 * groups.scales).all()


def test_a_change_of_zero_leaves_q8_0_as_it_was() -> None:
    """The files of quantisers have 127 or -127 in each group, for which the rule finds the stored scale again."""
    base = random_artifact(encoding="Q8_0")
    rows, columns = base.weights[NAME].shape
    _, a, b = random_case(4, rows, columns)
    once = tensor_of(merged(base, adapter_of(a, b)))
    again = merged(one_tensor(once.data, Encoding.Q8_0, once.shape), adapter_of(a, np.zeros_like(b)))
    assert np.array_equal(tensor_of(again).data, once.data)


@pytest.mark.parametrize("encoding", [each.value for each in MERGED_ENCODINGS])
def test_results_that_are_not_finite_are_refused_with_the_name_of_the_adapter(encoding: str) -> None:
    base = random_artifact(encoding=encoding)
    rows, columns = base.weights[NAME].shape
    a, b = np.full((1, columns), 2e19, np.float32), np.full((rows, 1), 2e19, np.float32)
    with pytest.raises(CorruptArtifactError, match=f"{NAME} .* 'tuned'"):
        tensor_of(merged(base, adapter_of(a, b)))


@pytest.mark.parametrize(
    ("encoding", "limit"), [("F16", 65520.0), ("BF16", (2 - 2.0**-8) * 2.0**127), ("Q8_0", 127 * 65520.0)]
)
def test_numbers_that_would_be_rounded_to_infinity_are_refused(encoding: str, limit: float) -> None:
    base = random_artifact(encoding=encoding)
    zeros = one_tensor(np.zeros_like(base.weights[NAME].data), Encoding(encoding), base.weights[NAME].shape)
    rows, columns = base.weights[NAME].shape
    a, ones = np.full((1, columns), -limit, np.float32), np.ones((rows, 1), np.float32)
    with pytest.raises(CorruptArtifactError, match=encoding):
        tensor_of(merged(zeros, adapter_of(a, ones, 1.0)))
    largest = dequantise(tensor_of(merged(zeros, adapter_of(np.nextafter(a, np.float32(0)), ones, 1.0))))
    assert np.isfinite(largest).all()
    assert (np.abs(largest) > 0.99 * limit).all()


@pytest.mark.parametrize("name", TINY)
def test_the_merged_model_computes_what_the_adapter_beside_its_base_does(name: str) -> None:
    artifact, adapter = random_artifact(TINY[name]), random_adapter(TINY[name], 5)
    f32: dict[str, Any] = {"kv_cache_precision": "f32"}
    with loaded(artifact, **f32) as executor, loaded(merged(artifact, adapter), **f32) as other:
        expected = run_with(executor, [executor.load_adapter(adapter)], (TOKENS, 0, TABLE))
        found, base = (run(each, (TOKENS, 0, TABLE), all_rows=True) for each in (other, executor))
    assert relative_error(found, expected) < 2e-5
    assert relative_error(base, expected) > 0.1
    assert not np.array_equal(found, expected), "the bits are other ones"


@pytest.mark.parametrize("isa", EACH_ISA)
@pytest.mark.parametrize("encoding", ["F16", "Q8_0"])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(encoding: str, isa: str) -> None:
    artifact = merged(random_artifact(encoding=encoding), random_adapter(TINY_LLAMA, 8))
    others = [(TOKENS[n:], 0, (4 + 3 * n, 5 + 3 * n, 6 + 3 * n)) for n in range(5)]
    with loaded(artifact) as executor:
        expected = run(executor, (TOKENS, 0, TABLE), all_rows=True)
    with loaded(artifact, isa=isa, threads=2) as executor:
        alone = run(executor, (TOKENS, 0, TABLE), all_rows=True)
        batched = run(executor, *others, (TOKENS, 0, TABLE), all_rows=True)[-len(TOKENS) :]
        chunked = [run(executor, (TOKENS[at : at + 23], at, TABLE), all_rows=True) for at in range(0, len(TOKENS), 23)]
    for found in (alone, batched, np.concatenate(chunked)):
        assert np.array_equal(found, expected)


def test_adapters_are_merged_one_after_the_other() -> None:
    base, first, second = random_artifact(), random_adapter(TINY_LLAMA, 4), random_adapter(TINY_LLAMA, 8, seed=1)
    both, swapped = merged(merged(base, first), second), merged(merged(base, second), first)
    assert len({each.fingerprint for each in (base, merged(base, first), both, swapped)}) == 4
    once = tensor_of(merged(base, first))
    then = merged(one_tensor(once.data, once.encoding), replace(second, targets={NAME: second.targets[NAME]}))
    assert np.array_equal(tensor_of(both).data, tensor_of(then).data)


@pytest.mark.parametrize(("encoding", "quantize"), [("Q8_0", None), ("F16", "int4"), ("BF16", "int8")])
def test_packed_weights_are_merged_once_and_mapped_by_later_loads(
    encoding: str, quantize: str | None, tmp_path: Path
) -> None:
    """The second artifact has the fingerprint of the first one and another adapter, which is not read."""
    artifact = merged(random_artifact(encoding=encoding), random_adapter(TINY_LLAMA, 8))
    options: dict[str, Any] = {"quantize": quantize, "cache_dir": tmp_path}
    with loaded(artifact, **options) as executor:
        expected = run(executor, (TOKENS, 0, TABLE))
    unread = replace(artifact, adapters=(random_adapter(TINY_LLAMA, 8, seed=5),))
    with loaded(unread, **options) as executor:
        assert np.array_equal(run(executor, (TOKENS, 0, TABLE)), expected)
    with loaded(random_artifact(encoding=encoding), **options) as executor:
        assert not np.array_equal(run(executor, (TOKENS, 0, TABLE)), expected), "the base has weights of its own"


def test_merged_floats_are_not_counted_as_mapped_from_a_file() -> None:
    """The system does not count them as free memory."""
    base, adapter = random_artifact(encoding="F16"), random_adapter(TINY_LLAMA, 8)
    with loaded(base) as executor, loaded(merged(base, adapter)) as other:
        assert executor.geometry.weights_bytes == other.geometry.weights_bytes
        adapted = sum(base.weights[name].data.nbytes for name in adapter.targets)
        assert executor.geometry.mapped_bytes - other.geometry.mapped_bytes == adapted
