"""What is asked: random samples and lines of JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.bench.samples import RandomLengths, Sample, TokenSegment, jsonl_samples, random_samples, trace_samples
from lockstep.errors import TraceError, UsageError
from lockstep.replay.readers import ReadOptions
from tests.replay.readers.files import AZURE, MOONCAKE


def test_random_lengths_stay_in_their_range_and_depend_on_the_seed_alone() -> None:
    lengths = RandomLengths(100, 10, range_ratio=0.5, prefix_tokens=32)
    samples = random_samples(200, lengths, seed=1)
    assert samples == random_samples(200, lengths, seed=1)
    assert samples != random_samples(200, lengths, seed=2)
    inputs = [sample.input_tokens for sample in samples]
    assert all(count is not None and 82 <= count <= 182 for count in inputs)
    assert len(set(inputs)) > 20
    assert {sample.output_tokens for sample in samples} == set(range(5, 16))
    assert {sample.recipe[0] for sample in samples} == {TokenSegment((0,), 32)}


def test_a_ratio_of_zero_makes_all_lengths_equal() -> None:
    samples = random_samples(5, RandomLengths(7, 3), seed=0)
    assert [(sample.input_tokens, sample.output_tokens) for sample in samples] == [(7, 3)] * 5


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((0, 1), "must be from 1"),
        ((1, 0), "must be from 1"),
        ((1, 1, 1.0), "below 1"),
        ((1, 1, 0.0, -1), "must be from 1"),
    ],
)
def test_impossible_lengths_are_refused(lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RandomLengths(*lengths)


def test_lines_of_json_are_prompts_or_conversations() -> None:
    lines = ['{"prompt": "a b"}', "", '{"messages": [{"role": "user", "content": "c"}], "output_tokens": 5}', "junk"]
    samples = jsonl_samples(lines, "f.jsonl", output_tokens=9, limit=2)
    assert samples == (Sample("a b", 9), Sample(({"role": "user", "content": "c"},), 5))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"f\.jsonl:1: not JSON"),
        ("[]", r"f\.jsonl:1: not a JSON object"),
        ('{"prompt": ""}', "must have a"),
        ('{"messages": [1]}', "must have a"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens is 0"),
        ('{"prompt": "a", "output_tokens": true}', "output_tokens is True"),
        ("", "has no requests"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        jsonl_samples([line], "f.jsonl", 1, 10)


def written(folder: Path, content: str) -> Path:
    path = folder / "trace"
    path.write_text(content)
    return path


def test_a_mooncake_trace_keeps_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    """Requests with equal hashes begin with equal segments; the last segment is what is left of the length."""
    first, second, third = trace_samples(written(tmp_path, MOONCAKE), ReadOptions())
    assert first.recipe == (TokenSegment((2, 0), 512), TokenSegment((2, 1), 512), TokenSegment((2, 2), 6))
    assert second.recipe == (TokenSegment((2, 0), 512),)
    assert (first.at_s, second.at_s, third.at_s) == (0.0, 0.0, 3.5)
    assert (first.input_tokens, first.output_tokens, third.output_tokens) == (1030, 7, 1)


def test_an_azure_trace_counts_from_its_first_request(tmp_path: Path) -> None:
    samples = trace_samples(written(tmp_path, AZURE), ReadOptions())
    assert [sample.at_s for sample in samples] == pytest.approx([0.0, 4.314579, 13.31941])
    assert [(sample.input_tokens, sample.output_tokens) for sample in samples] == [(374, 44), (396, 109), (1, 1)]
    assert len({sample.recipe for sample in samples}) == 3


def test_a_trace_can_be_cut_and_hurried(tmp_path: Path) -> None:
    samples = trace_samples(written(tmp_path, AZURE), ReadOptions(speed=2.0, limit=2))
    assert [sample.at_s for sample in samples] == pytest.approx([0.0, 2.1572895])


def test_a_workload_shares_the_blocks_that_it_names_and_nothing_behind_them(tmp_path: Path) -> None:
    text = """{"config": {"block_size": 16}, "requests": [
        {"id": 1, "prompt_tokens": 40, "max_output_tokens": 2, "prefix_hashes": ["system"], "arrival_ms": 0},
        {"id": 2, "prompt_tokens": 20, "max_output_tokens": 2, "prefix_hashes": ["system"], "arrival_ms": 1.5}]}"""
    first, second = trace_samples(written(tmp_path, text), ReadOptions())
    assert first.recipe == (TokenSegment((2, 0), 16), TokenSegment((1, 0), 24))
    assert second.recipe == (TokenSegment((2, 0), 16), TokenSegment((1, 1), 4))
    assert second.at_s == 0.0015


def test_arrivals_in_ticks_have_no_time(tmp_path: Path) -> None:
    text = '{"requests": [{"id": 1, "prompt_tokens": 4, "max_output_tokens": 2, "arrival_tick": 3}]}'
    with pytest.raises(TraceError, match="requires arrival_ms"):
        trace_samples(written(tmp_path, text), ReadOptions())


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read .*gone\.jsonl \(No such file"):
        trace_samples(tmp_path / "gone.jsonl", ReadOptions())


def test_a_trace_whose_times_are_ticks_of_a_simulation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_text('{"requests": [{"id": "r", "prompt_tokens": 3, "max_output_tokens": 2, "arrival_tick": 1}]}')
    with pytest.raises(TraceError, match="has arrivals in ticks of a simulation"):
        trace_samples(path, ReadOptions())
