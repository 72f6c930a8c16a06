"""Input formats of the gate: defines how each format is detected and mapped to observations.

DuckDB reads JSON lines, one record per line. ``columns`` has the members of a record with their types. ``table``
splits or numbers records if a record is not exactly one request. ``fields`` has the SQL of each field of an
observation. Names and units were taken from each tool's documentation and checked with files that the tool wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lockstep.release.observation import FIELDS

FILE = "file"
"""Name of the file's records in the SQL of ``table``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """File format of one tool."""

    name: str
    tool: str
    """Tool and options that write the format, for messages."""
    markers: tuple[str, ...]
    """Members that identify the format: all of its versions have them, and no other format has all of them."""
    required: tuple[str, ...] = ()
    """Members that every supported version has, as paths with dots."""
    hint: str = ""
    """Advice for the error message if a required member is missing."""
    layout: Literal["lines", "log", "arrays", "benchmarks"] = "lines"
    """``lines``: one record per line. ``log``: records among other lines. ``arrays``: a document with aligned arrays,
    one entry per request. ``benchmarks``: a document with lists of requests."""
    arrays: Mapping[str, str] = field(default_factory=dict)
    """Names of the aligned arrays, by the column that each becomes."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Types of the members of a record, by name."""
    table: str = FILE
    """SQL of the table of requests."""
    where: str = ""
    """SQL condition that selects the requests; empty: all."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """SQL of each field of an observation."""


OWN = Format(
    name="observations",
    tool="observations, one per line or row",
    markers=(),
    columns={each.name: each.type for each in FIELDS},
    fields={each.name: f'"{each.name}"' for each in FIELDS},
)
"""Lockstep's own format: records with the fields of an observation."""

LOCKSTEP_LOG = Format(
    name="lockstep-requests",
    tool="the request log of lockstep serve --log-format json",
    markers=("logger", "endpoint"),
    required=("id", "status", "total_ms"),
    layout="log",
    columns={
        "logger": "VARCHAR",
        "endpoint": "VARCHAR",
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
        "error": "coalesce(error, CASE WHEN status >= 400 THEN 'status ' || status END)",
        "latency_ms": "total_ms",
        "ttft_ms": "ttft_ms",
        "prompt_tokens": "prompt_tokens",
        "output_tokens": "CASE WHEN endpoint NOT LIKE '%/embed%' THEN output_tokens END",
    },
)

# -- benchmarks of vLLM and SGLang: aligned arrays, seconds, no ids ---------------------------------------------------

_BENCH_ARRAYS = {
    "input_len": "input_lens",
    "output_len": "output_lens",
    "ttft": "ttfts",
    "itl": "itls",
    "generated": "generated_texts",
    "error": "errors",
}
_BENCH_COLUMNS = {
    "place": "BIGINT",
    "input_len": "BIGINT",
    "output_len": "BIGINT",
    "ttft": "DOUBLE",
    "itl": "DOUBLE[]",
    "latency": "DOUBLE",
    "start_time": "DOUBLE",
    "generated": "VARCHAR",
    "error": "VARCHAR",
}
_BENCH_OK = "(coalesce(error, '') = '' AND NOT (output_len = 0 AND coalesce(ttft, 0) = 0))"
"""SQL: the request succeeded. A connection that is closed without an answer leaves an empty error and zeros."""
_BENCH_FIELDS = {
    "index": "place",
    "ok": _BENCH_OK,
    "error": f"CASE WHEN NOT {_BENCH_OK} THEN coalesce(nullif(error, ''), 'no answer') END",
    "latency_ms": f"CASE WHEN {_BENCH_OK} THEN coalesce(latency, ttft + coalesce(list_sum(itl), 0)) * 1e3 END",
    "ttft_ms": f"CASE WHEN {_BENCH_OK} THEN nullif(ttft, 0) * 1e3 END",
    "token_latencies_ms": "list_transform(itl, lambda s: s * 1e3)",
    "text": f"CASE WHEN {_BENCH_OK} THEN generated END",
    "prompt_tokens": "input_len",
    "output_tokens": "output_len",
}

VLLM_BENCH = Format(
    name="vllm-bench",
    tool="vllm bench serve --save-result --save-detailed (lockstep bench serve writes the same)",
    markers=("date", "backend", "model_id", "num_prompts"),
    required=tuple(_BENCH_ARRAYS.values()),
    hint="write it with --save-detailed",
    layout="arrays",
    arrays={**_BENCH_ARRAYS, "latency": "latencies", "start_time": "start_times"},
    columns={"model_id": "VARCHAR", **_BENCH_COLUMNS},
    fields={**_BENCH_FIELDS, "model": "model_id", "ts": "start_time"},
)

