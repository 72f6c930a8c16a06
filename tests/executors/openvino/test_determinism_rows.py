"""With our attention a token's logits are those of its own place, bit for bit, however many tokens share its pass.

What a decoder says one by one is the truth here; prompts, chunks and guesses that are verified at once must say the
same in every row, across the borders of blocks (32), of the operator's segments (128) and of windows, in contexts to
8,000 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from lockstep.executors.base import Logits
from lockstep.executors.openvino.executor import OpenVINOExecutor, load_executor
from lockstep.executors.openvino.ops import STORAGES
from lockstep.executors.options import ExecutorOptions
from tests.executors.openvino.support import TINY, Item, needs_operator, random_artifact, run
from tools.random_models import Shape

pytestmark = needs_operator
WINDOWED = replace(TINY["tiny-gemma3"], num_layers=2, windows=(16, 0))
SHAPES = {"llama": TINY["tiny-llama"], "qwen3": TINY["tiny-qwen3"], "gemma3, window 16": WINDOWED}
LENGTH, NUM_BLOCKS = 150, 600
MAX_GUESSES = 8
STARTS = (0, 1, 13, 27, 31, 32, 60, 96, 119, 121, 127, 128, 140)
"""Positions from which tokens are computed at once: before, on and behind borders."""


@contextmanager
def loaded(shape: Shape, storage: str, encoding: str = "Q8_0") -> Iterator[OpenVINOExecutor]:
    options = ExecutorOptions(attention="lockstep", kv_cache_precision=storage)
    executor = load_executor(random_artifact(shape, encoding), options)
    executor.allocate(NUM_BLOCKS, 0)
    assert executor.geometry.decode_equals_prefill
    yield executor
    executor.close()


def tokens_of(shape: Shape, length: int, seed: int = 5) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, shape.vocab_size, length).tolist()
    return drawn


def table_of(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + -(-length // 32)))


def rows_in_chunks(executor: OpenVINOExecutor, tokens: Sequence[int], chunks: Sequence[int], first: int = 1) -> Logits:
    """Logits of every token, computed in these chunks, in blocks from ``first`` on."""
    table, at, rows = table_of(len(tokens), first), 0, []
    for length in chunks:
        rows.append(run(executor, (tokens[at : at + length], at, table), all_rows=True)[:length])
        at += length
    assert at == len(tokens)
    return np.concatenate(rows)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", SHAPES)
def test_tokens_verified_at_once_have_the_bits_of_tokens_decoded_one_by_one(name: str, storage: str) -> None:
    """Two to nine of them, every row: what lossless speculation needs."""
    tokens = tokens_of(SHAPES[name], LENGTH)
    with loaded(SHAPES[name], storage) as executor:
        decoded = rows_in_chunks(executor, tokens, (1,) * LENGTH)
        for num_guesses in range(1, MAX_GUESSES + 1):
            for start in STARTS:
                end = start + 1 + num_guesses
                at_once = run(executor, (tokens[start:end], start, table_of(LENGTH)), all_rows=True)
                assert np.array_equal(at_once, decoded[start:end]), (num_guesses, start)
        others: list[Item] = [(tokens[:9], 0, (100,)), (tokens[:1], 0, (101,)), (tokens[:40], 0, (102, 103))]
        beside = run(executor, *others[:2], (tokens[120:129], 120, table_of(LENGTH)), others[2], all_rows=True)
        assert np.array_equal(beside[10:19], decoded[120:129])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_has_the_bits_of_the_same_tokens_decoded_from_a_prompt_of_one(name: str, storage: str) -> None:
    """At once, and in chunks of which some are of one token."""
    tokens = tokens_of(SHAPES[name], LENGTH)
    rng = np.random.default_rng(3)
    with loaded(SHAPES[name], storage) as executor:
        decoded = rows_in_chunks(executor, tokens, (1,) * LENGTH)
        ways = [(LENGTH,), (1, LENGTH - 1), (LENGTH - 1, 1), (32, 1, 94, 1, 1, 21)]
        for _ in range(6):
            cuts = np.unique(rng.integers(1, LENGTH, 12))
            ways.append(tuple(np.diff([0, *cuts, LENGTH]).tolist()))
        for number, chunks in enumerate(ways):
            rows = rows_in_chunks(executor, tokens, chunks, first=50 * (number + 1))
            assert np.array_equal(rows, decoded), chunks


@pytest.mark.parametrize("storage", ["f16", "int8"])
@pytest.mark.parametrize("windows", [(0,), (1000,)], ids=["all", "window 1000"])
def test_in_contexts_to_8000_a_row_has_its_bits(windows: tuple[int, ...], storage: str) -> None:
    """Alone its keys are split among the threads, beside thirty others not; decoded, verified, prompt or chunk."""
    length, most = 8000, 8192
    shape = replace(WINDOWED, num_layers=1, windows=windows, max_model_len=most)
    tokens = tokens_of(shape, length)
    with loaded(shape, storage) as executor:
        whole = rows_in_chunks(executor, tokens, (length,))
        chunked = rows_in_chunks(executor, tokens, (255, 1, *(512,) * 15, 64), first=251)
        assert np.array_equal(chunked, whole)
        others: list[Item] = [(tokens[:1], 0, (501 + index,)) for index in range(30)]
        for start in (100, 127, 128, 999, 1000, 2047, 4095, 6001, length - 9):
            table = table_of(start + 9)
            expected = whole[start : start + 9]
            assert np.array_equal(run(executor, (tokens[start : start + 9], start, table), all_rows=True), expected)
            for at in (start, start + 8):
                item: Item = (tokens[at : at + 1], at, table)
                assert np.array_equal(run(executor, item)[0], whole[at]), at
                assert np.array_equal(run(executor, *others, item)[-1], whole[at]), at
