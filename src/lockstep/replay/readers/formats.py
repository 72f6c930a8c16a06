"""Foreign trace formats (Azure, Mooncake, AIPerf, vLLM's bench): convert the records of each to requests.

`reading.py` opens the file, detects its format from its first bytes, and sorts and limits the requests. A file of lines
may have any size; a JSON document is read whole. A request that failed when it was recorded is still load, and an
output of 0 tokens counts as 1, because every request generates one.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from lockstep.errors import TraceError
from lockstep.replay.readers.document import Members
from lockstep.replay.readers.fields import (
    MAX_TOKENS,
    PS_PER_NS,
    PS_PER_S,
    array,
    check_keys,
    content_ids,
    json_object,
    json_object_at,
    shown,
    text,
    time_ps,
    whole,
)
from lockstep.replay.workload import PS_PER_MS, WorkloadRequest

Requests = Iterator[WorkloadRequest]
Lines = Iterable[tuple[int, str]]
"""Lines of a file with their numbers, from 1."""


@dataclass(frozen=True, slots=True)
class LineFormat:
    """A format with one request per line."""

    read: Callable[[Lines, str], Requests]
    """Function from lines and the file's name to requests with arrivals in picoseconds."""
    content_size: int = 0
    """Prompt tokens per content id; 0: the format has no contents."""
    is_sorted: bool = True
    """True if lines are in the order of arrival; otherwise all requests are read and then sorted."""


def _request(
    place: str, name: str, num_prompt: int, num_output: int, arrival_ps: int, contents: tuple[int, ...] = ()
) -> WorkloadRequest:
    """Request of a format with the number of output tokens but not their limit."""
    most = max(1, num_output)
    return WorkloadRequest(name, max(1, num_prompt), most, most, arrival_ps, contents=contents, place=place)


# ---- Azure


AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,12}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_COUNT = re.compile(r"\d{1,10}", re.ASCII)
_YEAR_1 = datetime.fromisoformat("0001-01-01T00:00:00+00:00")


def _azure_requests(lines: Lines, name: str) -> Requests:
    """Azure's LLM inference traces (Splitwise, ISCA '24): ``TIMESTAMP,ContextTokens,GeneratedTokens``.

    A timestamp is a date and a time with up to 12 decimals of a second, with or without an offset from UTC. The format
    has no contents, so requests share no prefix.
    """
    expected = ",".join(AZURE_COLUMNS)
    has_header = False
    for number, line in lines:
        place = f"{name}:{number}"
        try:
            columns = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise TraceError(f"{place}: not CSV ({error})") from None
        if not has_header and tuple(columns) != AZURE_COLUMNS:
            raise TraceError(f"{place}: the columns are {shown(','.join(columns))}; {expected} expected")
        if has_header:
            yield _azure_request(columns, number, place)
        has_header = True


def _azure_request(columns: Sequence[str], number: int, place: str) -> WorkloadRequest:
    if len(columns) != len(AZURE_COLUMNS):
        raise TraceError(f"{place}: {len(columns)} columns; {','.join(AZURE_COLUMNS)} expected")
    counts = {}
    for what, value in zip(AZURE_COLUMNS[:0:-1], columns[:0:-1], strict=True):
        if not _COUNT.fullmatch(value) or int(value) > MAX_TOKENS:
            raise TraceError(f"{place}: {what} is {shown(value)}; it must be a whole number from 0 to {MAX_TOKENS}")
        counts[what] = int(value)
    if counts["ContextTokens"] < 1:
        raise TraceError(f"{place}: ContextTokens is 0; it must be at least 1")
    arrival_ps = _stamp_ps(columns[0], place)
    return _request(place, str(number), counts["ContextTokens"], counts["GeneratedTokens"], arrival_ps)


def _stamp_ps(value: str, place: str) -> int:
    """Picoseconds since the year 1."""
    match = _STAMP.fullmatch(value)
    try:
        if match is None:
            raise ValueError("write it like 2023-11-16 18:15:46.6805900")
        whole_s, digits, offset = match.groups()
        since = datetime.fromisoformat(whole_s + (offset or "+00:00")) - _YEAR_1
        if since < timedelta(0):
            raise ValueError("the earliest year is 1")
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{place}: TIMESTAMP is {shown(value)}; it must be a date and a time ({error})") from None
    return since // timedelta(seconds=1) * PS_PER_S + int((digits or "0").ljust(12, "0"))


# ---- Mooncake


MOONCAKE_COLUMNS = ("timestamp", "input_length", "output_length", "hash_ids")
_CONTENT_TOKENS = 512
_TURNS = ("session_id", "delay", "delay_ms")
"""Keys of a variant whose lines are turns of conversations: when one comes depends on when the one before it ends."""


