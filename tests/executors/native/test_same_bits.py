"""A token's logits are the same bits alone, in company, in chunks, in any pass, on any threads and instruction set.

What a decoder gives one by one is the truth here. Rows are around the borders of blocks (32 tokens), of segments of
attention (128), of windows, and of the number of rows from which on threads share rows and not features (48).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from lockstep.artifacts.model import QueryScaling
from lockstep.executors.base import Logits
from lockstep.executors.native.executor import NativeExecutor
from lockstep.executors.probe import quick_probe, thorough_probe
from tests.executors.native.loading import EACH_ISA, USABLE, loaded, threads_with
from tests.executors.native.support import SMALL_LLAMA, TINY, Item, batch_of, random_artifact, run
from tools.golden.native_digests import DIGESTS, cases, prompt_digest
from tools.random_blocks import has_long_blocks
from tools.random_models import Shape

WINDOWED = replace(TINY["tiny-gemma3"], num_layers=2, windows=(16, 0))
WITH_SINKS = replace(TINY["tiny-granite_swa"], num_layers=2, windows=(0, 16))
SHAPES = {
    "llama": TINY["tiny-llama"],
    "qwen3": TINY["tiny-qwen3"],
    "gemma3, window 16": WINDOWED,
    "sinks and scaled queries": WITH_SINKS,
}
LENGTH = 150
STORAGES = ("f16", "int8", "f32")
PORTABLE_STORAGE = dict(zip(SHAPES, (*STORAGES, "f16"), strict=True))
"""Storage with which portable kernels compute a shape by default: they take ten times as long as others."""
STARTS = (0, 1, 13, 27, 31, 32, 60, 96, 119, 127, 128, 140)


def tokens_of(shape: Shape, length: int, seed: int = 5) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, shape.vocab_size, length).tolist()
    return drawn


def table_of(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple(range(first, first + -(-length // 32)))


def rows_in_chunks(executor: NativeExecutor, tokens: Sequence[int], chunks: Sequence[int], first: int = 1) -> Logits:
    """Logits of every token, computed in these chunks, in blocks from ``first`` on."""
    table, at, rows = table_of(len(tokens), first), 0, []
    for length in chunks:
        rows.append(run(executor, (tokens[at : at + length], at, table), all_rows=True))
        at += length
    return np.concatenate(rows)


def shapes_and_storages() -> list[ParameterSet]:
    """Every shape with every storage and instruction set; most of those that portable kernels compute are slow."""
    found = []
    for (name, storage), isa in product(product(SHAPES, STORAGES), EACH_ISA):
        is_slow = isa.values == ("portable",) and storage != PORTABLE_STORAGE[name]
        marks = [*isa.marks, pytest.mark.slow] if is_slow else isa.marks
        found.append(pytest.param(name, storage, *isa.values, marks=marks))
    return found


@pytest.mark.parametrize(("name", "storage", "isa"), shapes_and_storages())
def test_tokens_at_once_have_the_bits_of_tokens_one_by_one(name: str, storage: str, isa: str) -> None:
    shape = SHAPES[name]
    tokens, artifact = tokens_of(shape, LENGTH), random_artifact(shape, "Q8_0")
    if shape is WITH_SINKS:
        artifact = replace(artifact, config=replace(artifact.config, query_scaling=QueryScaling(0.5, 47)))
    with loaded(artifact, 600, kv_cache_precision=storage, isa=isa, threads=threads_with(isa)) as executor:
        decoded = rows_in_chunks(executor, tokens, (1,) * LENGTH)
        for number, chunks in enumerate([(LENGTH,), (1, 149), (149, 1), (32, 1, 94, 1, 1, 21), (48, 49, 53), (97, 53)]):
            assert np.array_equal(rows_in_chunks(executor, tokens, chunks, 50 * (number + 1)), decoded), chunks
        for num_guesses in (1, 3, 8):
            for start in STARTS:
                end = start + 1 + num_guesses
                at_once = run(executor, (tokens[start:end], start, table_of(LENGTH)), all_rows=True)
                assert np.array_equal(at_once, decoded[start:end]), (num_guesses, start)
        others: list[Item] = [(tokens[:9], 0, (500,)), (tokens[:1], 0, (501,)), (tokens[:40], 0, (502, 503))]
        beside = run(executor, *others[:2], (tokens[120:129], 120, table_of(LENGTH)), others[2], all_rows=True)
        assert np.array_equal(beside[10:19], decoded[120:129])


@pytest.mark.parametrize("isa", EACH_ISA)
@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_K_M", "Q3_K", "IQ4_XS"])
def test_no_circumstance_changes_a_bit(encoding: str, isa: str) -> None:
    shape = SMALL_LLAMA if has_long_blocks(encoding) else TINY["tiny-llama"]
    with loaded(random_artifact(shape, encoding), isa=isa) as executor:
        report = quick_probe(executor, 120) if isa != USABLE[0] else thorough_probe(executor, 120, 20)
    assert report.deterministic, [case for case in report.cases if not case.passed]


@pytest.mark.parametrize("rows", [1, 7, 8, 48, 49, 97, 300])
def test_threads_change_no_bit(rows: int) -> None:
    """Also more threads than panels, rows or blocks of rows."""
    tokens, seen = tokens_of(TINY["tiny-llama"], rows), set()
    for threads in (1, 2, 3, 7, 20):
        with loaded(random_artifact(TINY["tiny-llama"], "Q4_0"), threads=threads) as executor:
            seen.add(run(executor, (tokens, 0, table_of(rows)), all_rows=True).tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("name", list(cases()))
def test_every_machine_and_instruction_set_gives_the_digest_in_the_repository(name: str) -> None:
    expected = json.loads(DIGESTS.read_text())[name]
    assert {isa: prompt_digest(name, isa) for isa in USABLE} == dict.fromkeys(USABLE, expected)


def test_swapped_and_copied_blocks_come_back_bit_for_bit() -> None:
    tokens = tokens_of(TINY["tiny-llama"], 64)
    with loaded(random_artifact(), kv_cache_precision="int8") as executor:
        expected = run(executor, (tokens, 0, (1, 2)))
        before = executor.read_blocks([1, 2])
        executor.execute(batch_of((tokens[:1], 0, (9,)), swap_out=((1, 3), (2, 0))))
        executor.execute(batch_of((tokens[::-1], 0, (1, 2)), copies=()))
        executor.execute(batch_of((tokens[:1], 0, (9,)), swap_in=((3, 7), (0, 8)), copies=((7, 11),)))
        assert np.array_equal(executor.read_blocks([7, 8, 11]), before[[0, 1, 0]])
        assert np.array_equal(run(executor, (tokens[63:], 63, (11, 8))), expected)
        executor.write_blocks([20, 21], before)
        assert np.array_equal(run(executor, (tokens[63:], 63, (20, 21))), expected)


def test_a_digest_sees_one_changed_weight(tmp_path: Path) -> None:
    """The negative twin of the digests: a model of another seed has another one."""
    with loaded(random_artifact(seed=0)) as first, loaded(random_artifact(seed=1)) as second:
        tokens = tokens_of(TINY["tiny-llama"], 20)
        logits = [run(executor, (tokens, 0, (1,))).tobytes() for executor in (first, second)]
    assert len({hashlib.sha256(each).hexdigest() for each in logits}) == 2
