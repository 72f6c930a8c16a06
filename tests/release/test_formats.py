"""Files with the field names of each tool become the same observations; versions that nobody knows are refused."""

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


def approx(value: dict[str, Any]) -> Any:
    return {name: pytest.approx(each) if isinstance(each, float) else each for name, each in value.items()}


# -- our own log ------------------------------------------------------------------------------------------------------

LOG_LINE = {
    "time": "2026-11-22T20:23:04.894Z",
    "level": "info",
    "process": "server",
    "logger": "lockstep.request",
    "message": "ended",
    "id": "caller-1",
    "method": "POST",
    "endpoint": "/v1/chat/completions",
    "status": 200,
    "model": "pocket",
    "stream": True,
    "total_ms": 94.0,
    "prompt_tokens": 40,
    "output_tokens": 8,
    "ttft_ms": 21.5,
    "finish_reasons": ["length"],
}


def test_a_line_of_our_request_log_is_an_observation(tmp_path: Path) -> None:
    [found] = observations(write_lines(tmp_path / "log", [LOG_LINE]))
    assert found == approx(
        {
            "request_id": "caller-1",
            "ts": 1795378984.8,
            "model": "pocket",
            "backend": "lockstep",
            "ok": True,
            "latency_ms": 94.0,
            "ttft_ms": 21.5,
            "prompt_tokens": 40,
            "output_tokens": 8,
        }
    )


def test_requests_are_found_among_the_other_lines_of_a_log() -> None:
    found = observations(DATA / "requests.log")
    assert len(found) == 4
    assert {each["model"] for each in found} == {"pocket"}
    assert all(each["ok"] and each["ttft_ms"] > 0 for each in found)


def test_a_refused_and_a_failed_request_of_our_log_are_failures(tmp_path: Path) -> None:
    refused = {**LOG_LINE, "id": "a", "status": 429, "error": "queue_full"}
    silent = {**LOG_LINE, "id": "b", "status": 500}
    found = {each["request_id"]: each for each in observations(write_lines(tmp_path / "log", [refused, silent]))}
    assert (found["a"]["ok"], found["a"]["error"]) == (False, "queue_full")
    assert (found["b"]["ok"], found["b"]["error"]) == (False, "status 500")


# -- benches ----------------------------------------------------------------------------------------------------------

VLLM_RUN = {
    "date": "20260101-120000",
    "endpoint_type": "openai",
    "backend": "openai",
    "label": None,
    "model_id": "org/model",
    "tokenizer_id": "org/model",
    "num_prompts": 3,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": None,
    "duration": 2.0,
    "completed": 2,
    "failed": 1,
    "total_input_tokens": 30,
}
BENCH_ARRAYS = {
    "input_lens": [10, 11, 12],
    "output_lens": [3, 0, 0],
    "ttfts": [0.05, 0.0, 0.0],
    "itls": [[0.01, 0.02], [], []],
    "generated_texts": ["abc", "", ""],
    "errors": ["", "Traceback ...", ""],
}
BENCH_REQUESTS = [
    {
        "index": 0,
        "ok": True,
        "latency_ms": 80.0,
        "ttft_ms": 50.0,
        "token_latencies_ms": [10.0, 20.0],
        "text": "abc",
        "prompt_tokens": 10,
        "output_tokens": 3,
    },
    {
        "index": 1,
        "ok": False,
        "error": "Traceback ...",
        "token_latencies_ms": [],
        "prompt_tokens": 11,
        "output_tokens": 0,
    },
    {"index": 2, "ok": False, "error": "no answer", "token_latencies_ms": [], "prompt_tokens": 12, "output_tokens": 0},
]


def by_index(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda each: int(each["index"]))


def test_vllm_bench_arrays_are_requests_in_seconds_by_index(tmp_path: Path) -> None:
    run = {**VLLM_RUN, **BENCH_ARRAYS, "start_times": [7.0, 7.1, 7.2]}
    found = by_index(observations(write_json(tmp_path / "run.json", run)))
    assert found == [
        approx({**each, "model": "org/model", "ts": 7.0 + place / 10}) for place, each in enumerate(BENCH_REQUESTS)
    ]


def test_newer_vllm_bench_says_the_latency_itself(tmp_path: Path) -> None:
    run = {**VLLM_RUN, **BENCH_ARRAYS, "latencies": [0.1, 0.0, 0.0], "queue_times": [0, 0, 0]}
    found = by_index(observations(write_json(tmp_path / "run.json", run)))
    assert found[0]["latency_ms"] == pytest.approx(100.0)


def test_older_vllm_bench_has_no_endpoint_type_and_no_start_times(tmp_path: Path) -> None:
    run = {
        name: value for name, value in {**VLLM_RUN, **BENCH_ARRAYS}.items() if name not in ("endpoint_type", "label")
    }
    assert [each["index"] for each in by_index(observations(write_json(tmp_path / "run.json", run)))] == [0, 1, 2]


