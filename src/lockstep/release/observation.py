"""Observations: defines the fields of one request as answered by one side, to which all inputs are mapped.

A side is a table of observations in DuckDB. Fields that an input lacks are NULL and are never guessed. A request
without output is evidence of latency only, and the verdict reports that.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Literal, NamedTuple

Side = Literal["baseline", "candidate"]
SIDES: tuple[Side, Side] = ("baseline", "candidate")
EVENT_TYPE = "STRUCT(index BIGINT, token_id BIGINT, elapsed_ms DOUBLE)[]"


class Field(NamedTuple):
    """One field of an observation."""

    name: str
    type: str
    """Type in DuckDB's SQL."""
    meaning: str


FIELDS: tuple[Field, ...] = (
    Field("request_id", "VARCHAR", "Id of the request from the caller, equal on both sides."),
    Field("side", "VARCHAR", "baseline or candidate, if one file contains both sides."),
    Field("traceparent", "VARCHAR", "W3C trace context, whose trace id pairs requests."),
    Field("engine_id", "VARCHAR", "Id from the engine, e.g. chatcmpl-...; its prefix and suffix are ignored."),
    Field("conversation_id", "VARCHAR", "Id of the conversation to which the request belongs."),
    Field("turn", "BIGINT", "Number of the request in its conversation."),
    Field("index", "BIGINT", "Index in a data set with equal seed and length that was sent to both sides."),
    Field("prompt_digest", "VARCHAR", "Digest of the prompt; answers to different prompts are not compared."),
    Field(
        "params_digest",
        "VARCHAR",
        "Digest of the parameters that affect the output; answers with different ones are not compared.",
    ),
    Field("seed", "BIGINT", "Effective seed; answers with different seeds are not compared."),
    Field(
        "environment",
        "VARCHAR",
        "Environment that determines the bits of an answer; answers of different ones are not compared.",
    ),
    Field("prompt_tokens", "BIGINT", "Number of prompt tokens."),
    Field("output_tokens", "BIGINT", "Number of output tokens, whether or not the record contains them."),
    Field("ts", "DOUBLE", "Arrival time in seconds since a fixed moment of the side's choice."),
    Field("model", "VARCHAR", "Name of the model."),
    Field("model_version", "VARCHAR", "Version or revision of the model."),
    Field("artifact", "VARCHAR", "Fingerprint of the weights."),
    Field(
        "precision",
        "VARCHAR",
        "Precision of weights and KV cache; a different precision is treated like different weights.",
    ),
    Field(
        "deterministic", "BOOLEAN", "Whether the engine guarantees tokens that are independent of batch composition."
    ),
    Field("backend", "VARCHAR", "Engine: vllm, sglang, lockstep, ..."),
    Field("accelerator", "VARCHAR", "Device that computed the answer."),
    Field("route_id", "VARCHAR", "Route of the request; part of the provenance."),
    Field("replica_id", "VARCHAR", "Replica that answered."),
    Field("scheduler", "VARCHAR", "Scheduler of the request's steps; part of the provenance."),
    Field("segment", "VARCHAR", "Label of the traffic to which the request belongs."),
    Field("ok", "BOOLEAN", "Whether the request succeeded; default: whether there is no error."),
    Field("health", "VARCHAR", "ready, degraded or down, instead of ok; only down is a failure."),
    Field("error", "VARCHAR", "Error message; empty if the request succeeded."),
    Field("latency_ms", "DOUBLE", "Time from arrival to the last byte."),
    Field("ttft_ms", "DOUBLE", "Time from arrival to the first token."),
    Field("token_latencies_ms", "DOUBLE[]", "Gaps between tokens, without the time to the first token."),
    Field("stream_events", EVENT_TYPE, "Tokens with their times, from which first token and gaps are computed."),
    Field("queue_depth", "DOUBLE", "Number of waiting requests at its arrival."),
    Field("kv_used", "DOUBLE", "Blocks or bytes of the KV cache in use, in the unit of kv_total."),
    Field("kv_total", "DOUBLE", "Size of the KV cache in blocks or bytes."),
    Field("token_trace_fingerprint", "VARCHAR", "Engine's fingerprint of tokens and decisions; only reported."),
    Field("token_ids", "BIGINT[]", "Tokens of the answer."),
    Field("vector", "DOUBLE[]", "Answer of an embedding or scoring request."),
    Field("text", "VARCHAR", "Answer as text."),
    Field("fingerprint", "VARCHAR", "Fingerprint of the answer; Lockstep's is FNV-1a-64 of its output."),
    Field("logprobs", "DOUBLE[]", "Log-probabilities of the answer's tokens."),
)
"""All fields. Only an id and the side are required, and the side may be that of the whole file."""

NAMES: tuple[str, ...] = tuple(field.name for field in FIELDS)


class Metric(NamedTuple):
    """Number of each answer by which the sides are compared."""

    name: str
    """Column of the metric in the facts of observations."""
    figure: str
    """Name of the 95th percentile in a verdict."""
    unit: str
    """Unit of the metric: ``ms``; empty: it has none."""
    words: str
    """Name of the metric in sentences."""
    signal: str = ""
    """Signal of a regression; empty: no policy bounds the metric."""
    label: str = ""
    """Shorter name for rows of tables; empty: ``words``."""
    least: float = -math.inf
    """Values are evidence only if they are above this."""


METRICS: tuple[Metric, ...] = (
    Metric("latency_ms", "latency_p95_ms", "ms", "latency", "latency"),
    Metric("ttft_ms", "ttft_p95_ms", "ms", "time to the first token", "ttft", "first token"),
    # Tokens that a client reads at once are microseconds apart, regardless of the server's times.
    Metric("decode_ms", "decode_p95_ms", "ms", "gap between tokens", "decode", least=0.1),
    Metric("kv_pressure", "kv_pressure_p95", "", "KV pressure", "kv-pressure"),
    Metric("queue_depth", "queue_depth_p95", "", "queue depth"),
)
"""All metrics. ``decode_ms`` is the mean gap between an answer's tokens; its figure is the percentile of all gaps."""


class LeftOutReason(Enum):
    """Reasons why a record is not in a pair, or why a part of its evidence is left out."""

    NO_ID = "no-id"
    """The record has no key by which requests are joined."""
    UNLIKE_DATA_SETS = "unlike-data-sets"
    """The record's only key is its index in a data set, and the sides have different data sets."""
    NO_PARTNER = "no-partner"
    """The other side has no record with the same key."""
    RETRIED = "retried"
    """A later record with the same key replaces the record."""
    DUPLICATE = "duplicate-id"
    """Several records of the side have the same key, and it is unknown which of them counts."""
    DOUBLED_INDEX = "doubled-event-index"
    """Two stream events have the same index, or one has none; the events are left out."""
    FALLING_STAMPS = "falling-event-stamps"
    """A stream event has an earlier time than the one before it; the events are left out."""
