"""Views of clusters that a test makes up: any number of models, and figures of their engines."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from lockstep.cli.feed import Event, Reading, RequestRow, View
from lockstep.cli.scrape import Scrape
from lockstep.cluster.snapshot import ClusterSnapshot, ReplicaSnapshot
from tests.server.managing import Managed

URL = "http://127.0.0.1:9000"


def snapshot_of(names: tuple[str, ...] = ("router",), **changes: Any) -> ClusterSnapshot:
    """A cluster with these models, each on an engine of its own."""
    whole = Managed().snapshot()
    models = tuple(replace(whole.models[0], id=name, replica=f"key of {name}") for name in names)
    replicas = tuple(
        ReplicaSnapshot(f"key of {name}", "stub://x", "resident", (name,), 9, 9, 9, 1.0, 0, 0, "f", True, None)
        for name in names
    )
    return replace(whole, **{"models": models, "replicas": replicas, **changes})


def view_of(
    cluster: ClusterSnapshot,
    tokens_before: dict[str, int] | None = None,
    tokens_after: dict[str, int] | None = None,
    *,
    metrics: str = "",
    status: str = "ready",
    events: tuple[Event, ...] = (),
    requests: tuple[RequestRow, ...] | None = None,
    trouble: str = "",
) -> View:
    """Two readings, a second apart, of engines that have generated so many tokens by then."""
    before = Reading(cluster, _scrape(tokens_before, metrics, 1.0), status, "1.2.3", 1_000.0)
    after = Reading(cluster, _scrape(tokens_after, metrics, 2.0), status, "1.2.3", 1_001.0, requests)
    return View(URL, after, before, events, trouble)


def _scrape(tokens: dict[str, int] | None, metrics: str, at_s: float) -> Scrape:
    lines = [f'lockstep:generation_tokens_total{{model_name="{name}"}} {n}\n' for name, n in (tokens or {}).items()]
    return Scrape.parse(metrics + "".join(lines), at_s)
