"""Files of each tool become the same observations; unknown versions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import EvidenceError
from tests.release.inputs import DATA, observations, write_json, write_lines


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


@pytest.mark.parametrize("endpoint", ["/v1/embeddings", "/api/embed", "/api/embeddings"])
def test_an_embedding_of_our_log_has_no_number_of_output_tokens(tmp_path: Path, endpoint: str) -> None:
    [found] = observations(write_lines(tmp_path / "log", [{**LOG_LINE, "endpoint": endpoint, "output_tokens": 0}]))
    assert "output_tokens" not in found


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


def test_latencies_in_newer_vllm_bench_files_are_read(tmp_path: Path) -> None:
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
def test_all_names_of_sglang_are_one_engine(tmp_path: Path, backend: str) -> None:
    run = {**SGLANG_RUN, **BENCH_ARRAYS, "backend": backend}
    assert {each["backend"] for each in observations(write_json(tmp_path / "run.json", run))} == {"sglang"}


def test_arrays_of_different_lengths_are_refused(tmp_path: Path) -> None:
    run = {**VLLM_RUN, **BENCH_ARRAYS, "ttfts": [0.1]}
    with pytest.raises(EvidenceError, match=r"run\.json: the arrays differ in length: .*ttfts 1"):
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


def test_text_and_tokens_shortened_by_sglang_are_not_compared(tmp_path: Path) -> None:
    """Level 2 keeps 1,024 characters or tokens of each end."""
    text = "a" * 1024 + "..." + "b" * 1024
    ids: list[Any] = [*range(1024), "...", *range(1024)]
    [found] = observations(write_lines(tmp_path / "log", [sglang_finished(text=text, output_ids=ids)]))
    assert found.keys() & {"token_ids", "text"} == set()
