"""Recorded answers against the engine's answers, over files that rotate, are cut or are missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_in

from lockstep.cluster.recorded_index import AnswerQuery, RecordedAnswer
from lockstep.core.request import FinishReason
from lockstep.engine.options import LoadOptions
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.errors import TraceError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.replay.answers import RecordedAnswers, read_answers
from lockstep.replay.trace import open_trace
from lockstep.worker.flight.content import parameters_as_bytes, read_text
from lockstep.worker.flight.folder import TEXT_SUFFIX
from lockstep.worker.flight.options import TraceOptions
from lockstep.worker.messages import Abort, AnswerShown, Submit
from tests.adapter_files import stub_adapters
from tests.replay.recordings import POOL, files_of
from tests.replay.rotations import run_flight
from tests.worker.support import running

SEEDS = range(12)
NAMES = (("base", ""), ("first", "a0"), ("second", "a1"), (None, "a1"))
"""Models of requests, and their adapters."""


def request_of(number: int, **params: object) -> GenerationRequest:
    prompt = tuple(b"a beginning that all of them have"[: 5 + number % 29]) + (number % 250,) * (3 + number % 17)
    made = SamplingParams(max_tokens=8 + number % 20, ignore_eos=True, n=1 + (number % 6 == 5), **params)  # type: ignore[arg-type]
    return GenerationRequest(prompt, made, model="ab"[number % 2], external_id=f"request {number}")


def recorded(folder: Path, num_requests: int = 24, max_bytes: int = 1 << 28) -> list[RequestOutput]:
    """Two stubs with small pools and concurrent requests; returns the answer of each request."""
    with running(trace=TraceOptions(str(folder), max_bytes, has_content=True)) as bench:
        for key, name in zip("ab", ("alpha", "beta"), strict=True):
            bench.ready(key, f"stub://{name}", LoadOptions(POOL))
        for number in range(num_requests):
            bench.tell(Submit(number, "ab"[number % 2], request_of(number)))
        outputs = [bench.answer(number).request for number in range(num_requests)]
        assert all(output is not None for output in outputs)
        return [output for output in outputs if output is not None]


def answer_to(found: RecordedAnswers, request: GenerationRequest) -> RecordedAnswer | None:
    assert request.model is not None
    if request.model not in found.by_name:
        return None
    query = AnswerQuery(request.prompt_ids, parameters_as_bytes(request), request.params.n)
    match = found.by_name[request.model].index.find(query, is_strict=True)
    return None if match is None else match.answer


def test_every_answer_read_has_the_tokens_ends_and_counts_of_its_output(tmp_path: Path) -> None:
    outputs = recorded(tmp_path)
    found = read_answers(open_trace(tmp_path))
    assert (found.num_answers, found.num_unended, list(found.by_name)) == (len(outputs), 0, ["a", "b"])
    for number, output in enumerate(outputs):
        answer = answer_to(found, request_of(number))
        assert answer is not None, number
        assert answer.name == f"request {number}"
        told = [(each.token_ids, each.finish_reason) for each in output.completions]
        assert [(tuple(each.tokens), each.reason) for each in answer.sequences] == told
        assert (answer.num_cached_tokens, answer.num_preemptions) == (output.num_cached_tokens, output.num_preemptions)
        times = [delivery.at_us for delivery in answer.deliveries]
        assert times == sorted(times)
        for completion, (tokens, _) in enumerate(told):
            given = [each.num_tokens for each in answer.deliveries if each.completion == completion]
            assert sum(given) == len(tokens)
    assert any(output.num_preemptions for output in outputs), "the pool is small"


def test_answers_of_adapters_belong_to_the_names_of_their_models(tmp_path: Path) -> None:
    """A server of recorded answers has models without adapters. Requests find the answers by the names of models."""
    adapters = stub_adapters(tmp_path, 2)
    with running(trace=TraceOptions(str(tmp_path / "run"), has_content=True)) as bench:
        bench.ready("a", "stub://alpha", LoadOptions(replace(POOL, enable_lora=True), adapters=adapters))
        requests = [replace_in(request_of(0), model=model, adapter=name) for model, name in NAMES]
        bench.tell(*[Submit(number, "a", request) for number, request in enumerate(requests)])
        outputs = [bench.answer(number).request for number in range(len(requests))]
    found = read_answers(open_trace(tmp_path / "run"))
    assert list(found.by_name) == ["base", "first", "second", "a1"]
    for name, output in zip(found.by_name, outputs, strict=True):
        answer = answer_to(found, replace_in(request_of(0), model=name))
        assert answer is not None, name
        assert output is not None
        assert tuple(answer.sequences[0].tokens) == output.completions[0].token_ids


@pytest.mark.parametrize("seed", SEEDS)
def test_rotated_files_yield_the_tokens_of_the_right_answers(seed: int, tmp_path: Path) -> None:
    """Single files, and the remaining files after the first are deleted, yield the same answers as all of them."""
    run_flight(tmp_path, seed)
    whole = _by_name(read_answers(open_trace(tmp_path)))
    paths = files_of(tmp_path)
    for path in paths[: len(paths) // 2]:
        path.unlink()
    left = _by_name(read_answers(open_trace(tmp_path)))
    assert left.items() <= whole.items(), f"seed {seed}"
    assert len(paths) > 1
    assert whole


def _by_name(found: RecordedAnswers) -> dict[str, list[tuple[tuple[int, ...], FinishReason]]]:
    answers = [
        answer for each in found.by_name.values() for answers in each.index._answers.values() for answer in answers
    ]
    return {each.name: [(tuple(s.tokens), s.reason) for s in each.sequences] for each in answers}


def test_delivered_chunks_are_replayed_and_undelivered_tokens_follow_step_by_step(tmp_path: Path) -> None:
    request = GenerationRequest((1, 2, 3), SamplingParams(max_tokens=9, ignore_eos=True), model="a")
    with running(trace=TraceOptions(str(tmp_path), has_content=True)) as bench:
        bench.ready("a", "stub://alpha", LoadOptions(POOL))
        bench.tell(Submit(0, "a", request))
        bench.answer(0)
        bench.tell(AnswerShown("a", 0, ((0, 1, 900), (0, 4, 50))), AnswerShown("nobody", 0, ((0, 1, 1),)))
        bench.checked()
    answer = answer_to(read_answers(open_trace(tmp_path)), request)
    assert answer is not None
    assert answer.deliveries[:2] == ((900, 0, 1), (950, 0, 4))
    assert [each.num_tokens for each in answer.deliveries[2:]] == [1] * 4
    assert min(each.at_us for each in answer.deliveries[2:]) >= 950


def test_aborted_answers_come_last_and_unended_ones_are_omitted(tmp_path: Path) -> None:
    endless = GenerationRequest((5, 5), SamplingParams(max_tokens=4000, ignore_eos=True), model="a")
    with running(trace=TraceOptions(str(tmp_path), has_content=True)) as bench:
        bench.ready("a", "stub://alpha?token_us=200")
        bench.tell(Submit(0, "a", endless), Abort("a", (0,)))
        bench.answer(0)
        bench.tell(Submit(1, "a", request_of(0)))
        bench.answer(1)
    found = read_answers(open_trace(tmp_path))
    left = answer_to(found, endless)
    assert left is not None
    assert not left.is_whole
    assert [each.reason for each in left.sequences] == [FinishReason.ABORT]
    [path] = files_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    cut = read_answers(open_trace(tmp_path))
    assert cut.num_answers + cut.num_unended <= 2
    assert cut.notes


def test_the_vocabulary_is_stored_once_and_verified(tmp_path: Path) -> None:
    recorded(tmp_path, 2)
    trace = open_trace(tmp_path)
    names = {engine.text for engine in trace.engines}
    assert {path.name for path in tmp_path.glob(f"*{TEXT_SUFFIX}")} == {f"{name}{TEXT_SUFFIX}" for name in names}
    name = trace.engines[0].text
    assert read_text(tmp_path, name).parts().tokenizer.decode([104, 105]) == "hi"
    path = tmp_path / f"{name}{TEXT_SUFFIX}"
    held = path.read_bytes()
    path.write_bytes(held[:-3])
    with pytest.raises(TraceError, match="is damaged"):
        read_text(tmp_path, name)
    path.rename(tmp_path / f"{'0' * 16}{TEXT_SUFFIX}").write_bytes(held)
    with pytest.raises(TraceError, match="differs from the vocabulary that was recorded"):
        read_text(tmp_path, "0" * 16)
    with pytest.raises(TraceError, match="copy the file to its folder"):
        read_text(tmp_path, name)


def test_without_content_no_answers_and_no_vocabulary_are_recorded(tmp_path: Path) -> None:
    with running(trace=TraceOptions(str(tmp_path))) as bench:
        bench.ready("a", "stub://alpha", LoadOptions(POOL))
        bench.tell(Submit(0, "a", request_of(0)))
        bench.answer(0)
    assert not list(tmp_path.glob(f"*{TEXT_SUFFIX}"))
    with pytest.raises(TraceError, match="--trace-content"):
        read_answers(open_trace(tmp_path))
