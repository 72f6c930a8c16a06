"""What is asked: random samples and lines of JSON."""

from __future__ import annotations

import pytest

from lockstep.bench.samples import RandomLengths, Sample, Segment, jsonl_samples, random_samples
from lockstep.errors import UsageError


def test_random_lengths_stay_in_their_range_and_depend_on_the_seed_alone() -> None:
    lengths = RandomLengths(100, 10, range_ratio=0.5, prefix_tokens=32)
    samples = random_samples(200, lengths, seed=1)
    assert samples == random_samples(200, lengths, seed=1)
    assert samples != random_samples(200, lengths, seed=2)
    inputs = [sample.input_tokens for sample in samples]
    assert all(count is not None and 82 <= count <= 182 for count in inputs)
    assert len(set(inputs)) > 20
    assert {sample.output_tokens for sample in samples} == set(range(5, 16))
    assert {sample.recipe[0] for sample in samples} == {Segment((0,), 32)}


def test_a_ratio_of_zero_makes_all_lengths_equal() -> None:
    samples = random_samples(5, RandomLengths(7, 3), seed=0)
    assert [(sample.input_tokens, sample.output_tokens) for sample in samples] == [(7, 3)] * 5


@pytest.mark.parametrize(
    ("lengths", "message"),
    [((0, 1), "begin at 1"), ((1, 0), "begin at 1"), ((1, 1, 1.0), "below 1"), ((1, 1, 0.0, -1), "begin at 1")],
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
        ('{"prompt": ""}', "neither"),
        ('{"messages": [1]}', "neither"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens is 0"),
        ('{"prompt": "a", "output_tokens": true}', "output_tokens is True"),
        ("", "holds no request"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        jsonl_samples([line], "f.jsonl", 1, 10)