def _mooncake_requests(lines: Lines, name: str) -> Requests:
    """Mooncake's traces (FAST '25), as they are published: one JSON object per line.

    ``{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}``, one id per 512 tokens of the prompt, a
    partial last block included; equal ids are equal blocks with equal past. Without ``hash_ids`` a request shares
    nothing.
    """
    for number, line in lines:
        place = f"{name}:{number}"
        fields = json_object(line, place)
        if not fields.keys().isdisjoint(_TURNS):
            keys = ", ".join(key for key in _TURNS if key in fields)
            raise TraceError(
                f"{place}: turns of a conversation ({keys}) are not supported, because their arrival depends on the "
                "previous answer and a replay's arrivals are fixed; give each turn a timestamp and its whole "
                "input_length, and omit these keys"
            )
        check_keys(fields, MOONCAKE_COLUMNS, MOONCAKE_COLUMNS[:3], place)
        num_prompt = whole(fields["input_length"], "input_length", place, 1)
        num_output = whole(fields["output_length"], "output_length", place)
        ids = array(fields.get("hash_ids", []), "hash_ids", place)
        if ids and len(ids) != -(-num_prompt // _CONTENT_TOKENS):
            raise TraceError(
                f"{place}: {len(ids)} hash_ids for {num_prompt} tokens; one per {_CONTENT_TOKENS} tokens expected"
            )
        arrival_ps = time_ps(fields["timestamp"], "timestamp", place, PS_PER_MS)
        yield _request(place, str(number), num_prompt, num_output, arrival_ps, content_ids(ids, "a hash id", place))


# ---- AIPerf


AIPERF_KEYS = ("metadata", "metrics")
_PHASE = "profiling"
_PROMPT_METRICS = ("input_sequence_length", "error_isl")
_OUTPUT_METRICS = ("output_sequence_length", "output_token_count")


def _aiperf_requests(lines: Lines, name: str) -> Requests:
    """AIPerf's ``profile_export.jsonl``: one JSON object per request, in the order in which they ended.

    Read are ``metadata.request_start_ns`` (since 1970) and the metrics ``input_sequence_length`` (for failures
    ``error_isl``) and ``output_sequence_length`` (otherwise ``output_token_count``), each ``{"value", "unit"}``.
    Records with a ``benchmark_phase`` other than ``profiling`` are warm-up requests and not part of the workload.
    """
    for number, line in lines:
        place = f"{name}:{number}"
        fields = json_object(line, place)
        metadata = json_object_at(fields, "metadata", place)
        if metadata.get("benchmark_phase", _PHASE) != _PHASE:
            continue
        metrics = json_object_at(fields, "metrics", place)
        num_prompt = _metric(metrics, _PROMPT_METRICS, place)
        if num_prompt is None:
            raise TraceError(
                f"{place}: the metric {' or '.join(_PROMPT_METRICS)} is missing, so the prompt's length is unknown"
            )
        num_output = _metric(metrics, _OUTPUT_METRICS, place) or 0
        own_name = text(metadata.get("x_request_id") or str(number), "metadata.x_request_id", place)
        arrival_ps = time_ps(metadata.get("request_start_ns"), "metadata.request_start_ns", place, PS_PER_NS)
        yield _request(place, own_name, num_prompt, num_output, arrival_ps)


def _metric(metrics: Mapping[str, Any], names: Iterable[str], place: str) -> int | None:
    """First of these metrics that is present, as a number of tokens."""
    for name in names:
        metric = metrics.get(name)
        if metric is not None:
            value = metric.get("value") if isinstance(metric, dict) else metric
            return whole(value, f"metrics.{name}", place)
    return None


# ---- vLLM's bench


VLLM_ARRAYS = ("input_lens", "output_lens", "start_times")
VLLM_RUN_KEYS = ("num_prompts", "request_rate", "completed", "total_input_tokens")
"""Keys of all results, with or without details."""


def vllm_bench_requests(document: Members, name: str) -> list[WorkloadRequest]:
    """Results of ``vllm bench serve --save-result --save-detailed``, and of ``lockstep bench serve``.

    One JSON document with aligned arrays: ``input_lens``, ``output_lens``, ``start_times`` (seconds of any clock), in
    the order in which requests were sent. Other members of the file are measurements and are not read.
    """
    missing = [key for key in VLLM_ARRAYS if key not in document]
    if missing:
        raise TraceError(
            f"{name}: {' and '.join(missing)} missing; a result has single requests only if it was saved with "
            "--save-detailed"
        )
    columns = [array(document[key].value, key, f"{name}:{document[key].line}") for key in VLLM_ARRAYS]
    if len(set(map(len, columns))) > 1:
        lengths = ", ".join(f"{key} {len(column)}" for key, column in zip(VLLM_ARRAYS, columns, strict=True))
        raise TraceError(f"{name}: its arrays differ in length: {lengths}")
    requests = []
    for index, (num_input, num_output, start_s) in enumerate(zip(*columns, strict=True)):
        place = f"{name}:{document[VLLM_ARRAYS[0]].line}: request {index}"
        most = whole(num_output, "its output_lens", place)
        num_prompt = whole(num_input, "its input_lens", place)
        arrival_ps = time_ps(start_s, "its start_times", place, PS_PER_S)
        requests.append(_request(place, str(index), num_prompt, most, arrival_ps))
    return sorted(requests, key=lambda request: request.arrival)


MOONCAKE = LineFormat(_mooncake_requests, _CONTENT_TOKENS)
AZURE = LineFormat(_azure_requests)
AIPERF = LineFormat(_aiperf_requests, is_sorted=False)