SGLANG_BENCH = Format(
    name="sglang-bench",
    tool="sglang.bench_serving --output-details",
    markers=("backend", "dataset_name", "completed", "total_output_tokens"),
    required=tuple(_BENCH_ARRAYS.values()),
    hint="write it with --output-details",
    layout="arrays",
    arrays=_BENCH_ARRAYS,
    columns={"backend": "VARCHAR", **_BENCH_COLUMNS},
    fields={**_BENCH_FIELDS, "backend": "regexp_replace(backend, '-(oai|oai-chat|chat|native)$', '')"},
)

# -- SGLang's own files -----------------------------------------------------------------------------------------------


def _sglang_fields(request: str, meta: str) -> dict[str, str]:
    """SQL of the fields of a request in SGLang's logs, which have two objects per request.

    Args:
        request: SQL of the object with the request.
        meta: SQL of the object with the result.
    """
    reason = f"{meta}->>'$.finish_reason.type'"
    return {
        "engine_id": f"{meta}->>'$.id'",
        "model_version": f"{meta}->>'$.weight_version'",
        "backend": "'sglang'",
        "ok": f"coalesce({reason}, '') <> 'abort'",
        "error": f"CASE {reason} WHEN 'abort' THEN coalesce({meta}->>'$.finish_reason.message', 'abort') END",
        "latency_ms": f"({meta}->>'$.e2e_latency')::DOUBLE * 1e3",
        "prompt_tokens": f"({meta}->>'$.prompt_tokens')::BIGINT",
        "output_tokens": f"({meta}->>'$.completion_tokens')::BIGINT",
        "prompt_digest": f"md5(coalesce({request}->>'$.text', {request}->>'$.input_ids'))",
        "params_digest": f"md5({request}->>'$.sampling_params')",
    }


SGLANG_METRICS = Format(
    name="sglang-metrics",
    tool="SGLang --export-metrics-to-file",
    markers=("request_parameters", "id"),
    required=("e2e_latency", "finish_reason"),
    columns={"request_parameters": "VARCHAR", "request_received_ts": "DOUBLE", "num_waiting_reqs": "DOUBLE"}
    | dict.fromkeys(
        ("id", "finish_reason", "prompt_tokens", "completion_tokens", "e2e_latency", "weight_version"), "JSON"
    ),
    table=(
        "(SELECT *, request_parameters::JSON AS request, json_object('id', id, 'finish_reason', finish_reason,"
        " 'prompt_tokens', prompt_tokens, 'completion_tokens', completion_tokens, 'e2e_latency', e2e_latency,"
        f" 'weight_version', weight_version) AS meta FROM {FILE})"
    ),
    fields={
        **_sglang_fields("request", "meta"),
        "request_id": "request->>'$.rid'",
        "ts": "request_received_ts",
        "queue_depth": "num_waiting_reqs",
    },
)

_HALF = 1024
"""Number of characters that SGLang leaves at each end of a long text at log level 2."""
_OUT_TEXT = "out->>'$.text'"

SGLANG_REQUESTS = Format(
    name="sglang-requests",
    tool="SGLang --log-requests --log-requests-format json",
    markers=("timestamp", "event", "rid"),
    required=("obj",),
    layout="log",
    columns={"timestamp": "VARCHAR", "event": "VARCHAR", "rid": "VARCHAR", "obj": "JSON", "out": "JSON"},
    where="event = 'request.finished'",
    fields={
        **_sglang_fields("obj", "out->'$.meta_info'"),
        "request_id": "rid",
        "ts": (
            "coalesce((out->>'$.meta_info.request_received_ts')::DOUBLE, epoch(timestamp::TIMESTAMP)"
            " - coalesce((out->>'$.meta_info.e2e_latency')::DOUBLE, 0))"
        ),
        "token_ids": (
            "CASE WHEN NOT list_contains((out->'$.output_ids')::VARCHAR[], '...')"
            " THEN (out->'$.output_ids')::BIGINT[] END"
        ),
        "text": (
            f"CASE WHEN NOT (length({_OUT_TEXT}) = {2 * _HALF + 3} AND substr({_OUT_TEXT}, {_HALF + 1}, 3) = '...')"
            f" THEN {_OUT_TEXT} END"
        ),
    },
)

# -- OpenTelemetry ----------------------------------------------------------------------------------------------------

