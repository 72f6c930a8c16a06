"""Random encoders as people have them, with texts of at most 512 tokens and a tokenizer, and requests to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from lockstep.engine.deadlines import Clock
from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.options import ExecutorOptions
from tools.random_encoders import ENCODERS, write_encoder, write_word_tokenizer

Ids = tuple[int, ...]
LENGTHS = (1, 31, 33, 512)
PAD_ID = 0
FIRST_WORD_ID = 5


def write_served_encoder(folder: Path, name: str) -> Path:
    """Write an encoder with its tokenizer, once for each folder."""
    path = folder / name
    if not path.exists():
        offset = 2 if name.startswith("xlm-roberta") else 0
        config = {**ENCODERS[name].config, "max_position_embeddings": 512 + offset}
        write_encoder(path, replace(ENCODERS[name], config=config))
        write_word_tokenizer(path, config["vocab_size"])
    return path


@contextmanager
def encoder_engine(
    path: Path,
    options: EngineOptions | None = None,
    limits: dict[str, Any] | None = None,
    clock: Clock | None = None,
    **executor: Any,
) -> Iterator[Engine]:
    """An engine of an encoder.

    Args:
        limits: fields of the scheduler's configuration, in positions.
        executor: fields of `ExecutorOptions`.
    """
    loading = LoadOptions(options or EngineOptions(), ExecutorOptions(**executor), path.parent / "cache")
    model, config = load_model(str(path), loading)
    try:
        yield Engine(model, replace(config, **(limits or {})), clock=clock)
    finally:
        model.close()


def text(random: Random, length: int) -> Ids:
    """Random words."""
    return tuple(random.choices(range(FIRST_WORD_ID, 320), k=length))


def embedding_request(ids: Ids, *, is_score: bool = False, **fields: Any) -> GenerationRequest:
    """Request for the vector of a text, or for the score of a pair that is tokenised already."""
    return GenerationRequest(ids, pooling="score" if is_score else "model", **fields)


def vectors_of(engine: Engine, texts: Sequence[Ids]) -> list[bytes]:
    """Bytes of the vectors of a batch."""
    is_score = engine.model.scoring == "classifier"
    ids = [engine.submit(embedding_request(each, is_score=is_score)) for each in texts]
    engine.run_until_idle()
    engine.scheduler.check()
    return [vector_of(engine, each) for each in ids]


def vector_of(engine: Engine, request_id: int) -> bytes:
    """Bytes of the vector of a request that has ended."""
    output = engine.result(request_id)
    assert output is not None
    assert output.embedding is not None
    return output.embedding.tobytes()
