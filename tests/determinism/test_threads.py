"""Promise 1 on every number of threads that the machine has cores for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lockstep import EngineOptions, ExecutorOptions, LoadOptions
from lockstep.engine.loading import load_model
from lockstep.executors.machine import available_cores
from tests.determinism.harness import ALONE, CASES, SAMPLINGS, Answer, Case, Subject

POOL = EngineOptions(num_blocks=400, host_kv_memory_bytes=64 << 20, max_num_seqs=40)
THREADS = [number for number in (1, 2, 3, 4, 8, 16, 32) if number <= available_cores()]
SUBJECTS = [pytest.param((number, kv), id=f"{number}-{kv}") for number in THREADS for kv in ("f16", "int8")]
BY_DEFAULT = ("batched with 31", "ragged chunks beside 9", "warm prefix, batched with 7", "recomputed")


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, cache_dir: Path) -> Iterator[Subject]:
    threads, kv = request.param
    executor = ExecutorOptions(threads=threads, kv_cache_precision=kv)
    loaded = Subject(*load_model("pocket://", LoadOptions(POOL, executor, cache_dir=cache_dir)))
    assert loaded.model.executor.machine["threads"] == str(threads)
    yield loaded
    loaded.model.close()


@pytest.fixture(scope="module")
def expected(subject: Subject) -> Mapping[str, Answer]:
    return {name: subject.ask(ALONE, params)[0] for name, params in SAMPLINGS.items()}


def check(subject: Subject, expected: Mapping[str, Answer], case: Case) -> None:
    for name, params in SAMPLINGS.items():
        answer, output = subject.ask(case, params)
        assert (output.num_preemptions > 0) == case.preempts
        assert answer == expected[name], (case.name, name)


@pytest.mark.parametrize("subject", SUBJECTS[:2], indirect=True)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in BY_DEFAULT], ids=lambda case: case.name)
def test_the_bytes_are_the_same_on_one_thread(subject: Subject, expected: Mapping[str, Answer], case: Case) -> None:
    check(subject, expected, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bytes_are_the_same_on_any_number(subject: Subject, expected: Mapping[str, Answer], case: Case) -> None:
    check(subject, expected, case)
