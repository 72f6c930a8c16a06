"""Log-probabilities of prompts by the real engine: correct, once for all siblings, equal in every circumstance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs

from lockstep import LLM, EngineOptions, GenerationRequest, LoadOptions, SamplingParams
from lockstep.core.request import FinishReason
from lockstep.engine.engine import Engine
from lockstep.engine.loading import LoadedModel
from lockstep.engine.outputs import RequestOutput
from lockstep.errors import InvalidParameterError, NumericsError
from lockstep.executors.base import Executor, Geometry, Logits, StepBatch
from lockstep.executors.logits import TokenLogprobs
from lockstep.executors.stub import VOCAB_SIZE

PROMPT = tuple(int(token) for token in np.random.default_rng(5).integers(3, 4000, 203))
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
COUNT = 3
_TIGHT = {"num_blocks": 14, "max_chunk_tokens": 16, "max_num_seqs": 8}
"""Blocks run out while the prompt is computed."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    cache_dir: Path = tmp_path_factory.mktemp("cache")
    pool = EngineOptions(num_blocks=400, host_kv_memory_bytes=64 << 20)
    with LLM("pocket://", LoadOptions(pool, cache_dir=cache_dir)) as loaded:
        yield loaded


class CountingExecutor:
    """An executor that counts the requested rows, and can corrupt the logits of one position."""

    def __init__(self, inner: Executor, faulty_row: int | None = None) -> None:
        self._inner = inner
        self._faulty_row = faulty_row
        self.row_counts: list[int] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    @property
    def geometry(self) -> Geometry:
        return self._inner.geometry

    def execute(self, batch: StepBatch) -> Logits:
        self.row_counts.append(len(batch.rows))
        return self._inner.execute(batch)

    def prompt_logits(self, first: int, last: int) -> Logits:
        self.row_counts[-1] += last - first
        logits = self._inner.prompt_logits(first, last).copy()
        if self._faulty_row is not None and first <= self._faulty_row < last:
            logits[self._faulty_row - first] = np.nan
        return logits


def engine_of(llm: LLM, executor: object = None, **config: object) -> Engine:
    model: LoadedModel = llm.model if executor is None else replace(llm.model, executor=executor)  # type: ignore[arg-type]  # delegates what it does not define
    return Engine(model, replace(llm.engine.config, **config))  # type: ignore[arg-type]  # fields by name


