"""Hybrid models: values of logits, and the same bits in chunks of any sizes, beside others, and on any processor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from lockstep.artifacts.hybrids import KERNELS
from lockstep.artifacts.layout import expected_tensors
from lockstep.artifacts.model import Artifact, Encoding, Tensor
from lockstep.core.step import StepPlan
from lockstep.errors import InvalidPlanError
from lockstep.executors.base import StepBatch
from lockstep.executors.fixed_plans import Regions
from lockstep.executors.native.executor import NativeExecutor
from lockstep.executors.native.packs import load_weights
from tests.artifacts.hybrid_reference import hybrid_logits
from tests.executors.native.loading import USABLE, loaded
from tests.executors.native.support import random_artifact, with_tensor
from tests.executors.native.test_packs import library
from tests.golden_hybrids import (
    llama_cpp_hybrid_logits,
    open_gguf_hybrid,
    open_huggingface_hybrid,
    transformers_hybrid_logits,
)
from tools.golden.hybrid_cases import HYBRID_CASES, HYBRID_GGUF_CASES, POSITIONS, hybrid_token_ids
from tools.random_hybrids import DeltaShape
from tools.random_models import SHAPES, random_tensor

Floats = npt.NDArray[np.float32]
NAMES = ("tiny-qwen35", "tiny-lfm2", "tiny-lfm3")
NUM_TOKENS = 90
NUM_COLUMNS = 3
"""Blocks of the first group that a sequence of so many tokens has."""


@dataclass(frozen=True)
class Chunk:
    """Tokens of a sequence, and its blocks."""

    tokens: Sequence[int]
    start: int
    table: tuple[int, ...]
    after: tuple[int, ...]
    """Blocks of the state after the tokens."""
    before: tuple[int, ...] | None = None
    """Blocks of the state before them, if they are others."""

    @property
    def states(self) -> tuple[int, ...]:
        return (*(self.before or ()), *self.after)


def step(executor: NativeExecutor, *chunks: Chunk) -> list[Floats]:
    """Logits of all tokens of each chunk."""
    lengths = [len(chunk.tokens) for chunk in chunks]
    regions = regions_before_states(executor)
    plan = StepPlan(
        step=0, evicted=(), swap_out=(), swap_in=(), copies=(), seq_ids=tuple(range(len(chunks))),
        starts=tuple(chunk.start for chunk in chunks), lengths=tuple(lengths),
        tables=tuple(chunk.table for chunk in chunks), samples=(True,) * len(chunks),
        other_tables=tuple(
            (*regions.other_tables(chunk.table, chunk.start, chunk.start + len(chunk.tokens)), chunk.states)
            for chunk in chunks
        ),
    )  # fmt: skip
    ids = np.array([token for chunk in chunks for token in chunk.tokens], np.int64)
    logits = executor.execute(StepBatch(plan, ids, np.arange(len(ids)))).copy()
    return np.split(logits, np.cumsum(lengths)[:-1])


def regions_before_states(executor: NativeExecutor) -> Regions:
    """Division of the pool among the groups that are not of states. Blocks of states are in the first region."""
    geometry = executor.geometry
    return Regions(geometry.groups[:-1], geometry.block_size, executor.num_blocks // num_regions(executor))


def num_regions(executor: NativeExecutor) -> int:
    return sum(group.num_parts for group in executor.geometry.groups[:-1])


def sequences(executor: NativeExecutor, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tables of the first group and of a state for several sequences; all blocks hold what is not a number."""
    num_parts = executor.geometry.groups[-1].num_parts
    size = NUM_COLUMNS + num_parts
    blocks = [tuple(range(1 + i * size, 1 + (i + 1) * size)) for i in range(count)]
    total = count * size * num_regions(executor)
    executor.allocate(total, 0)
    executor.write_blocks(range(1, 1 + total), np.full((total, executor.geometry.bytes_per_block), 0xFF, np.uint8))
    return [(each[:NUM_COLUMNS], each[NUM_COLUMNS:]) for each in blocks]


def whole(executor: NativeExecutor, tokens: Sequence[int]) -> Floats:
    [(table, state)] = sequences(executor, 1)
    return step(executor, Chunk(tokens, 0, table, state))[0]


def random_tokens(artifact: Artifact, count: int = NUM_TOKENS, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, artifact.config.vocab_size, count).tolist()
    return found


