"""A cluster's counters, budgets and tiers as families of ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from lockstep.cluster.base import Cluster
from lockstep.cluster.breaker import BreakerState
from lockstep.cluster.remote_counts import RemoteSnapshot
from lockstep.cluster.snapshot import ClusterSnapshot, ModelSnapshot
from lockstep.errors import UnavailableError
from lockstep.server.buckets import cumulative

STATES = ("resident", "standby", "loading", "unloading", "failed", "remote")
"""Of a model; exactly one holds."""
HELP: Mapping[str, str] = {
    "requests_total": "Requests to the cluster.",
    "router_hits": "Requests that went through the entry model.",
    "dispatch_hits": "Routed requests that the rule sent to a model.",
    "dispatch_fallbacks": "Routed requests that went to the fallback.",
    "promotions": "Models that became resident after the boot.",
    "demotions": "Models that became resident no longer.",
    "co_activation_warms": "Models that were loaded because a request was likely.",
    "lru_evictions": "Idle sessions whose KV was given up, least recently used first.",
    "model_evictions": "Models that were unloaded to make room for others.",
}
MODEL_HELP: Mapping[str, str] = {
    "running": "Requests that a model answers.",
    "waiting": "Requests that wait for one of its sessions, or until it is loaded.",
    "sessions": "Sessions that it holds, those of requests without one included.",
}
REMOTE_HELP: Mapping[str, str] = {
    "requests": "Calls of a remote model.",
    "attempts": "Requests that were sent to its server.",
    "failures": "Attempts that failed by the server's fault.",
    "refusals": "Calls that its open breaker kept back.",
}
MODEL = ("model_name",)


def cluster_families(cluster: Cluster, prefix: str) -> Iterator[Metric]:
    """Nothing until its models have been opened."""
    try:
        snapshot = cluster.snapshot()
    except UnavailableError:
        return
    yield from _families(snapshot, f"{prefix}:cluster")


def _families(snapshot: ClusterSnapshot, prefix: str) -> Iterator[Metric]:
    for name, value in msgspec.to_builtins(snapshot.counters).items():
        counted = name.removesuffix("_total")
        yield CounterMetricFamily(f"{prefix}_{counted}", HELP.get(name, name), value=value)
    yield GaugeMetricFamily(
        f"{prefix}_sessions", "Named sessions, and open requests without.", value=snapshot.sessions_live
    )
    used = GaugeMetricFamily(f"{prefix}_budget_used_bytes", "Bytes in use of a budget.", labels=("budget",))
    limit = GaugeMetricFamily(f"{prefix}_budget_bytes", "What bounds them.", labels=("budget",))
    for budget in snapshot.budgets:
        used.add_metric((budget.name,), budget.used_bytes)
        if budget.effective_bytes is not None:
            limit.add_metric((budget.name,), budget.effective_bytes)
    yield used
    yield limit
    state = GaugeMetricFamily(f"{prefix}_model_state", "1 for the state of a model.", labels=("model_name", "state"))
    for model in snapshot.models:
        for each in STATES:
            state.add_metric((model.id, each), float(model.state == each))
    yield state
    yield from _model_families(snapshot.models, f"{prefix}_model")
    yield from _remote_families(snapshot.remotes, f"{prefix}_remote")


def _model_families(models: Sequence[ModelSnapshot], prefix: str) -> Iterator[Metric]:
    """What models of one replica share in the families of engines, told apart."""
    requests = CounterMetricFamily(f"{prefix}_requests", "Requests to a model, hops of routed ones.", labels=MODEL)
    gauges = {name: GaugeMetricFamily(f"{prefix}_{name}", text, labels=MODEL) for name, text in MODEL_HELP.items()}
    for model in models:
        requests.add_metric((model.id,), model.num_requests)
        for name, gauge in gauges.items():
            gauge.add_metric((model.id,), getattr(model, f"num_{name}"))
    yield requests
    yield from gauges.values()


def _remote_families(remotes: Sequence[RemoteSnapshot], prefix: str) -> Iterator[Metric]:
    """Of models that other servers answer; nothing where there are none."""
    if not remotes:
        return
    for name, text in REMOTE_HELP.items():
        counted = CounterMetricFamily(f"{prefix}_{name}", text, labels=MODEL)
        for remote in remotes:
            counted.add_metric((remote.model,), getattr(remote, f"{name}_total"))
        yield counted
    breaker = GaugeMetricFamily(f"{prefix}_breaker_state", "1 for the state of a breaker.", labels=(*MODEL, "state"))
    first_byte = HistogramMetricFamily(
        f"{prefix}_time_to_first_byte_seconds", "From an attempt to the first event of its answer.", labels=MODEL
    )
    for remote in remotes:
        for each in BreakerState:
            breaker.add_metric((remote.model, each), float(remote.breaker == each))
        first_byte.add_metric((remote.model,), cumulative(remote.first_byte_s), remote.first_byte_s.sum)
    yield breaker
    yield first_byte
