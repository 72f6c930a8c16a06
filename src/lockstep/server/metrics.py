"""``/metrics``: the models' snapshots and the server's own counts in Prometheus' formats.

The names, units and buckets are the engine's, which are vLLM's; here they get a prefix, labels and a wire format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from lockstep.engine.metrics import Labelled, MetricsSnapshot
from lockstep.server.buckets import cumulative
from lockstep.server.cluster_metrics import cluster_families
from lockstep.server.record import RequestRecord
from lockstep.server.serving import serving_of

T = TypeVar("T")
FamilyOf = type[GaugeMetricFamily] | type[CounterMetricFamily]

LABELS = ("model_name", "engine")
OPENMETRICS = "application/openmetrics-text"
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
    "num_steps": "Steps computed.",
    "num_failed_steps": "Steps that ended with an error.",
    "time_to_first_token_seconds": "From submission to the first token, at engine steps.",
    "inter_token_latency_seconds": "Between two tokens of a sequence, at engine steps.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a finished sequence.",
    "e2e_request_latency_seconds": "From submission to the end.",
    "request_queue_time_seconds": "From submission to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "iteration_tokens_total": "Tokens of a step, prompts' and generated.",
    "num_requests_waiting_by_reason": "Requests that wait, for room or for the next step.",
    "cache_config_info": "Settings of the KV cache.",
    "prompt_tokens_by_source": "Prompt tokens, by where their KV came from.",
    "request_success": "Finished sequences by reason.",
    "admission_rejections": "Requests that a full queue refused.",
    "corrupted_requests": "Sequences whose logits were not finite.",
    "trace_recording": "1 while the steps of this model are recorded, 0 while they cannot be.",
    "trace_lost_steps": "Steps that the flight recorder could not record.",
    "trace_gaps": "How often the recording of this model's device broke off and began anew.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "request_max_num_generation_tokens": "Generated tokens of a request's longest sequence.",
    "request_params_n": "Sequences that a request asked for.",
    "request_params_max_tokens": "Tokens that a sequence was allowed.",
    "request_prefill_kv_computed_tokens": "Prompt tokens that were computed, not cached.",
    "request_prompt_tokens": "Prompt tokens of a finished sequence.",
    "request_generation_tokens": "Generated tokens of a finished sequence.",
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
    responses={200: {"content": {"text/plain": {}, OPENMETRICS: {}}}},
)
async def metrics(request: Request) -> Response:
    """Prometheus' text format, or OpenMetrics where it is asked for."""
    serving = serving_of(request)
    counts: HttpCounts = request.app.state.http_counts
    snapshots = await serving.cluster.metrics()
    prefix = serving.options.metrics_prefix
    families = [*model_families(snapshots, prefix), *cluster_families(serving.cluster, prefix), counts.family()]
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    if content_type.startswith(OPENMETRICS):
        # The library's other escapings break names with a colon (client_python #1177); ours need none.
        encode = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
    return Response(encode(_Page(families)), media_type=content_type)


def model_families(snapshots: Mapping[str, MetricsSnapshot], prefix: str) -> Iterator[Metric]:
    """One family per metric, with the samples of every model that has it."""
    yield from _plain(GaugeMetricFamily, prefix, {model: each.gauges for model, each in snapshots.items()})
    yield from _labelled(GaugeMetricFamily, prefix, {model: each.labelled_gauges for model, each in snapshots.items()})
    yield from _info(prefix, {model: each.info for model, each in snapshots.items()})
    yield from _plain(CounterMetricFamily, prefix, {model: each.counters for model, each in snapshots.items()})
    counters = {
        model: {"request_success": Labelled("finished_reason", each.finished), **each.labelled_counters}
        for model, each in snapshots.items()
    }
    yield from _labelled(CounterMetricFamily, prefix, counters)
    for name, observed in _by_name({model: each.histograms for model, each in snapshots.items()}):
        family = HistogramMetricFamily(f"{prefix}:{name}", _help(name), labels=LABELS)
        for model, histogram in observed.items():
            family.add_metric((model, ENGINE), cumulative(histogram), histogram.sum)
        yield family


def _plain(family_of: FamilyOf, prefix: str, values: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    for name, by_model in _by_name(values):
        family = family_of(f"{prefix}:{name}", _help(name), labels=LABELS)
        for model, value in by_model.items():
            family.add_metric((model, ENGINE), value)
        yield family


def _labelled(family_of: FamilyOf, prefix: str, values: Mapping[str, Mapping[str, Labelled]]) -> Iterator[Metric]:
    for name, by_model in _by_name(values):
        label = next(iter(by_model.values())).label
        family = family_of(f"{prefix}:{name}", _help(name), labels=(*LABELS, label))
        for model, labelled in by_model.items():
            for label_value, value in sorted(labelled.values.items()):
                family.add_metric((model, ENGINE, label_value), value)
        yield family


def _info(prefix: str, facts: Mapping[str, Mapping[str, Mapping[str, str]]]) -> Iterator[Metric]:
    for name, by_model in _by_name(facts):
        names = sorted({fact for each in by_model.values() for fact in each})
        family = GaugeMetricFamily(f"{prefix}:{name}", _help(name), labels=(*LABELS, *names))
        for model, each in by_model.items():
            family.add_metric((model, ENGINE, *(each.get(fact, "") for fact in names)), 1.0)
        yield family


def _by_name(values: Mapping[str, Mapping[str, T]]) -> Iterator[tuple[str, Mapping[str, T]]]:
    """From values by model and name to values by name and model, in order of their first appearance."""
    names = dict.fromkeys(name for each in values.values() for name in each)
    for name in names:
        yield name, {model: each[name] for model, each in values.items() if name in each}


def _help(name: str) -> str:
    return HELP.get(name, name.replace("_", " ").capitalize() + ".")


class _Page(Collector):
    """What one scrape is told: the given families, then this process's memory, time and files."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families
        self._process = ProcessCollector(registry=CollectorRegistry())

    def collect(self) -> Iterator[Metric]:
        yield from self._families
        yield from self._process.collect()