def ask(engine: Engine, request: GenerationRequest, num_others: int = 0) -> RequestOutput:
    """Answer of a request in a batch with others that decode."""
    others = [
        GenerationRequest(PROMPT[index : 20 + 4 * index], SamplingParams(max_tokens=50, seed=index, ignore_eos=True))
        for index in range(num_others)
    ]
    ids = [engine.submit(each) for each in (*others[: num_others // 2], request, *others[num_others // 2 :])]
    engine.run_until_idle()
    engine.scheduler.check()
    output = engine.result(ids[num_others // 2])
    assert output is not None
    return output


def wanted(**changes: object) -> GenerationRequest:
    return structs.replace(GenerationRequest(PROMPT, PARAMS, prompt_logprobs=COUNT), **changes)


def bits(entries: tuple[TokenLogprobs | None, ...] | None) -> list[object]:
    assert entries is not None
    return [e and (e.logprob.hex(), [(token, value.hex()) for token, value in e.top]) for e in entries]


def softmax_of_every_position(llm: LLM) -> npt.NDArray[np.float64]:
    """[positions, vocab], log-probabilities in float64 from logits that the executor computes row by row."""
    kept: list[Logits] = []

    class Keeping(CountingExecutor):
        def execute(self, batch: StepBatch) -> Logits:
            rows = structs.replace(batch, rows=np.arange(len(batch.token_ids)))
            kept.append(self._inner.execute(rows).copy())
            return kept[-1][-1:]

    engine = engine_of(llm, Keeping(llm.model.executor))
    ask(engine, GenerationRequest(PROMPT, SamplingParams(temperature=0.0, max_tokens=1)))
    logits = np.concatenate(kept).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def test_each_token_has_the_log_probability_of_the_previous_position(llm: LLM) -> None:
    expected = softmax_of_every_position(llm)
    entries = ask(engine_of(llm), wanted()).prompt_logprobs
    assert entries is not None
    assert (len(entries), entries[0]) == (len(PROMPT), None)
    for position, entry in enumerate(entries[1:]):
        assert entry is not None
        row = expected[position]
        best = np.argsort(-row, kind="stable")[:COUNT]
        assert math.isclose(entry.logprob, row[PROMPT[position + 1]], rel_tol=1e-5, abs_tol=1e-5)
        assert [token for token, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], row[best], rtol=1e-5, atol=1e-5)


def test_every_position_is_computed_once(llm: LLM) -> None:
    """With any chunks and preemptions, as shown by the number of rows."""
    alone = ask(engine_of(llm), wanted()).prompt_logprobs
    assert alone is not None
    for num_others, config in CASES.values():
        entries = ask(engine_of(llm, **config), wanted(priority=1), num_others).prompt_logprobs
        assert entries is not None
        values = np.array([[entry.logprob for entry in each[1:] if entry] for each in (alone, entries)])
        np.testing.assert_allclose(values[0], values[1], atol=0.01)


CASES: Mapping[str, tuple[int, dict[str, object]]] = {
    "again": (0, {}),
    "batched": (7, {}),
    "chunks of 3": (0, {"max_chunk_tokens": 3}),
    "chunks of 64": (0, {"max_chunk_tokens": 64}),
    "ragged chunks": (5, {"max_num_batched_tokens": 83, "max_chunk_tokens": 29}),
    "swapped": (4, {**_TIGHT, "num_host_blocks": 64}),
    "recomputed": (4, {**_TIGHT, "num_host_blocks": 0, "preemption": "recompute"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_the_same_in_every_circumstance(llm: LLM, case: str) -> None:
    alone = ask(engine_of(llm), wanted())
    num_others, config = CASES[case]
    output = ask(engine_of(llm, **config), wanted(priority=1), num_others)
    assert (output.num_preemptions > 0) == (case in ("swapped", "recomputed"))
    assert bits(output.prompt_logprobs) == bits(alone.prompt_logprobs)
    assert output.completions[0].token_ids == alone.completions[0].token_ids


def test_a_warm_cache_is_not_read_but_siblings_share(llm: LLM) -> None:
    engine = engine_of(llm)
    first = ask(engine, wanted())
    again = ask(engine, wanted())
    assert again.num_cached_tokens == 0
    assert bits(again.prompt_logprobs) == bits(first.prompt_logprobs)
    watched = CountingExecutor(llm.model.executor)
    engine = engine_of(llm, watched)
    siblings = ask(engine, wanted(params=structs.replace(PARAMS, n=3)))
    assert bits(siblings.prompt_logprobs) == bits(first.prompt_logprobs)
    assert sum(watched.row_counts) == len(PROMPT) - 1 + 3 * PARAMS.max_tokens  # type: ignore[operator]  # it is set
    assert engine.metrics().counters["prefix_cache_hits"] > 0


def test_requests_without_prompt_logprobs_compute_no_extra_rows(llm: LLM) -> None:
    watched = CountingExecutor(llm.model.executor)
    output = ask(engine_of(llm, watched), wanted(prompt_logprobs=None))
    assert output.prompt_logprobs is None
    assert max(watched.row_counts) == 1


@pytest.mark.parametrize("max_chunk_tokens", [32, 100])
def test_no_step_requests_more_rows_than_its_tokens(llm: LLM, max_chunk_tokens: int) -> None:
    watched = CountingExecutor(llm.model.executor)
    ask(engine_of(llm, watched, max_chunk_tokens=max_chunk_tokens), wanted())
    assert max(watched.row_counts) <= max_chunk_tokens


def test_zero_requests_only_the_prompts_tokens(llm: LLM) -> None:
    entries = ask(engine_of(llm), wanted(prompt_logprobs=0)).prompt_logprobs
    assert entries is not None
    assert all(entry is not None and entry.top == () for entry in entries[1:])


def test_one_token_has_nothing_before_it(llm: LLM) -> None:
    assert ask(engine_of(llm), wanted(prompt=PROMPT[:1])).prompt_logprobs == (None,)


def test_a_faulty_row_of_the_prompt_fails_only_its_request(llm: LLM) -> None:
    engine = engine_of(llm, CountingExecutor(llm.model.executor, faulty_row=20))
    output = ask(engine, wanted(), num_others=4)
    assert isinstance(output.error, NumericsError)
    assert "at position" in str(output.error)
    assert output.completions[0].finish_reason is FinishReason.ERROR
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("value", [-1, 65, True, 1.5])
def test_an_invalid_number_is_refused_by_name(llm: LLM, value: object) -> None:
    with pytest.raises(InvalidParameterError, match=r"prompt_logprobs is .*a whole number, 0 to 64") as caught:
        engine_of(llm).submit(wanted(prompt_logprobs=value))
    assert caught.value.param == "prompt_logprobs"


def test_embeddings_have_no_prompt_logprobs(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="an embedding request cannot have prompt_logprobs"):
        engine_of(llm).submit(wanted(pooling="mean"))


def test_a_stub_finds_all_tokens_equally_likely() -> None:
    with LLM("stub://x") as stub:
        entries = ask(stub.engine, GenerationRequest("abc", SamplingParams(max_tokens=2), prompt_logprobs=1))
    assert entries.prompt_logprobs is not None
    told = [entry and round(math.exp(-entry.logprob)) for entry in entries.prompt_logprobs]
    assert told == [None, VOCAB_SIZE, VOCAB_SIZE]
