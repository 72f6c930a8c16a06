"""A cluster's counters, budgets and tiers as families of ``/metrics``, where a manifest describes the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lockstep.cluster.base import Cluster
from lockstep.cluster.managed import ManagedCluster
from lockstep.cluster.snapshot import ClusterSnapshot
from lockstep.errors import UnavailableError

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
    "lru_evictions": "Models that made room for others.",
}


def cluster_families(cluster: Cluster, prefix: str) -> Iterator[Metric]:
    """Nothing where there is no manifest, or its models are not open yet."""
    if not isinstance(cluster, ManagedCluster):
        return
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
