"""Recurrent operations: values, and the same bits in chunks of any sizes, beside others, and on any processor."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tests.executors.native.native_elements import Elements, Floats
from tests.executors.native.recurrent_step import Bytes, Chunk, ConvolutionLayer, DeltaLayer, Layer, pool_of, run
from tests.executors.native.test_attention import Reversed

CONVOLUTIONS = (
    ConvolutionLayer(1100, 4, "silu"),
    ConvolutionLayer(40, 3, has_bias=True),
    ConvolutionLayer(7, 2, "silu", has_bias=True),
    ConvolutionLayer(528, 7),
)
DELTA_RULES = (
    DeltaLayer(2, 4, 128, 128),
    DeltaLayer(2, 6, 16, 80, is_tiled=True),
    DeltaLayer(1, 1, 256, 256),
    DeltaLayer(3, 3, 8, 24),
    DeltaLayer(1, 2, 40, 7),
)
LAYERS: tuple[Layer, ...] = (*CONVOLUTIONS, *DELTA_RULES)


def name_of(layer: Any) -> str:
    return ", ".join(str(value) for value in vars(layer).values() if isinstance(value, (int, str)))


def tables(layer: Layer, count: int) -> list[tuple[int, ...]]:
    """Blocks of several states, in no order."""
    rest = list(range(1, 1 + count * layer.num_parts))[::-1]
    return [tuple(rest[i::count]) for i in range(count)]


def whole(native: Elements, layer: Layer, x: Floats, **settings: Any) -> tuple[Floats, bytes]:
    """Results and last state of a sequence that is computed in one step."""
    [own] = tables(layer, 1)
    pool = pool_of(layer, 1 + layer.num_parts)
    [out] = run(layer, native, pool, Chunk(x, None, own), **settings)
    return out, state(layer, pool, own)


def state(layer: Layer, pool: Bytes, blocks: tuple[int, ...]) -> bytes:
    return layer.state(pool, blocks).tobytes()


@pytest.mark.parametrize("layer", LAYERS, ids=name_of)
def test_results_are_right_and_alike_with_every_instruction_set(isas: list[Elements], layer: Layer) -> None:
    x = layer.draw(np.random.default_rng(1), 70)
    answers = [whole(native, layer, x) for native in isas]
    assert np.abs(answers[0][0] - layer.reference(x)).max() < 5e-6
    assert all(np.array_equal(out, answers[0][0]) and kept == answers[0][1] for out, kept in answers)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("layer", LAYERS, ids=name_of)
def test_chunks_give_the_bits_of_the_whole(isas: list[Elements], layer: Layer, seed: int) -> None:
    """Ragged chunks, single tokens, in place and from one state to another, beside another sequence."""
    rng = np.random.default_rng(seed)
    native = isas[seed % len(isas)]
    x, other = layer.draw(rng, 60), layer.draw(rng, 60)
    out, last = whole(native, layer, x)
    first, second, third = tables(layer, 3)
    pool = pool_of(layer, 1 + 3 * layer.num_parts)
    sizes = [1] * 12 if seed == 0 else rng.integers(1, 12, 12).tolist()
    ends = np.minimum(np.cumsum(sizes), 60).tolist()
    before: tuple[int, ...] | None = None
    beside: tuple[int, ...] | None = None
    begin = 0
    for end in ends:
        if end == begin:
            break
        after = before if before is not None and rng.integers(2) else (second if before == first else first)
        snapshot = None if before is None else (before, state(layer, pool, before))
        chunks = [Chunk(x[begin:end], before, after)]
        if rng.integers(2):
            chunks.insert(int(rng.integers(2)), Chunk(other[begin:end], beside, third))
            beside = third
        results = run(layer, native, pool, *chunks)
        mine = results[[chunk.after for chunk in chunks].index(after)]
        assert np.array_equal(mine, out[begin:end]), f"seed {seed}, rows {begin} to {end}"
        if snapshot is not None and after != before:
            assert state(layer, pool, snapshot[0]) == snapshot[1], "a state that others may read was changed"
        begin, before = end, after
    assert before is not None
    assert state(layer, pool, before) == whole(native, layer, x[:begin])[1]
    assert begin < 60 or state(layer, pool, before) == last


@pytest.mark.parametrize("threads", [1, 2, 7, 64])
@pytest.mark.parametrize("layer", LAYERS, ids=name_of)
def test_no_bit_depends_on_the_distribution_of_work(best: Elements, layer: Layer, threads: int) -> None:
    """Items run from the last to the first."""
    x = layer.draw(np.random.default_rng(2), 40)
    workers = Reversed(threads)
    assert whole(best, layer, x, workers=workers)[0].tobytes() == whole(best, layer, x)[0].tobytes()
    for rows in (1, 40):
        alone = whole(best, layer, x[:rows], workers=Reversed(threads))
        assert alone[1] == whole(best, layer, x[:rows])[1]
    assert threads == 1 or workers.num_items > 1 or isinstance(layer, ConvolutionLayer) or layer.num_results < 128


def test_heads_are_split_where_threads_would_have_no_work(best: Elements) -> None:
    layer, workers = DeltaLayer(1, 1, 16, 256), Reversed(8)
    whole(best, layer, layer.draw(np.random.default_rng(2), 3), workers=workers)
    assert workers.num_items == 4


def test_heads_read_the_key_heads_of_their_order(best: Elements) -> None:
    """Both orders are the same for a model with as many key heads, and otherwise differ."""
    for heads, is_same in ((2, True), (4, False)):
        layers = [DeltaLayer(2, heads, 16, 16, is_tiled=each) for each in (False, True)]
        x = layers[0].draw(np.random.default_rng(3), 5)
        first, second = (whole(best, layer, x)[0] for layer in layers)
        assert np.array_equal(first, second) == is_same


def test_a_parallel_formulation_has_other_bits(best: Elements) -> None:
    """Solving a chunk's changes together, as fast kernels often do, gives the same values and other bits."""
    layer = DELTA_RULES[0]
    x = layer.draw(np.random.default_rng(4), 64)
    out = whole(best, layer, x)[0]
    parallel = chunked(layer, x)
    assert np.abs(parallel - out).max() < 1e-5
    assert (parallel != out).mean() > 0.5


