"""Attention of all sizes of heads is right, and its bits are the same

Bits are the same with every instruction set and in every division among workers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lockstep.executors.native.forward import BLOCK_TOKENS
from tests.executors.native.attention_step import Chunk, Floats, Heads, random_chunk, reference, step_of, table_for
from tests.executors.native.native_elements import Elements

USUAL = (
    *(Heads(6, 2, 64, storage, rotary_dim=64) for storage in ("f32", "f16", "int8")),
    Heads(4, 4, 16, rotary_dim=16),
    Heads(16, 8, 128, window=40, rotary_dim=128, is_normed=True),
    Heads(32, 2, 80, "int8", rotary_dim=24),
    Heads(8, 1, 256, window=1),
)
UNUSUAL = (
    *(Heads(6, 2, 72, storage, rotary_dim=36, is_normed=True) for storage in ("f32", "f16", "int8")),
    Heads(3, 1, 8, rotary_dim=8),
    Heads(4, 2, 40, "int8", window=17, rotary_dim=40),
    Heads(13, 1, 512, "f16", rotary_dim=512),
    Heads(2, 1, 504, "f32", rotary_dim=128),
)
ERRORS = {"f32": 2e-6, "f16": 2e-3, "int8": 3e-2}
ITEM = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ITEM, ctypes.c_void_p)
SIZES = ("projected", "rotary", "norms", "cache", "out", "totals", "queries")


class Step(ctypes.Structure):
    """``Step`` of attention.hpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("kv_heads", "head_dim", "storage", "heads", "window", "rotary_dim")),
        *((name, ctypes.c_float) for name in ("scale", "epsilon")),
        *((name, ctypes.c_int) for name in ("num_parts", "part", "num_norms", "only_reads")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_blocks", "plan_size")),
        *((name, ctypes.c_void_p) for name in ("projected", "rotary", "norms", "plan", "first_columns", "cache")),
        ("block_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("out", "totals", "queries")),
        ("query_stride", ctypes.c_int64),
        *((f"{name}_size", ctypes.c_int64) for name in ("projected", "rotary", "norms")),
        ("cache_bytes", ctypes.c_int64),
        *((f"{name}_size", ctypes.c_int64) for name in ("out", "totals")),
        ("queries_bytes", ctypes.c_int64),
    )


class Workers(ctypes.Structure):
    """``Workers`` of attention.hpp."""

    _fields_ = (("threads", ctypes.c_int), ("run", RUN), ("pool", ctypes.c_void_p))


@dataclass
class Reversed:
    """Workers of one thread that does the last item first, and counts them."""

    threads: int
    num_items: int = 0

    def run(self, _pool: int, count: int, item: Any, work: int) -> None:
        self.num_items += count
        for index in reversed(range(count)):
            item(work, index)


BIDIRECTIONAL = (
    *(Heads(6, 2, 64, storage, rotary_dim=64, is_bidirectional=True) for storage in ("f32", "f16", "int8")),
    Heads(12, 12, 32, is_bidirectional=True),
    Heads(4, 4, 16, window=128, rotary_dim=16, is_bidirectional=True),
    Heads(3, 1, 256, "int8", window=41, rotary_dim=24, is_normed=True, is_bidirectional=True),
    Heads(2, 2, 8, window=1, is_bidirectional=True),
)


def attend(
    native: Elements,
    heads: Heads,
    cache: npt.NDArray[np.uint8],
    chunks: Sequence[Chunk],
    /,
    workers: Reversed | None = None,
    **faults: Any,
) -> Floats:
    numbers, arrays = step_of(heads, cache, *chunks, **{k: v for k, v in faults.items() if not k.endswith("_size")})
    sizes = {f"{name}_size": arrays[name].size if name in arrays else 0 for name in SIZES}
    sizes |= {name: size for name, size in faults.items() if name.endswith("_size")}
    sizes["queries_bytes"], sizes["cache_bytes"] = sizes.pop("queries_size"), sizes.pop("cache_size")
    pointers = {name: array.ctypes.data for name, array in arrays.items()}
    step = Step(**{**numbers, **pointers, **sizes})
    function = native.library.native_attention
    function.restype = ctypes.c_char_p
    pool = None if workers is None else Workers(workers.threads, RUN(workers.run), None)
    wrong = function(native.isa.encode(), ctypes.byref(step), None if pool is None else ctypes.byref(pool))
    if wrong is not None:
        raise ValueError(wrong.decode())
    out: Floats = arrays["out"]
    return out


@pytest.mark.parametrize("heads", [*USUAL, *UNUSUAL, *BIDIRECTIONAL], ids=str)
def test_it_is_right_and_alike_with_every_instruction_set(isas: list[Elements], heads: Heads) -> None:
    whole = random_chunk(np.random.default_rng(2), heads, 150, table_for(150))
    answers, caches = [], []
    for native in isas:
        caches.append(heads.cache(6))
        answers.append(attend(native, heads, caches[-1], [whole]))
    assert np.abs(answers[0] - reference(heads, whole)).max() < ERRORS[heads.storage]
    assert all(np.array_equal(answer, answers[0]) for answer in answers)
    assert all(np.array_equal(cache, caches[0]) for cache in caches)


@pytest.mark.parametrize("heads", [USUAL[0], UNUSUAL[0], UNUSUAL[4]], ids=str)
def test_row_has_the_same_bits_alone_in_a_prompt_and_with_any_distribution_of_work(
    best: Elements, heads: Heads
) -> None:
    """With many threads a row's segments are separate items; here the last item comes first."""
    length = 300
    whole = random_chunk(np.random.default_rng(3), heads, length, table_for(length))
    expected = attend(best, heads, heads.cache(12), [whole])
    cache = heads.cache(12)
    attend(best, heads, cache, [whole.part(0, length - 1)])
    last = whole.part(length - 1, length)
    assert np.array_equal(attend(best, heads, cache, [last])[0], expected[-1])
    for threads in (2, 64, 10_000):
        workers = Reversed(threads)
        assert np.array_equal(attend(best, heads, heads.cache(12), [whole], workers), expected)
        assert workers.num_items > length


@pytest.mark.parametrize("heads", BIDIRECTIONAL, ids=str)
def test_kept_queries_give_the_bits_of_projected_ones_in_any_division(best: Elements, heads: Heads) -> None:
    length = 300
    whole = random_chunk(np.random.default_rng(3), heads, length, table_for(length)[::-1])
    cache = heads.cache(12)
    expected = attend(best, heads, cache, [whole])
    blocks = np.zeros((12, BLOCK_TOKENS, heads.heads * heads.head_dim), np.float32)
    for position, queries in enumerate(whole.queries):
        blocks[whole.table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = queries.ravel()
    both = np.concatenate([cache, blocks.reshape(12, -1).view(np.uint8)], axis=1)
    queries = both.reshape(-1)[heads.block_bytes :]
    kept = {"queries": queries.ctypes.data, "queries_size": len(queries), "query_stride": 4 * blocks.shape[2]}
    other = random_chunk(np.random.default_rng(4), heads, 40, (11, 5))
    for cuts in ((0, 300), (0, 1, 31, 128, 299, 300)):
        for workers in (None, Reversed(2), Reversed(10_000)):
            found = []
            for begin, end in pairwise(cuts):
                parts = [whole.part(begin, end), other.part(3, 9)]
                out = attend(best, heads, both, parts, workers, totals=[length, 40], **kept)
                found.append(out[: end - begin])
            assert np.array_equal(np.concatenate(found), expected), cuts


def test_a_token_more_or_a_wider_window_changes_bits(best: Elements) -> None:
    """The negative twins: a padded text, a window with one more token on each side, and causal attention."""
    heads, rng = Heads(4, 4, 16, window=40, is_bidirectional=True), np.random.default_rng(6)
    whole = random_chunk(rng, heads, 101, table_for(101))
    expected = attend(best, heads, heads.cache(5), [whole.part(0, 100)])
    padded = attend(best, heads, heads.cache(5), [whole])[:100]
    assert np.array_equal(padded[:80], expected[:80])
    assert not np.array_equal(padded[80:], expected[80:])
    for other in (replace(heads, window=42), replace(heads, is_bidirectional=False)):
        assert not np.array_equal(attend(best, other, other.cache(5), [whole.part(0, 100)]), expected)


@pytest.mark.parametrize("storage", ERRORS)
def test_a_sequence_that_is_not_a_number_spoils_no_other_and_is_canonical(isas: list[Elements], storage: str) -> None:
    heads, rng = Heads(6, 2, 72, storage), np.random.default_rng(4)
    good, bad = random_chunk(rng, heads, 50, (1, 2)), random_chunk(rng, heads, 50, (3, 4))
    expected = attend(isas[0], heads, heads.cache(5), [good, bad])
    bad.keys.view(np.uint32)[20] = 0xFFC12345
    bad.values[30] = np.inf
    caches, answers = [], []
    for native in isas:
        caches.append(heads.cache(5))
        answers.append(attend(native, heads, caches[-1], [good, bad]))
        assert np.array_equal(answers[-1][:70], expected[:70]), "neither the other nor what came before"
        assert (answers[-1].view(np.uint32)[70:] == 0x7FC00000).all()
        assert np.array_equal(caches[-1], caches[0])


FAULTS: dict[str, dict[str, Any]] = {
    "a block is not of this pool": {"blocks": [1, 5]},
    "a block table is too short": {"table_begins": [0, 1]},
    "a past length is negative": {"past": [-1]},
    "longer than 2^31 - 1": {"past": [2**31 - 1]},
    "the sequences' beginnings do not cover the tokens": {"begins": [0, 39]},
    "the tables' beginnings do not cover the tables": {"table_begins": [0, 3]},
    "the plan is too short for its sequences": {"num_sequences": [2**31 - 1]},
    "no multiple of the KV heads": {"heads": 5},
    "no multiple of the KV heads ": {"heads": 0},
    "not a multiple of 8 up to 512": {"head_dim": 68},
    "not a multiple of 8 up to 512 ": {"head_dim": 520},
    "no such precision": {"storage": 3},
    "no even number up to a head's size": {"rotary_dim": 66},
    "window is negative": {"window": -1},
    "queries, keys and values are too short": {"projected_size": 40 * 10 * 64 - 1},
    "the rotations are too short": {"rotary_size": 40 * 64 - 1},
    "the norms' weights are too short": {"norms_size": 127},
    "the cache is too short": {"cache_size": 5 * 2 * 2 * 32 * 64 * 2 - 1},
    "the output is too short": {"out_size": 40 * 6 * 64 - 1},
}


BIDIRECTIONAL_FAULTS: dict[str, dict[str, Any]] = {
    "more than its total length": {"totals": [39]},
    "a block table is too short": {"totals": [65]},
    "a block table is too short ": {"totals": [2**31 - 1]},
    "fewer total lengths": {"totals_size": 0},
    "the rotations are too short": {"totals": [41], "num_rotations": 40},
    "kept queries are for attention that looks both ways": {"query_stride": 4 * 6 * 64 - 4},
    "kept queries are for attention that looks both ways ": {"query_stride": 2**62},
    "the kept queries are too short": {"queries_size": -1},
}


@pytest.mark.parametrize("message", BIDIRECTIONAL_FAULTS)
def test_a_bidirectional_step_that_would_leave_its_memory_is_refused(best: Elements, message: str) -> None:
    heads = Heads(rotary_dim=64, is_bidirectional=True)
    rows = np.zeros((5, BLOCK_TOKENS * 6 * 64), np.float32)
    cache = np.concatenate([heads.cache(5), rows.view(np.uint8)], axis=1)
    queries = cache.reshape(-1)[heads.block_bytes :]
    num_bytes = rows.nbytes + 4 * heads.block_bytes
    kept = {"queries": queries.ctypes.data, "queries_size": num_bytes, "query_stride": 4 * 6 * 64}
    chunk = random_chunk(np.random.default_rng(5), heads, 40, (1, 2))
    faults = dict(BIDIRECTIONAL_FAULTS[message])
    if "queries_size" in faults:
        faults["queries_size"] += num_bytes
    with pytest.raises(ValueError, match=message.strip()):
        attend(best, heads, cache, [chunk], **{**kept, **faults})


@pytest.mark.parametrize("message", FAULTS)
def test_a_step_that_would_leave_its_memory_is_refused_untouched(best: Elements, message: str) -> None:
    heads = Heads(rotary_dim=64, is_normed=True)
    cache = heads.cache(5)
    chunk = random_chunk(np.random.default_rng(5), heads, 40, (1, 2))
    before = cache.copy()
    with pytest.raises(ValueError, match=message.strip().replace("^", r"\^")):
        attend(best, heads, cache, [chunk], **FAULTS[message])
    assert np.array_equal(cache, before)
    assert np.isfinite(attend(best, heads, cache, [chunk])).all()
