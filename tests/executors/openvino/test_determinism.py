"""Promise 1 on the machine that runs this: the probe passes as served, and its negative twins fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from lockstep.executors.machine import instruction_set
from lockstep.executors.openvino.executor import OpenVINOExecutor, load_executor
from lockstep.executors.openvino.inputs import build_inputs
from lockstep.executors.openvino.loading import compile_artifact
from lockstep.executors.openvino.ops import STORAGES
from lockstep.executors.openvino.products import MAX_PASS_TOKENS
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.probe import Scenario, play, quick_probe, thorough_probe
from lockstep.executors.step_inputs import Limits
from tests.executors.openvino.support import (
    OPERATORS,
    SMALL_LLAMA,
    SMALL_QWEN3,
    TINY,
    TINY_LLAMA,
    TINY_QWEN3,
    batch_of,
    needs_operator,
    random_artifact,
    run,
)
from tools.random_models import ENCODINGS, MIXES, Shape

NUM_BLOCKS, NUM_HOST_BLOCKS = 120, 20
ALONE = Scenario((45,))
WIDE = replace(TINY_LLAMA, num_layers=1, hidden_size=544, intermediate_size=1056, vocab_size=515)


@contextmanager
def loaded(
    shape: Shape = TINY_LLAMA, encoding: str = "Q8_0", options: ExecutorOptions | None = None
) -> Iterator[OpenVINOExecutor]:
    executor = load_executor(random_artifact(shape, encoding), options)
    executor.allocate(NUM_BLOCKS, NUM_HOST_BLOCKS)
    yield executor
    executor.close()


@pytest.mark.parametrize("shape", [TINY_LLAMA, TINY_QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("encoding", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("attention", OPERATORS)
def test_logits_are_bitwise_the_same_alone_batched_and_chunked(shape: Shape, encoding: str, attention: str) -> None:
    with loaded(shape, encoding, ExecutorOptions(attention=attention)) as executor:
        report = quick_probe(executor, NUM_BLOCKS)
    assert report.deterministic, [case for case in report.cases if not case.passed]


@pytest.mark.parametrize("name", [name for name in TINY if name not in ("tiny-llama", "tiny-qwen3")])
def test_they_are_so_in_every_architecture(name: str) -> None:
    with loaded(TINY[name]) as executor:
        report = quick_probe(executor, NUM_BLOCKS)
    assert report.deterministic, [case for case in report.cases if not case.passed]


@pytest.mark.parametrize("name", [pytest.param("tiny-mistral", marks=pytest.mark.slow), "tiny-gemma3"])
def test_chunks_that_end_anywhere_in_a_sliding_window_change_nothing(name: str) -> None:
    """Chunks of every size against windows of 16 tokens, contexts of 75 and of 600."""
    shape = replace(TINY[name], num_layers=2, windows=(16, 16 if name == "tiny-mistral" else 0))
    with loaded(shape) as executor:
        report = thorough_probe(executor, NUM_BLOCKS, NUM_HOST_BLOCKS)
    assert len(report.cases) > 100
    assert report.deterministic, [case for case in report.cases if not case.passed]


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1"])
def test_they_are_so_where_products_are_wide_and_the_vocabulary_is_uneven(encoding: str) -> None:
    """More columns than some kernels sum in one go, in the layers and in the head."""
    with loaded(WIDE, encoding) as executor:
        report = quick_probe(executor, NUM_BLOCKS)
    assert report.deterministic, [case for case in report.cases if not case.passed]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1"])
def test_there_they_are_so_in_every_circumstance(encoding: str) -> None:
    with loaded(WIDE, encoding) as executor:
        report = thorough_probe(executor, NUM_BLOCKS, NUM_HOST_BLOCKS)
    assert report.deterministic, [case for case in report.cases if not case.passed]


@pytest.mark.skipif(not instruction_set().has_row_dependent_kernels, reason="this processor's kernels do not need it")
def test_passes_of_any_length_would_break_it_and_the_quick_probe_sees_that() -> None:
    artifact = random_artifact(WIDE, "Q8_0")
    compiled = compile_artifact(artifact, ExecutorOptions(), lambda stage, fraction: None)
    assert compiled.max_pass_tokens == MAX_PASS_TOKENS
    executor = OpenVINOExecutor(artifact, replace(compiled, max_pass_tokens=None))
    executor.allocate(NUM_BLOCKS, 0)
    assert not quick_probe(executor, NUM_BLOCKS).deterministic
    executor.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "kv_cache_precision"),
    [
        *(("openvino", kv) for kv in ("f16", "f32")),
        *(pytest.param("lockstep", kv, marks=needs_operator) for kv in STORAGES),
    ],
)
@pytest.mark.parametrize("group_size", [32, 0])
@pytest.mark.parametrize("encoding", [*ENCODINGS, *MIXES])
@pytest.mark.parametrize("shape", [SMALL_LLAMA, SMALL_QWEN3], ids=["llama", "qwen3"])
def test_they_are_so_in_every_circumstance(
    shape: Shape, encoding: str, group_size: int, attention: str, kv_cache_precision: str
) -> None:
    options = ExecutorOptions(
        kv_cache_precision=kv_cache_precision, attention=attention, dynamic_quantization_group_size=group_size
    )
    artifact = random_artifact(shape, encoding)

    def load() -> OpenVINOExecutor:
        executor = load_executor(artifact, options)
        executor.allocate(NUM_BLOCKS, NUM_HOST_BLOCKS)
        return executor

    executor = load()
    report = thorough_probe(executor, NUM_BLOCKS, NUM_HOST_BLOCKS, load)
    executor.close()
    assert report.deterministic, [case for case in report.cases if not case.passed]


def test_a_compressed_kv_cache_breaks_it_and_the_quick_probe_sees_that() -> None:
    options = ExecutorOptions(kv_cache_precision="u8")
    assert not options.is_batch_invariant
    with loaded(options=options) as executor:
        assert not quick_probe(executor, NUM_BLOCKS).deterministic


def test_a_prompt_chunk_of_one_token_breaks_it_with_openvinos_attention() -> None:
    """Which is why the scheduler makes none there (determinism rule 1 of the core)."""
    with loaded(options=ExecutorOptions(attention="openvino")) as executor:
        assert not executor.geometry.decode_equals_prefill
        assert not np.array_equal(
            play(executor, NUM_BLOCKS, replace(ALONE, chunks=(44, 1))), play(executor, NUM_BLOCKS, ALONE)
        )


@needs_operator
@pytest.mark.parametrize("kv_cache_precision", STORAGES)
@pytest.mark.parametrize("encoding", ["F32", "Q8_0", "Q4_0"])
def test_with_ours_a_token_computed_alone_has_the_bits_that_it_has_among_others(
    encoding: str, kv_cache_precision: str
) -> None:
    """Decoded one by one, as a prompt, in chunks of one, and up to eight at once (what lossless speculation needs)."""
    options = ExecutorOptions(kv_cache_precision=kv_cache_precision, attention="lockstep")
    with loaded(TINY_QWEN3, encoding, options) as executor:
        assert executor.geometry.decode_equals_prefill
        decoded = play(executor, NUM_BLOCKS, Scenario((45,), decodes=9))
        others = [Scenario((45 + k,), decodes=9 - k) for k in range(1, 10)]
        others += [Scenario((45, k), decodes=9 - k) for k in range(1, 9)]
        others += [Scenario((1,) * 45, decodes=9), Scenario((20, 1, 24), decodes=9, company=(5, 16, 27))]
        for scenario in others:
            rows = play(executor, NUM_BLOCKS, scenario)
            assert np.array_equal(rows, decoded[-len(rows) :]), scenario


def test_without_padding_a_pass_over_one_token_would_differ() -> None:
    """With OpenVINO's attention; with ours it was not seen, and the padding is left for what products may yet do."""
    prompt, chunk = list(range(40)), ([7], 40, (1, 2))
    with loaded(options=ExecutorOptions(attention="openvino")) as executor:
        run(executor, (prompt, 0, (1, 2)))
        geometry = executor.geometry
        limits = Limits(geometry.block_size, NUM_BLOCKS, 0, geometry.max_model_len, geometry.vocab_size)
        inputs = build_inputs(batch_of(chunk), limits)
        bare = replace(
            inputs,
            token_ids=inputs.token_ids[:1],
            positions=inputs.positions[:1],
            past_lens=inputs.past_lens[:1],
            subsequence_begins=inputs.subsequence_begins[:2],
            block_indices=inputs.block_indices[:-1],
            block_indices_begins=inputs.block_indices_begins[:2],
        )
        alone = executor._forward(bare)[0].copy()
        in_company = run(executor, chunk, ([9], 0, (3,)))[0]
        padded = run(executor, chunk)[0]
    assert np.array_equal(padded, in_company)
    assert not np.array_equal(alone, in_company)


