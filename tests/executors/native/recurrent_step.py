"""Recurrent operations by hand: layers with random inputs, states in blocks, and references in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tests.executors.native.native_elements import GATES, Elements
from tests.executors.native.test_attention import RUN, Reversed, Workers

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
PADDING = 3
"""Columns of a buffer that no operation may touch."""


class Place(ctypes.Structure):
    """``Place`` of recurrent.hpp."""

    _fields_ = (("group", ctypes.c_int32), ("part", ctypes.c_int32), ("offset", ctypes.c_int64))


class States(ctypes.Structure):
    """``States`` of recurrent.hpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_sequences", "num_parts", "num_blocks", "block_bytes")),
        *((name, ctypes.c_void_p) for name in ("begins", "blocks", "cache")),
    )


class Convolution(ctypes.Structure):
    """``Convolution`` of recurrent.hpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "out_stride", "channels")),
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        *(("taps", ctypes.c_int64), ("function", ctypes.c_int), ("place", Place)),
    )


class DeltaRule(ctypes.Structure):
    """``DeltaRule`` of recurrent.hpp."""

    _fields_ = (
        *((n, ctypes.c_int32) for n in ("key_heads", "value_heads", "key_dim", "value_dim", "is_tiled")),
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "out_stride")),
        ("places", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence, and the blocks of its state."""

    x: Floats
    """[rows, columns]"""
    before: tuple[int, ...] | None
    """Blocks of the state before them; None: it is zero."""
    after: tuple[int, ...]

    def part(self, begin: int, end: int) -> Chunk:
        """Some of its rows, after those before them."""
        return replace(self, x=self.x[begin:end], before=self.after if begin else self.before)


class Layer(Protocol):
    """A layer with random weights."""

    @property
    def columns(self) -> int:
        """Columns of an input."""
        ...

    @property
    def num_results(self) -> int:
        """Columns of an output."""
        ...

    @property
    def num_parts(self) -> int:
        """Blocks of a state."""
        ...

    @property
    def block_bytes(self) -> int: ...

    def arguments(self) -> tuple[str, ctypes.Structure]:
        """Name of the operation, and what it has beside rows and states."""
        ...

    def draw(self, rng: np.random.Generator, rows: int) -> Floats:
        """Random inputs [rows, columns]."""
        ...

    def reference(self, x: Floats) -> Doubles:
        """Results [rows, num_results] of a whole sequence."""
        ...

    def state(self, pool: Bytes, blocks: Sequence[int]) -> Floats:
        """The numbers of a state in its blocks."""
        ...


def pool_of(layer: Layer, num_blocks: int) -> Bytes:
    """Blocks that are not numbers."""
    return np.full((num_blocks, layer.block_bytes), 0xFF, np.uint8)


def run(
    layer: Layer, native: Elements, pool: Bytes, /, *chunks: Chunk, workers: Reversed | None = None, **faults: Any
) -> list[Floats]:
    """Compute a step; the results of each chunk. Faults replace fields of the library's structures."""
    x = np.concatenate([chunk.x for chunk in chunks])
    stride = layer.columns + PADDING
    rows = np.full((len(x), stride), np.nan, np.float32)
    rows[:, : layer.columns] = x
    out = np.full((len(x), layer.num_results + PADDING), 77, np.float32)
    begins = np.cumsum([0, *(len(chunk.x) for chunk in chunks)]).astype(np.int32)
    zero = (-1,) * layer.num_parts
    blocks = np.array([[*(c.before or zero), *c.after] for c in chunks], np.int32)
    begins = np.array(faults.pop("begins", begins), np.int32)
    blocks = np.array(faults.pop("blocks", blocks), np.int32)
    states = States(
        len(chunks), layer.num_parts, len(pool), layer.block_bytes, begins.ctypes.data, blocks.ctypes.data,
        pool.ctypes.data,
    )  # fmt: skip
    name, passed = layer.arguments()
    passed.x, passed.x_stride, passed.out, passed.out_stride = (
        rows.ctypes.data,
        stride,
        out.ctypes.data,
        out.shape[1],
    )
    sizes = {"x_size": rows.size, "out_size": out.size}
    for fault, value in faults.items():
        if fault in sizes:
            sizes[fault] = value
        else:
            setattr(states if hasattr(states, fault) else passed, fault, value)
    function = native.library[f"native_{name}"]
    function.restype = ctypes.c_char_p
    threads = None if workers is None else ctypes.byref(Workers(workers.threads, RUN(workers.run), None))
    wrong = function(
        native.isa.encode(), ctypes.byref(passed), ctypes.byref(states), ctypes.c_int64(len(x)),
        ctypes.c_int64(sizes["x_size"]), ctypes.c_int64(sizes["out_size"]), threads,
    )  # fmt: skip
    if wrong is not None:
        assert (out == 77).all(), "a refused step wrote results"
        raise ValueError(wrong.decode())
    assert (out[:, layer.num_results :] == 77).all(), "a result was written behind its row"
    return np.split(out[:, : layer.num_results].copy(), begins[1:-1])


