"""Formats with one request per line: Mooncake, Azure and AIPerf; and the arrays of vllm bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.bench.statistics import per_request
from lockstep.errors import TraceError
from lockstep.replay.readers import read_workload
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit
from tests.replay.readers.files import (
    AIPERF,
    AZURE,
    MOONCAKE,
    VLLM_BENCH,
    aiperf_record,
    as_lines,
    requests_in,
    written,
)

AZURE_HEADER = AZURE.split("\n")[0]
AZURE_ROW = "2023-11-16 18:15:46.6805900,374,44"


def test_a_mooncake_trace_keeps_lengths_and_contents_and_counts_from_its_first_request(tmp_path: Path) -> None:
    workload = read_workload(written(tmp_path, MOONCAKE))
    assert (workload.unit, workload.content_size, workload.config) == (ArrivalUnit.PS, 512, {})
    first, second, third = workload.requests
    assert (first.contents, second.contents, third.contents) == ((0, 1, 2), (0,), (9,))
    assert (first.arrival, second.arrival, third.arrival) == (0, 0, 3500 * PS_PER_MS)
    assert (first.num_prompt_tokens, first.max_output_tokens, first.num_output_tokens) == (1030, 7, 7)
    assert third.num_output_tokens == 1
    assert [request.place for request in workload.requests] == ["file:1", "file:2", "file:3"]


def test_an_azure_trace_counts_from_its_first_request_to_the_last_digit(tmp_path: Path) -> None:
    requests = requests_in(tmp_path, AZURE)
    assert [request.arrival for request in requests] == [0, 4_314_579_000_000, 13_319_410_000_000]
    assert [(request.num_prompt_tokens, request.num_output_tokens) for request in requests] == [
        (374, 44),
        (396, 109),
        (1, 1),
    ]
    assert not any(request.contents for request in requests)


def test_timestamps_with_a_utc_offset_are_converted(tmp_path: Path) -> None:
    stamps = ("2024-05-10 00:00:00.009930+00:00", "2024-05-10T02:00:01.009930+02:00", "2024-05-10 00:00:02Z")
    text = "\n".join([AZURE_HEADER, *(f"{stamp},1,1" for stamp in stamps)])
    assert [request.arrival // PS_PER_MS for request in requests_in(tmp_path, text)] == [0, 1000, 1990]


def test_aiperf_records_are_sorted_by_their_start(tmp_path: Path) -> None:
    """The whole output counts, including reasoning; records are in the order in which requests ended."""
    first, second = requests_in(tmp_path, AIPERF)
    assert (first.num_prompt_tokens, first.num_output_tokens, first.arrival) == (10, 3, 0)
    assert (second.num_prompt_tokens, second.num_output_tokens, second.arrival) == (40, 8, 1_000_000_500_000)


def test_aiperf_failures_count_as_load_and_warm_up_does_not(tmp_path: Path) -> None:
    failed = aiperf_record(5, error_isl=33) | {"error": {"code": 500, "type": "x", "message": "y"}}
    warm = aiperf_record(1, input_sequence_length=9, output_sequence_length=9)
    warm["metadata"]["benchmark_phase"] = "warmup"
    named = aiperf_record(7, input_sequence_length=9.0, output_sequence_length=2)
    named["metadata"]["x_request_id"] = "abc"
    requests = requests_in(tmp_path, as_lines([warm, failed, named]))
    assert [(each.name, each.num_prompt_tokens, each.num_output_tokens) for each in requests] == [
        ("2", 33, 1),
        ("abc", 9, 2),
    ]


def test_a_bench_result_has_the_requests_that_it_sent(tmp_path: Path) -> None:
    """Requests are in order of their start; a failed one has at least one token; NaN in measurements is ignored."""
    requests = requests_in(tmp_path, VLLM_BENCH)
    assert [(each.name, each.num_prompt_tokens, each.num_output_tokens, each.arrival) for each in requests] == [
        ("1", 20, 1, 0),
        ("0", 10, 5, 250 * PS_PER_MS),
        ("2", 30, 7, 750 * PS_PER_MS),
    ]


def test_results_of_bench_serve_can_be_read() -> None:
    assert {"input_lens", "output_lens", "start_times"} <= set(per_request([]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON object expected, not"),
        ('{"timestamp": 9000}', "missing input_length and output_length"),
        ('{"timestamp": 9000, "input_length": 1, "output_length": 1, "user": 5}', "unknown key 'user'"),
        ('{"session_id": "s", "input_length": 1, "delay": 5}', r"turns of a conversation \(session_id, delay\)"),
        ('{"timestamp": 9000, "input_length": 0, "output_length": 1}', "input_length is 0"),
        ('{"timestamp": 9000, "input_length": NaN, "output_length": 1}', "NaN is not a number"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1}', "timestamp is -1"),
        ('{"timestamp": 9000, "input_length": 1, "output_length": -1}', "output_length is -1"),
        ('{"timestamp": "9000", "input_length": 1, "output_length": 1}', "timestamp is '9000'"),
        ('{"timestamp": 9000, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "1 hash_ids for 513 tokens"),
        ('{"timestamp": 9000, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "a hash id is -1"),
        ('{"timestamp": 9000, "input_length": 1, "output_length": 1, "hash_ids": 5}', "hash_ids is 5"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1}', "sort the trace by time"),
        ('{"timestamp": 9000, "input_length": 1, "timestamp": 9000}', "'timestamp' appears twice"),
    ],
)
def test_an_invalid_mooncake_line_is_refused_with_its_number(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(TraceError, match=rf"^file:5: .*{message}") as refused:
        requests_in(tmp_path, f"{MOONCAKE}\n{row}\n")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:15:46", "1 columns; TIMESTAMP,ContextTokens,GeneratedTokens expected"),
        ("2023-11-16 18:15:46,1,2,3", "4 columns"),
        ("2023-11-16 18:15:46,x,1", "ContextTokens is 'x'"),
        ("2023-11-16 18:15:46,0,1", "ContextTokens is 0"),
        ("2023-11-16 18:15:46,1,-1", "GeneratedTokens is '-1'"),
        ("2023-11-16 18:15:46,1,nan", "GeneratedTokens is 'nan'"),
        ("2023-11-16 18:15:46,99999999999,1", "ContextTokens is '99999999999'"),
        ("2023-11-31 18:15:46,1,1", "TIMESTAMP is '2023-11-31 18:15:46'; it must be a date and a time"),
        ("0001-01-01 00:00:00+01:00,1,1", "TIMESTAMP is"),
        ("1700158546,1,1", "write it like 2023-11-16 18:15:46.6805900"),
        ("2023-11-16 18:15:45,1,1", "sort the trace by time"),
        ('"2023-11-16 18:15:45,1,1', "not CSV"),
        (f"{'x' * 200_000},1,1", "not CSV"),
    ],
)
def test_an_invalid_azure_line_is_refused_with_its_number(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(TraceError, match=rf"^file:3: .*{message}") as refused:
        requests_in(tmp_path, f"{AZURE_HEADER}\r\n{AZURE_ROW}\r\n{row}\r\n")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("header", ["TIMESTAMP,ContextTokens", "Timestamp,Context,Generated", "TIMESTAMP;a;b"])
def test_unexpected_columns_are_listed_with_the_expected_ones(tmp_path: Path, header: str) -> None:
    with pytest.raises(TraceError, match=rf"file:1: the columns are '{header}'; TIMESTAMP,ContextTokens,Gen"):
        requests_in(tmp_path, f"{header}\n{AZURE_ROW}\n")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"metadata": [], "metrics": {}}, "metadata is"),
        ({"metadata": {"request_start_ns": 1}, "metrics": {}}, "input_sequence_length or error_isl is missing"),
        (aiperf_record(-1, input_sequence_length=1), "request_start_ns is -1"),
        (aiperf_record(1, input_sequence_length=1.5), "metrics.input_sequence_length is 1.5"),
        (aiperf_record(1, input_sequence_length=float("nan")), "NaN is not a number"),
        ({"metadata": {}, "metrics": {"error_isl": {"value": 1}}}, "request_start_ns is None"),
        ({"metadata": {"request_start_ns": 1}, "metrics": None}, "metrics is None"),
    ],
)
def test_an_invalid_aiperf_record_is_refused_with_its_line(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=rf"^file:3: .*{message}"):
        requests_in(tmp_path, AIPERF + json.dumps(record))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_times": None}, "start_times missing; .*--save-detailed"),
        ({"input_lens": [1]}, "differ in length: input_lens 1, output_lens 3, start_times 3"),
        ({"input_lens": {}}, r"input_lens is \{\}; it must be a list"),
        ({"input_lens": [1, "x", 1]}, "request 1: its input_lens is 'x'"),
        ({"start_times": [0, 1, -1]}, "request 2: its start_times is -1"),
        ({"start_times": [0, 1, float("nan")]}, "NaN is not a number"),
        ({"input_lens": [], "output_lens": [], "start_times": []}, "has no requests"),
    ],
)
def test_an_invalid_bench_result_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    result = {key: value for key, value in (json.loads(VLLM_BENCH) | changes).items() if value is not None}
    with pytest.raises(TraceError, match=message):
        requests_in(tmp_path, json.dumps(result))
