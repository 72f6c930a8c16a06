"""Prometheus metrics: serves ``/metrics`` with the metrics of the engines, the cluster, the batches and the HTTP
server.

Metric names, units and buckets are defined by the engine and are those of vLLM. This module adds the prefix, labels and
wire format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from lockstep.cluster.breaker import BreakerState
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.snapshot import HostSnapshot, PlaceSnapshot, RemoteSnapshot
from lockstep.engine.kv_tiers import TierStats
from lockstep.engine.metrics import HistogramSnapshot, Labelled, MetricsSnapshot
from lockstep.errors import UnavailableError
from lockstep.hosts.values import ReplicaPhase
from lockstep.server.batches import BatchRunner
from lockstep.server.errors import ERROR_RESPONSES
from lockstep.server.request_context import RequestContext
from lockstep.server.serving import serving_of

T = TypeVar("T")
FamilyOf = type[GaugeMetricFamily] | type[CounterMetricFamily]

LABELS = ("model_name", "engine")
OPENMETRICS = "application/openmetrics-text"
ENGINE = "0"
"""Value of vLLM's engine label. A model has exactly one engine here."""
METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
"""Other methods are counted together, because clients can send arbitrary names."""
HELP: Mapping[str, str] = {
    "num_requests_running": "Number of running requests.",
    "num_requests_waiting": "Number of requests that wait for their first step or to be resumed.",
    "kv_cache_usage_perc": "Fraction of KV blocks in use, 0 to 1; an encoder's blocks hold activations.",
    "prompt_tokens": "Prompt tokens, computed or cached.",
    "prompt_tokens_cached": "Prompt tokens that came from the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Sequences whose blocks were freed for other sequences.",
    "prefix_cache_queries": "Tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens that were found in the prefix cache.",
    "num_steps": "Steps computed.",
    "num_failed_steps": "Steps that ended with an error.",
    "time_to_first_token_seconds": "Time from submission to the first token, measured at engine steps.",
    "inter_token_latency_seconds": "Time between two tokens of a sequence, measured at engine steps.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a finished sequence.",
    "e2e_request_latency_seconds": "Time from submission to the end.",
    "request_queue_time_seconds": "Time from submission to the first step.",
    "request_prefill_time_seconds": "Time from the first step to the first token.",
    "request_decode_time_seconds": "Time from the first token to the last token.",
    "iteration_tokens_total": "Prompt and generated tokens per step.",
    "num_requests_waiting_by_reason": "Number of requests that wait for memory or for the next step, by reason.",
    "cache_config_info": "Settings of the KV cache, or of the pool of an encoder's activations; lengths in tokens.",
    "lora_requests_info": "Adapters of open requests: running with a slot, or waiting for one.",
    "prompt_tokens_by_source": "Prompt tokens by the source of their KV.",
    "request_success": "Finished sequences by reason.",
    "admission_rejections": "Requests rejected because the queue was full.",
    "corrupted_requests": "Sequences whose logits were not finite.",
    "spec_decode_num_drafts": "Rows of steps that verified drafts.",
    "spec_decode_num_draft_tokens": "Drafts that were verified.",
    "spec_decode_num_accepted_tokens": "Drafts that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted drafts by their place in the row, from 0.",
    "trace_recording": "1 if the model's steps are recorded, 0 if recording fails.",
    "trace_lost_steps": "Steps that the flight recorder could not record.",
    "trace_gaps": "Number of times that the recording of this model's device stopped and restarted.",
    "request_inference_time_seconds": "Time from the first step to the last token.",
    "request_max_num_generation_tokens": "Number of generated tokens of a request's longest sequence.",
    "request_params_n": "Number of sequences per request.",
    "request_params_max_tokens": "Token limit of a sequence.",
    "request_prefill_kv_computed_tokens": "Prompt tokens that were computed because they were not cached.",
    "request_prompt_tokens": "Prompt tokens of a finished sequence.",
    "request_generation_tokens": "Generated tokens of a finished sequence.",
}
"""Help texts by metric name. The help text of any other metric is made from its name."""