_VALUE = "STRUCT(stringValue VARCHAR, intValue VARCHAR, doubleValue DOUBLE, boolValue BOOLEAN)"
_ATTRIBUTES = f"STRUCT(key VARCHAR, value {_VALUE})[]"
_SPAN = (
    f"STRUCT(traceId VARCHAR, spanId VARCHAR, name VARCHAR, startTimeUnixNano VARCHAR, endTimeUnixNano VARCHAR,"
    f" attributes {_ATTRIBUTES}, status STRUCT(code VARCHAR, message VARCHAR))"
)


def _attribute(*names: str) -> str:
    """SQL of the first of these attributes that a span has, as text."""

    def value(name: str) -> str:
        found = f"list_filter(span.attributes, lambda a: a.key = '{name}')[1].value"
        return f"{found}.stringValue, {found}.intValue, {found}.doubleValue::VARCHAR"

    return f"coalesce({', '.join(map(value, names))})"


_SPAN_MS = "(span.endTimeUnixNano::DOUBLE - span.startTimeUnixNano::DOUBLE) / 1e6"
_ERROR_TYPE = _attribute("error.type")
_FAILED = f"({_ERROR_TYPE} IS NOT NULL OR coalesce(span.status.code, '') IN ('2', 'STATUS_CODE_ERROR'))"

OTLP = Format(
    name="otlp",
    tool="OpenTelemetry spans as OTLP-JSON",
    markers=("resourceSpans",),
    required=("resourceSpans.scopeSpans.spans",),
    columns={"resourceSpans": f"STRUCT(scopeSpans STRUCT(spans {_SPAN}[])[])[]"},
    table=(
        "(SELECT unnest(scope.spans) AS span FROM (SELECT unnest(resource_span.scopeSpans) AS scope FROM"
        f" (SELECT unnest(resourceSpans) AS resource_span FROM {FILE})))"
    ),
    where=(  # spans of model calls, by vLLM's and SGLang's attributes or the conventions; no spans of tools or agents
        f"({_attribute('gen_ai.latency.e2e', 'gen_ai.request.id')} IS NOT NULL OR {_attribute('gen_ai.operation.name')}"
        " IN ('chat', 'text_completion', 'generate_content', 'embeddings'))"
    ),
    fields={
        "traceparent": "span.traceId",
        "request_id": _attribute("lockstep.request_id"),
        "engine_id": _attribute("gen_ai.request.id", "gen_ai.response.id"),
        "conversation_id": _attribute("gen_ai.conversation.id"),
        "ts": "span.startTimeUnixNano::DOUBLE / 1e9",
        "model": _attribute("gen_ai.response.model", "gen_ai.request.model"),
        "backend": _attribute("gen_ai.provider.name"),
        "ok": f"NOT {_FAILED}",
        "error": f"CASE WHEN {_FAILED} THEN coalesce({_ERROR_TYPE}, nullif(span.status.message, ''), 'error') END",
        "latency_ms": f"coalesce({_attribute('gen_ai.latency.e2e')}::DOUBLE * 1e3, {_SPAN_MS})",
        "ttft_ms": (
            _attribute("gen_ai.latency.time_to_first_token", "gen_ai.response.time_to_first_chunk") + "::DOUBLE * 1e3"
        ),
        "prompt_tokens": _attribute("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens") + "::BIGINT",
        "output_tokens": (
            f"CASE WHEN {_attribute('gen_ai.operation.name')} IS DISTINCT FROM 'embeddings' THEN "
            + _attribute("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")
            + "::BIGINT END"
        ),
        "seed": f"{_attribute('gen_ai.request.seed')}::BIGINT",
    },
)

# -- load generators --------------------------------------------------------------------------------------------------


def _measured_ms(name: str, value: str) -> str:
    """SQL of an AIPerf metric in milliseconds. An unknown unit raises an error that names the unit.

    Args:
        name: name of the metric.
        value: SQL of the value, with ``{factor}`` in place of the unit's factor.
    """
    unit = f"metrics->>'$.{name}.unit'"
    factor = (
        f"CASE {unit} WHEN 'ms' THEN 1 WHEN 's' THEN 1e3 WHEN 'sec' THEN 1e3 WHEN 'us' THEN 1e-3 WHEN 'ns' THEN 1e-6"
        f" ELSE error('{name} has the unit ' || coalesce({unit}, '?') || '; supported are ms, s, us and ns') END"
    )
    return f"CASE WHEN (metrics->'$.{name}') IS NOT NULL THEN {value.format(factor=factor)} END"


def _aiperf_ms(name: str) -> str:
    return _measured_ms(name, f"(metrics->>'$.{name}.value')::DOUBLE * {{factor}}")


_CANCELLED = "coalesce((metadata->>'$.was_cancelled')::BOOLEAN, false)"
_AIPERF_ERROR = "coalesce(json_type(error), 'NULL') <> 'NULL'"

