"""Small random decoders with windows and states, as people have them, and requests to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from lockstep.engine.engine import Engine
from lockstep.engine.kv_store import KVStore
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.options import ExecutorOptions
from lockstep.executors.sampling_params import SamplingParams
from tools.golden.logit_cases import sharpened
from tools.random_models import write_huggingface, write_safetensors
from tools.random_shapes import SHAPES

Ids = tuple[int, ...]
NAMES = ("tiny-qwen35", "tiny-lfm3", "tiny-gemma3", "tiny-gemma4")
BLOCK = 32


class Answer(NamedTuple):
    """Tokens of an answer with the bits of their log-probabilities, and how its prompt was computed."""

    tokens: Ids
    logprobs: tuple[float, ...]
    num_cached_tokens: int
    num_preemptions: int

    @property
    def bits(self) -> tuple[Ids, tuple[float, ...]]:
        return self.tokens, self.logprobs


def write_hybrid(folder: Path, name: str) -> Path:
    """Write a model with its tokenizer, once for each folder."""
    path = folder / name
    if not path.exists():
        write_huggingface(path, SHAPES[name], "F32")
        write_safetensors(path / "model.safetensors", sharpened(SHAPES[name]))
    return path


@contextmanager
def hybrid_engine(
    path: Path, limits: dict[str, Any] | None = None, store: KVStore | None = None, **executor: Any
) -> Iterator[Engine]:
    """An engine of a model.

    Args:
        limits: fields of the scheduler's configuration.
        executor: fields of `ExecutorOptions`.
    """
    options = EngineOptions(max_num_seqs=8, kv_cache_memory_bytes=64 << 20)
    loading = LoadOptions(options, ExecutorOptions(**executor), path.parent / "cache")
    model, config = load_model(str(path), loading)
    try:
        yield Engine(model, replace(config, **(limits or {})), store=store)
    finally:
        model.close()


def text(random: Random, length: int) -> Ids:
    """Random tokens."""
    return tuple(random.choices(range(5, 300), k=length))


def request(ids: Ids, max_tokens: int = 24, **fields: Any) -> GenerationRequest:
    """A request with log-probabilities, so that every bit is seen."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=1)
    return GenerationRequest(ids, params, **fields)


def answers(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Answer]:
    """Answers of requests that are submitted at once."""
    ids = [engine.submit(each) for each in requests]
    while not all(map(engine.is_complete, ids)):
        engine.step()
        engine.scheduler.check()
    found = []
    for each in ids:
        output = engine.result(each)
        assert output is not None
        assert output.error is None, output.error
        [completion] = output.completions
        logprobs = tuple([position.logprob for position in completion.logprobs or ()])
        found.append(Answer(tuple(completion.token_ids), logprobs, output.num_cached_tokens, output.num_preemptions))
    return found