@pytest.fixture(scope="module", params=NAMES)
def artifact(request: pytest.FixtureRequest) -> Artifact:
    return random_artifact(SHAPES[request.param], "F32")


@pytest.fixture
def executor(artifact: Artifact) -> Iterator[NativeExecutor]:
    with loaded(artifact, 8, 0, threads=2) as found:
        yield found


def test_logits_are_those_of_the_definition(artifact: Artifact) -> None:
    tokens = random_tokens(artifact)
    with loaded(artifact, 8, 0, kv_cache_precision="f32") as executor:
        logits = whole(executor, tokens)
    expected = hybrid_logits(artifact, tokens)
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    "net",
    [DeltaShape(1, 3, 8, 20, 2), DeltaShape(2, 4, 3, 5, 5), DeltaShape(2, 4, 40, 24, 4), DeltaShape(3, 3, 130, 7, 3)],
    ids=str,
)
def test_delta_nets_of_any_shape_are_right(net: DeltaShape) -> None:
    """Sizes that are no multiple of a vector, and other numbers of taps."""
    artifact = random_artifact(replace(SHAPES["tiny-qwen35"], delta_net=net), "F32")
    tokens = random_tokens(artifact)
    with loaded(artifact, 8, 0, kv_cache_precision="f32") as executor:
        logits = whole(executor, tokens)
    expected = hybrid_logits(artifact, tokens)
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()


