"""Models of one manifest: finds a model by any name that a request may use. Event loop only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.cluster.manifest import Manifest, ModelEntry, Tier
from lockstep.cluster.planner import Phase
from lockstep.cluster.recorded import RecordedModel
from lockstep.cluster.remote import MAX_CONNECTIONS, RemoteModel
from lockstep.cluster.replica_state import FAILED, ReplicaState
from lockstep.cluster.routing import Router
from lockstep.cluster.sessions import ModelSessions
from lockstep.cluster.snapshot import ModelSnapshot
from lockstep.errors import ModelNotFoundError
from lockstep.spelling import nearest

MAX_SHOWN_NAMES = 16
"""Maximum number of names listed in the error for an unknown model."""


@dataclass(slots=True, eq=False)
class Model:
    """One named model: its declaration, its replica or remote server, and its use."""

    entry: ModelEntry
    """Entry as the backend serves it."""
    declared: ModelEntry
    """Entry as in the manifest."""
    replica: ReplicaState | None
    """Replica that computes for the model; None: the model is remote, or its source has not been opened yet."""
    remote: RemoteModel | RecordedModel | None
    """Remote server or recording that answers for the model; None: a replica does."""
    sessions: ModelSessions
    num_requests: int = 0
    num_running: int = 0
    num_waiting: int = 0
    """Number of calls that wait for a session or for the replica."""
    last_used_s: float | None = None

    @property
    def id(self) -> str:
        return self.entry.id

    def status(self, now_s: float) -> str:
        """Displayed state: that of the replica, or of the remote server or recording."""
        if self.replica is None:
            return "loading" if self.remote is None else self.remote.status
        return self.replica.status(now_s)

    def snapshot(self, worker_trouble: str, now_s: float) -> ModelSnapshot:
        """Snapshot of the model for management requests.

        Args:
            worker_trouble: reason why the worker cannot serve requests now; empty: it can.
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
            max_model_len=None if replica is None or replica.loaded is None else replica.loaded.max_model_len,
            num_requests=self.num_requests,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_sessions=self.sessions.num_held,
            max_active_sessions=self.sessions.limit,
            co_activation=entry.co_activation,
            idle_s=None if self.last_used_s is None else now_s - self.last_used_s,
            task=None if replica is None else replica.spec.options.task,
            adapter=entry.adapter,
        )


class ModelSet:
    """All models of one manifest, by every name that a request may use; replaced as a whole.

    Args:
        declared: manifest as written.
        served: manifest as the backend serves it.
        make: builds the model of a declared and a served entry.
    """

    def __init__(self, declared: Manifest, served: Manifest, make: Callable[[ModelEntry, ModelEntry], Model]) -> None:
        self.declared = declared
        self.served = served
        pairs = zip(declared.entries, served.entries, strict=True)
        self.by_id: Mapping[str, Model] = {own.id: make(own, entry) for own, entry in pairs}
        """Models by id, in order of definition."""
        self.router = Router.of(served)
        self._by_name: dict[str | None, Model] = {
            name: model for model in self.by_id.values() for name in (*model.entry.aliases, model.id)
        }
        self._by_name[None] = next(iter(self.by_id.values()))
        """Model of a request without a name: the entry model, or else the first one."""
        if self.router is not None:
            self._by_name[None] = self.by_id[self.router.entry]
            self._by_name.setdefault(declared.cluster, self._by_name[None])
        self.warmed_by: Mapping[str, tuple[Model, ...]] = {
            id_: tuple(m for m in self.by_id.values() if id_ in m.entry.co_activation and m.replica is not None)
            for id_ in self.by_id
        }
        """Models that name a model in `co_activation`, by the id of that model."""

    def find(self, name: str | None) -> Model:
        """Find the model of an id or alias. The cluster's name, or none, selects the entry model.

        Raises:
            ModelNotFoundError: no model has this name.
        """
        model = self._by_name.get(name)
        if model is None:
            near = nearest(name or "", [each for each in self._by_name if each is not None])
            hint = f"did you mean `{near[0]}`? T" if near else "t"
            raise ModelNotFoundError(
                f"The model `{name}` does not exist; {hint}his server has {self._names_text()}.", param="model"
            )
        return model

    def _names_text(self) -> str:
        names = [f"`{name}`" for model in self.by_id.values() for name in (model.id, *model.entry.aliases)]
        more = f" and {len(names) - MAX_SHOWN_NAMES} more (GET /v1/models)" if len(names) > MAX_SHOWN_NAMES else ""
        return f"{', '.join(names[:MAX_SHOWN_NAMES])}{more}"

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """Replicas of the models, each once, in order of definition."""
        return tuple(dict.fromkeys(m.replica for m in self.by_id.values() if m.replica is not None))


def unopened_model(declared: ModelEntry, entry: ModelEntry) -> Model:
    """Build a model whose artifact has not been read yet: it can be found by name but serves no requests."""
    return Model(entry, declared, None, None, ModelSessions(None, lambda session: None))


def session_limit(entry: ModelEntry, manifest: Manifest) -> int | None:
    """Maximum number of sessions that a model may hold at once. A remote model holds nothing on the device, so its
    connections set the limit."""
    if entry.max_active_sessions is not None:
        return entry.max_active_sessions
    return MAX_CONNECTIONS if entry.tier is Tier.REMOTE else manifest.sessions.max_active_sessions