AIPERF = Format(
    name="aiperf",
    tool="AIPerf's profile_export.jsonl",
    markers=("metadata", "metrics"),
    required=("metadata.x_request_id", "metadata.request_start_ns", "metadata.request_end_ns"),
    columns={"metadata": "JSON", "metrics": "JSON", "error": "JSON"},
    table=(  # AIPerf repeats a data set that is shorter than the run, so a conversation may occur several times
        "(SELECT *, row_number() OVER (PARTITION BY metadata->>'$.conversation_id', metadata->>'$.turn_index'"
        " ORDER BY (metadata->>'$.request_start_ns')::BIGINT, metadata->>'$.x_request_id') AS nth"
        f" FROM {FILE} WHERE coalesce(metadata->>'$.benchmark_phase', 'profiling') = 'profiling')"
    ),
    fields={
        "request_id": "metadata->>'$.x_request_id'",
        "conversation_id": "(metadata->>'$.conversation_id') || CASE WHEN nth > 1 THEN '#' || nth ELSE '' END",
        "turn": "(metadata->>'$.turn_index')::BIGINT",
        "ts": "(metadata->>'$.request_start_ns')::DOUBLE / 1e9",
        "ok": f"NOT ({_AIPERF_ERROR} OR {_CANCELLED})",
        "error": (
            f"CASE WHEN {_AIPERF_ERROR} THEN coalesce(error->>'$.type', error->>'$.message', 'error')"
            f" WHEN {_CANCELLED} THEN 'cancelled' END"
        ),
        "latency_ms": _aiperf_ms("request_latency"),
        "ttft_ms": _aiperf_ms("time_to_first_token"),
        "token_latencies_ms": _measured_ms(
            "inter_chunk_latency",
            "list_transform((metrics->'$.inter_chunk_latency.value')::DOUBLE[], lambda v: v * {factor})",
        ),
        "prompt_tokens": "(metrics->>'$.input_sequence_length.value')::DOUBLE::BIGINT",
        "output_tokens": "(metrics->>'$.output_sequence_length.value')::DOUBLE::BIGINT",
    },
)

_BODY = "CASE WHEN json_valid(request->>'$.request_args') THEN (request->>'$.request_args')::JSON->'$.body' END"
_PROMPT = "coalesce(body->>'$.messages', body->>'$.prompt', request->>'$.prompt', request->>'$.request_args')"
_PARAMETERS = (
    "CASE WHEN body IS NOT NULL THEN"
    """ json_merge_patch(body, '{"messages": null, "prompt": null, "model": null}') END"""
)
_QUEUED = "coalesce(request->>'$.info.timings.queued', request->>'$.scheduler_info.queued_time')::DOUBLE"
_GUIDELLM_START = "coalesce(request->>'$.info.timings.request_start', request->>'$.start_time')::DOUBLE"

GUIDELLM = Format(
    name="guidellm",
    tool="guidellm's benchmarks.json",
    markers=("benchmarks",),
    required=("request.request_id", "request.request_latency", "request.time_to_first_token_ms"),
    layout="benchmarks",
    columns={"run": "BIGINT", "outcome": "VARCHAR", "request": "JSON"},
    table=(  # ids are random in each run and the start order varies; requests are queued in the order of the data set
        f"(SELECT *, {_BODY} AS body, row_number() OVER (ORDER BY run, {_QUEUED}, request->>'$.request_id') - 1"
        f" AS place FROM {FILE})"
    ),
    where="outcome IN ('successful', 'errored')",
    fields={
        "index": "place",
        "prompt_digest": f"md5({_PROMPT})",
        "params_digest": f"md5({_PARAMETERS})",
        "ts": _GUIDELLM_START,
        "model": "body->>'$.model'",
        "ok": "outcome = 'successful'",
        "error": (
            "CASE outcome WHEN 'errored' THEN coalesce(request->>'$.info.error', request->>'$.error', 'error') END"
        ),
        "latency_ms": "(request->>'$.request_latency')::DOUBLE * 1e3",
        "ttft_ms": "(request->>'$.time_to_first_token_ms')::DOUBLE",
        "text": "request->>'$.output'",
        "prompt_tokens": "(request->>'$.prompt_tokens')::BIGINT",
        "output_tokens": "(request->>'$.output_tokens')::BIGINT",
    },
)

FORMATS: tuple[Format, ...] = (
    LOCKSTEP_LOG,
    VLLM_BENCH,
    SGLANG_BENCH,
    SGLANG_METRICS,
    SGLANG_REQUESTS,
    OTLP,
    AIPERF,
    GUIDELLM,
)
"""Formats of tools, including Lockstep's request log, in the order in which they are tried."""
