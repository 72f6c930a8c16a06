"""``/metrics``: the models' snapshots and the server's own counts in Prometheus' formats.

The names, units and buckets are the engine's, which are vLLM's; here they get a prefix, labels and a wire format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from lockstep.engine.metrics import HistogramSnapshot, MetricsSnapshot
from lockstep.server.record import RequestRecord
from lockstep.server.serving import serving_of

LABELS = ("model_name", "engine")
ENGINE = "0"
"""vLLM numbers the engines of a model; here a model has one."""
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
"""Others are counted together: the client chooses them."""
HELP: Mapping[str, str] = {
    "num_requests_running": "Requests that are being computed.",
    "num_requests_waiting": "Requests that wait for their first step, or to be resumed.",
    "kv_cache_usage_perc": "Part of the KV blocks in use, 0 to 1.",
    "prompt_tokens": "Prompt tokens, computed or cached.",
    "prompt_tokens_cached": "Prompt tokens that came from the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Sequences that lost their blocks for others.",
    "prefix_cache_queries": "Tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens that were found in the prefix cache.",
    "num_requests_waiting_by_reason": "Requests that wait, for capacity or (deferred) for the step under way to end.",
    "cache_config_info": "Settings of the KV cache.",
    "prompt_tokens_by_source": "Prompt tokens that were computed, and those that came from the prefix cache.",
    "admission_rejections": "Requests that a full queue refused.",
    "corrupted_requests": "Sequences that ended because the model's numbers were not finite.",
    "num_steps": "Steps computed.",
    "num_failed_steps": "Steps that ended with an error.",
    "time_to_first_token_seconds": "From submission to the first token, at engine steps.",
    "inter_token_latency_seconds": "Between two tokens of a sequence, at engine steps.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a finished sequence.",
    "e2e_request_latency_seconds": "From submission to the end.",
    "request_queue_time_seconds": "From submission to the first step.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "iteration_tokens_total": "Tokens of a step, prompts' and generated.",
    "request_prompt_tokens": "Prompt tokens of a finished sequence.",
    "request_generation_tokens": "Generated tokens of a finished sequence.",
    "request_max_num_generation_tokens": "Generated tokens of the longest sequence of a finished request.",
    "request_params_max_tokens": "Generated tokens that a finished sequence might have had.",
    "request_params_n": "Sequences of a finished request.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of a finished sequence that were computed.",
}
"""What is not described here is described by its name."""

router = APIRouter(tags=["metrics"])


class HttpCounts:
    """Requests by method, route and status; an observer of their records. Bounded: none of the three is free text."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}

    def __call__(self, record: RequestRecord, duration_s: float) -> None:
        method = record.method if record.method in METHODS else "OTHER"
        key = (method, record.endpoint, str(record.status))
        self._counts[key] = self._counts.get(key, 0) + 1

    def family(self) -> Metric:
        family = CounterMetricFamily("http_requests", "HTTP requests answered.", labels=("method", "path", "status"))
        for labels, count in sorted(self._counts.items()):
            family.add_metric(labels, count)
        return family


@router.get(
    "/metrics",
    operation_id="metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
)
async def metrics(request: Request) -> Response:
    """Prometheus' text format, or OpenMetrics where it is asked for."""
    serving = serving_of(request)
    counts: HttpCounts = request.app.state.http_counts
    snapshots = await serving.cluster.metrics()
    families = [*model_families(snapshots, serving.options.metrics_prefix), counts.family()]
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(_Page(families)), media_type=content_type)


def model_families(snapshots: Mapping[str, MetricsSnapshot], prefix: str) -> Iterator[Metric]:
    """One family per metric, with a sample for every model that has it."""
    gauges = {name: None for snapshot in snapshots.values() for name in snapshot.gauges}
    counters = {name: None for snapshot in snapshots.values() for name in snapshot.counters}
    histograms = {name: None for snapshot in snapshots.values() for name in snapshot.histograms}
    for name in gauges:
        gauge = GaugeMetricFamily(f"{prefix}:{name}", _help(name), labels=LABELS)
        for model, snapshot in snapshots.items():
            gauge.add_metric((model, ENGINE), snapshot.gauges[name])
        yield gauge
    for name in counters:
        counter = CounterMetricFamily(f"{prefix}:{name}", _help(name), labels=LABELS)
        for model, snapshot in snapshots.items():
            counter.add_metric((model, ENGINE), snapshot.counters[name])
        yield counter
    yield _finished(snapshots, prefix)
    yield from _labelled(snapshots, prefix)
    yield from _infos(snapshots, prefix)
    for name in histograms:
        histogram = HistogramMetricFamily(f"{prefix}:{name}", _help(name), labels=LABELS)
        for model, snapshot in snapshots.items():
            observed = snapshot.histograms[name]
            histogram.add_metric((model, ENGINE), cumulative(observed), observed.sum)
        yield histogram


def cumulative(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    """Prometheus' buckets: how many observations were at most each bound, the last one without bound."""
    bounds = [*(_number(bound) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


def _finished(snapshots: Mapping[str, MetricsSnapshot], prefix: str) -> Metric:
    family = CounterMetricFamily(
        f"{prefix}:request_success", "Finished sequences by reason.", labels=(*LABELS, "finished_reason")
    )
    for model, snapshot in snapshots.items():
        for reason, count in sorted(snapshot.finished.items()):
            family.add_metric((model, ENGINE, reason), count)
    return family


def _labelled(snapshots: Mapping[str, MetricsSnapshot], prefix: str) -> Iterator[Metric]:
    """Families with a label of their own."""
    gauges = {name: m.label for snapshot in snapshots.values() for name, m in snapshot.labelled_gauges.items()}
    counters = {name: m.label for snapshot in snapshots.values() for name, m in snapshot.labelled_counters.items()}
    for name, label in gauges.items():
        gauge = GaugeMetricFamily(f"{prefix}:{name}", _help(name), labels=(*LABELS, label))
        for model, snapshot in snapshots.items():
            for value, amount in snapshot.labelled_gauges[name].values.items():
                gauge.add_metric((model, ENGINE, value), amount)
        yield gauge
    for name, label in counters.items():
        counter = CounterMetricFamily(f"{prefix}:{name}", _help(name), labels=(*LABELS, label))
        for model, snapshot in snapshots.items():
            for value, amount in snapshot.labelled_counters[name].values.items():
                counter.add_metric((model, ENGINE, value), amount)
        yield counter


def _infos(snapshots: Mapping[str, MetricsSnapshot], prefix: str) -> Iterator[Metric]:
    """Facts as the labels of gauges that are 1."""
    facts = {name: tuple(labels) for snapshot in snapshots.values() for name, labels in snapshot.info.items()}
    for name, labels in facts.items():
        family = GaugeMetricFamily(f"{prefix}:{name}", _help(name), labels=(*LABELS, *labels))
        for model, snapshot in snapshots.items():
            family.add_metric((model, ENGINE, *(snapshot.info[name][label] for label in labels)), 1.0)
        yield family


def _help(name: str) -> str:
    return HELP.get(name, name.replace("_", " ").capitalize() + ".")


def _number(bound: float) -> str:
    return repr(float(bound))


class _Page(Collector):
    """What one scrape is told: the given families, then this process's memory, time and files."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families
        self._process = ProcessCollector(registry=CollectorRegistry())

    def collect(self) -> Iterator[Metric]:
        yield from self._families
        yield from self._process.collect()