router = APIRouter(tags=["metrics"], responses=ERROR_RESPONSES)


class HttpCounts:
    """Counts requests by method, route and status, and unparsable tool calls by model. An observer of request contexts.

    The number of label values is bounded: none of the labels is free text.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = {}
        self._unread_calls: dict[tuple[str], int] = {}

    def __call__(self, context: RequestContext, duration_s: float) -> None:
        method = context.method if context.method in METHODS else "OTHER"
        key = (method, context.endpoint, str(context.status))
        self._counts[key] = self._counts.get(key, 0) + 1
        if context.num_unread_calls and context.model is not None:
            of_model = (context.model,)
            self._unread_calls[of_model] = self._unread_calls.get(of_model, 0) + context.num_unread_calls

    def families(self, prefix: str) -> Iterator[Metric]:
        labels, text = ("method", "path", "status"), "HTTP requests by method, path and status."
        yield _family(CounterMetricFamily, "http_requests", text, labels, sorted(self._counts.items()))
        text = "Tool calls in answers that could not be parsed and were returned as text."
        unread = sorted(self._unread_calls.items())
        yield _family(CounterMetricFamily, f"{prefix}:unread_tool_calls", text, MODEL, unread)


@router.get(
    "/metrics",
    operation_id="metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}, OPENMETRICS: {}}}},
)
async def metrics(request: Request) -> Response:
    """Metrics in the Prometheus text format, or in OpenMetrics if the request accepts it."""
    serving = serving_of(request)
    counts: HttpCounts = request.app.state.http_counts
    snapshots = await serving.cluster.metrics()
    prefix = serving.options.metrics_prefix
    families = [
        *model_families(snapshots, prefix),
        *cluster_families(serving.cluster, prefix),
        *counts.families(prefix),
    ]
    families += batch_families(request.app.state.batches, prefix)
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    if content_type.startswith(OPENMETRICS):
        # The library's other escapings break names with a colon (client_python #1177). These names need no escaping.
        encode = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
    return Response(encode(_Page(families)), media_type=content_type)


def model_families(snapshots: Mapping[str, MetricsSnapshot], prefix: str) -> Iterator[Metric]:
    """Yield one family per metric, with the samples of every model that reports it."""
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    yield from _plain(gauge, prefix, {model: each.gauges for model, each in snapshots.items()})
    yield from _labelled(gauge, prefix, {model: each.labelled_gauges for model, each in snapshots.items()})
    for name, facts in _by_name({model: each.facts for model, each in snapshots.items()}):
        names = sorted({fact for each in facts.values() for fact in each})
        samples = [((model, ENGINE, *(each.get(fact, "") for fact in names)), 1.0) for model, each in facts.items()]
        yield _family(gauge, f"{prefix}:{name}", _help(name), (*LABELS, *names), samples)
    yield from _plain(counter, prefix, {model: each.counters for model, each in snapshots.items()})
    counters = {
        model: {"request_success": Labelled("finished_reason", each.finished), **each.labelled_counters}
        for model, each in snapshots.items()
    }
    yield from _labelled(counter, prefix, counters)
    for name, observed in _by_name({model: each.histograms for model, each in snapshots.items()}):
        family = HistogramMetricFamily(f"{prefix}:{name}", _help(name), labels=LABELS)
        for model, histogram in observed.items():
            family.add_metric((model, ENGINE), cumulative(histogram), histogram.sum)
        yield family


def _family(
    kind: FamilyOf, name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    family = kind(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _plain(kind: FamilyOf, prefix: str, values: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
    for name, by_model in _by_name(values):
        samples = [((model, ENGINE), value) for model, value in by_model.items()]
        yield _family(kind, f"{prefix}:{name}", _help(name), LABELS, samples)


def _labelled(kind: FamilyOf, prefix: str, values: Mapping[str, Mapping[str, Labelled]]) -> Iterator[Metric]:
    for name, by_model in _by_name(values):
        label = next(iter(by_model.values())).label
        samples = [
            ((model, ENGINE, label_value), value)
            for model, labelled in by_model.items()
            for label_value, value in sorted(labelled.values.items())
        ]
        yield _family(kind, f"{prefix}:{name}", _help(name), (*LABELS, label), samples)


def _by_name(values: Mapping[str, Mapping[str, T]]) -> Iterator[tuple[str, Mapping[str, T]]]:
    """Regroup values from model and name to name and model, in order of first appearance."""
    names = dict.fromkeys(name for each in values.values() for name in each)
    for name in names:
        yield name, {model: each[name] for model, each in values.items() if name in each}


def _help(name: str) -> str:
    return HELP.get(name, name.replace("_", " ").capitalize() + ".")


class _Page(Collector):
    """Collector of one scrape: the given families, then memory, CPU time and file metrics of this process."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families
        self._process = ProcessCollector(registry=CollectorRegistry())

    def collect(self) -> Iterator[Metric]:
        yield from self._families
        yield from self._process.collect()