SGLANG_RUN = {
    "tag": None,
    "backend": "sglang-oai",
    "dataset_name": "random",
    "request_rate": "trace",
    "max_concurrency": 8,
    "duration": 2.0,
    "completed": 2,
    "total_input_tokens": 30,
    "total_output_tokens": 3,
    "total_output_tokens_retokenized": 3,
    "mean_ttft_ms": 50.0,
    "server_info": {"a": [1]},
    "accept_length": None,
}


def test_sglang_bench_arrays_are_requests_of_its_engine(tmp_path: Path) -> None:
    found = by_index(observations(write_lines(tmp_path / "run.jsonl", [{**SGLANG_RUN, **BENCH_ARRAYS}])))
    assert found == [approx({**each, "backend": "sglang"}) for each in BENCH_REQUESTS]


@pytest.mark.parametrize("backend", ["sglang", "sglang-native", "sglang-oai-chat"])
def test_all_ways_to_call_sglang_are_one_engine(tmp_path: Path, backend: str) -> None:
    run = {**SGLANG_RUN, **BENCH_ARRAYS, "backend": backend}
    assert {each["backend"] for each in observations(write_json(tmp_path / "run.json", run))} == {"sglang"}


def test_arrays_of_unlike_lengths_are_refused(tmp_path: Path) -> None:
    run = {**VLLM_RUN, **BENCH_ARRAYS, "ttfts": [0.1]}
    with pytest.raises(EvidenceError, match=r"run\.json: its arrays differ in length: .*ttfts 1"):
        observations(write_json(tmp_path / "run.json", run))


# -- SGLang's files ---------------------------------------------------------------------------------------------------

SGLANG_METRICS = {
    "request_parameters": json.dumps(
        {"rid": "r-1", "text": "Hello", "sampling_params": {"temperature": 0.0}, "stream": False}
    ),
    "id": "r-1",
    "finish_reason": {"type": "length", "length": 8},
    "prompt_tokens": 5,
    "completion_tokens": 8,
    "cached_tokens": 1,
    "weight_version": "default",
    "e2e_latency": 0.25,
    "queue_time": 0.01,
    "request_received_ts": 1700000000.5,
}
SGLANG_NEWER = {
    "num_retractions": 0,
    "request_finished_ts": 1700000000.75,
    "num_running_reqs": 3,
    "num_waiting_reqs": 2,
}
SGLANG_OLDER = {"total_retractions": 0, "decode_finished_ts": 1700000000.75, "inference_time": 0.2}


@pytest.mark.parametrize(("version", "queue"), [(SGLANG_NEWER, {"queue_depth": 2.0}), (SGLANG_OLDER, {})])
def test_exported_metrics_of_sglang_in_both_versions(
    tmp_path: Path, version: dict[str, Any], queue: dict[str, float]
) -> None:
    [found] = observations(write_lines(tmp_path / "sglang-request-metrics.log", [{**SGLANG_METRICS, **version}]))
    digests = {name: found.pop(name) for name in ("prompt_digest", "params_digest")}
    assert found == approx(
        {
            "request_id": "r-1",
            "engine_id": "r-1",
            "ts": 1700000000.5,
            "model_version": "default",
            "backend": "sglang",
            "ok": True,
            "latency_ms": 250.0,
            "prompt_tokens": 5,
            "output_tokens": 8,
            **queue,
        }
    )
    assert len(set(digests.values())) == 2


def test_an_aborted_request_of_sglang_failed(tmp_path: Path) -> None:
    aborted = {**SGLANG_METRICS, "finish_reason": {"type": "abort", "message": "out of memory"}}
    [found] = observations(write_lines(tmp_path / "metrics", [aborted]))
    assert (found["ok"], found["error"]) == (False, "out of memory")


def sglang_finished(**out: Any) -> dict[str, Any]:
    meta = {
        "id": "e-1",
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "e2e_latency": 0.5,
        "weight_version": "v2",
    }
    return {
        "timestamp": "2026-01-01T12:00:01.000000",
        "event": "request.finished",
        "rid": "r-1",
        "obj": {"rid": "r-1", "input_ids": [1, 2], "sampling_params": {"temperature": 0}},
        "out": {**out, "meta_info": meta},
    }


def test_logged_requests_of_sglang_are_their_finished_lines(tmp_path: Path) -> None:
    received = {"timestamp": "2026-01-01T12:00:00.5", "event": "request.received", "rid": "r-1", "obj": {}}
    path = write_lines(tmp_path / "host_0.log", [received, sglang_finished(text="abc", output_ids=[7, 8, 9])])
    [found] = observations(path)
    assert found["token_ids"] == [7, 8, 9]
    assert found["text"] == "abc"
    assert found["model_version"] == "v2"
    assert (found["request_id"], found["engine_id"], found["latency_ms"]) == ("r-1", "e-1", 500.0)
    assert found["ts"] == pytest.approx(1767268800.5)


