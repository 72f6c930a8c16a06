"""Observations: one request as one side answered it, the fields that all inputs are mapped to.

A side is a table of observations in DuckDB. Fields that an input does not have are NULL, never a guess: a request
without output material is evidence of latency only, and the verdict reports that.
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
    """In DuckDB's words."""
    meaning: str


FIELDS: tuple[Field, ...] = (
    Field("request_id", "VARCHAR", "The caller's id of the request, equal on both sides."),
    Field("side", "VARCHAR", "baseline or candidate, where one file holds both."),
    Field("traceparent", "VARCHAR", "W3C trace context; its trace id pairs requests."),
    Field("engine_id", "VARCHAR", "The id that the engine gave, e.g. chatcmpl-...; prefix and suffix do not count."),
    Field("conversation_id", "VARCHAR", "The conversation that the request is a turn of."),
    Field("turn", "BIGINT", "Its number in the conversation."),
    Field("index", "BIGINT", "Its place in a data set that both sides were sent, of equal seed and length."),
    Field("prompt_digest", "VARCHAR", "Digest of the prompt; unlike ones are incomparable."),
    Field("params_digest", "VARCHAR", "Digest of the parameters that decide output; unlike ones are incomparable."),
    Field("seed", "BIGINT", "Effective seed; unlike ones are incomparable."),
    Field("environment", "VARCHAR", "What the bits of an answer depend on; unlike ones are incomparable."),
    Field("prompt_tokens", "BIGINT", "Tokens of the prompt."),
    Field("output_tokens", "BIGINT", "Tokens of the answer, however many of them are given."),
    Field("ts", "DOUBLE", "Arrival, in seconds since any moment that the side keeps to."),
    Field("model", "VARCHAR", "Name of the model."),
    Field("model_version", "VARCHAR", "Version or revision of the model."),
    Field("artifact", "VARCHAR", "Fingerprint of the weights."),
    Field(
        "precision", "VARCHAR", "Precision that weights and KV cache are computed in; unlike ones are other weights."
    ),
    Field("deterministic", "BOOLEAN", "Whether the engine's tokens are guaranteed independent of batch composition."),
    Field("backend", "VARCHAR", "Engine: vllm, sglang, lockstep, ..."),
    Field("accelerator", "VARCHAR", "Device that computed the answer."),
    Field("route_id", "VARCHAR", "Route that the request took; provenance with the scheduler."),
    Field("replica_id", "VARCHAR", "Replica that answered."),
    Field("scheduler", "VARCHAR", "Scheduler that decided its steps; provenance with the route."),
    Field("segment", "VARCHAR", "Label of the traffic that the request belongs to."),
    Field("ok", "BOOLEAN", "Whether it was answered; without it: whether there is no error."),
    Field("health", "VARCHAR", "ready, degraded or down, in place of ok; only down is a failure."),
    Field("error", "VARCHAR", "Why it failed; empty: it did not."),
    Field("latency_ms", "DOUBLE", "From arrival to the last byte."),
    Field("ttft_ms", "DOUBLE", "From arrival to the first token."),
    Field("token_latencies_ms", "DOUBLE[]", "Gaps between tokens, the first one's wait not among them."),
    Field("stream_events", EVENT_TYPE, "Tokens as they came; first token and gaps follow from them."),
    Field("queue_depth", "DOUBLE", "Requests that waited when it came."),
    Field("kv_used", "DOUBLE", "Blocks or bytes of the KV cache in use, in the unit of kv_total."),
    Field("kv_total", "DOUBLE", "Blocks or bytes that the KV cache has."),
    Field("token_trace_fingerprint", "VARCHAR", "The engine's fingerprint of tokens and decisions; reported only."),
    Field("token_ids", "BIGINT[]", "Tokens of the answer."),
    Field("vector", "DOUBLE[]", "Answer of an embedding or a score."),
    Field("text", "VARCHAR", "Answer as text."),
    Field("fingerprint", "VARCHAR", "Fingerprint of the answer, FNV-1a-64 of its material where it is ours."),
    Field("logprobs", "DOUBLE[]", "Log-probabilities of the answer's tokens."),
)
"""All fields. Only an id and a side, or the file's role as a side, are needed."""

NAMES: tuple[str, ...] = tuple(field.name for field in FIELDS)


class Metric(NamedTuple):
    """One number of each answer, by which the sides are compared."""

    name: str
    """Its column among the facts of an observation."""
    figure: str
    """Name of its 95th percentile in a verdict."""
    unit: str
    """``ms``, or empty."""
    words: str
    signal: str = ""
    """Signal of its regression; empty: no policy bounds it."""
    label: str = ""
    """Shorter words for a row of a table; empty: ``words``."""
    least: float = -math.inf
    """Numbers are evidence only above it."""


METRICS: tuple[Metric, ...] = (
    Metric("latency_ms", "latency_p95_ms", "ms", "latency", "latency"),
    Metric("ttft_ms", "ttft_p95_ms", "ms", "time to the first token", "ttft", "first token"),
    # Tokens that a client reads at once are microseconds apart, whatever the server took for each.
    Metric("decode_ms", "decode_p95_ms", "ms", "gap between tokens", "decode", least=0.1),
    Metric("kv_pressure", "kv_pressure_p95", "", "KV pressure", "kv-pressure"),
    Metric("queue_depth", "queue_depth_p95", "", "queue depth"),
)
"""All metrics; ``decode_ms`` is the mean gap between an answer's tokens, and its figure that of all gaps."""


class LeftOutReason(Enum):
    """Reasons for which a record is in no pair, or a part of its evidence is left out."""

    NO_ID = "no-id"
    """It has none of the keys that requests are joined by."""
    UNLIKE_DATA_SETS = "unlike-data-sets"
    """Its only key is its place in a data set, and the sides were not sent the same one."""
    NO_PARTNER = "no-partner"
    """The other side has no record of the same key."""
    RETRIED = "retried"
    """A later record of the same key took its place."""
    DUPLICATE = "duplicate-id"
    """Several records of one side have its key, and none of their fields decides which one counts."""
    DOUBLED_INDEX = "doubled-event-index"
    """Two stream events have the same index, or one has none; the events are left out."""
    FALLING_STAMPS = "falling-event-stamps"
    """A stream event is older than the one before it; the events are left out."""
