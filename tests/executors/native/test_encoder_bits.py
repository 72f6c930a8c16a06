"""A text's hidden states are the same bits alone, beside others, in any division, on any threads and instruction set.

Lengths are around the borders of blocks (32 tokens), of segments of attention (128), and of the number of rows from
which on threads share rows and not features (48).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.artifacts.model import Artifact
from lockstep.executors.native.encoder import EncoderExecutor
from tests.executors.native.encoder_models import (
    Chunk,
    Floats,
    Longs,
    loaded_encoder,
    open_encoder,
    open_encoder_gguf,
    states_of,
)
from tests.executors.native.loading import EACH_ISA, USABLE
from tools.golden.encoder_cases import text
from tools.golden.native_digests import DIGESTS, encoder_cases, encoder_digest
from tools.random_encoders import ENCODERS

LENGTHS = (1, 31, 33, 200)
TEXTS = [text(length) for length in LENGTHS]
FAMILIES = ("bert", "xlm-roberta", "nomic-bert", "modern-bert", "gemma-embedding")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("encoders")
    opened = {name: open_encoder(folder, name) for name in FAMILIES}
    return opened | {f"{name} Q8_0": open_encoder_gguf(folder, name, "Q8_0") for name in FAMILIES}


@pytest.fixture(scope="module")
def executor(artifacts: dict[str, Artifact]) -> Iterator[EncoderExecutor]:
    with loaded_encoder(artifacts["modern-bert Q8_0"], threads=2) as found:
        yield found


def same(found: Sequence[Floats], expected: Sequence[Floats]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("isa", EACH_ISA)
@pytest.mark.parametrize("form", ["", " Q8_0"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_has_its_bits_alone_and_beside_others(
    artifacts: dict[str, Artifact], name: str, form: str, isa: str
) -> None:
    """With several threads, too, for the fastest instruction set: the division of work is the same for all."""
    found = []
    for threads in (1, 2) if isa == USABLE[0] else (1,):
        with loaded_encoder(artifacts[name + form], isa=isa, threads=threads, kv_cache_precision="f16") as each:
            alone = [states_of(each, [ids])[0] for ids in TEXTS]
            assert same(states_of(each, TEXTS), alone)
            assert same(states_of(each, TEXTS[::-1])[::-1], alone)
            found.append(np.concatenate(alone))
    assert np.array_equal(found[0], found[-1])


@pytest.mark.parametrize("name", list(encoder_cases()))
def test_every_machine_and_instruction_set_gives_the_digest_in_the_repository(name: str, tmp_path: Path) -> None:
    expected = json.loads(DIGESTS.read_text())[name]
    assert {isa: encoder_digest(name, tmp_path, isa) for isa in USABLE} == dict.fromkeys(USABLE, expected)


@settings(max_examples=25)
@given(data=st.data())
def test_no_division_of_the_work_changes_a_bit(executor: EncoderExecutor, data: st.DataObject) -> None:
    check_division(executor, data)


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data())
def test_no_division_of_many_changes_a_bit(executor: EncoderExecutor, data: st.DataObject) -> None:
    check_division(executor, data)


def check_division(executor: EncoderExecutor, data: st.DataObject) -> None:
    """Steps of random chunks of several texts: a chunk may begin and end anywhere, also in different stages."""
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    texts = [text(length) for length in lengths]
    expected = states_of(executor, texts)
    left = {index: len(ids) * executor.geometry.num_stages for index, ids in enumerate(texts)}
    done = dict.fromkeys(left, 0)
    steps: list[list[Chunk]] = []
    while left:
        chunks = []
        for index in sorted(data.draw(st.sets(st.sampled_from(sorted(left)), min_size=1))):
            length = data.draw(st.integers(1, left[index]) if len(steps) < 40 else st.just(left[index]))
            chunks.append(Chunk(index, done[index], length))
            done[index] += length
            left[index] -= length
        left = {index: count for index, count in left.items() if count}
        steps.append(chunks)
    assert same(states_of(executor, texts, steps), expected)


@pytest.mark.parametrize("size", [1, 7, 33, 200])
def test_equal_chunks_of_any_size_give_the_same_bits(executor: EncoderExecutor, size: int) -> None:
    ids = text(70)
    num_positions = len(ids) * executor.geometry.num_stages
    steps = [[Chunk(0, at, min(size, num_positions - at))] for at in range(0, num_positions, size)]
    assert same(states_of(executor, [ids], steps), states_of(executor, [ids]))


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_changes_the_bits(artifacts: dict[str, Artifact], name: str) -> None:
    """The negative twin: with more tokens, even of padding, a text is another one."""
    ids = text(33)
    with loaded_encoder(artifacts[name]) as each:
        [expected] = states_of(each, [ids])
        [padded] = states_of(each, [np.concatenate([ids, np.zeros(7, np.int64)])])
    assert not np.array_equal(padded[:33], expected)


def test_old_contents_of_blocks_have_no_effect(artifacts: dict[str, Artifact]) -> None:
    with loaded_encoder(artifacts["bert"], num_blocks=7) as each:
        expected = states_of(each, [TEXTS[2]])
        blocks = list(range(1, 8))
        each.write_blocks(blocks, np.full((7, each.geometry.bytes_per_block), 0xFF, np.uint8))
        assert same(states_of(each, [TEXTS[2]]), expected)


def test_vectors_have_their_bits_in_any_number(artifacts: dict[str, Artifact]) -> None:
    vectors = np.random.default_rng(1).normal(0, 1, (70, 64)).astype(np.float32)
    digests = set()
    for isa in USABLE:
        with loaded_encoder(artifacts["gemma-embedding"], isa=isa, threads=2) as each:
            together = each.project(vectors)
            alone = np.concatenate([each.project(vectors[row : row + 1]) for row in range(len(vectors))])
        assert np.array_equal(alone, together)
        digests.add(hashlib.sha256(together.tobytes()).hexdigest())
    assert len(digests) == 1


def test_all_families_are_tested() -> None:
    kinds = {encoder.config["model_type"] for encoder in ENCODERS.values()}
    assert {ENCODERS[name].config["model_type"] for name in FAMILIES} == kinds


def test_two_halves_of_a_text_are_not_the_text(executor: EncoderExecutor) -> None:
    """A text's tokens see all others, so that its halves as texts of their own have other states."""
    ids: Longs = text(60)
    [whole] = states_of(executor, [ids])
    halves = np.concatenate(states_of(executor, [ids[:30], ids[30:]]))
    assert not np.array_equal(halves, whole)
