"""Input formats as rows: the fields that tell each, their types, and which observation each record means, in SQL.

A format is read by DuckDB: ``columns`` are the members of a record with their types, ``table`` cuts a file's records
into requests, and ``fields`` says what an observation's field is, as an expression over them. Names and units are those
of each tool's documentation and of files that it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lockstep.release.observation import FIELDS

FILE = "file"
"""Name under which ``table`` sees the file's records."""

_VALUE = "STRUCT(stringValue VARCHAR, intValue VARCHAR, doubleValue DOUBLE, boolValue BOOLEAN)"
_ATTRIBUTES = f"STRUCT(key VARCHAR, value {_VALUE})[]"
_SPAN = (
    f"STRUCT(traceId VARCHAR, spanId VARCHAR, name VARCHAR, startTimeUnixNano VARCHAR, endTimeUnixNano VARCHAR,"
    f" attributes {_ATTRIBUTES}, status STRUCT(code JSON, message VARCHAR))"
)


@dataclass(frozen=True, slots=True)
class Format:
    """One format of one tool."""

    name: str
    tool: str
    """Words for messages: who writes it, and how."""
    tells: tuple[str, ...]
    """Members, with dots within them, that no other format's records have."""
    needs: tuple[str, ...] = ()
    """Further members without which it is a version that nobody here knows."""
    columns: Mapping[str, str] = field(default_factory=dict)
    table: str = FILE
    where: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    layout: Literal["lines", "document"] = "lines"
    """Whether each line is a record, or the whole file is one."""
    hint: str = ""
    """Advice where a needed member is missing."""
    weak_join: bool = False
    """Whether its only key is the place in the data set."""


def _attribute(*names: str) -> str:
    """The value of the first of some attributes that a span has, as text."""
    listed = ", ".join(f"'{name}'" for name in names)
    found = f"list_filter(span.attributes, lambda a: a.key IN ({listed}))[1].value"
    return f"coalesce({found}.stringValue, {found}.intValue, {found}.doubleValue::VARCHAR)"


def _measured_ms(name: str) -> str:
    """An AIPerf metric in milliseconds, by its unit; an unknown unit is an error that names it."""
    unit, value = f"metrics->>'$.{name}.unit'", f"(metrics->>'$.{name}.value')::DOUBLE"
    return f"({value} * {_factor(unit, name)})"


def _factor(unit: str, name: str) -> str:
    return (
        f"CASE {unit} WHEN 'ms' THEN 1 WHEN 's' THEN 1e3 WHEN 'sec' THEN 1e3 WHEN 'us' THEN 1e-3 WHEN 'ns' THEN 1e-6"
        f" ELSE CASE WHEN {unit} IS NULL THEN NULL ELSE error('{name} has the unit ' || ({unit})) END END"
    )


_AIPERF_GAPS = "metrics->'$.inter_chunk_latency'"
_AIPERF_GAPS_UNIT = "metrics->>'$.inter_chunk_latency.unit'"

