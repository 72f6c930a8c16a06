"""Embeddings by the real engine: correct, and equal alone, batched, chunked and preempted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from lockstep import LLM, AsyncEngine, EngineOptions, GenerationRequest, LoadOptions, SamplingParams
from lockstep.artifacts.task import POOLINGS, Pooling
from lockstep.engine.engine import Engine
from lockstep.engine.input_processing import prepare
from lockstep.errors import InvalidParameterError, PromptTooLongError

TEXTS = ["I was charged twice", "My login page shows an error " * 12, "Is a clause enforceable", "hi"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    cache_dir: Path = tmp_path_factory.mktemp("cache")
    options = LoadOptions(EngineOptions(num_blocks=200), cache_dir=cache_dir)
    with LLM("pocket://", options) as loaded:
        yield loaded


def vector_of(llm: LLM, pooling: Pooling, **config: object) -> npt.NDArray[np.float32]:
    """Vector of the second text, in a batch with others, with a configuration."""
    engine = Engine(llm.model, replace(llm.engine.config, **config))  # type: ignore[arg-type]  # fields by name
    others = [GenerationRequest(text * 3, SamplingParams(max_tokens=40, ignore_eos=True, seed=1)) for text in TEXTS]
    for other in others[:2]:
        engine.submit(other)
    request_id = engine.submit(GenerationRequest(TEXTS[1], priority=1, pooling=pooling))
    for other in others[2:]:
        engine.submit(other)
    engine.run_until_idle()
    engine.scheduler.check()
    output = engine.result(request_id)
    assert output is not None
    assert output.embedding is not None
    assert (output.num_output_tokens, output.num_cached_tokens, output.text) == (0, 0, "")
    return output.embedding


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_vector_is_the_same_in_every_circumstance(llm: LLM, pooling: Pooling) -> None:
    alone = llm.embed(TEXTS[1], pooling=pooling, normalize=False)[0]
    batched = llm.embed(TEXTS, pooling=pooling, normalize=False)[1]
    assert np.array_equal(alone, batched)
    for config in ({"max_chunk_tokens": 7}, {"max_num_batched_tokens": 80}, {"num_blocks": 10, "max_num_seqs": 6}):
        assert np.array_equal(alone, vector_of(llm, pooling, **config))


def test_different_texts_have_different_vectors(llm: LLM) -> None:
    vectors = llm.embed(TEXTS)
    assert vectors.shape == (4, 256)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-6)
    assert (vectors @ vectors.T)[0, 1] < 0.99


async def test_the_async_api_returns_the_same_vectors(llm: LLM, tmp_path: Path) -> None:
    options = LoadOptions(EngineOptions(num_blocks=64), cache_dir=tmp_path)
    async with AsyncEngine("pocket://", options) as engine:
        assert np.array_equal(await engine.embed(TEXTS[0]), llm.embed(TEXTS[0])[0])


def test_a_wrong_pooling_and_a_model_without_hidden_states_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="it must be one of model, mean, last, cls"):
        llm.embed("x", pooling="max")  # type: ignore[arg-type]  # the wrong value is the point
    with LLM("stub://x") as stub, pytest.raises(InvalidParameterError, match="does not provide hidden states"):
        stub.embed("x")


def test_a_pooled_prompt_may_have_one_token_less_than_the_context(llm: LLM) -> None:
    model, config = llm.model, llm.engine.config
    longest = config.max_model_len - 1
    assert prepare(model, config, GenerationRequest((7,) * longest, pooling="mean")).max_output_tokens == 1
    with pytest.raises(PromptTooLongError, match=f"has {longest + 1} tokens, but the model takes {longest};"):
        prepare(model, config, GenerationRequest((7,) * (longest + 1), pooling="mean"))
