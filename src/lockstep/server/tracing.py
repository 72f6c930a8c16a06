"""OpenTelemetry tracing (optional extra): exports a span per request and per hop, with GenAI attributes (1.41).

Conventions: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/. A span is created from the request's
context when the request has ended, so running requests have no overhead. `traceparent` makes it a child of the caller's
span.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lockstep.cluster.base import Hop
from lockstep.errors import UsageError
from lockstep.server.access_log import PROBES
from lockstep.server.dialect import OPERATIONS
from lockstep.server.request_context import RequestContext, RequestTotals
from lockstep.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.util.types import AttributeValue

PROVIDER = "lockstep"
EXPORT_TIMEOUT_S = 5.0
"""Time limit, in seconds, for exporting a batch of spans, including the last one at shutdown."""
MAX_QUEUED_SPANS = 4_096
"""Maximum number of spans that wait for export. Further spans are dropped."""


class RequestTracer:
    """Request observer that exports a span per request. `close` exports the remaining spans.

    Args:
        endpoint: URL of the trace receiver, for example ``http://localhost:4318/v1/traces``.

    Raises:
        UsageError: the extra is not installed, or the endpoint is not a URL.
    """

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise UsageError(
                f"--otlp-traces-endpoint is {endpoint!r}; it must be a URL like http://localhost:4318/v1/traces"
            )
        try:
            has_exporter = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        except ModuleNotFoundError:
            has_exporter = False
        if not has_exporter:
            raise UsageError("--otlp-traces-endpoint requires an extra: pip install 'lockstep-llm[otel]'")
        self._provider = _provider(endpoint)
        self._tracer = self._provider.get_tracer("lockstep.server", __version__)

    def __call__(self, context: RequestContext, duration_s: float) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if context.endpoint in PROBES:
            return
        end_ns = time.time_ns()
        carrier = {} if context.traceparent is None else {"traceparent": context.traceparent}
        span = self._tracer.start_span(
            span_name(context),
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes=span_attributes(context),
            start_time=end_ns - int(duration_s * 1e9),
        )
        if context.status is not None and context.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        parent = set_span_in_context(span)
        for hop in hop_spans(context, duration_s):
            child = self._tracer.start_span(
                hop.name, parent, attributes=hop.attributes, start_time=end_ns - int(hop.began_s * 1e9)
            )
            child.end(end_ns - int(hop.ended_s * 1e9))
        span.end(end_ns)

    def close(self) -> None:
        """Export the remaining spans within the export time limit. Blocks."""
        self._provider.shutdown()


@dataclass(frozen=True, slots=True)
class HopSpan:
    """One model's part of a routed request."""

    name: str
    began_s: float
    """Start in seconds before the end of the request. The end below has the same unit."""
    ended_s: float
    attributes: Mapping[str, AttributeValue]


def hop_spans(context: RequestContext, duration_s: float) -> Iterator[HopSpan]:
    """Yield spans of the routing models, in sequence from the start of the request, and of the answering model, up to
    its end.

    Requests with several prompts have none, because their hops overlap.
    """
    totals = context.totals
    if not context.hops or totals.num_answered != 1 or totals.num_unanswered:
        return
    left_s = duration_s
    for hop in context.hops:
        began_s, left_s = left_s, max(0.0, left_s - hop.latency_s)
        route = {"lockstep.intent": hop.intent or "", "lockstep.target": hop.target or ""}
        yield HopSpan(f"hop {hop.model}", began_s, left_s, {**_hop_attributes(hop.model, hop), **route})
    if context.hops[-1].target is not None:
        model = context.model or ""
        yield HopSpan(f"hop {model}", min(left_s, totals.total_s), 0.0, _hop_attributes(model, totals))


def _hop_attributes(model: str, counts: Hop | RequestTotals) -> dict[str, AttributeValue]:
    return {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": counts.num_prompt_tokens,
        "gen_ai.usage.output_tokens": counts.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": counts.num_cached_tokens,
    }


def span_name(context: RequestContext) -> str:
    """Operation and model. For other routes: method and route. An unknown model is left out."""
    operation = OPERATIONS.get(context.endpoint)
    return (
        f"{context.method} {context.endpoint}"
        if operation is None
        else " ".join(filter(None, (operation, context.model)))
    )


def span_attributes(context: RequestContext) -> dict[str, AttributeValue]:
    """Attributes of a request under the names of the conventions, without prompts and answers."""
    operation, totals, error = OPERATIONS.get(context.endpoint), context.totals, context.error
    attributes: dict[str, AttributeValue | None] = {
        "http.request.method": context.method,
        "http.route": context.endpoint,
        "lockstep.request_id": context.request_id,
        "http.response.status_code": context.status,
        "lockstep.tenant": context.tenant or None,
        "error.type": None if error is None else error.code or error.type,
    }
    if operation is not None:
        attributes |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.stream": context.is_stream,
            "gen_ai.request.model": context.model,
            "gen_ai.response.model": context.model,
        }
        if totals.num_answered or totals.num_output_tokens:
            attributes["gen_ai.usage.input_tokens"] = totals.num_prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = totals.num_output_tokens
        if totals.num_answered:
            attributes |= {
                "gen_ai.usage.cache_read.input_tokens": None if totals.num_unanswered else totals.num_cached_tokens,
                "gen_ai.response.finish_reasons": tuple(context.finish_reasons),
                "gen_ai.response.time_to_first_chunk": totals.ttft_s,
                "lockstep.queue_s": totals.queue_s,
            }
    return {name: value for name, value in attributes.items() if value is not None}


def _provider(endpoint: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(
        resource=Resource.create({"service.name": "lockstep", "service.version": __version__}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED_SPANS))
    return provider