STATES = ("resident", "standby", "loading", "unloading", "failed", "remote")
"""States of a model. A model is in exactly one of them."""
CLUSTER_HELP: Mapping[str, str] = {
    "requests_total": "Requests received by the cluster.",
    "router_hits": "Requests that were routed by the entry model.",
    "dispatch_hits": "Routed requests that the routing rule sent to a model.",
    "dispatch_fallbacks": "Routed requests that were sent to the fallback model.",
    "promotions": "Models that became resident after startup.",
    "demotions": "Models that stopped being resident.",
    "co_activation_warms": "Models that were loaded in advance because a request was likely.",
    "lru_evictions": "Idle sessions whose KV was evicted, least recently used first.",
    "model_evictions": "Models that were unloaded to free memory for others.",
}
MODEL_HELP: Mapping[str, str] = {
    "running": "Running requests of a model.",
    "waiting": "Requests that wait for a session of the model or for the model to be loaded.",
    "sessions": "Sessions of a model, including those of requests without a session.",
}
REMOTE_HELP: Mapping[str, str] = {
    "requests": "Calls to a remote model.",
    "attempts": "Requests that were sent to the remote server.",
    "failures": "Attempts that failed because of the remote server.",
    "refusals": "Calls that the open circuit breaker rejected.",
}
STORE_FAMILIES: tuple[tuple[str, FamilyOf, str], ...] = (
    ("num_blocks", GaugeMetricFamily, "KV blocks stored outside of device memory."),
    ("num_bytes", GaugeMetricFamily, "Bytes used by stored KV blocks."),
    ("budget_bytes", GaugeMetricFamily, "Byte limit for stored KV blocks."),
    ("num_loaded", CounterMetricFamily, "KV blocks loaded from the store."),
    ("num_evicted", CounterMetricFamily, "KV blocks evicted for other blocks."),
    ("num_rejected", CounterMetricFamily, "KV blocks rejected because of a mismatch with the original data."),
    ("num_checked", CounterMetricFamily, "KV blocks that were loaded and recomputed for comparison."),
)
MODEL = ("model_name",)
REPLICA = (*MODEL, "replica")
Fields = Mapping[str, tuple[str, str]]
"""Fields of a snapshot and their help, by name of the metric."""
OF_HOST: Fields = {
    "there": ("is_there", "1 if a host is connected, 0 if it is lost."),
    "drained": ("is_drained", "1 if a host is drained and receives no replicas."),
    "replicas": ("num_replicas", "Replicas on a host, including those that are leaving."),
}
RESOURCES: Fields = {
    "resources": ("resources", "Resources of a host; memory in bytes."),
    "resources_free": ("free", "Free resources of a host."),
}
OF_PLACE: Fields = {
    "running": ("num_running", "Requests of this gateway that are running on a replica."),
    "cached_blocks": ("num_cached_blocks", "KV blocks that a replica has reported to this gateway as cached."),
}
COUNTED_OF_PLACE: Fields = {
    "retried": ("num_retried", "Requests retried elsewhere because the replica was lost before the first token."),
    "starts": ("num_starts", "Workers that were started for a replica."),
    "losses": ("num_away", "Number of times that a running replica was lost or left its host."),
    "away_seconds": ("away_s", "Time without the replica since it first ran."),
}


