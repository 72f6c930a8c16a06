"""Steps of attention by hand: numbers and arrays, random steps, and a reference in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.executors.native.forward import BLOCK_TOKENS, STORAGES

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
EPSILON = 1e-5


@dataclass(frozen=True)
class Heads:
    """Shape of a layer's attention, and how its KV is kept."""

    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    storage: str = "f16"
    window: int = 0
    rotary_dim: int = 0
    is_normed: bool = False
    """Queries and keys are normalised."""
    is_bidirectional: bool = False
    """Tokens see later ones, and a window reaches half its size to each side."""

    @property
    def norms(self) -> Floats:
        """[2, head_dim]: weights of the norms of queries and keys."""
        return np.linspace(0.5, 1.5, 2 * self.head_dim, dtype=np.float32).reshape(2, -1)

    def rotary(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """[tokens, rotary_dim]: cosines of each pair, then sines."""
        angles = positions[:, None] * 1e4 ** -np.linspace(0, 1, self.rotary_dim // 2, endpoint=False)
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)

    @property
    def block_bytes(self) -> int:
        size = {"f32": 4, "f16": 2, "int8": 1}[self.storage]
        scales = 2 * 4 * BLOCK_TOKENS if self.storage == "int8" else 0
        return self.kv_heads * (2 * BLOCK_TOKENS * self.head_dim * size + scales)

    def cache(self, num_blocks: int) -> npt.NDArray[np.uint8]:
        return np.full((num_blocks, self.block_bytes), 0xFF, np.uint8)  # not a number in any precision


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence from a position on, in its blocks."""

    queries: Floats
    """[tokens, heads, head_dim]"""
    keys: Floats
    """[tokens, kv_heads, head_dim]; values alike."""
    values: Floats
    past: int
    table: tuple[int, ...]

    def part(self, begin: int, end: int) -> Chunk:
        """Some of its tokens, after those before them."""
        cut = slice(begin, end)
        return replace(
            self, queries=self.queries[cut], keys=self.keys[cut], values=self.values[cut], past=self.past + begin
        )


def random_chunk(rng: np.random.Generator, heads: Heads, length: int, table: tuple[int, ...], past: int = 0) -> Chunk:
    def draw(count: int) -> Floats:
        return rng.normal(0, 1, (length, count, heads.head_dim)).astype(np.float32)

    return Chunk(draw(heads.heads), draw(heads.kv_heads), draw(heads.kv_heads), past, table)


def step_of(
    heads: Heads, cache: npt.NDArray[np.uint8], /, *chunks: Chunk, **faults: Any
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Numbers and arrays of a step, by their names in attention.hpp; the output is not a number yet."""
    plan: dict[str, Any] = {
        "num_sequences": [len(chunks)],
        "past": [chunk.past for chunk in chunks],
        "begins": np.cumsum([0, *(len(chunk.queries) for chunk in chunks)]),
        "table_begins": np.cumsum([0, *(len(chunk.table) for chunk in chunks)]),
        "blocks": [block for chunk in chunks for block in chunk.table],
    }
    plan |= {name: faults.pop(name) for name in plan if name in faults}
    lengths = [chunk.past + len(chunk.queries) for chunk in chunks]
    totals = np.array(faults.pop("totals", lengths), np.int32)
    num_rotations = faults.pop("num_rotations", min(totals.max(), 4096))
    positions = [chunk.past + np.arange(len(chunk.queries)) for chunk in chunks]
    arrays: dict[str, npt.NDArray[Any]] = {
        "projected": np.concatenate([np.concatenate([c.queries, c.keys, c.values], axis=1) for c in chunks]),
        "rotary": np.concatenate([heads.rotary(each) for each in positions]).astype(np.float32),
        "plan": np.concatenate(list(plan.values())).astype(np.int32),
        "cache": cache,
    }
    if heads.is_bidirectional:
        arrays["totals"] = totals
        arrays["rotary"] = heads.rotary(np.arange(num_rotations)).astype(np.float32)
    if heads.is_normed:
        arrays["norms"] = heads.norms
    arrays["out"] = np.full((len(arrays["projected"]), heads.heads, heads.head_dim), np.nan, np.float32)
    numbers: dict[str, Any] = {
        "kv_heads": heads.kv_heads,
        "head_dim": heads.head_dim,
        "storage": STORAGES.index(heads.storage),
        "heads": heads.heads,
        "window": heads.window,
        "rotary_dim": heads.rotary_dim,
        "scale": heads.head_dim**-0.5,
        "epsilon": EPSILON,
        "num_parts": 1,
        "num_norms": 2 if heads.is_normed else 0,
        "num_tokens": len(arrays["out"]),
        "num_blocks": len(cache),
        "block_stride": cache.shape[1],
        "plan_size": len(arrays["plan"]),
    }
    return numbers | faults, arrays


def reference(heads: Heads, chunk: Chunk) -> npt.NDArray[np.float64]:
    """The same of one whole sequence, in float64 and with its keys and values as they are."""
    length, group = len(chunk.queries), heads.heads // heads.kv_heads
    table, half = heads.rotary(np.arange(length))[:, None], heads.rotary_dim // 2
    cos, sin = table[..., :half], table[..., half:]

    def prepared(x: Floats, norm: Floats) -> npt.NDArray[np.float64]:
        y = x.astype(np.float64)
        if heads.is_normed:
            y *= norm / np.sqrt((y**2).mean(axis=-1, keepdims=True) + EPSILON)
        first, second, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    queries = prepared(chunk.queries, heads.norms[0])
    keys, values = prepared(chunk.keys, heads.norms[1]), chunk.values.astype(np.float64)
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", queries, keys) * heads.head_dim**-0.5
    ages = np.arange(length)[:, None] - np.arange(length)[None, :]
    seen = (ages >= 0) & (ages < (heads.window or length))
    if heads.is_bidirectional:
        seen = np.abs(ages) <= (heads.window // 2 if heads.window else length)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: npt.NDArray[np.float64] = np.einsum("hqk,khd->qhd", weights, values)
    return mixed


def table_for(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + -(-length // BLOCK_TOKENS)))
