"""Decoders with windows and states by the real engine: the same bits in every circumstance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import OpenStore
from tests.engine.hybrid_engines import BLOCK, NAMES, Answer, Ids, answers, hybrid_engine, request, text, write_hybrid
from tests.executors.native.loading import EACH_ISA

LENGTHS = (1, 31, 33, 64, 150, 700)
NUM_FEW_BLOCKS = {"tiny-qwen35": 70, "tiny-lfm3": 60, "tiny-gemma3": 80, "tiny-gemma4": 40}
"""Blocks that suffice for six prompts, but not for their answers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@pytest.fixture(scope="module")
def prompts() -> list[Ids]:
    generator = random.Random(1)
    return [text(generator, length) for length in LENGTHS]


@pytest.fixture(scope="module")
def alone(folder: Path, prompts: list[Ids]) -> dict[str, list[Answer]]:
    """Answers to each prompt alone, without the prefix cache, by model."""
    found = {}
    for name in NAMES:
        with hybrid_engine(write_hybrid(folder, name), {"enable_prefix_caching": False}) as engine:
            found[name] = [answers(engine, [request(each)])[0] for each in prompts]
    return found


def bits(found: Sequence[Answer]) -> list[Any]:
    return [each.bits for each in found]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [7, 64, 256])
def test_batches_and_chunks_of_any_size_change_no_bit(
    folder: Path, prompts: list[Ids], alone: dict[str, list[Answer]], name: str, chunk: int
) -> None:
    with hybrid_engine(write_hybrid(folder, name), {"max_chunk_tokens": chunk}) as engine:
        assert bits(answers(engine, [request(each) for each in prompts])) == bits(alone[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("isa", EACH_ISA)
def test_every_instruction_set_gives_the_same_bits(
    folder: Path, prompts: list[Ids], alone: dict[str, list[Answer]], name: str, isa: str
) -> None:
    """Portable kernels, which take ten times as long, get all prompts but the longest."""
    count = len(prompts) - (isa == "portable")
    with hybrid_engine(write_hybrid(folder, name), threads=1, isa=isa) as engine:
        assert bits(answers(engine, [request(each) for each in prompts[:count]])) == bits(alone[name][:count])


@pytest.mark.parametrize("name", NAMES)
def test_preemption_with_and_without_host_memory_changes_no_bit(folder: Path, name: str) -> None:
    generator = random.Random(5)
    requests = [request(text(generator, 100), 120) for _ in range(6)]
    path, limits = write_hybrid(folder, name), {"enable_prefix_caching": False}
    with hybrid_engine(path, limits) as engine:
        expected = [answers(engine, [each])[0] for each in requests]
    for num_host_blocks in (0, 200):
        few = {"num_blocks": NUM_FEW_BLOCKS[name], "num_host_blocks": num_host_blocks}
        with hybrid_engine(path, {**limits, **few}) as engine:
            found = answers(engine, requests)
            assert bits(found) == bits(expected), num_host_blocks
            assert sum(each.num_preemptions for each in found) > 0
            assert (engine.scheduler.stats().num_swapped_in_blocks > 0) == (num_host_blocks > 0)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_decoded_has_the_bits_of_a_prompt(folder: Path, prompts: list[Ids], name: str) -> None:
    with hybrid_engine(write_hybrid(folder, name), {"enable_prefix_caching": False}) as engine:
        [whole] = answers(engine, [request(prompts[-1], 60)])
        [rest] = answers(engine, [request((*prompts[-1], *whole.tokens[:40]), 20)])
    assert rest.bits == (whole.tokens[40:], whole.logprobs[40:])


@pytest.mark.parametrize("name", NAMES)
def test_the_next_turn_continues_from_the_snapshot_before_the_answer(
    folder: Path, prompts: list[Ids], name: str
) -> None:
    """The answer is written differently in the next prompt, as templates omit reasoning."""
    first, new = prompts[-1], text(random.Random(2), 40)
    lasting = len(first) - 5
    second = (*first[:lasting], *new)
    path = write_hybrid(folder, name)
    with hybrid_engine(path) as engine:
        answers(engine, [request(first, num_lasting_tokens=lasting)])
        [warm] = answers(engine, [request(second)])
    with hybrid_engine(path) as engine:
        [cold] = answers(engine, [request(second)])
    assert warm.bits == cold.bits
    assert (warm.num_cached_tokens, cold.num_cached_tokens) == (lasting // BLOCK * BLOCK, 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_next_turn_continues_at_the_end_of_an_answer_that_it_repeats(
    folder: Path, prompts: list[Ids], name: str
) -> None:
    path, first, new = write_hybrid(folder, name), prompts[4], text(random.Random(3), 20)
    with hybrid_engine(path) as engine:
        [answer] = answers(engine, [request(first, 100)])
        second = (*first, *answer.tokens, *new)
        [warm] = answers(engine, [request(second)])
    with hybrid_engine(path) as engine:
        [cold] = answers(engine, [request(second)])
    assert warm.bits == cold.bits
    assert warm.num_cached_tokens == (len(first) + 99) // BLOCK * BLOCK


@pytest.mark.parametrize("name", NAMES)
def test_a_session_is_restored_from_disk_with_the_same_bits(
    folder: Path, prompts: list[Ids], open_store: OpenStore, tmp_path: Path, name: str
) -> None:
    path, first = write_hybrid(folder, name), prompts[-1]
    fields: dict[str, Any] = {"session_id": "s", "session_owner": "m"}
    second = (*first, *text(random.Random(4), 30))
    with hybrid_engine(path, store=open_store(disk_bytes=1 << 28)) as engine:
        answers(engine, [request(first, num_lasting_tokens=len(first) - 5, **fields)])
        engine.sessions.sweep()
        assert engine.sessions.kv is not None
        assert engine.sessions.kv.store.flush(30.0)
    store = open_store(disk_bytes=1 << 28)
    for each in (tmp_path / "host").rglob("*.kv"):
        each.unlink()
    with hybrid_engine(path, store=store) as engine:
        [warm] = answers(engine, [request(second, **fields)])
    with hybrid_engine(path) as engine:
        [cold] = answers(engine, [request(second)])
    assert warm.bits == cold.bits
    assert warm.num_cached_tokens == (len(first) - 5) // BLOCK * BLOCK
