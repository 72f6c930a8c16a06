"""Steps of the attention operator by hand: the library's own structure, random steps, and a reference in float64."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.executors.openvino.ops import BLOCK_TOKENS, STORAGES, own_library

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
KERNELS = ("avx512", "avx2", "portable")


class _Step(ctypes.Structure):
    """``lockstep::Step`` of attention.hpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("kv_heads", "head_dim", "storage", "heads", "window")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_sequences", "num_blocks", "num_table_entries")),
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values", "past", "begins", "blocks")),
        *((name, ctypes.c_void_p) for name in ("table_begins", "cache", "out")),
    )


@dataclass(frozen=True)
class Heads:
    """Shape of a layer's attention, and how its KV is kept."""

    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    storage: str = "f16"
    window: int = 0

    @property
    def block_bytes(self) -> int:
        found = library().lockstep_block_bytes(self.kv_heads, self.head_dim, STORAGES.index(self.storage))
        return int(found)

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


def library() -> ctypes.CDLL:
    found = own_library()
    assert not isinstance(found, str), found
    return found


def has_kernel(name: str) -> bool:
    return bool(library().lockstep_has_kernel(name.encode()))


def random_chunk(rng: np.random.Generator, heads: Heads, length: int, table: tuple[int, ...], past: int = 0) -> Chunk:
    def draw(count: int) -> Floats:
        return rng.normal(0, 1, (length, count, heads.head_dim)).astype(np.float32)

    return Chunk(draw(heads.heads), draw(heads.kv_heads), draw(heads.kv_heads), past, table)


def attend(heads: Heads, cache: npt.NDArray[np.uint8], /, *chunks: Chunk, kernel: str = "", **faults: Any) -> Floats:
    """The operator's answer [tokens, heads, head_dim]; writes the chunks' keys and values into the cache.

    Args:
        faults: arrays or numbers of the step that take the place of the right ones.

    Raises:
        ValueError: the operator refused the step, with its words.
    """

    def joined(name: str) -> Floats:
        parts: list[Floats] = [getattr(chunk, name) for chunk in chunks]
        return np.ascontiguousarray(np.concatenate(parts))

    arrays: dict[str, Any] = {
        "queries": joined("queries"),
        "keys": joined("keys"),
        "values": joined("values"),
        "past": np.array([chunk.past for chunk in chunks], np.int32),
        "begins": np.cumsum([0, *(len(chunk.queries) for chunk in chunks)]).astype(np.int32),
        "blocks": np.array([block for chunk in chunks for block in chunk.table], np.int32),
        "table_begins": np.cumsum([0, *(len(chunk.table) for chunk in chunks)]).astype(np.int32),
    }
    out: Floats = np.full_like(arrays["queries"], np.nan)
    numbers: dict[str, Any] = {
        "kv_heads": heads.kv_heads,
        "head_dim": heads.head_dim,
        "storage": STORAGES.index(heads.storage),
        "heads": heads.heads,
        "window": heads.window,
        "scale": heads.head_dim**-0.5,
        "num_tokens": len(out),
        "num_sequences": len(chunks),
        "num_blocks": len(cache),
        "num_table_entries": len(arrays["blocks"]),
    }
    for name, value in faults.items():
        (arrays if name in arrays else numbers)[name] = value
    pointers = {name: array.ctypes.data for name, array in (arrays | {"cache": cache, "out": out}).items()}
    wrong = library().lockstep_attention(ctypes.byref(_Step(**numbers, **pointers)), kernel.encode())
    if wrong is not None:
        raise ValueError(wrong.decode())
    return out


def reference(heads: Heads, chunk: Chunk) -> npt.NDArray[np.float64]:
    """The same of one whole sequence, in float64 and with its keys and values as they are."""
    length, group = len(chunk.queries), heads.heads // heads.kv_heads
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (chunk.keys, chunk.values))
    scores = np.einsum("qhd,khd->hqk", chunk.queries.astype(np.float64), keys) * heads.head_dim**-0.5
    ages = np.arange(length)[:, None] - np.arange(length)[None, :]
    seen = (ages >= 0) & (ages < (heads.window or length))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: npt.NDArray[np.float64] = np.einsum("hqk,khd->qhd", weights, values)
    return mixed


def table_for(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + -(-length // BLOCK_TOKENS)))