@dataclass(frozen=True)
class ConvolutionLayer:
    """A causal convolution. Its state begins after some bytes of the second block."""

    channels: int
    taps: int
    activation: str = "identity"
    has_bias: bool = False
    num_parts: int = 2
    offset: int = 20
    weights: Floats = field(init=False)
    bias: Floats = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.channels)
        object.__setattr__(self, "weights", rng.normal(0, 1, (self.taps, self.channels)).astype(np.float32))
        object.__setattr__(self, "bias", rng.normal(0, 1, self.channels).astype(np.float32))

    @property
    def columns(self) -> int:
        return self.channels

    @property
    def num_results(self) -> int:
        return self.channels

    @property
    def block_bytes(self) -> int:
        return self.offset + 4 * (self.taps - 1) * self.channels + 12

    def arguments(self) -> tuple[str, ctypes.Structure]:
        return "convolve", Convolution(
            channels=self.channels, weights=self.weights.ctypes.data,
            bias=self.bias.ctypes.data if self.has_bias else None, taps=self.taps,
            function=GATES.index(self.activation), place=Place(0, 1, self.offset),
        )  # fmt: skip

    def draw(self, rng: np.random.Generator, rows: int) -> Floats:
        return rng.normal(0, 1, (rows, self.channels)).astype(np.float32)

    def reference(self, x: Floats) -> Doubles:
        padded = np.concatenate([np.zeros((self.taps - 1, self.channels)), x.astype(np.float64)])
        y: Doubles = np.zeros(x.shape) + self.has_bias * self.bias
        for tap in range(self.taps):
            y += padded[tap : tap + len(x)] * self.weights[tap]
        return y / (1 + np.exp(-y)) if self.activation == "silu" else y

    def state(self, pool: Bytes, blocks: Sequence[int]) -> Floats:
        """The last inputs [taps - 1, channels] in the blocks of a state."""
        size = 4 * (self.taps - 1) * self.channels
        return pool[blocks[1], self.offset : self.offset + size].view(np.float32).reshape(self.taps - 1, -1)


@dataclass(frozen=True)
class DeltaLayer:
    """A gated delta rule. Each head's state is in a block of its own, and the last ones share one."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    is_tiled: bool = False
    places: Any = field(init=False)
    """Array of `Place`."""

    def __post_init__(self) -> None:
        own = max(1, self.value_heads - 1)
        heads = range(self.value_heads)
        places = [Place(0, min(head, own - 1), 4 + max(0, head - own + 1) * self.piece_bytes) for head in heads]
        object.__setattr__(self, "places", (Place * len(places))(*places))

    @property
    def piece_bytes(self) -> int:
        return 4 * self.key_dim * self.value_dim

    @property
    def num_parts(self) -> int:
        return int(self.places[-1].part) + 1

    @property
    def block_bytes(self) -> int:
        return 4 + 2 * self.piece_bytes + 8

    @property
    def columns(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 2)

    @property
    def num_results(self) -> int:
        return self.value_heads * self.value_dim

    def arguments(self) -> tuple[str, ctypes.Structure]:
        shape = (self.key_heads, self.value_heads, self.key_dim, self.value_dim, self.is_tiled)
        return "delta_rule", DeltaRule(*shape, places=ctypes.addressof(self.places))

    def draw(self, rng: np.random.Generator, rows: int) -> Floats:
        """Unit keys, queries of a head's scale, values, betas from 0 to 1, and decays up to 1."""
        keys = rng.normal(0, 1, (2, rows, self.key_heads, self.key_dim))
        keys /= np.sqrt((keys**2).sum(-1, keepdims=True))
        keys[0] /= np.sqrt(self.key_dim)
        values = rng.normal(0, 1, (rows, self.value_heads * self.value_dim))
        numbers = rng.uniform(0, 1, (2, rows, self.value_heads))
        numbers[1] = np.exp(-rng.exponential(0.3, (rows, self.value_heads)))
        parts = [keys[0].reshape(rows, -1), keys[1].reshape(rows, -1), values, *numbers]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def split(self, x: Floats) -> tuple[Doubles, ...]:
        """Queries, keys and values [rows, value heads, dim], betas and decays [rows, value heads]."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        sizes = np.cumsum([keys, keys, values, self.value_heads])
        q, k, v, beta, decay = np.split(x.astype(np.float64), sizes, axis=1)
        heads = np.arange(self.value_heads)
        own = heads % self.key_heads if self.is_tiled else heads // (self.value_heads // self.key_heads)
        q, k = (each.reshape(len(x), self.key_heads, -1)[:, own] for each in (q, k))
        return q, k, v.reshape(len(x), self.value_heads, -1), beta, decay

    def reference(self, x: Floats) -> Doubles:
        q, k, v, beta, decay = self.split(x)
        state = np.zeros((self.value_heads, self.key_dim, self.value_dim))
        out = np.empty(v.shape)
        for t in range(len(x)):
            state *= decay[t][:, None, None]
            change = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
            state += k[t][:, :, None] * change[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
        return out.reshape(len(x), -1)

    def state(self, pool: Bytes, blocks: Sequence[int]) -> Floats:
        """The matrices [value heads, key_dim, value_dim] in the blocks of a state."""
        size = self.piece_bytes
        found = [pool[blocks[at.part], at.offset : at.offset + size].view(np.float32) for at in self.places]
        return np.stack(found).reshape(self.value_heads, self.key_dim, self.value_dim)