def test_what_lies_beyond_a_sequence_in_its_blocks_is_never_read() -> None:
    prompt = list(range(40))
    with loaded() as executor:
        clean = run(executor, (prompt, 0, (1, 2))), run(executor, ([7], 40, (1, 2)))
        assert executor._pool is not None
        for cache in executor._pool.caches:
            cache[...] = 0xFF  # not a number in any precision
        dirty = run(executor, (prompt, 0, (1, 2))), run(executor, ([7], 40, (1, 2)))
    assert np.array_equal(clean, dirty)


@pytest.mark.parametrize("precision", ["f16", "f32", "u8", pytest.param("int8", marks=needs_operator)])
def test_swapping_and_copying_move_blocks_bit_for_bit(precision: str) -> None:
    prompt = list(range(70))
    with loaded(TINY_QWEN3, "Q4_0", ExecutorOptions(kv_cache_precision=precision)) as executor:
        run(executor, (prompt, 0, (1, 2, 3)))
        expected = run(executor, ([5], 70, (1, 2, 3)))
        run(executor, (prompt, 0, (1, 2, 3)))
        executor.execute(batch_of(swap_out=((1, 7), (2, 0), (3, 4)), copies=((2, 30),)))
        run(executor, (prompt[::-1], 0, (1, 2, 3)))
        moved = executor.execute(batch_of(([5], 70, (9, 30, 20)), swap_in=((7, 9), (4, 20))))
        assert np.array_equal(moved, expected)
        if precision == "u8":
            return  # computing the last token again requantises its block
        chained = batch_of(([5], 70, (12, 30, 20)), copies=((9, 11), (11, 12)))
        assert np.array_equal(executor.execute(chained), expected), "copies are made in plan order"


def test_a_model_loaded_again_says_the_same_bits() -> None:
    with loaded() as executor:
        first = play(executor, NUM_BLOCKS, ALONE)
    with loaded() as executor:
        assert np.array_equal(play(executor, NUM_BLOCKS, ALONE), first)
