"""AIPerf's ``profile_export.jsonl``: one JSON object per request, in the order in which they ended.

Read are ``metadata.request_start_ns`` and the metrics ``input_sequence_length`` (of failures ``error_isl``) and
``output_sequence_length`` (else ``output_token_count``), each ``{"value", "unit"}``. Records of another
``benchmark_phase`` than ``profiling`` warmed the server up and are no part of the workload. A request that failed or
was cancelled was load all the same: it counts with the tokens that it got, at least 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lockstep.errors import TraceError
from lockstep.replay.readers.fields import PS_PER_NS, json_object, shown, text, time_ps, whole
from lockstep.replay.workload import WorkloadRequest

KEYS = ("metadata", "metrics")
_PHASE = "profiling"
_PROMPT_METRICS = ("input_sequence_length", "error_isl")
_OUTPUT_METRICS = ("output_sequence_length", "output_token_count")


def rows(lines: Iterable[tuple[int, str]], name: str) -> Iterator[WorkloadRequest]:
    """The requests in the order of the file; arrivals in picoseconds since 1970."""
    for number, line in lines:
        place = f"{name}:{number}"
        fields = json_object(line, place)
        metadata = _object(fields, "metadata", place)
        if metadata.get("benchmark_phase", _PHASE) == _PHASE:
            yield row(metadata, fields, number, place)


def row(metadata: Mapping[str, object], fields: Mapping[str, object], number: int, place: str) -> WorkloadRequest:
    """One record; TraceError names its place."""
    metrics = _object(fields, "metrics", place)
    num_prompt = _metric(metrics, _PROMPT_METRICS, place)
    if num_prompt is None:
        raise TraceError(
            f"{place}: the metric {' or '.join(_PROMPT_METRICS)} is missing; the prompt's length is unknown"
        )
    num_output = max(1, _metric(metrics, _OUTPUT_METRICS, place) or 0)
    start_ns = metadata.get("request_start_ns")
    return WorkloadRequest(
        name=text(metadata.get("x_request_id") or str(number), "metadata.x_request_id", place),
        num_prompt_tokens=max(1, num_prompt),
        max_output_tokens=num_output,
        num_output_tokens=num_output,
        arrival=time_ps(start_ns, "metadata.request_start_ns", place, PS_PER_NS),
        place=place,
    )


def _object(fields: Mapping[str, object], key: str, place: str) -> Mapping[str, Any]:
    value = fields.get(key)
    if not isinstance(value, dict):
        raise TraceError(f"{place}: {key} is {shown(value)}; it must be an object")
    return value


def _metric(metrics: Mapping[str, object], names: Iterable[str], place: str) -> int | None:
    """The first of these metrics that is there, as a number of tokens."""
    for name in names:
        metric = metrics.get(name)
        if metric is not None:
            value = metric.get("value") if isinstance(metric, dict) else metric
            return whole(value, f"metrics.{name}", place)
    return None
