"""Vectors and scores of encoders by the real engine: the same bytes in every circumstance, and who goes first."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.core.request import FinishReason, Priority
from lockstep.engine.deadlines import ManualClock
from lockstep.engine.engine import Engine
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.sampling_params import SamplingParams
from lockstep.worker.messages import Load, Loaded, Submit, TrialOptions
from tests.engine.encoder_engines import (
    LENGTHS,
    PAD_ID,
    Ids,
    embedding_request,
    encoder_engine,
    text,
    vector_of,
    vectors_of,
    write_served_encoder,
)
from tests.executors.native.loading import EACH_ISA
from tests.worker.support import running

EMBEDDER, CLASSIFIER = "modern-bert", "xlm-roberta-classifier"
NAMES = (EMBEDDER, CLASSIFIER)
NUM_BATCHES = 200
SMALLEST_STEP = {"max_num_seqs": 4, "max_num_batched_tokens": 19, "max_chunk_tokens": 19}
LONG = EngineOptions(order="priority", max_num_seqs=8)
SHORT_STEPS = {"max_num_batched_tokens": 128, "max_chunk_tokens": 64}
"""Steps of an eighth of a stage of a text of 512 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def texts() -> list[Ids]:
    """Three texts of each length."""
    generator = random.Random(1)
    return [text(generator, length) for length in LENGTHS for _ in range(3)]


@pytest.fixture(scope="module")
def alone(folder: Path, texts: list[Ids]) -> dict[str, dict[Ids, bytes]]:
    """Vectors of each model and text, computed alone."""
    found = {}
    for name in NAMES:
        with encoder_engine(write_served_encoder(folder, name), threads=1) as engine:
            found[name] = {each: vectors_of(engine, [each])[0] for each in texts}
    assert all(len(set(vectors.values())) == len(texts) for vectors in found.values())
    return found