def cluster_families(cluster: Cluster, prefix: str) -> Iterator[Metric]:
    """Yield the cluster's families; none until its models have been opened."""
    try:
        snapshot = cluster.snapshot()
    except UnavailableError:
        return
    yield from _store_families(cluster.kv_tiers, f"{prefix}:kv_store")
    prefix = f"{prefix}:cluster"
    for name, value in msgspec.to_builtins(snapshot.counters).items():
        counted = name.removesuffix("_total")
        yield CounterMetricFamily(f"{prefix}_{counted}", CLUSTER_HELP.get(name, name), value=value)
    yield GaugeMetricFamily(
        f"{prefix}_sessions", "Named sessions, and open requests without a session.", value=snapshot.sessions_live
    )
    gauge, counter, budgets, models = GaugeMetricFamily, CounterMetricFamily, snapshot.budgets, snapshot.models
    used = [((each.name,), each.used_bytes) for each in budgets]
    yield _family(gauge, f"{prefix}_budget_used_bytes", "Bytes used of a memory budget.", ("budget",), used)
    limits = [((each.name,), each.effective_bytes) for each in budgets if each.effective_bytes is not None]
    yield _family(gauge, f"{prefix}_budget_bytes", "Limit of a memory budget in bytes.", ("budget",), limits)
    states = [((model.id, each), float(model.state == each)) for model in models for each in STATES]
    yield _family(gauge, f"{prefix}_model_state", "1 for the current state of a model.", (*MODEL, "state"), states)
    requests = [((model.id,), model.num_requests) for model in models]
    text = "Requests to a model, including the hops of routed requests."
    yield _family(counter, f"{prefix}_model_requests", text, MODEL, requests)
    for name, text in MODEL_HELP.items():  # engine families are per replica; these are per model
        samples = [((model.id,), getattr(model, f"num_{name}")) for model in models]
        yield _family(gauge, f"{prefix}_model_{name}", text, MODEL, samples)
    if snapshot.remotes:
        yield from _remote_families(snapshot.remotes, f"{prefix}_remote")
    yield from host_families(snapshot.hosts, prefix)
    if snapshot.report_age_s is not None:
        text = "Time since the controller's last report on hosts and replicas."
        yield gauge(f"{prefix}_report_age_seconds", text, value=snapshot.report_age_s)
    yield from place_families(snapshot.places, prefix)


def _store_families(tiers: Mapping[str, TierStats], prefix: str) -> Iterator[Metric]:
    for name, kind, text in STORE_FAMILIES:
        samples = [((tier,), getattr(stats, name)) for tier, stats in tiers.items()]
        if samples:
            yield _family(kind, f"{prefix}_{name.removeprefix('num_')}", text, ("tier",), samples)


def _remote_families(remotes: Sequence[RemoteSnapshot], prefix: str) -> Iterator[Metric]:
    """Yield the families of models that run on remote servers."""
    for name, text in REMOTE_HELP.items():
        samples = [((remote.model,), getattr(remote, f"{name}_total")) for remote in remotes]
        yield _family(CounterMetricFamily, f"{prefix}_{name}", text, MODEL, samples)
    states = [((remote.model, each), float(remote.breaker == each)) for remote in remotes for each in BreakerState]
    labels = (*MODEL, "state")
    yield _family(GaugeMetricFamily, f"{prefix}_breaker_state", "1 for the breaker's state.", labels, states)
    first_byte = HistogramMetricFamily(
        f"{prefix}_time_to_first_byte_seconds", "Time from an attempt to the first event of its answer.", labels=MODEL
    )
    for remote in remotes:
        first_byte.add_metric((remote.model,), cumulative(remote.first_byte_s), remote.first_byte_s.sum)
    yield first_byte


