"""Views of clusters that a test makes up: any number of models, stats of their engines, and requests."""

from __future__ import annotations

from typing import Any, Literal

from msgspec.structs import replace

from lockstep.cli.top_client import ServerSnapshot, View
from lockstep.cluster.cluster_stats import ClusterStats, EngineStats, StoreTier
from lockstep.cluster.events import ClusterEvent
from lockstep.cluster.snapshot import ClusterSnapshot, ReplicaSnapshot
from lockstep.server.request_rows import RequestRow
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


def request_of(id_: str, state: Literal["waiting", "running", "ended"], **fields: Any) -> RequestRow:
    """A request of which nothing is known but these fields."""
    unknown = ("model", "session_id", "priority", "status", "error", "waited_ms", "ttft_ms", "tokens_per_second")
    zero = ("number", "at_s", "total_ms", "prompt_tokens", "cached_tokens", "output_tokens", "preemptions")
    empty = ("hops", "finish_reasons", "waits", "replay")
    values: dict[str, Any] = {**dict.fromkeys(unknown), **dict.fromkeys(zero, 0), **dict.fromkeys(empty, ())}
    values |= {"endpoint": "/v1/completions", "caller": "", "stream": False, **fields}
    return RequestRow(id=id_, state=state, **values)


def view_of(
    cluster: ClusterSnapshot,
    tokens_per_s: dict[str, float] | None = None,
    *,
    tiers: tuple[StoreTier, ...] = (),
    uptime_s: float | None = None,
    status: str = "ready",
    events: tuple[ClusterEvent, ...] = (),
    requests: tuple[RequestRow, ...] | None = None,
    error: str = "",
) -> View:
    """A server of engines that generate so many tokens a second."""
    engines = tuple(EngineStats(name, rate) for name, rate in (tokens_per_s or {}).items())
    stats = ClusterStats(1.0, uptime_s, None, engines, tiers)
    return View(URL, ServerSnapshot(cluster, stats, status, "1.2.3", requests), events, error)
