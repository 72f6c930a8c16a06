"""Promise 1 with a constraint: the same tokens, and the same bits of every row that was sampled from, forced segments
and all, alone or not, preempted or not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jsonschema
import pytest
from msgspec import structs

from lockstep import (
    Constraint,
    EngineOptions,
    ExecutorOptions,
    FinishReason,
    GenerationRequest,
    LoadOptions,
    SamplingParams,
)
from lockstep.core.sequence import Sequence
from lockstep.core.step import StepEvents, StepPlan, StepResult
from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.executors.base import Executor, Geometry, Logits, StepBatch
from tests.determinism.harness import ALONE, CASES, Case, Subject
from tests.engine.schemas import SCHEMAS

SCHEMA = SCHEMAS["invoice"]
PARAMS: Mapping[str, SamplingParams] = {
    name: SamplingParams(temperature=temperature, seed=4, max_tokens=160, constraint=Constraint.json_schema(SCHEMA))
    for name, temperature in (("greedy", 0.0), ("seeded", 1.0))
}


class RowRecorder:
    """Delegates to an executor and keeps a digest of each row that one sequence samples from, by position."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.seq_id = -1
        self.rows: dict[int, str] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    @property
    def geometry(self) -> Geometry:
        return self._inner.geometry

    def execute(self, batch: StepBatch) -> Logits:
        logits = self._inner.execute(batch)
        sampling = [chunk for chunk in batch.plan.chunks() if chunk.samples]
        for chunk, row in zip(sampling, logits, strict=True):
            if chunk.seq_id == self.seq_id:
                self.rows[chunk.start + chunk.length] = hashlib.sha256(row.tobytes()).hexdigest()
        return logits


@dataclass(frozen=True, slots=True)
class Run:
    tokens: tuple[int, ...]
    rows: Mapping[int, str]
    num_preemptions: int
    num_segments: int
    """Forced segments that were computed."""
    num_replayed: int
    """Tokens of the answer that were computed once more after a preemption."""


def load(cache_dir: Path, kv_cache_precision: str = "f16") -> Subject:
    pool = EngineOptions(num_blocks=400, host_kv_memory_bytes=64 << 20, max_num_seqs=40)
    executor = ExecutorOptions(kv_cache_precision=kv_cache_precision)
    options = LoadOptions(pool, executor, cache_dir=cache_dir)
    return Subject(*load_model("pocket://", options))


@pytest.fixture(scope="module", params=["f16", pytest.param("int8", marks=pytest.mark.slow)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    loaded = load(tmp_path_factory.mktemp("cache"), kv_cache_precision=request.param)
    yield loaded
    loaded.model.close()


@pytest.fixture(scope="module")
def expected(subject: Subject) -> Mapping[str, Run]:
    return {name: ask(subject, ALONE, params) for name, params in PARAMS.items()}


def ask(subject: Subject, case: Case, params: SamplingParams) -> Run:
    """The constrained request among unconstrained and constrained ones, under a case's circumstances."""
    recorder = RowRecorder(subject.model.executor)
    plans: list[StepPlan] = []

    def observe(plan: StepPlan, result: StepResult, events: StepEvents) -> None:
        plans.append(plan)

    model = replace(subject.model, executor=recorder)  # type: ignore[arg-type]  # delegates what it does not define
    engine = Engine(model, replace(subject.config, **case.config), observer=observe)  # type: ignore[arg-type]  # by name
    others = subject.others(case.num_others)
    for index in range(0, len(others), 3):
        company = structs.replace(
            others[index].params, logprobs=None, constraint=Constraint.json_schema(SCHEMAS["person"])
        )
        others[index] = structs.replace(others[index], params=company)
    target = GenerationRequest(subject.prompt, params, priority=case.priority)
    if case.warm or case.others_first:
        for request in [target] * case.warm + others * case.others_first:
            engine.submit(request)
        engine.run_until_idle()
    plans.clear()
    middle = len(others) // 2
    running = [] if case.others_first else others
    queue = [*running[:middle], target, *running[middle:]]
    recorder.seq_id = engine.scheduler.state().next_id + queue.index(target)
    ids = [engine.submit(request) for request in queue]
    engine.run_until_idle()
    engine.scheduler.check()
    output = engine.result(ids[queue.index(target)])
    assert output is not None
    assert output.error is None, output.error
    assert output.completions[0].finish_reason is FinishReason.STOP
    jsonschema.validate(json.loads(output.text), SCHEMA)
    segments = [
        chunk
        for plan in plans
        for chunk in plan.chunks()
        if chunk.seq_id == recorder.seq_id and chunk.start >= len(subject.prompt) and chunk.length > 1
    ]
    num_distinct = len({chunk.start for chunk in segments})
    computed = [
        position
        for plan in plans
        for chunk in plan.chunks()
        if chunk.seq_id == recorder.seq_id
        for position in range(max(chunk.start, len(subject.prompt)), chunk.start + chunk.length)
    ]
    return Run(
        output.completions[0].token_ids,
        recorder.rows,
        output.num_preemptions,
        num_distinct,
        len(computed) - len(set(computed)),
    )


@pytest.mark.parametrize("sampling", PARAMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bytes_are_the_same(subject: Subject, expected: Mapping[str, Run], case: Case, sampling: str) -> None:
    run, alone = ask(subject, case, PARAMS[sampling]), expected[sampling]
    assert (run.num_preemptions > 0) == case.preempts, f"preempted {run.num_preemptions} times"
    if case.name == "recomputed":
        assert run.num_replayed > 0, "nothing of the answer was computed again"
    assert alone.num_segments > 5, "the document has forced parts"
    assert run.tokens == alone.tokens
    assert run.rows == alone.rows


def test_greedy_and_seeded_documents_differ(expected: Mapping[str, Run]) -> None:
    assert expected["greedy"].tokens != expected["seeded"].tokens


def test_computing_forced_tokens_one_by_one_changes_no_bit(
    subject: Subject, expected: Mapping[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget_segments(seq: Sequence, num_tokens: int, *_: object) -> None:
        seq.num_known += num_tokens

    monkeypatch.setattr(Sequence, "append", forget_segments)
    runs = {name: ask(subject, ALONE, params) for name, params in PARAMS.items()}
    assert all(run.num_segments == 0 for run in runs.values())
    for name in PARAMS:
        assert {at: expected[name].rows[at] for at in runs[name].rows if at in expected[name].rows} == {
            at: row for at, row in runs[name].rows.items() if at in expected[name].rows
        }
        assert runs[name].tokens == expected[name].tokens
