"""What is asked: random samples, lines of JSON, and the two trace formats."""

from __future__ import annotations

import pytest

from lockstep.bench.samples import RandomLengths, Sample, Segment, jsonl_samples, random_samples
from lockstep.bench.traces import faster, spread, trace_samples
from lockstep.errors import UsageError

MOONCAKE = [
    '{"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}\n',
    '{"timestamp": 3000, "input_length": 512, "output_length": 3, "hash_ids": [0]}\n',
    "\n",
    '{"timestamp": 6500, "input_length": 20, "output_length": 0, "hash_ids": [9]}\n',
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "2023-11-16 18:15:46.6805900,374,44\n",
    "2023-11-16 18:15:50.9951690,396,109\n",
    "2023-11-16 18:16:00,1,0\n",
]


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


def test_a_mooncake_trace_keeps_times_lengths_and_shared_blocks() -> None:
    """Requests with equal hashes begin with equal segments; the last segment is what is left of the length."""
    first, second, third = trace_samples(MOONCAKE, "t", 10)
    assert first.recipe == (Segment((2, 0), 512), Segment((2, 1), 512), Segment((2, 2), 6))
    assert second.recipe == (Segment((2, 0), 512),)
    assert (first.at_s, second.at_s, third.at_s) == (0.0, 0.0, 3.5)
    assert (first.input_tokens, first.output_tokens, third.output_tokens) == (1030, 7, 1)


def test_an_azure_trace_counts_from_its_first_request() -> None:
    samples = trace_samples(AZURE, "t", 10)
    assert [sample.at_s for sample in samples] == pytest.approx([0.0, 4.314579, 13.31941])
    assert [(sample.input_tokens, sample.output_tokens) for sample in samples] == [(374, 44), (396, 109), (1, 1)]
    assert len({sample.recipe for sample in samples}) == 3


def test_a_trace_can_be_cut_and_hurried() -> None:
    samples = faster(trace_samples(AZURE, "t", 2), 2.0)
    assert [sample.at_s for sample in samples] == pytest.approx([0.0, 2.1572895])


def test_a_coarse_clock_is_spread_up_to_its_next_tick() -> None:
    """Order, requests and the length of the trace stay; no two share a time any more."""
    coarse = tuple(Sample("x", index + 1, at_s=float(index // 4 * 3)) for index in range(12))
    fine = spread(coarse, seed=0)
    assert fine == spread(coarse, seed=0)
    assert [sample.output_tokens for sample in fine] == [sample.output_tokens for sample in coarse]
    times = [sample.at_s or 0.0 for sample in fine]
    assert times == sorted(set(times))
    assert times[0] == 0.0
    assert times[-1] <= 9.0
    assert spread((Sample("x", 1, at_s=5.0),), 0)[0].at_s == 0.0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a,b\n", "1,2\n"], "is no trace"),
        ([], "is no trace"),
        ([AZURE[0]], "holds no request"),
        ([AZURE[0], "2023-11-16 18:15:46,x,1\n"], "t:2: TIMESTAMP"),
        ([AZURE[0], AZURE[2], AZURE[1]], "t:3: its time is before"),
        (['{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}'], "1 hash_ids for 513 tokens"),
        (['{"timestamp": 0, "input_length": 0, "output_length": 1}'], "input_length is 0"),
        (['{"input_length": 1}'], "t:1: timestamp, input_length"),
    ],
)
def test_a_wrong_trace_is_refused_by_line(lines: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trace_samples(lines, "t", 10)
