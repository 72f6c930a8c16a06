"""Models of one manifest, by every name that a request may use. Event loop only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.cluster.manifest import Entry, Manifest
from lockstep.cluster.planner import Phase
from lockstep.cluster.remote import RemoteModel
from lockstep.cluster.replica_state import FAILED, ReplicaState
from lockstep.cluster.routing import Router
from lockstep.cluster.sessions import ModelSessions
from lockstep.cluster.snapshot import ModelSnapshot
from lockstep.errors import ModelNotFoundError


@dataclass(slots=True, eq=False)
class Model:
    """One named model: what was declared, who computes for it, and what it has done."""

    entry: Entry
    """As the backend serves it."""
    declared: Entry
    """As the manifest says."""
    replica: ReplicaState | None
    """The replica that computes for it; None: it is remote."""
    remote: RemoteModel | None
    sessions: ModelSessions
    num_requests: int = 0
    num_running: int = 0
    num_waiting: int = 0
    """Calls that wait for a session or for the replica."""
    last_used_s: float | None = None

    @property
    def id(self) -> str:
        return self.entry.id

    def status(self, now_s: float) -> str:
        """The state that it is shown in: ``remote``, or that of its replica."""
        return "remote" if self.replica is None else self.replica.status(now_s)

    def snapshot(self, worker_trouble: str, now_s: float) -> ModelSnapshot:
        """The model as it is shown outside.

        Args:
            worker_trouble: why the worker would answer nobody now; empty: it would.
        """
        replica, entry, state = self.replica, self.entry, self.status(now_s)
        reason = ""
        if self.remote is not None:
            reason = self.remote.health().reason
        elif replica is not None and replica.phase is Phase.RESIDENT:
            reason = worker_trouble
        elif replica is not None and state == FAILED:
            reason = str(replica.failure)
        return ModelSnapshot(
            id=self.id,
            set=entry.set,
            source=entry.source,
            tier=self.declared.tier,
            state=state,
            reason=reason,
            priority=entry.priority,
            aliases=entry.aliases,
            replica=None if replica is None else replica.key,
            size_bytes=0 if replica is None else replica.bytes,
            max_model_len=None if replica is None or replica.loaded is None else replica.loaded.config.max_model_len,
            num_requests=self.num_requests,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_sessions=self.sessions.num_held,
            max_active_sessions=self.sessions.limit,
            co_activation=entry.co_activation,
            idle_s=None if self.last_used_s is None else now_s - self.last_used_s,
        )


class Names:
    """Names under which requests may call the models of a manifest; known before any of them is opened."""

    def __init__(self, manifest: Manifest) -> None:
        entries = manifest.entries
        self.ids = tuple(entry.id for entry in entries)
        """In order of definition."""
        self._ids = {alias: entry.id for entry in entries for alias in entry.aliases} | {e.id: e.id for e in entries}
        self._entry = None if manifest.routing is None else manifest.routing.entry
        if self._entry is not None:
            self._ids.setdefault(manifest.cluster, self._entry)
        self._default = self._entry or self.ids[0]
        """Who is meant where a request names nobody."""

    def is_routed(self, name: str | None) -> bool:
        """Whether a request under this name goes through the entry model."""
        return self._entry is not None and (name is None or self._ids.get(name) == self._entry)

    def find(self, name: str | None) -> str:
        """The id of an id or alias; the entry model's of the cluster's name or none.

        Raises:
            ModelNotFoundError: nobody is called so.
        """
        id_ = self._default if name is None else self._ids.get(name)
        if id_ is None:
            raise ModelNotFoundError(f"The model `{name}` does not exist.", param="model")
        return id_


class ModelSet:
    """All models of one manifest, found by name; replaced as a whole.

    Args:
        declared: the manifest as it was written.
        served: the same, as the backend serves it.
        make: the model of a declared and a served entry.
    """

    def __init__(self, declared: Manifest, served: Manifest, make: Callable[[Entry, Entry], Model]) -> None:
        self.declared = declared
        self.served = served
        pairs = zip(declared.entries, served.entries, strict=True)
        self.by_id: Mapping[str, Model] = {own.id: make(own, entry) for own, entry in pairs}
        """By id, in order of definition."""
        self.names = Names(served)
        self.router = Router.of(served)
        self._warmed_by: dict[str, tuple[Model, ...]] = {
            id_: tuple(m for m in self.by_id.values() if id_ in m.entry.co_activation and m.replica is not None)
            for id_ in self.by_id
        }

    def is_routed(self, name: str | None) -> bool:
        """Whether a request under this name goes through the entry model."""
        return self.names.is_routed(name)

    def find(self, name: str | None) -> Model:
        """The model that `Names.find` says; ModelNotFoundError."""
        return self.by_id[self.names.find(name)]

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """Replicas of its models, each once, in order of definition."""
        return tuple(dict.fromkeys(m.replica for m in self.by_id.values() if m.replica is not None))

    def warmed_by(self, id_: str) -> tuple[Model, ...]:
        """Models that name this one in `co_activation`."""
        return self._warmed_by[id_]
