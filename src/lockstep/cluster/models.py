"""The models of one manifest, by every name that a request may use. Event loop only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.cluster.held import Held
from lockstep.cluster.manifest import Entry, Manifest
from lockstep.cluster.remote import RemoteModel
from lockstep.cluster.routing import Router
from lockstep.cluster.sessions import ModelSessions
from lockstep.errors import ModelNotFoundError


@dataclass(slots=True, eq=False)
class Model:
    """One named model: what was declared, who computes for it, and what it has done."""

    entry: Entry
    """As the backend serves it."""
    declared: Entry
    """As the manifest says."""
    held: Held | None
    """Its replica; None: it is remote."""
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


class Names:
    """What requests may call the models of a manifest, which is known before any of them is opened."""

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


class Roster:
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
        self.models: Mapping[str, Model] = {own.id: make(own, entry) for own, entry in pairs}
        """By id, in order of definition."""
        self.names = Names(served)
        self.router = Router.of(served)
        self._warmed_by: dict[str, tuple[Model, ...]] = {
            id_: tuple(m for m in self.models.values() if id_ in m.entry.co_activation and m.held is not None)
            for id_ in self.models
        }

    def is_routed(self, name: str | None) -> bool:
        """As `Names.is_routed`."""
        return self.names.is_routed(name)

    def find(self, name: str | None) -> Model:
        """The model that `Names.find` says; ModelNotFoundError."""
        return self.models[self.names.find(name)]

    def warmed_by(self, id_: str) -> tuple[Model, ...]:
        """Models that name this one in `co_activation`."""
        return self._warmed_by[id_]