@pytest.fixture
def engine(folder: Path, clock: ManualClock) -> Iterator[Engine]:
    """An engine with short steps, which serves by priority."""
    with encoder_engine(write_served_encoder(folder, EMBEDDER), LONG, SHORT_STEPS, clock) as found:
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_vectors_in_ragged_batches_have_the_bytes_that_they_have_alone(
    folder: Path, texts: list[Ids], alone: dict[str, dict[Ids, bytes]], name: str
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    with encoder_engine(write_served_encoder(folder, name), threads=2) as engine:
        for _ in range(NUM_BATCHES):
            batch = generator.choices(texts, k=generator.randint(1, 6))
            assert vectors_of(engine, batch) == [alone[name][each] for each in batch]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", EACH_ISA)
def test_every_instruction_set_and_number_of_threads_gives_the_same_bytes(
    folder: Path, texts: list[Ids], alone: dict[str, dict[Ids, bytes]], name: str, threads: int, isa: str
) -> None:
    with encoder_engine(write_served_encoder(folder, name), threads=threads, isa=isa) as engine:
        one_of_each = texts[::-3]
        assert vectors_of(engine, one_of_each) == [alone[name][each] for each in one_of_each]


@pytest.mark.parametrize(
    "limits",
    [
        SMALLEST_STEP,
        {"max_num_batched_tokens": 100, "max_chunk_tokens": 7},
        {"max_num_batched_tokens": 1_000, "max_chunk_tokens": 999},
        {"max_num_batched_tokens": 1 << 20, "max_chunk_tokens": 1 << 20},
    ],
)
def test_no_size_of_steps_changes_a_vector(
    folder: Path, texts: list[Ids], alone: dict[str, dict[Ids, bytes]], limits: dict[str, int]
) -> None:
    with encoder_engine(write_served_encoder(folder, EMBEDDER), limits=limits) as engine:
        some = texts[::2]
        assert vectors_of(engine, some) == [alone[EMBEDDER][each] for each in some]


def test_many_texts_share_few_blocks(folder: Path, texts: list[Ids], alone: dict[str, dict[Ids, bytes]]) -> None:
    """The pool has room for one longest text and a short one."""
    options = EngineOptions(num_blocks=17, max_num_seqs=32)
    with encoder_engine(write_served_encoder(folder, EMBEDDER), options) as engine:
        many = texts * 5
        assert vectors_of(engine, many) == [alone[EMBEDDER][each] for each in many]
        assert engine.scheduler.stats().num_free_blocks == 17


def test_a_padded_text_has_another_vector(folder: Path, texts: list[Ids], alone: dict[str, dict[Ids, bytes]]) -> None:
    """The negative twin: if a batch padded its texts to one length, the other tests would fail."""
    for name in NAMES:
        with encoder_engine(write_served_encoder(folder, name)) as engine:
            longest = max(map(len, texts))
            short = [each for each in texts if len(each) < longest]
            padded = vectors_of(engine, [each + (PAD_ID,) * (longest - len(each)) for each in short])
        assert all(vector != alone[name][each] for vector, each in zip(padded, short, strict=True))


def test_vectors_and_chats_of_one_device_do_not_affect_each_other(
    folder: Path, texts: list[Ids], alone: dict[str, dict[Ids, bytes]]
) -> None:
    prompts = [tuple(range(60, 60 + length)) for length in (5, 40, 90)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    sources = {"chat": "pocket://", **{name: str(write_served_encoder(folder, name)) for name in NAMES}}
    answers: list[list[tuple[int, ...]]] = []
    for has_texts in (False, True):
        with running() as bench:
            for key, source in sources.items():
                options = LoadOptions(EngineOptions(num_blocks=100), ExecutorOptions(), folder / "cache")
                bench.tell(Load(key, source, options, TrialOptions(enabled=False), Priority.NORMAL))
                bench.heard(Loaded, lambda event, key=key: event.replica == key)  # type: ignore[misc]  # a default
            for number, prompt in enumerate(prompts):
                bench.tell(Submit(number, "chat", GenerationRequest(prompt, params)))
            requests = [(name, each) for each in texts for name in NAMES] if has_texts else []
            for number, (name, ids) in enumerate(requests):
                bench.tell(Submit(100 + number, name, embedding_request(ids, is_score="classifier" in name)))
            chats = [bench.answer(number).request for number in range(len(prompts))]
            answers.append([chat.completions[0].token_ids for chat in chats if chat is not None])
            for number, (name, ids) in enumerate(requests):
                output = bench.answer(100 + number).request
                assert output is not None
                assert output.embedding is not None
                assert output.embedding.tobytes() == alone[name][ids]
            bench.checked()
    assert answers[0] == answers[1]
    assert all(len(tokens) == 24 for tokens in answers[0])


def test_a_critical_text_overtakes_bulk_ones_in_the_middle_of_a_long_text(
    engine: Engine, texts: list[Ids], alone: dict[str, dict[Ids, bytes]]
) -> None:
    longest = [each for each in texts if len(each) == max(LENGTHS)]
    bulk = [engine.submit(embedding_request(each, priority=Priority.LOW)) for each in longest]
    for _ in range(10):
        engine.step()
    short = next(each for each in texts if len(each) == 33)
    critical = engine.submit(embedding_request(short, priority=Priority.CRITICAL))
    num_steps = 0
    while not engine.is_complete(critical):
        engine.step()
        num_steps += 1
    assert num_steps <= 3 + 33 * 4 // 64
    assert not any(engine.is_complete(each) for each in bulk)
    engine.scheduler.check()
    engine.run_until_idle()
    assert vector_of(engine, critical) == alone[EMBEDDER][short]
    assert [vector_of(engine, each) for each in bulk] == [alone[EMBEDDER][each] for each in longest]


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.DEADLINE])
def test_a_text_that_ends_in_the_middle_of_its_stages_frees_its_blocks(
    engine: Engine,
    texts: list[Ids],
    alone: dict[str, dict[Ids, bytes]],
    clock: ManualClock,
    reason: FinishReason,
) -> None:
    num_free = engine.scheduler.stats().num_free_blocks
    request_id = engine.submit(embedding_request(texts[-1], deadline_s=10.0))
    for _ in range(12):
        engine.step()
    assert engine.scheduler.stats().num_free_blocks == num_free - 16
    if reason is FinishReason.ABORT:
        engine.abort(request_id)
    else:
        clock.advance(10.5)
    engine.drain()
    engine.scheduler.check()
    assert engine.scheduler.stats().num_free_blocks == num_free
    output = engine.result(request_id)
    assert output is not None
    assert output.completions[0].finish_reason is reason
    assert output.embedding is None
    assert vectors_of(engine, texts[-1:]) == [alone[EMBEDDER][texts[-1]]]
