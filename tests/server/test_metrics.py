"""Metrics as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from lockstep.cluster.base import Accepted
from lockstep.core.request import FinishReason
from lockstep.engine.metrics import HISTOGRAMS, HistogramSnapshot
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.server.metrics import HttpCounts, cumulative, model_families
from lockstep.server.request_context import RequestContext
from tests.cluster.support import one_model
from tests.server.process import ServerProcess
from tests.server.support import NAME, client_of
from tests.waiting import until

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def samples(families: Iterable[Metric]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def of(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({"model_name": NAME, "engine": "0", **labels}.items())


def test_both_formats_are_read_by_prometheus_own_parsers_and_agree(server: ServerProcess) -> None:
    with server.client() as client:
        # A request is counted when it has ended, which may be after its client has seen the end.
        until(lambda: "http_requests_total{" in client.get("/metrics").text, "a request has been counted")
        plain = client.get("/metrics")
        open_ = client.get("/metrics", headers={"Accept": OPENMETRICS})
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert open_.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    names = [
        {name for name, _ in samples(parse(text.text))}
        for parse, text in ((parse_text, plain), (parse_openmetrics, open_))
    ]
    assert names[0] == names[1]
    assert {"lockstep:num_requests_running", "lockstep:prompt_tokens_total", "process_cpu_seconds_total"} <= names[0]
    assert {f"lockstep:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")} <= names[0]


def test_types_are_those_that_boards_expect(server: ServerProcess) -> None:
    with server.client() as client:
        text = client.get("/metrics").text
    types = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert types["lockstep:kv_cache_usage_perc"] == "gauge"
    assert types["lockstep:generation_tokens_total"] == "counter"
    assert types["lockstep:iteration_tokens_total"] == "histogram"
    assert types["http_requests_total"] == "counter"


async def test_counts_are_exact_and_gauges_return_to_zero() -> None:
    """R requests of T tokens leave R(T-1) latencies between tokens and R first ones."""
    num_requests, num_tokens = 3, 7
    cluster = one_model("stub://alpha", (NAME,))
    await cluster.start()
    try:
        for _ in range(num_requests):
            call = GenerationRequest("hello", SamplingParams(max_tokens=num_tokens, ignore_eos=True), model=NAME)
            events = [event async for events in cluster.stream(call) for event in events]
            assert isinstance(events[0], Accepted)
        found = samples(model_families(await cluster.metrics(), "vllm"))
    finally:
        await cluster.close()
    assert found[of("vllm:inter_token_latency_seconds_count")] == num_requests * (num_tokens - 1)
    assert found[of("vllm:time_to_first_token_seconds_count")] == num_requests
    assert found[of("vllm:generation_tokens_total")] == num_requests * num_tokens
    assert found[of("vllm:iteration_tokens_total_sum")] == num_requests * (len("hello") + num_tokens)
    assert found[of("vllm:request_success_total", finished_reason=FinishReason.LENGTH.value)] == num_requests
    for reason in ("capacity", "deferred"):
        assert found[of("vllm:num_requests_waiting_by_reason", reason=reason)] == 0
    assert found[of("vllm:num_requests_running")] == found[of("vllm:num_requests_waiting")] == 0
    assert found[of("vllm:kv_cache_usage_perc")] == 0


async def test_requests_are_counted_by_route() -> None:
    async with client_of() as client:
        for path in ("/v1/models/a", "/v1/models/b", "/no/1", "/no/2"):
            await client.get(path)
        await client.request("BREW", "/v1/models")
        text = (await client.get("/metrics")).text
    lines = {line for line in text.splitlines() if line.startswith("http_requests_total")}
    assert lines == {
        'http_requests_total{method="GET",path="/v1/models/{model_id:path}",status="404"} 2.0',
        'http_requests_total{method="GET",path="unrouted",status="404"} 2.0',
        'http_requests_total{method="OTHER",path="/v1/models",status="405"} 1.0',
    }


def test_unknown_methods_do_not_create_series() -> None:
    counts = HttpCounts()
    for number in range(1_000):
        counts(RequestContext("id", "unrouted", 0.0, method=f"M{number}", status=405), 0.0)
    assert [len(family.samples) for family in counts.families("lockstep")] == [1, 0]


def test_buckets_are_cumulative() -> None:
    histogram = HistogramSnapshot((0.5, 1.0), (2, 0, 3), 5, 9.0)
    assert cumulative(histogram) == [("0.5", 2), ("1.0", 2), ("+Inf", 5)]


async def test_a_scrape_while_the_model_loads_is_answered() -> None:
    cluster = one_model("stub://alpha", (NAME,))
    assert list(samples(model_families(await cluster.metrics(), "lockstep"))) == []


@pytest.mark.parametrize("accept", ["*/*", "text/html", "nonsense;;;", ""])
def test_any_accept_header_gets_a_page(server: ServerProcess, accept: str) -> None:
    with server.client() as client:
        assert client.get("/metrics", headers={"Accept": accept}).status_code == 200
