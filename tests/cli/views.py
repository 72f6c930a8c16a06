"""Views of clusters that a test makes up: any number of models, and stats of their engines."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from lockstep.cli.top_client import Event, Reading, RequestRow, View
from lockstep.cluster.cluster_stats import ClusterStats, EngineStats, StoreTier
from lockstep.cluster.snapshot import ClusterSnapshot, ReplicaSnapshot
from tests.server.managing import Managed

URL = "http://127.0.0.1:9000"


def snapshot_of(names: tuple[str, ...] = ("router",), **changes: Any) -> ClusterSnapshot:
    """A cluster with these models, each on an engine of its own."""
    whole = Managed().snapshot()
    models = tuple(replace(whole.models[0], id=name, replica=f"key of {name}") for name in names)
    replicas = tuple(
        ReplicaSnapshot(f"key of {name}", "stub://x", "resident", (name,), 9, 9, 9, 1.0, 0, 0, "f", None)
        for name in names
    )
    return replace(whole, **{"models": models, "replicas": replicas, **changes})


def view_of(
    cluster: ClusterSnapshot,
    tokens_per_s: dict[str, float] | None = None,
    *,
    tiers: tuple[StoreTier, ...] = (),
    uptime_s: float | None = None,
    status: str = "ready",
    events: tuple[Event, ...] = (),
    requests: tuple[RequestRow, ...] | None = None,
    trouble: str = "",
) -> View:
    """A reading of engines that generate so many tokens a second."""
    engines = tuple(EngineStats(name, rate) for name, rate in (tokens_per_s or {}).items())
    stats = ClusterStats(1.0, uptime_s, None, engines, tiers)
    return View(URL, Reading(cluster, stats, status, "1.2.3", requests), events, trouble)