def chunked(layer: DeltaLayer, x: Floats) -> Floats:
    """The delta rule of one chunk by a triangular system, in float32."""
    q, k, v, beta, decay = (each.astype(np.float32) for each in layer.split(x))
    out = np.empty(v.shape, np.float32)
    for head in range(layer.value_heads):
        total = np.cumsum(np.log(decay[:, head]))
        pairs = np.tril(np.exp(total[:, None] - total[None, :]))
        system = np.tril((k[:, head] * beta[:, head, None]) @ k[:, head].T * pairs, -1) + np.eye(
            len(x), dtype=np.float32
        )
        changes = np.linalg.solve(system, v[:, head] * beta[:, head, None])
        out[:, head] = (q[:, head] @ k[:, head].T * pairs) @ changes
    return out.reshape(len(x), -1)


def test_special_numbers_give_the_same_bits_everywhere(isas: list[Elements]) -> None:
    """Denormals, infinities and NaN of any payload: what leaves an operation, states too, is canonical."""
    special = np.array([0x1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7F812345, 0xFFC00001], np.uint32).view(np.float32)
    for layer in (CONVOLUTIONS[0], *DELTA_RULES[1:3]):
        rng = np.random.default_rng(5)
        x = layer.draw(rng, 12)
        x *= (10.0 ** rng.integers(-30, 20, x.shape)).astype(np.float32)
        if isinstance(layer, DeltaLayer):
            x.flat[rng.integers(0, x.size, 12)] = rng.choice(special, 12)
        answers = [whole(native, layer, x) for native in isas]
        assert all(out.tobytes() == answers[0][0].tobytes() and kept == answers[0][1] for out, kept in answers)
        numbers = np.concatenate([answers[0][0].ravel(), np.frombuffer(answers[0][1], np.float32)])
        assert set(numbers[np.isnan(numbers)].view(np.uint32).tolist()) <= {0x7FC00000}


