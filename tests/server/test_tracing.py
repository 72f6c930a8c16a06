"""Spans as a receiver of OTLP over HTTP gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from lockstep.cluster.base import Hop
from lockstep.core.request import FinishReason
from lockstep.engine.outputs import Completion, RequestOutput, Timings
from lockstep.errors import UsageError
from lockstep.server.errors import HttpError
from lockstep.server.request_context import RequestContext, RequestTotals
from lockstep.server.tracing import RequestTracer, span_attributes, span_name
from tests.server.process import IN_THREAD, serve
from tests.waiting import HANG_S

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextmanager
def receiver() -> Iterator[tuple[str, list[Span]]]:
    """A receiver's URL, and the spans that it has got so far."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            spans.extend(
                span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
            )
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans
        finally:
            server.shutdown()
            thread.join()


def attributes_of(span: Span) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in span.attributes}


def record_of_a_chat() -> RequestContext:
    completion = Completion(0, "text", (1, 2, 3), FinishReason.STOP, None, None)
    output = RequestOutput(1, (1,) * 10, (completion,), 4, 0, Timings(0.5, 0.75, 2.0))
    return RequestContext(
        "r-1",
        "/v1/chat/completions",
        0.0,
        method="POST",
        tenant="key-1",
        model="alpha",
        is_stream=True,
        totals=RequestTotals.of([output]),
        finish_reasons=["stop"],
        status=200,
    )


def test_a_span_per_request_is_a_child_of_the_callers() -> None:
    parent = f"00-{TRACE_ID}-{PARENT_ID}-01"
    with (
        receiver() as (url, spans),
        serve("stub://alpha", *IN_THREAD, "--otlp-traces-endpoint", url) as server,
        server.client() as client,
    ):
        client.get("/health")
        client.post("/tokenize", json={"prompt": "my secret"}, headers={"traceparent": parent, "x-request-id": "r"})
        client.post("/tokenize", json={"prompt": 1}, headers={"traceparent": "nonsense"})
        assert server.stop() == 0
        assert "Traceback" not in server.stderr
    assert len(spans) == 2, "probes have none"
    child, orphan = spans
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert child.name == "POST /tokenize"
    assert child.kind == Span.SPAN_KIND_SERVER
    assert child.end_time_unix_nano > child.start_time_unix_nano
    expected = {"http.route": "/tokenize", "http.response.status_code": 200, "lockstep.request_id": "r"}
    assert expected.items() <= attributes_of(child).items()
    assert orphan.trace_id.hex() != TRACE_ID
    assert attributes_of(orphan)["error.type"] == "invalid_parameter"
    assert "secret" not in str(spans)


def test_the_genai_conventions_are_met() -> None:
    with receiver() as (url, spans):
        tracer = RequestTracer(url)
        tracer(record_of_a_chat(), 2.0)
        tracer.close()
    attributes = attributes_of(spans[0])
    assert spans[0].name == "chat alpha"
    assert spans[0].end_time_unix_nano - spans[0].start_time_unix_nano == 2_000_000_000
    finish_reasons = attributes.pop("gen_ai.response.finish_reasons")
    assert [value.string_value for value in finish_reasons.values] == ["stop"]
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "lockstep",
        "gen_ai.request.model": "alpha",
        "gen_ai.response.model": "alpha",
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.time_to_first_chunk": 0.75,
        "lockstep.tenant": "key-1",
    }.items() <= attributes.items()


def test_every_hop_of_a_routed_request_is_a_child_of_its_span() -> None:
    record = record_of_a_chat()
    record.hops = [Hop("router", "alpha", "alpha", "set.alpha", 0.25, 20, 16, 1)]
    with receiver() as (url, spans):
        tracer = RequestTracer(url)
        tracer(record, 3.0)
        tracer.close()
    by_name = {span.name: span for span in spans}
    request, router, last = by_name["chat alpha"], by_name["hop router"], by_name["hop alpha"]
    assert {router.parent_span_id, last.parent_span_id} == {request.span_id}
    assert router.start_time_unix_nano == request.start_time_unix_nano
    assert router.end_time_unix_nano - router.start_time_unix_nano == 250_000_000
    assert last.end_time_unix_nano == request.end_time_unix_nano
    assert last.end_time_unix_nano - last.start_time_unix_nano == 2_000_000_000
    told = attributes_of(router)
    assert (told["lockstep.intent"], told["lockstep.target"]) == ("alpha", "set.alpha")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.cache_read.input_tokens"]) == (20, 16)
    assert attributes_of(last)["gen_ai.usage.output_tokens"] == 3


def test_the_span_of_a_failed_request_has_the_error_code() -> None:
    record = RequestContext("r", "/v1/completions", 0.0, method="POST", status=503)
    record.error = HttpError(503, "gone", code="worker_lost")
    assert span_name(record) == "text_completion"
    assert span_attributes(record)["error.type"] == "worker_lost"
    with receiver() as (url, spans):
        tracer = RequestTracer(url)
        tracer(record, 0.1)
        tracer.close()
    assert spans[0].status.code == spans[0].status.STATUS_CODE_ERROR


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "grpc://localhost:4317"])
def test_invalid_endpoint_url_is_rejected_at_start(endpoint: str) -> None:
    with pytest.raises(UsageError, match="must be a URL like"):
        RequestTracer(endpoint)


def test_a_missing_extra_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(UsageError, match=r"lockstep-llm\[otel\]"):
        RequestTracer("http://localhost:4318/v1/traces")


def test_an_unreachable_receiver_is_given_up_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The end comes at all: what tries again must not go on for ever."""
    tracer = RequestTracer("http://127.0.0.1:9/v1/traces")
    tracer(record_of_a_chat(), 2.0)
    closing = threading.Thread(target=tracer.close, daemon=True)
    closing.start()
    closing.join(HANG_S)
    assert not closing.is_alive()
    assert "Failed to export" in caplog.text
