"""Promise 1: tokens and log-probabilities are bitwise the same in every circumstance, and the check can fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep import EngineOptions, ExecutorOptions, LoadOptions
from lockstep.core import step_builder
from lockstep.engine.loading import load_model
from lockstep.executors.base import Executor, Geometry, Logits, StepBatch
from tests.determinism.harness import ALONE, CASES, MATRIX, SAMPLINGS, Answer, Case, Subject
from tools.random_models import SHAPES, write_gguf

POOL = EngineOptions(num_blocks=400, host_kv_memory_bytes=64 << 20, max_num_seqs=40)
MODELS = ("pocket", "random-qwen3", "random-qwen3 int8")
"""A model, and the precision of its KV where it is not the default."""


def load(source: str, cache_dir: Path, kv_cache_precision: str = "f16") -> Subject:
    executor = ExecutorOptions(kv_cache_precision=kv_cache_precision)
    options = LoadOptions(POOL, executor, cache_dir=cache_dir)
    return Subject(*load_model(source, options))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    shape = replace(SHAPES["tiny-qwen3"], hidden_size=256, intermediate_size=512)
    path = write_gguf(tmp_path_factory.mktemp("model") / "random.gguf", shape, "Q4_0", seed=3)
    return {"pocket": "pocket://", "random-qwen3": str(path)}


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest, sources: Mapping[str, str], cache_dir: Path) -> Iterator[Subject]:
    model, *choices = request.param.split()
    loaded = load(sources[model], cache_dir, *choices)
    yield loaded
    loaded.model.close()


@pytest.fixture(scope="module")
def expected(subject: Subject) -> Mapping[str, Answer]:
    """What the request gets alone."""
    return {name: subject.ask(ALONE, params)[0] for name, params in SAMPLINGS.items()}


def check(subject: Subject, expected: Mapping[str, Answer], case: Case, sampling: str) -> None:
    answer, output = subject.ask(case, SAMPLINGS[sampling])
    assert (output.num_preemptions > 0) == case.preempts, f"{case.name}: preempted {output.num_preemptions} times"
    assert (output.num_cached_tokens > 0) == case.warm
    assert answer == expected[sampling], case.name


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bytes_are_the_same(subject: Subject, expected: Mapping[str, Answer], case: Case, sampling: str) -> None:
    check(subject, expected, case, sampling)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("case", MATRIX, ids=lambda case: case.name)
def test_the_bytes_are_the_same_in_the_full_matrix(
    subject: Subject, expected: Mapping[str, Answer], case: Case, sampling: str
) -> None:
    check(subject, expected, case, sampling)


def test_unloading_and_reloading_changes_nothing(
    subject: Subject, expected: Mapping[str, Answer], cache_dir: Path, tmp_path: Path
) -> None:
    """From the packed weights and from those that are packed anew."""
    for directory in (cache_dir, tmp_path):
        again = load(subject.model.source, directory, subject.model.executor.environment["kv_cache_precision"])
        assert {name: again.ask(ALONE, params)[0] for name, params in SAMPLINGS.items()} == expected
        again.model.close()


def test_greedy_and_seeded_answers_differ(expected: Mapping[str, Answer]) -> None:
    """Otherwise the seeded half of this suite would prove nothing."""
    assert expected["greedy"].tokens != expected["seeded"].tokens


# -- negative twins: the same comparison must fail where the conditions of the promise are broken -------------------


def broken_by(subject: Subject, cases: tuple[Case, ...]) -> Iterator[str]:
    """Names of the cases in which the answer is not the one that the request gets alone."""
    for params in SAMPLINGS.values():
        alone = subject.ask(ALONE, params)[0]
        yield from (case.name for case in cases if subject.ask(case, params)[0] != alone)


def test_computing_one_token_at_a_time_changes_nothing(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_at_a_time(remaining: int, room: int, may_end: bool) -> int:
        return min(1, room)

    alone = {name: subject.ask(ALONE, params)[0] for name, params in SAMPLINGS.items()}
    monkeypatch.setattr(step_builder, "prompt_chunk", one_at_a_time)
    assert {name: subject.ask(ALONE, params)[0] for name, params in SAMPLINGS.items()} == alone


class BatchDependent:
    """An executor whose last bit depends on how many sequences share the step."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    @property
    def geometry(self) -> Geometry:
        return self._inner.geometry

    def execute(self, batch: StepBatch) -> Logits:
        logits = self._inner.execute(batch).copy()
        if batch.plan.num_sequences > 1:
            logits = np.nextafter(logits, np.float32(np.inf))
        return logits


@pytest.mark.parametrize("subject", [pytest.param("pocket", marks=pytest.mark.slow), "random-qwen3"], indirect=True)
def test_an_executor_that_depends_on_its_batch_is_always_caught(subject: Subject) -> None:
    """That is a truth of the comparison, whatever the model."""
    batched = tuple(case for case in CASES if case.num_others and not case.others_first)
    faulty = Subject(replace(subject.model, executor=BatchDependent(subject.model.executor)), subject.config)  # type: ignore[arg-type]  # delegates what it does not define
    assert sorted(broken_by(faulty, batched)) == sorted(case.name for case in batched for _ in SAMPLINGS)
