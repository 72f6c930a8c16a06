"""Products of compressed weights: cut without a change in value, and of one class of bits within a pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.executors.machine import instruction_set
from lockstep.executors.openvino.loading import compile_properties
from lockstep.executors.openvino.products import (
    INDIFFERENT_COLUMNS,
    MAX_COLUMNS,
    MAX_PASS_TOKENS,
    needs_short_passes,
    parts,
    split_below,
    split_products,
)
from lockstep.executors.openvino.runtime import CompiledModel, Model, Node, op, ov, the_core
from lockstep.executors.options import ExecutorOptions

KINDS = ("int8 per channel", "int8 in groups", "int4 in groups", "int4 in groups with zero points")
EVEN, UNEVEN = 64, 72
OPTIONS = ExecutorOptions(dynamic_quantization_group_size=0)

Floats = npt.NDArray[np.float32]


def model_of(kind: str, num_features: int, num_columns: int, num_products: int = 1) -> Model:
    """x [T, 1, columns] times each of some random weights, in the patterns of graph.py and of exporters."""
    x = op.parameter(ov.PartialShape([-1, 1, num_columns]), np.float32, name="x")
    weights = [weights_of(kind, num_features, num_columns, seed) for seed in range(num_products)]
    return ov.Model([op.result(op.matmul(x, node, False, True)) for node in weights], [x])


def weights_of(kind: str, num_features: int, num_columns: int, seed: int) -> Node:
    rng = np.random.default_rng(seed)
    shape = (num_features, num_columns // 32, 32)
    if kind == "int8 per channel":
        values = rng.integers(-127, 128, (num_features, num_columns)).astype(np.int8)
        scales = (rng.random((num_features, 1)) / 1000).astype(np.float16)
        return op.convert(op.multiply(op.convert(op.constant(values), np.float16), op.constant(scales)), np.float32)
    scales = (rng.random((*shape[:-1], 1)) / 1000).astype(np.float16)
    if kind == "int8 in groups":
        centred = op.convert(op.constant(rng.integers(-127, 128, shape).astype(np.int8)), np.float16)
    else:
        nibbles = op.convert(four_bits(rng, shape), np.float16)
        zero_points = four_bits(rng, (*shape[:-1], 1)) if "zero points" in kind else op.constant(np.uint8(8))
        centred = op.subtract(nibbles, op.convert(zero_points, np.float16))
    grouped = op.multiply(centred, op.constant(scales))
    return op.convert(op.reshape(grouped, op.constant(np.array([num_features, num_columns])), False), np.float32)


def four_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> Node:
    tensor = ov.Tensor(ov.Type.u4, ov.Shape(shape))
    tensor.data.reshape(-1)[...] = rng.integers(0, 256, tensor.data.size)
    return op.constant(tensor, shared_memory=True)


def compiled(model: Model) -> CompiledModel:
    return the_core().compile_model(model, "CPU", compile_properties(OPTIONS))


def rows_of(compiled: CompiledModel, x: Floats) -> Floats:
    rows: Floats = compiled([x])[0].copy()
    return rows


def activations(num_rows: int, num_columns: int) -> Floats:
    return np.random.default_rng(9).standard_normal((num_rows, 1, num_columns), np.float32)


@given(
    num_columns=st.integers(1, 300).map(lambda n: 32 * n),
    group_size=st.sampled_from([1, 32, 64, 128]),
    max_columns=st.sampled_from([INDIFFERENT_COLUMNS, MAX_COLUMNS]),
)
def test_parts_are_few_whole_groups_and_make_up_the_whole(num_columns: int, group_size: int, max_columns: int) -> None:
    widths = parts(num_columns, group_size, max_columns)
    assert sum(widths) == num_columns
    assert max(widths) <= max_columns
    assert len(widths) == -(-num_columns // max_columns)
    assert all(width % 32 == 0 and width % group_size == 0 for width in widths[:-1])


def test_groups_wider_than_a_part_cannot_be_cut() -> None:
    assert parts(4096, 1024, 512) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_that_was_cut_has_the_same_value(kind: str) -> None:
    x = activations(5, 1056)
    expected = rows_of(compiled(model_of(kind, UNEVEN, 1056)), x)
    model = model_of(kind, UNEVEN, 1056)
    assert split_products(model) == 1
    assert sum(node.get_type_name() == "MatMul" for node in model.get_ops()) == 3
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(rows_of(compiled(model), x), expected, atol=1e-5)


def test_products_of_one_input_share_its_parts() -> None:
    model = model_of("int8 in groups", UNEVEN, 1056, num_products=3)
    assert split_products(model) == 3
    assert [node.get_type_name() for node in model.get_ops()].count("VariadicSplit") == 1
    sums = [result.input_value(0).get_node() for result in model.get_results()]
    below = [split_below(node) for node in sums]
    assert [node.get_type_name() for node in below if node is not None] == ["VariadicSplit"] * 3
    assert split_below(sums[0].input_value(1).get_node()) is None, "a part is no sum"


def test_only_wide_products_of_integers_are_cut() -> None:
    assert split_products(model_of("int8 in groups", EVEN, MAX_COLUMNS)) == 0
    assert split_products(model_of("int8 in groups", EVEN, MAX_COLUMNS + 32)) == 1
    assert split_products(model_of("int8 in groups", UNEVEN, INDIFFERENT_COLUMNS)) == 0
    x = op.parameter(ov.PartialShape([-1, 1, 4096]), np.float32)
    floats = ov.Model([op.matmul(x, op.constant(np.ones((UNEVEN, 4096), np.float32)), False, True)], [x])
    assert split_products(floats) == 0
    assert not needs_short_passes(floats)


def test_passes_are_short_where_a_product_is_wider_than_the_kernel_is_indifferent_to() -> None:
    assert not needs_short_passes(model_of("int4 in groups", EVEN, INDIFFERENT_COLUMNS))
    assert needs_short_passes(model_of("int4 in groups", EVEN, INDIFFERENT_COLUMNS + 32))
    cut = model_of("int4 in groups", UNEVEN, 1056)
    split_products(cut)
    assert not needs_short_passes(cut)


@pytest.mark.parametrize("num_features", [EVEN, UNEVEN, 1003])
@pytest.mark.parametrize("kind", KINDS)
def test_within_a_pass_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(kind: str, num_features: int) -> None:
    model = model_of(kind, num_features, 1056)
    split_products(model)
    product, x = compiled(model), activations(MAX_PASS_TOKENS, 1056)
    expected = rows_of(product, x)
    for num_rows in (2, 3, 6, 7, 15, 16, 17, 31, 33, 64, 65, 79):
        assert np.array_equal(rows_of(product, x[:num_rows]), expected[:num_rows]), num_rows


@pytest.mark.skipif(not instruction_set().has_row_dependent_kernels, reason="this processor's kernels do not need it")
def test_beyond_a_pass_and_without_cuts_they_do() -> None:
    """Which is why there are a limit and cuts: should a release mend the kernel, both can go."""
    even = compiled(model_of("int8 in groups", EVEN, 1056))
    x = activations(MAX_PASS_TOKENS + 1, 1056)
    assert not np.array_equal(rows_of(even, x)[:2], rows_of(even, x[:2]))
    uneven = compiled(model_of("int8 in groups", UNEVEN, 1056))
    assert not np.array_equal(rows_of(uneven, x)[:2], rows_of(uneven, x[:2]))
