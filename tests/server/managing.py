"""A cluster without models: what the routes that look at a cluster and change it ask of it, in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import yaml
from msgspec.structs import replace

from lockstep.cluster.base import ModelCard
from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.manifest_permissions import NONE, Permissions
from lockstep.cluster.snapshot import (
    BudgetSnapshot,
    ClusterCounters,
    ClusterSnapshot,
    HostSnapshot,
    ModelSnapshot,
    PlaceSnapshot,
    Replaced,
    SessionSnapshot,
    host_named,
)
from lockstep.errors import (
    ConfigError,
    InvalidParameterError,
    ManifestError,
    ModelNotFoundError,
    Problem,
    SessionNotFoundError,
)
from lockstep.hosts.values import Host, ReplicaPhase, ReplicaStatus, ReplicaUse

MANIFEST = "cluster: small\nmodels:\n  router:\n    source: stub://router\n"
FAULTS = (Problem(2, "models.router.tier", "is 'hot'; it must be resident"), Problem(3, "routing.entry", "is missing"))


class Managed(Cluster):
    """Serves nothing; remembers what it was told.

    Lines of a new manifest decide what becomes of it: ``bad`` has faults, ``big`` does not fit.
    """

    def __init__(self) -> None:
        super().__init__(parse(MANIFEST))
        self.text = MANIFEST
        self.states = {"router": "resident", "org/legal": "standby", "far": "remote"}
        self.ended: list[str] = []
        self.environments: list[Mapping[str, str] | None] = []
        self._sessions = {"a/b": SessionSnapshot("a/b", "router", "idle", 2.0, 1.0, 3, 32)}

    def card(self, name: str | None) -> ModelCard:
        found = {"law": "org/legal"}.get(name or "router", name or "router")
        if found not in self.states:
            raise ModelNotFoundError(f"The model `{name}` does not exist.", param="model")
        return ModelCard(found, (), "stub://x", 1, self.states[found], 10, True)

    def snapshot(self) -> ClusterSnapshot:
        models = tuple(_model(name, state) for name, state in self.states.items())
        budget = BudgetSnapshot("gpu_budget", 100, 80, 40)
        return ClusterSnapshot(
            "small", "stub", "router", None, False, models, (), (budget,), self.sessions(), 1, ClusterCounters(3), ()
        )

    def manifest_text(self) -> str:
        return self.text

    def manifest_plain(self) -> Mapping[str, Any]:
        plain: Mapping[str, Any] = yaml.safe_load(self.text)
        return plain

    async def replace(
        self, text: str, environment: Mapping[str, str] | None = None, permissions: Permissions = NONE
    ) -> Replaced:
        self.environments.append(environment)
        if "bad" in text:
            raise ManifestError(FAULTS)
        if "big" in text:
            raise ConfigError("router needs 3 GB, gpu_budget is 2 GB")
        self.text = text
        await asyncio.sleep(0)
        self.events.emit("manifest_replaced", cluster="new", error=None, duration_ms=1.5)
        return Replaced("new", ("x",), (), (), ("router",), 0, 0, 1.5)

    async def load_model(self, id_: str) -> None:
        if id_ == "far":
            raise InvalidParameterError("far is remote: there is nothing to load", param="model")
        self._move(id_, "resident")

    async def unload_model(self, id_: str) -> None:
        self._move(id_, "standby")

    def sessions(self) -> tuple[SessionSnapshot, ...]:
        return tuple(self._sessions.values())

    async def end_session(self, id_: str, caller: str | None = None) -> None:
        if id_ not in self._sessions:
            raise SessionNotFoundError(f"No session with id {id_!r}.", param="session_id")
        del self._sessions[id_]
        self.ended.append(id_)

    def _move(self, name: str, state: str) -> None:
        before, self.states[name] = self.states[name], state
        self.events.emit(
            "tier_changed", model=name, replica="r", from_=before, to=state, reason="by hand", duration_ms=0.5
        )


class Hosted(Managed):
    """The same on three hosts, one of which is lost; replicas of `a` are on `b` as soon as `a` is drained."""

    hosts: tuple[Host, ...] = (
        Host("a", "id-a", "10.0.0.1", True, {"CPU": 4.0, "memory": 8e9, "fast": 1.0}, {"CPU": 1.0, "memory": 2.5e9}),
        Host("b", "id-b", "10.0.0.2", True, {"CPU": 2.0, "memory": 4e9}, {"CPU": 0.0, "memory": 4e9}),
        Host("gone", "id-gone", "10.0.0.3", False, {"CPU": 2.0}, {}),
    )

    def __init__(self) -> None:
        super().__init__()
        self.drained: dict[str, None] = {}
        self.places = [
            ReplicaStatus("stub://router", 0, ReplicaPhase.READY, "", "a", "id-a", "10.0.0.1", 5001, 101, 100, 1),
            ReplicaStatus(
                "stub://router", 1, ReplicaPhase.LOADING, "the model is loading", "b", "id-b", "", 0, 102, 99, 3
            ),
            ReplicaStatus("stub://legal", 0, ReplicaPhase.WAITING, "no host has 4 CPU free: a has 1 CPU; b has 0 CPU"),
        ]

    async def drain_host(self, name: str, is_drained: bool) -> str:
        name = host_named(self.snapshot().hosts, name)
        if not is_drained:
            self.drained.pop(name)
            return name
        self.drained[name] = None
        if name == "a":
            self.places = [
                replace(each, host="b", node_id="id-b") if each.host == "a" else each for each in self.places
            ]
        return name

    def snapshot(self) -> ClusterSnapshot:
        hosts = (replace(host, is_drained=host.name in self.drained) for host in self.hosts)
        models = {"stub://router": ("router",), "stub://legal": ("org/legal",)}
        return replace(
            super().snapshot(),
            hosts=tuple(HostSnapshot.of(host, self.places) for host in hosts),
            places=tuple(PlaceSnapshot.of(place, models[place.key], ReplicaUse()) for place in self.places),
        )


def _model(name: str, state: str) -> ModelSnapshot:
    return ModelSnapshot(
        id=name,
        set=None,
        source="stub://x",
        tier=state,
        state=state,
        reason="",
        priority=0,
        aliases=(),
        replica=None if state == "remote" else "r",
        size_bytes=40,
        max_model_len=10,
        num_requests=7,
        num_running=1,
        num_waiting=0,
        num_sessions=1,
        max_active_sessions=16,
        co_activation=(),
        idle_s=time.monotonic() * 0,
    )
