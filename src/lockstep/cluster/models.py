"""Models of one manifest, by every name that a request may use. Event loop only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.cluster.manifest import Entry, Manifest
from lockstep.cluster.planner import Phase
from lockstep.cluster.recorded import RecordedModel
from lockstep.cluster.remote import RemoteModel
from lockstep.cluster.replica_state import FAILED, ReplicaState
from lockstep.cluster.routing import Router
from lockstep.cluster.sessions import ModelSessions
from lockstep.cluster.snapshot import ModelSnapshot
from lockstep.errors import ModelNotFoundError

MAX_SHOWN_NAMES = 16
"""Names of models in the error of an unknown one."""


@dataclass(slots=True, eq=False)
class Model:
    """One named model: what was declared, who computes for it, and what it has done."""

    entry: Entry
    """As the backend serves it."""
    declared: Entry
    """As in the manifest."""
    replica: ReplicaState | None
    """The replica that computes for it; None: it is remote, or its source was not opened yet."""
    remote: RemoteModel | RecordedModel | None
    """Who answers where nothing is computed here: another server, or a recording."""
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
        """The state that it is shown in: that of its replica, or of who answers in its place."""
        if self.replica is None:
            return "loading" if self.remote is None else self.remote.status
        return self.replica.status(now_s)

    def snapshot(self, worker_trouble: str, now_s: float) -> ModelSnapshot:
        """The model as it is shown outside.

        Args:
            worker_trouble: why the worker would answer no request now; empty: it would.
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


class ModelSet:
    """All models of one manifest, by every name that a request may use; replaced as a whole.

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
        """In order of definition."""
        self.router = Router.of(served)
        self._by_name: dict[str | None, Model] = {
            name: model for model in self.by_id.values() for name in (*model.entry.aliases, model.id)
        }
        self._by_name[None] = next(iter(self.by_id.values()))
        """The model of a request that names none: the entry model, or the first one."""
        if self.router is not None:
            self._by_name[None] = self.by_id[self.router.entry]
            self._by_name.setdefault(declared.cluster, self._by_name[None])
        self.warmed_by: Mapping[str, tuple[Model, ...]] = {
            id_: tuple(m for m in self.by_id.values() if id_ in m.entry.co_activation and m.replica is not None)
            for id_ in self.by_id
        }
        """By id, the models that name this one in `co_activation`."""

    def find(self, name: str | None) -> Model:
        """The model of an id or alias; the entry model of the cluster's name or none.

        Raises:
            ModelNotFoundError: no model has that name.
        """
        model = self._by_name.get(name)
        if model is None:
            raise ModelNotFoundError(f"The model `{name}` does not exist; {self._names_text()}.", param="model")
        return model

    def _names_text(self) -> str:
        names = [f"`{name}`" for model in self.by_id.values() for name in (model.id, *model.entry.aliases)]
        more = f" and {len(names) - MAX_SHOWN_NAMES} more (GET /v1/models)" if len(names) > MAX_SHOWN_NAMES else ""
        return f"this server has {', '.join(names[:MAX_SHOWN_NAMES])}{more}"

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """Replicas of its models, each once, in order of definition."""
        return tuple(dict.fromkeys(m.replica for m in self.by_id.values() if m.replica is not None))