def batch_families(runner: BatchRunner | None, prefix: str) -> Iterator[Metric]:
    """Yield the batch families; none if the server runs no batches."""
    if runner is None:
        return
    prefix, gauge, counter, counts = f"{prefix}:batch", GaugeMetricFamily, CounterMetricFamily, runner.counts
    open_ones = [((status,), count) for status, count in runner.num_of().items()]
    yield _family(gauge, f"{prefix}_open", "Batches that have not ended.", ("status",), open_ones)
    text = "1 if batch data cannot be written to disk."
    yield gauge(f"{prefix}_storage_fault", text, value=float(runner.store.fault is not None))
    yield gauge(f"{prefix}_requests_running", "Running batch requests.", value=runner.num_running)
    yield gauge(f"{prefix}_requests_waiting", "Waiting batch requests.", value=runner.num_waiting)
    answered = [(("completed",), counts.num_completed), (("failed",), counts.num_failed)]
    yield _family(counter, f"{prefix}_requests", "Finished batch requests, by result.", ("result",), answered)
    text = "Number of times that a batch request was aborted for a client request and queued again."
    yield counter(f"{prefix}_requests_set_back", text, value=counts.num_aborted)


def host_families(hosts: Sequence[HostSnapshot], prefix: str) -> Iterator[Metric]:
    """Yield the families of the hosts on which replicas can be placed; none without hosts.

    If several hosts have the same name, the connected one is reported: the others were lost before it joined.
    """
    if not hosts:
        return
    known = {host.name: host for host in sorted(hosts, key=lambda host: host.is_there)}.values()
    for name, (field, text) in OF_HOST.items():
        samples = [((host.name,), float(getattr(host, field))) for host in known]
        yield _family(GaugeMetricFamily, f"{prefix}_host_{name}", text, ("host",), samples)
    for name, (field, text) in RESOURCES.items():
        amounts = [((host.name, of), amount) for host in known for of, amount in sorted(getattr(host, field).items())]
        yield _family(GaugeMetricFamily, f"{prefix}_host_{name}", text, ("host", "resource"), amounts)


def place_families(places: Sequence[PlaceSnapshot], prefix: str) -> Iterator[Metric]:
    """Yield the families of replicas on hosts; none without hosts.

    Counters continue when a replica is placed on another host, so they have no host label. ``replica_state`` reports
    the host.
    """
    if not places:
        return
    stay_last = sorted(places, key=lambda place: place.state != ReplicaPhase.LEAVING)
    known: dict[tuple[str, ...], PlaceSnapshot]
    known = {(each.group, str(each.number)): each for each in stay_last}  # an ending group may have the same model
    here = [((*names, place.host), place) for names, place in known.items()]
    states = [((*names, each), float(place.state == each)) for names, place in here for each in ReplicaPhase]
    text = "1 for the current state of a replica."
    yield _family(GaugeMetricFamily, f"{prefix}_replica_state", text, (*REPLICA, "host", "state"), states)
    for name, (field, text) in OF_PLACE.items():
        samples = [(names, float(getattr(place, field))) for names, place in here]
        yield _family(GaugeMetricFamily, f"{prefix}_replica_{name}", text, (*REPLICA, "host"), samples)
    routed = [((*names, why), count) for names, place in known.items() for why, count in sorted(place.routed.items())]
    text = "Requests routed to a replica, by reason."
    yield _family(CounterMetricFamily, f"{prefix}_replica_routed", text, (*REPLICA, "why"), routed)
    for name, (field, text) in COUNTED_OF_PLACE.items():
        samples = [(names, float(getattr(place, field))) for names, place in known.items()]
        yield _family(CounterMetricFamily, f"{prefix}_replica_{name}", text, REPLICA, samples)


def cumulative(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    """Prometheus buckets: number of observations up to each bound. The last bound is +Inf."""
    bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