def test_requests_of_sglang_are_found_among_other_lines_of_its_output(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_text("[2026-01-01 12:00:00] server is fired up\n" + json.dumps(sglang_finished()) + "\nINFO: done\n")
    [found] = observations(path)
    assert found.keys() & {"token_ids", "text"} == set()


def test_text_and_tokens_that_sglang_cut_are_no_material(tmp_path: Path) -> None:
    """Level 2 keeps 1,024 characters or tokens of each end."""
    text = "a" * 1024 + "..." + "b" * 1024
    ids: list[Any] = [*range(1024), "...", *range(1024)]
    [found] = observations(write_lines(tmp_path / "log", [sglang_finished(text=text, output_ids=ids)]))
    assert found.keys() & {"token_ids", "text"} == set()


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


def test_a_span_after_the_conventions_is_read_by_their_names(tmp_path: Path) -> None:
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


def test_spans_of_tools_agents_and_hops_are_no_answers(tmp_path: Path) -> None:
    others = [
        span({"gen_ai.operation.name": "execute_tool"}),
        span({"gen_ai.operation.name": "invoke_agent"}),
        span({"gen_ai.provider.name": "lockstep", "gen_ai.request.model": "router"}),
        span({"http.route": "/health"}),
    ]
    found = observations(write_lines(tmp_path / "spans.json", [otlp(*others), otlp(span(VLLM_SPAN))]))
    assert [each["engine_id"] for each in found] == ["chatcmpl-abc"]


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
def test_units_of_aiperf_count(tmp_path: Path, unit: str, factor: float) -> None:
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
    with pytest.raises(EvidenceError, match=r"export\.jsonl: latency_ms .*request_latency has the unit minutes"):
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


def test_a_conversation_that_comes_again_has_an_id_of_its_own(tmp_path: Path) -> None:
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
    """Requests start in any order, but they are queued in the order of the data set."""
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


def test_errors_of_guidellm_count_and_what_a_limit_cut_off_does_not(tmp_path: Path) -> None:
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
    ({"request": "a", "duration": 3}, "of no known format; its first record has request and duration"),
    ({"latency": 3, "id": "a"}, "did you mean 'latency_ms'"),
    ({"request_id": "a", "latency_s": 3}, "has the field 'latency_s', which is unknown; did you mean 'latency_ms'"),
]


@pytest.mark.parametrize(
    ("record", "num_lines", "message"),
    [(record, num_lines, message) for record, message in UNKNOWN for num_lines in (1, 2)]
    + [(record, 1, message) for record, message in UNKNOWN_RUNS],
)
def test_an_unknown_version_is_refused_by_the_name_of_a_field(
    tmp_path: Path, record: dict[str, Any], num_lines: int, message: str
) -> None:
    path = write_lines(tmp_path / "input", [record] * num_lines)
    with pytest.raises(EvidenceError, match=rf"input: .*{message}"):
        observations(path)


def test_several_runs_in_one_file_are_refused(tmp_path: Path) -> None:
    """SGLang's bench appends to its file; which run is the baseline's partner, nobody can tell."""
    path = write_lines(tmp_path / "runs.jsonl", [{**SGLANG_RUN, **BENCH_ARRAYS}] * 2)
    with pytest.raises(EvidenceError, match=r"runs\.jsonl: several runs of sglang\.bench_serving"):
        observations(path)


def test_a_file_of_a_tool_holds_one_side(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "export.jsonl", [aiperf(0), aiperf(1)])
    with open_store() as store, pytest.raises(EvidenceError, match=r"AIPerf.*holds one side only; give two files"):
        read(store, path, None)


def test_names_of_formats_are_unlike() -> None:
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
    """AIPerf 0.13.0, guidellm 0.8.1 and our own bench, against our server; the last request of two failed."""
    verdict = verdict_of(*(DATA / name.format(side) for side in ("baseline", "candidate")), outputs="ignore")
    assert verdict.joining["by_key"] == {key: num_pairs}
    assert verdict.joining["unjoined"] == []
    assert verdict.summary.figures["error_rate"].candidate == pytest.approx(100 * num_failed / num_pairs)
    for figure in ("latency_p95_ms", "ttft_p95_ms"):
        assert verdict.summary.figures[figure].baseline is not None


def test_answers_of_real_files_are_the_same() -> None:
    """The two runs of each had the same seeds, and temperature 0."""
    for name in ("guidellm-{}.json", "bench-{}.json"):
        verdict = verdict_of(*(DATA / name.format(side) for side in ("baseline", "candidate")))
        assert verdict.summary.differing == verdict.summary.incomparable == 0
        assert verdict.summary.same == verdict.summary.healthy > 0