FORMATS: tuple[Format, ...] = (
    Format(
        name="lockstep-requests",
        tool="the request log of lockstep serve --log-format json",
        tells=("logger", "process", "endpoint", "total_ms"),
        needs=("id", "status"),
        columns={
            "logger": "VARCHAR",
            "time": "TIMESTAMPTZ",
            "id": "VARCHAR",
            "status": "BIGINT",
            "model": "VARCHAR",
            "total_ms": "DOUBLE",
            "ttft_ms": "DOUBLE",
            "prompt_tokens": "BIGINT",
            "output_tokens": "BIGINT",
            "error": "VARCHAR",
        },
        where="logger = 'lockstep.request' AND model IS NOT NULL",
        fields={
            "request_id": "id",
            "ts": "epoch(time) - total_ms / 1e3",
            "model": "model",
            "backend": "'lockstep'",
            "ok": "status < 400 AND error IS NULL",
            "error": "error",
            "latency_ms": "total_ms",
            "ttft_ms": "ttft_ms",
            "prompt_tokens": "prompt_tokens",
            "output_tokens": "output_tokens",
        },
    ),
    Format(
        name="vllm-bench",
        tool="vllm bench serve --save-result --save-detailed (lockstep bench serve writes the same)",
        tells=("endpoint_type", "completed", "ttfts", "itls"),
        needs=("model_id", "input_lens", "output_lens", "errors"),
        columns={
            "model_id": "VARCHAR",
            "backend": "VARCHAR",
            "input_lens": "BIGINT[]",
            "output_lens": "BIGINT[]",
            "ttfts": "DOUBLE[]",
            "itls": "DOUBLE[][]",
            "latencies": "DOUBLE[]",
            "start_times": "DOUBLE[]",
            "generated_texts": "VARCHAR[]",
            "errors": "VARCHAR[]",
        },
        table=(
            "(SELECT model_id, backend, unnest(range(len(errors))) AS place, unnest(input_lens) AS input_len,"
            " unnest(output_lens) AS output_len, unnest(ttfts) AS ttft, unnest(itls) AS itl,"
            " unnest(latencies) AS latency, unnest(start_times) AS start_time,"
            f" unnest(generated_texts) AS generated, unnest(errors) AS error FROM {FILE})"
        ),
        fields={
            "index": "place",
            "ts": "start_time",
            "model": "model_id",
            "backend": "backend",
            "ok": "error = ''",
            "error": "error",
            "latency_ms": "coalesce(latency, ttft + coalesce(list_sum(itl), 0)) * 1e3",
            "ttft_ms": "ttft * 1e3",
            "token_latencies_ms": "list_transform(itl, lambda s: s * 1e3)",
            "text": "generated",
            "prompt_tokens": "input_len",
            "output_tokens": "output_len",
        },
        layout="document",
        hint="write it with --save-detailed",
        weak_join=True,
    ),
    Format(
        name="sglang-bench",
        tool="sglang.bench_serving --output-details",
        tells=("dataset_name", "completed", "ttfts", "itls"),
        needs=("input_lens", "output_lens", "errors"),
        columns={
            "backend": "VARCHAR",
            "input_lens": "BIGINT[]",
            "output_lens": "BIGINT[]",
            "ttfts": "DOUBLE[]",
            "itls": "DOUBLE[][]",
            "generated_texts": "VARCHAR[]",
            "errors": "VARCHAR[]",
        },
        table=(
            "(SELECT backend, unnest(range(len(errors))) AS place, unnest(input_lens) AS input_len,"
            " unnest(output_lens) AS output_len, unnest(ttfts) AS ttft, unnest(itls) AS itl,"
            f" unnest(generated_texts) AS generated, unnest(errors) AS error FROM {FILE})"
        ),
        fields={
            "index": "place",
            "backend": "backend",
            "ok": "error = ''",
            "error": "error",
            "latency_ms": "(ttft + coalesce(list_sum(itl), 0)) * 1e3",
            "ttft_ms": "ttft * 1e3",
            "token_latencies_ms": "list_transform(itl, lambda s: s * 1e3)",
            "text": "generated",
            "prompt_tokens": "input_len",
            "output_tokens": "output_len",
        },
        layout="document",
        hint="write it with --output-details",
        weak_join=True,
    ),
    Format(
        name="sglang-metrics",
        tool="SGLang --export-metrics-to-file",
        tells=("request_parameters", "id"),
        needs=("e2e_latency", "finish_reason"),
        columns={
            "request_parameters": "VARCHAR",
            "id": "VARCHAR",
            "finish_reason": "JSON",
            "prompt_tokens": "BIGINT",
            "completion_tokens": "BIGINT",
            "e2e_latency": "DOUBLE",
            "weight_version": "VARCHAR",
            "request_received_ts": "DOUBLE",
            "num_waiting_reqs": "DOUBLE",
        },
        fields={
            "request_id": "request_parameters->>'$.rid'",
            "engine_id": "id",
            "ts": "request_received_ts",
            "model_version": "weight_version",
            "backend": "'sglang'",
            "ok": "coalesce(finish_reason->>'$.type', '') <> 'abort'",
            "error": "CASE finish_reason->>'$.type' WHEN 'abort' THEN coalesce(finish_reason->>'$.message', 'abort') END",
            "latency_ms": "e2e_latency * 1e3",
            "queue_depth": "num_waiting_reqs",
            "prompt_tokens": "prompt_tokens",
            "output_tokens": "completion_tokens",
        },
    ),
    Format(
        name="sglang-requests",
        tool="SGLang --log-requests --log-requests-format json",
        tells=("event", "rid", "timestamp"),
        columns={
            "timestamp": "VARCHAR",
            "event": "VARCHAR",
            "rid": "VARCHAR",
            "out": "JSON",
        },
        where="event = 'request.finished'",
        fields={
            "request_id": "rid",
            "engine_id": "out->>'$.meta_info.id'",
            "ts": "epoch(try_cast(timestamp AS TIMESTAMPTZ))",
            "model_version": "out->>'$.meta_info.weight_version'",
            "backend": "'sglang'",
            "ok": "coalesce(out->>'$.meta_info.finish_reason.type', '') <> 'abort'",
            "error": (
                "CASE out->>'$.meta_info.finish_reason.type' WHEN 'abort'"
                " THEN coalesce(out->>'$.meta_info.finish_reason.message', 'abort') END"
            ),
            "latency_ms": "(out->>'$.meta_info.e2e_latency')::DOUBLE * 1e3",
            "token_ids": "(out->'$.output_ids')::BIGINT[]",
            "text": "out->>'$.text'",
            "prompt_tokens": "(out->>'$.meta_info.prompt_tokens')::BIGINT",
            "output_tokens": "(out->>'$.meta_info.completion_tokens')::BIGINT",
        },
    ),
    Format(
        name="otlp",
        tool="OpenTelemetry spans as OTLP-JSON",
        tells=("resourceSpans",),
        columns={
            "resourceSpans": (
                f"STRUCT(resource STRUCT(attributes {_ATTRIBUTES}), scopeSpans STRUCT(spans {_SPAN}[])[])[]"
            )
        },
        table=(
            "(SELECT unnest(scope.spans) AS span FROM (SELECT unnest(resource_span.scopeSpans) AS scope FROM"
            f" (SELECT unnest(resourceSpans) AS resource_span FROM {FILE})))"
        ),
        where="len(list_filter(span.attributes, lambda a: starts_with(a.key, 'gen_ai.'))) > 0",
        fields={
            "traceparent": "span.traceId",
            "engine_id": _attribute("gen_ai.request.id", "gen_ai.response.id"),
            "conversation_id": _attribute("gen_ai.conversation.id"),
            "ts": "span.startTimeUnixNano::DOUBLE / 1e9",
            "model": _attribute("gen_ai.response.model", "gen_ai.request.model"),
            "backend": f"coalesce({_attribute('gen_ai.provider.name')}, 'vllm')",
            "ok": f"{_attribute('error.type')} IS NULL"
            " AND coalesce(span.status.code::VARCHAR, '0') NOT IN ('2', '\"STATUS_CODE_ERROR\"')",
            "error": f"coalesce({_attribute('error.type')}, span.status.message)",
            "latency_ms": (
                f"coalesce({_attribute('gen_ai.latency.e2e')}::DOUBLE * 1e3,"
                " (span.endTimeUnixNano::DOUBLE - span.startTimeUnixNano::DOUBLE) / 1e6)"
            ),
            "ttft_ms": (
                f"coalesce({_attribute('gen_ai.latency.time_to_first_token')},"
                f" {_attribute('gen_ai.response.time_to_first_chunk')})::DOUBLE * 1e3"
            ),
            "prompt_tokens": f"{_attribute('gen_ai.usage.prompt_tokens', 'gen_ai.usage.input_tokens')}::BIGINT",
            "output_tokens": f"{_attribute('gen_ai.usage.completion_tokens', 'gen_ai.usage.output_tokens')}::BIGINT",
            "seed": f"{_attribute('gen_ai.request.seed')}::BIGINT",
        },
    ),
    Format(
        name="aiperf",
        tool="AIPerf's profile_export.jsonl",
        tells=("metadata", "metrics"),
        needs=("metadata.x_request_id", "metadata.request_start_ns", "metadata.request_end_ns"),
        columns={"metadata": "JSON", "metrics": "JSON", "error": "JSON"},
        where="coalesce(metadata->>'$.benchmark_phase', 'profiling') = 'profiling'",
        fields={
            "request_id": "metadata->>'$.x_request_id'",
            "conversation_id": "metadata->>'$.conversation_id'",
            "turn": "(metadata->>'$.turn_index')::BIGINT",
            "ts": "(metadata->>'$.request_start_ns')::DOUBLE / 1e9",
            "ok": (
                "coalesce(json_type(error), 'NULL') = 'NULL'"
                " AND NOT coalesce((metadata->>'$.was_cancelled')::BOOLEAN, false)"
            ),
            "error": (
                "CASE WHEN json_type(error) <> 'NULL' THEN coalesce(error->>'$.type', error->>'$.message')"
                " WHEN (metadata->>'$.was_cancelled')::BOOLEAN THEN 'cancelled' END"
            ),
            "latency_ms": (
                f"coalesce({_measured_ms('request_latency')}, ((metadata->>'$.request_end_ns')::DOUBLE"
                " - (metadata->>'$.request_start_ns')::DOUBLE) / 1e6)"
            ),
            "ttft_ms": _measured_ms("time_to_first_token"),
            "token_latencies_ms": (
                f"list_transform(({_AIPERF_GAPS}->'$.value')::DOUBLE[],"
                f" lambda v: v * {_factor(_AIPERF_GAPS_UNIT, 'inter_chunk_latency')})"
            ),
            "prompt_tokens": "(metrics->>'$.input_sequence_length.value')::DOUBLE::BIGINT",
            "output_tokens": "(metrics->>'$.output_sequence_length.value')::DOUBLE::BIGINT",
        },
    ),
    Format(
        name="guidellm",
        tool="guidellm's benchmarks.json",
        tells=("benchmarks",),
        needs=("benchmarks.requests",),
        columns={"benchmarks": "JSON[]"},
        table=(
            "(SELECT row_number() OVER (ORDER BY run, start, id) - 1 AS place, * FROM (SELECT run, request,"
            " (request->>'$.info.timings.request_start')::DOUBLE AS start, request->>'$.request_id' AS id FROM"
            " (SELECT run, unnest(list_concat((b->'$.requests.successful')::JSON[],"
            " (b->'$.requests.errored')::JSON[], (b->'$.requests.incomplete')::JSON[])) AS request FROM"
            f" (SELECT unnest(benchmarks) AS b, unnest(range(len(benchmarks))) AS run FROM {FILE}))))"
        ),
        fields={
            "index": "place",
            "conversation_id": "request->>'$.info.conversation_id'",
            "turn": "(request->>'$.info.turn_index')::BIGINT",
            "ts": "start",
            "ok": "request->>'$.info.status' = 'completed'",
            "error": "request->>'$.info.error'",
            "latency_ms": "(request->>'$.request_latency')::DOUBLE * 1e3",
            "ttft_ms": "(request->>'$.time_to_first_token_ms')::DOUBLE",
            "text": "request->>'$.output'",
            "prompt_tokens": "(request->>'$.prompt_tokens')::BIGINT",
            "output_tokens": "(request->>'$.output_tokens')::BIGINT",
        },
        layout="document",
        weak_join=True,
    ),
)
"""Formats of tools, ours among them, in the order in which they are tried."""

OWN = Format(
    name="observations",
    tool="observations, a line or a row each",
    tells=(),
    columns={each.name: each.type for each in FIELDS},
    fields={each.name: f'"{each.name}"' for each in FIELDS},
)
"""Our own, with the fields of an observation."""