def test_rates_are_right(isas: list[Elements]) -> None:
    """Betas are logistic functions; decays e^(rate * softplus), from 0 to 1."""
    heads = 300
    rng = np.random.default_rng(6)
    x = (rng.normal(0, 1, (2, heads)) * 10.0 ** rng.integers(-3, 3, (2, heads))).astype(np.float32)
    x[:, :4] = [[np.inf, -np.inf, 1e4, -1e4], [np.inf, -np.inf, 1e4, -1e4]]
    numbers = np.stack([-rng.uniform(0.01, 16, heads), rng.normal(0, 1, heads)]).astype(np.float32)
    out = np.empty((2, heads), np.float32)
    isas[0].library["native_rates"](
        x.ctypes.data_as(ctypes.c_void_p), numbers.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(heads),
        out.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    with np.errstate(over="ignore"):
        beta = 1 / (1 + np.exp(-x[0].astype(np.float64)))
        soft = np.logaddexp(0, (x[1] + numbers[1]).astype(np.float64))
        expected = np.stack([beta, np.exp(numbers[0] * soft)]).astype(np.float32)
    close = np.abs(out - expected) <= np.spacing(expected)
    assert close.all(), (x[:, ~close.all(0)], out[:, ~close.all(0)])


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"begins": [0, 4]}, "cover the rows"),
        ({"begins": [1, 5]}, "cover the rows"),
        ({"blocks": [0, 9, 1, 2]}, "before the step"),
        ({"blocks": [-1, 3, 1, 2]}, "before the step"),
        ({"blocks": [-2, -2, 1, 2]}, "before the step"),
        ({"blocks": [-1, -1, -1, 2]}, "after the step"),
        ({"blocks": [-1, -1, 1, 6]}, "after the step"),
        ({"num_sequences": 0}, "no states"),
        ({"num_parts": 0}, "no states"),
        ({"x_size": 4}, "fit their memory"),
        ({"out_size": 4}, "fit their memory"),
        ({"x_stride": 3}, "fit their memory"),
        ({"out_stride": 3}, "fit their memory"),
        ({"block_bytes": 100}, "inside its block"),
    ],
    ids=str,
)
@pytest.mark.parametrize("layer", [CONVOLUTIONS[1], DeltaLayer(1, 3, 8, 16)], ids=name_of)
def test_hostile_steps_are_refused(best: Elements, layer: Layer, faults: dict[str, Any], message: str) -> None:
    assert layer.num_parts == 2
    x, pool = layer.draw(np.random.default_rng(7), 5), pool_of(layer, 6)
    with pytest.raises(ValueError, match=message):
        run(layer, best, pool, Chunk(x, None, (1, 2)), **faults)
    assert (pool == 0xFF).all()


@pytest.mark.parametrize(
    ("layer", "faults"),
    [
        *((CONVOLUTIONS[1], {"channels": each}) for each in (0, -1, 1 << 21)),
        *((CONVOLUTIONS[1], {"taps": each}) for each in (1, 0, -1, 65)),
        *((CONVOLUTIONS[1], {"function": each}) for each in (1, 5, -1, 99)),
        *((DELTA_RULES[1], {"key_heads": each}) for each in (0, 4, 7, -2)),
        *((DELTA_RULES[1], {"value_heads": each}) for each in (0, 5, -2, 1 << 20)),
        *((DELTA_RULES[1], {name: each}) for each in (0, -1, 1025) for name in ("key_dim", "value_dim")),
    ],
    ids=str,
)
def test_hostile_shapes_are_refused(best: Elements, layer: Layer, faults: dict[str, Any]) -> None:
    x, pool = layer.draw(np.random.default_rng(7), 5), pool_of(layer, 20)
    with pytest.raises(ValueError, match=r"convolution|delta rule"):
        run(layer, best, pool, Chunk(x, None, tuple(range(1, 1 + layer.num_parts))), **faults)
