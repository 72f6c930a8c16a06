"""Spans and files of clients and tools become the same observations; unknown versions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import EvidenceError
from lockstep.release.formats import FORMATS
from lockstep.release.reading import read
from lockstep.release.store import open_store
from tests.release.inputs import DATA, observations, verdict_of, write_json, write_lines
from tests.release.test_formats import BENCH_ARRAYS, LOG_LINE, SGLANG_RUN, VLLM_RUN, by_index


def approx(value: dict[str, Any]) -> Any:
    return {name: pytest.approx(each) if isinstance(each, float) else each for name, each in value.items()}


# -- spans ------------------------------------------------------------------------------------------------------------


def span(attributes: dict[str, Any], **members: Any) -> dict[str, Any]:
    def value(of: Any) -> dict[str, Any]:
        if isinstance(of, bool):
            return {"boolValue": of}
        if isinstance(of, int):
            return {"intValue": str(of)}
        return {"doubleValue": of} if isinstance(of, float) else {"stringValue": of}

    return {
        "traceId": "0af7651916cd43dd8448eb211c80319c",
        "spanId": "b7ad6b7169203331",
        "name": "llm_request",
        "kind": 2,
        "startTimeUnixNano": "1700000000000000000",
        "endTimeUnixNano": "1700000000400000000",
        "attributes": [{"key": key, "value": value(of)} for key, of in attributes.items()],
        "status": {},
        **members,
    }


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "vllm"}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "x"}, "spans": list(spans)}]}]}


VLLM_SPAN = {
    "gen_ai.response.model": "org/model",
    "gen_ai.request.id": "chatcmpl-abc",
    "gen_ai.request.temperature": 0.0,
    "gen_ai.request.max_tokens": 16,
    "gen_ai.usage.num_sequences": 1,
    "gen_ai.usage.prompt_tokens": 5,
    "gen_ai.usage.completion_tokens": 16,
    "gen_ai.latency.time_in_queue": 0.01,
    "gen_ai.latency.time_to_first_token": 0.05,
    "gen_ai.latency.e2e": 0.3,
}


def test_a_span_of_vllm_has_seconds_under_its_own_names(tmp_path: Path) -> None:
    [found] = observations(write_lines(tmp_path / "spans.json", [otlp(span(VLLM_SPAN))]))
    assert found == approx(
        {
            "traceparent": "0af7651916cd43dd8448eb211c80319c",
            "engine_id": "chatcmpl-abc",
            "ts": 1.7e9,
            "model": "org/model",
            "ok": True,
            "latency_ms": 300.0,
            "ttft_ms": 50.0,
            "prompt_tokens": 5,
            "output_tokens": 16,
        }
    )


def test_a_span_with_conventional_names_is_read(tmp_path: Path) -> None:
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lockstep",
        "gen_ai.request.model": "asked",
        "gen_ai.response.model": "answered",
        "gen_ai.response.id": "chatcmpl-xyz",
        "gen_ai.conversation.id": "conv",
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.time_to_first_chunk": 0.07,
        "lockstep.request_id": "caller-1",
        "error.type": "timeout",
    }
    [found] = observations(write_json(tmp_path / "spans.json", otlp(span(attributes))))
    assert found == approx(
        {
            "request_id": "caller-1",
            "traceparent": "0af7651916cd43dd8448eb211c80319c",
            "engine_id": "chatcmpl-xyz",
            "conversation_id": "conv",
            "ts": 1.7e9,
            "seed": 7,
            "model": "answered",
            "backend": "lockstep",
            "ok": False,
            "error": "timeout",
            "latency_ms": 400.0,
            "ttft_ms": 70.0,
            "prompt_tokens": 5,
            "output_tokens": 6,
        }
    )


def test_spans_of_tools_agents_and_hops_are_not_answers(tmp_path: Path) -> None:
    others = [
        span({"gen_ai.operation.name": "execute_tool"}),
        span({"gen_ai.operation.name": "invoke_agent"}),
        span({"gen_ai.provider.name": "lockstep", "gen_ai.request.model": "router"}),
        span({"http.route": "/health"}),
    ]
    found = observations(write_lines(tmp_path / "spans.json", [otlp(*others), otlp(span(VLLM_SPAN))]))
    assert [each["engine_id"] for each in found] == ["chatcmpl-abc"]


def test_an_embedding_of_a_span_has_no_number_of_output_tokens(tmp_path: Path) -> None:
    attributes = {"gen_ai.operation.name": "embeddings", "gen_ai.usage.output_tokens": 0}
    [found] = observations(write_json(tmp_path / "spans.json", otlp(span(attributes))))
    assert "output_tokens" not in found


@pytest.mark.parametrize("code", [2, "2", "STATUS_CODE_ERROR"])
def test_the_status_of_a_span_is_a_number_or_a_name(tmp_path: Path, code: Any) -> None:
    status = {"code": code, "message": "boom"}
    [found] = observations(write_lines(tmp_path / "spans.json", [otlp(span(VLLM_SPAN, status=status))]))
    assert (found["ok"], found["error"]) == (False, "boom")


# -- AIPerf -----------------------------------------------------------------------------------------------------------


def aiperf(place: int = 0, **members: Any) -> dict[str, Any]:
    start = 1_700_000_000_000_000_000 + place * 1_000_000_000
    return {
        "metadata": {
            "session_num": place,
            "x_request_id": f"uuid-{place}",
            "x_correlation_id": "c",
            "conversation_id": f"session_{place}",
            "turn_index": 1,
            "request_start_ns": start,
            "request_ack_ns": start + 1,
            "request_end_ns": start + 300_000_000,
            "worker_id": "w",
            "record_processor_id": "p",
            "benchmark_phase": "profiling",
            "was_cancelled": False,
        },
        "metrics": {
            "input_sequence_length": {"value": 5, "unit": "tokens"},
            "time_to_first_token": {"value": 50.5, "unit": "ms"},
            "request_latency": {"value": 300.25, "unit": "ms"},
            "output_sequence_length": {"value": 3, "unit": "tokens"},
            "inter_chunk_latency": {"value": [10.0, 20.0], "unit": "ms"},
        },
        "error": None,
        **members,
    }


def test_a_record_of_aiperf_is_an_observation(tmp_path: Path) -> None:
    [found] = observations(write_lines(tmp_path / "profile_export.jsonl", [aiperf()]))
    assert found == approx(
        {
            "request_id": "uuid-0",
            "conversation_id": "session_0",
            "turn": 1,
            "ts": 1.7e9,
            "ok": True,
            "latency_ms": 300.25,
            "ttft_ms": 50.5,
            "token_latencies_ms": [10.0, 20.0],
            "prompt_tokens": 5,
            "output_tokens": 3,
        }
    )


@pytest.mark.parametrize(("unit", "factor"), [("ms", 1.0), ("s", 1e3), ("sec", 1e3), ("us", 1e-3), ("ns", 1e-6)])
def test_units_of_aiperf_are_converted(tmp_path: Path, unit: str, factor: float) -> None:
    metrics = {
        "request_latency": {"value": 3000.0, "unit": unit},
        "time_to_first_token": {"value": 2000.0, "unit": unit},
        "inter_chunk_latency": {"value": [100.0], "unit": unit},
    }
    [found] = observations(write_lines(tmp_path / "export.jsonl", [aiperf(metrics=metrics)]))
    assert found["latency_ms"] == pytest.approx(3000 * factor)
    assert found["ttft_ms"] == pytest.approx(2000 * factor)
    assert found["token_latencies_ms"] == [pytest.approx(100 * factor)]


def test_an_unknown_unit_is_refused_by_the_name_of_its_metric(tmp_path: Path) -> None:
    metrics = {"request_latency": {"value": 3.0, "unit": "minutes"}}
    path = write_lines(tmp_path / "export.jsonl", [aiperf(metrics=metrics)])
    with pytest.raises(
        EvidenceError, match=r"export\.jsonl: record 1: latency_ms .*request_latency has the unit minutes"
    ):
        observations(path)


def test_failed_and_cancelled_records_of_aiperf_are_failures(tmp_path: Path) -> None:
    error = {"code": 404, "type": "Not Found", "message": "..."}
    failed = aiperf(0, metrics={"error_isl": {"value": 20, "unit": "tokens"}}, error=error)
    cancelled = aiperf(1)
    cancelled["metadata"] |= {"was_cancelled": True, "cancellation_time_ns": 5}
    found = observations(write_lines(tmp_path / "export.jsonl", [failed, cancelled]))
    assert [(each["ok"], each["error"]) for each in found] == [(False, "Not Found"), (False, "cancelled")]
    assert "latency_ms" not in found[0]


def test_warm_up_records_of_aiperf_do_not_count(tmp_path: Path) -> None:
    warm_up = aiperf(0)
    warm_up["metadata"]["benchmark_phase"] = "warmup"
    found = observations(write_lines(tmp_path / "export.jsonl", [warm_up, aiperf(1)]))
    assert [each["request_id"] for each in found] == ["uuid-1"]


def test_a_repeated_conversation_has_a_separate_id(tmp_path: Path) -> None:
    records = [aiperf(0), aiperf(1), aiperf(2)]
    for record in records:
        record["metadata"]["conversation_id"] = "session_0"
    found = observations(write_lines(tmp_path / "export.jsonl", records))
    assert [each["conversation_id"] for each in found] == ["session_0", "session_0#2", "session_0#3"]


# -- guidellm ---------------------------------------------------------------------------------------------------------


def guidellm(successful: list[dict[str, Any]], errored: Any = (), incomplete: Any = ()) -> dict[str, Any]:
    requests = {"successful": successful, "errored": list(errored), "incomplete": list(incomplete), "total": None}
    return {"metadata": {"version": 2}, "config": {}, "benchmarks": [{"requests": requests}]}


def guidellm_request(place: int, **members: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": f"prompt {place}"}], "max_tokens": 8}
    queued = 1.7e9 + place
    return {
        "type_": "generative_request_stats",
        "request_id": f"uuid-{-place}",
        "response_id": f"chatcmpl-{place}",
        "request_args": json.dumps({"method": None, "body": body}),
        "output": "text",
        "info": {
            "status": "completed",
            "conversation_id": f"drawn-{place}",
            "turn_index": 0,
            "timings": {"queued": queued, "request_start": queued + 5 - place},
            "error": None,
        },
        "request_latency": 0.2,
        "prompt_tokens": 5,
        "output_tokens": 8,
        "time_to_first_token_ms": 30.0,
        "inter_token_latency_ms": 4.0,
        **members,
    }


def test_a_request_of_guidellm_has_its_place_in_the_data_set(tmp_path: Path) -> None:
    """Requests start in any order, but are queued in the order of the data set."""
    found = by_index(
        observations(write_json(tmp_path / "b.json", guidellm([guidellm_request(1), guidellm_request(0)])))
    )
    digests = [[each.pop(name) for name in ("prompt_digest", "params_digest")] for each in found]
    assert found == [
        approx(
            {
                "index": place,
                "ts": 1.7e9 + 5,
                "model": "m",
                "ok": True,
                "latency_ms": 200.0,
                "ttft_ms": 30.0,
                "text": "text",
                "prompt_tokens": 5,
                "output_tokens": 8,
            }
        )
        for place in (0, 1)
    ]
    assert digests[0][0] != digests[1][0]
    assert digests[0][1] == digests[1][1]


def test_errors_of_guidellm_count_and_requests_cancelled_by_a_limit_do_not(tmp_path: Path) -> None:
    failed = guidellm_request(1, request_args=None, request_latency=None, time_to_first_token_ms=None, output=None)
    failed["info"]["error"] = "HTTPStatusError(...)"
    document = guidellm([guidellm_request(0)], [failed], [guidellm_request(2)])
    found = by_index(observations(write_json(tmp_path / "b.json", document)))
    assert [(each["index"], each["ok"], each.get("error")) for each in found] == [
        (0, True, None),
        (1, False, "HTTPStatusError(...)"),
    ]


def test_guidellm_before_0_4_has_other_names(tmp_path: Path) -> None:
    request = {
        "type_": "generative_text_response",
        "request_id": "uuid",
        "request_type": "text_completions",
        "scheduler_info": {"queued_time": 1.7e9, "completed": True},
        "prompt": "Hello",
        "output": "text",
        "prompt_tokens": 2,
        "output_tokens": 8,
        "start_time": 1.7e9 + 1,
        "request_latency": 0.2,
        "time_to_first_token_ms": 30.0,
    }
    [found] = observations(write_json(tmp_path / "b.json", guidellm([request])))
    assert found.pop("prompt_digest")
    assert found == approx(
        {
            "index": 0,
            "ts": 1.7e9 + 1,
            "ok": True,
            "latency_ms": 200.0,
            "ttft_ms": 30.0,
            "text": "text",
            "prompt_tokens": 2,
            "output_tokens": 8,
        }
    )


# -- versions ---------------------------------------------------------------------------------------------------------

UNKNOWN_RUNS = [
    ({**VLLM_RUN}, "vllm bench serve .* has no input_lens; write it with --save-detailed"),
    ({**SGLANG_RUN}, "sglang.bench_serving .* has no input_lens; write it with --output-details"),
    ({"benchmarks": [{"results": []}]}, r"guidellm.*benchmarks\[0\] has no requests"),
    (guidellm([{"request_id": "a", "latency": 3}]), "guidellm.* has no request.request_latency"),
]
UNKNOWN = [
    ({name: value for name, value in LOG_LINE.items() if name != "total_ms"}, "request log .* has no total_ms"),
    ({"request_parameters": "{}", "id": "r", "finish_reason": None}, "--export-metrics-to-file, .* no e2e_latency"),
    ({"timestamp": "t", "event": "request.finished", "rid": "r"}, "--log-requests .* has no obj"),
    ({"resourceSpans": [{"instrumentationLibrarySpans": []}]}, "OTLP-JSON.* has no resourceSpans.scopeSpans.spans"),
    ({"metadata": {"x_request_id": "a"}, "metrics": {}}, "AIPerf.* has no metadata.request_start_ns"),
    ({"request": "a", "duration": 3}, "unknown format; the first record has request and duration"),
    ({"latency": 3, "id": "a"}, "did you mean 'latency_ms'"),
    ({"request_id": "a", "latency_s": 3}, "unknown field 'latency_s' of an observation; did you mean 'latency_ms'"),
]


@pytest.mark.parametrize(
    ("record", "num_lines", "message"),
    [(record, num_lines, message) for record, message in UNKNOWN for num_lines in (1, 2)]
    + [(record, 1, message) for record, message in UNKNOWN_RUNS],
)
def test_an_unknown_version_is_refused_with_a_field_name(
    tmp_path: Path, record: dict[str, Any], num_lines: int, message: str
) -> None:
    path = write_lines(tmp_path / "input", [record] * num_lines)
    with pytest.raises(EvidenceError, match=rf"input: .*{message}"):
        observations(path)


def test_several_runs_in_one_file_are_refused(tmp_path: Path) -> None:
    """SGLang's bench appends to its file, so it is unknown which run is the baseline's partner."""
    path = write_lines(tmp_path / "runs.jsonl", [{**SGLANG_RUN, **BENCH_ARRAYS}] * 2)
    with pytest.raises(EvidenceError, match=r"runs\.jsonl: contains several runs of sglang\.bench_serving"):
        observations(path)


def test_a_file_of_a_tool_holds_one_side(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "export.jsonl", [aiperf(0), aiperf(1)])
    with open_store() as store, pytest.raises(EvidenceError, match=r"AIPerf.*has one side only; pass two files"):
        read(store, path, None)


def test_names_of_formats_differ() -> None:
    assert len({each.name for each in FORMATS}) == len(FORMATS)


# -- files that the tools wrote ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "num_pairs", "num_failed"),
    [
        ("aiperf-{}.jsonl", "conversation", 7, 1),
        ("guidellm-{}.json", "index", 5, 1),
        ("bench-{}.json", "index", 6, 0),
    ],
)
def test_real_files_are_joined_and_judged(name: str, key: str, num_pairs: int, num_failed: int) -> None:
    """AIPerf 0.13.0, guidellm 0.8.1 and our bench, against our server; the last request of two failed."""
    verdict = verdict_of(*(DATA / name.format(side) for side in ("baseline", "candidate")), outputs="ignore")
    assert verdict.joining.by_key == {key: num_pairs}
    assert verdict.joining.unjoined == ()
    assert verdict.summary.figures["error_rate"].candidate == pytest.approx(100 * num_failed / num_pairs)
    for figure in ("latency_p95_ms", "ttft_p95_ms"):
        assert verdict.summary.figures[figure].baseline is not None


def test_answers_of_real_files_are_equal() -> None:
    """The two runs of each had equal seeds, and temperature 0."""
    for name in ("guidellm-{}.json", "bench-{}.json"):
        verdict = verdict_of(*(DATA / name.format(side) for side in ("baseline", "candidate")))
        assert verdict.summary.differing == verdict.summary.incomparable == 0
        assert verdict.summary.same == verdict.summary.healthy > 0