def test_convolutions_may_have_biases() -> None:
    plain = random_artifact(SHAPES["tiny-lfm2"], "F32")
    artifact = replace(plain, config=replace(plain.config, conv_bias=True))
    for name, shape in expected_tensors(artifact.config).items():
        if name not in artifact.weights:
            artifact = with_tensor(artifact, Tensor(name, Encoding.F32, shape, random_tensor(name, shape, "F32", 0)))
    tokens = random_tokens(artifact)
    with loaded(artifact, 8, 0, kv_cache_precision="f32") as executor:
        logits = whole(executor, tokens)
    expected = hybrid_logits(artifact, tokens)
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
    assert np.abs(hybrid_logits(plain, tokens) - expected).max() > 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("name", HYBRID_CASES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    ids = hybrid_token_ids(HYBRID_CASES[name].shape).tolist()
    with loaded(open_huggingface_hybrid(name, tmp_path), 8, 0, kv_cache_precision="f32") as executor:
        logits = long_logits(executor, ids)
    assert np.abs(logits - transformers_hybrid_logits(name)).max() <= 1e-4


GGUF_CASES = [(name, encoding) for name, case in HYBRID_GGUF_CASES.items() for encoding in case.encodings]


@pytest.mark.parametrize(("name", "encoding"), GGUF_CASES)
def test_logits_are_those_of_llama_cpp(name: str, encoding: str, tmp_path: Path) -> None:
    ids = hybrid_token_ids(HYBRID_GGUF_CASES[name].shape).tolist()
    with loaded(open_gguf_hybrid(name, encoding, tmp_path), 8, 0, kv_cache_precision="f32") as executor:
        logits = long_logits(executor, ids)
    golden = llama_cpp_hybrid_logits(name, encoding)
    errors = np.linalg.norm(logits - golden, axis=1) / np.linalg.norm(golden, axis=1)
    assert errors.max() <= {"F32": 1e-5, "Q8_0": 8e-2}[encoding], "5.7e-2 was seen: it rounds activations differently"


def long_logits(executor: NativeExecutor, ids: Sequence[int]) -> Floats:
    """Logits at the golden positions, of a prompt in two chunks."""
    num_columns, num_parts = -(-len(ids) // 32), executor.geometry.groups[-1].num_parts
    table, state = tuple(range(1, 1 + num_columns)), tuple(range(1 + num_columns, 1 + num_columns + num_parts))
    executor.allocate((num_columns + num_parts) * num_regions(executor), 0)
    parts = [step(executor, Chunk(ids[:300], 0, table, state)), step(executor, Chunk(ids[300:], 300, table, state))]
    return np.concatenate([part[0] for part in parts])[list(POSITIONS)]


@pytest.mark.parametrize("seed", range(3))
def test_chunks_and_decoded_tokens_have_the_bits_of_the_whole(
    artifact: Artifact, executor: NativeExecutor, seed: int
) -> None:
    """Beside another sequence in other chunks; states are updated in place, or go from one place to another."""
    rng = np.random.default_rng(seed)
    tokens, others = random_tokens(artifact), random_tokens(artifact, seed=1)
    expected, expected_other = whole(executor, tokens), whole(executor, others)
    (table, first), (other_table, other_state), (_, second) = sequences(executor, 3)
    start, other_start, state = 0, 0, first
    while start < NUM_TOKENS:
        end = start + 1 if seed == 0 and start > 40 else min(NUM_TOKENS, start + int(rng.integers(1, 30)))
        after = state if start == 0 or rng.integers(2) else (second if state == first else first)
        before = None if start == 0 or after == state else state
        snapshot = executor.read_blocks(state)
        chunks = [Chunk(tokens[start:end], start, table, after, before)]
        other_end = min(NUM_TOKENS, other_start + int(rng.integers(1, 30)))
        if other_end > other_start:
            chunks.append(Chunk(others[other_start:other_end], other_start, other_table, other_state))
        results = step(executor, *chunks)
        assert results[0].tobytes() == expected[start:end].tobytes(), f"seed {seed}, tokens {start} to {end}"
        if len(chunks) > 1:
            assert results[1].tobytes() == expected_other[other_start:other_end].tobytes(), f"seed {seed}"
        if before is not None:
            assert np.array_equal(executor.read_blocks(state), snapshot), "a state that others may read was changed"
        start, other_start, state = end, other_end, after


@pytest.mark.parametrize("encoding", ["F32", "Q8_0"])
def test_bits_depend_on_neither_threads_nor_the_instruction_set(artifact: Artifact, encoding: str) -> None:
    tokens = random_tokens(artifact, 70)
    same = random_artifact(SHAPES[f"tiny-{artifact.config.architecture}"], encoding)
    seen = set()
    for isa, threads in [(USABLE[0], 1), (USABLE[0], 3), *((isa, 2) for isa in USABLE[1:]), ("portable", 1)]:
        with loaded(same, 8, 0, isa=isa, threads=threads) as executor:
            logits = whole(executor, tokens)
            seen.add((logits.tobytes(), executor.read_blocks([NUM_COLUMNS + 1]).tobytes()))
    assert len(seen) == 1


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_float_weights_are_rounded_but_kernels_are_not(artifact: Artifact, quantize: str) -> None:
    """Kernels of convolutions have few numbers, which decide much."""
    weights = load_weights(artifact, library(), quantize, None, 0, lambda stage, share: None)
    kernels = [name for name in artifact.weights.names() if name.endswith(KERNELS)]
    assert kernels
    assert not set(kernels) & set(weights.matrices)
    tokens = random_tokens(artifact, 40)
    with loaded(artifact, 8, 0) as executor:
        exact = whole(executor, tokens)
    with loaded(artifact, 8, 0, quantize=quantize) as executor:
        logits = whole(executor, tokens)
    error = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert 0 < error < {"int8": 0.12, "int4": 0.8}[quantize], "8.2e-2 and 6.5e-1 were seen"


def test_a_second_prompt_begins_with_a_zero_state(artifact: Artifact, executor: NativeExecutor) -> None:
    """The blocks of its state still hold that of the first one."""
    tokens, others = random_tokens(artifact), random_tokens(artifact, seed=1)
    [(table, state)] = sequences(executor, 1)
    first = step(executor, Chunk(tokens, 0, table, state))[0]
    step(executor, Chunk(others, 0, table, state))
    assert step(executor, Chunk(tokens, 0, table, state))[0].tobytes() == first.tobytes()


def test_wrong_tables_of_states_are_refused(executor: NativeExecutor) -> None:
    (table, state), (other_table, other) = sequences(executor, 2)
    good = Chunk([1, 2], 0, table, state)
    step(executor, good)
    for chunks in (
        [replace(good, after=state[:-1])],
        [replace(good, after=(*state, *other))],
        [replace(good, after=(*state[:-1], 0))],
        [replace(good, after=(*state[:-1], 10**6))],
        [replace(good, after=(*state[:-1], table[0]))],
        [good, Chunk([1], 0, other_table, state)],
        [replace(good, start=2, after=other, before=(0,) * len(state))],
    ):
        before = executor.read_blocks([*table, *state, *other])
        with pytest.raises(InvalidPlanError):
            step(executor, *chunks)
        assert np.array_equal(executor.read_blocks([*table, *state, *other]), before)
