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
        self._names = {alias: model for model in self.models.values() for alias in model.entry.aliases} | dict(
            self.models
        )
        self.router = Router.of(served)
        self._warmed_by: dict[str, tuple[Model, ...]] = {
            id_: tuple(m for m in self.models.values() if id_ in m.entry.co_activation and m.held is not None)
            for id_ in self.models
        }

    def is_routed(self, name: str | None) -> bool:
        """Whether a request under this name goes through the entry model."""
        if self.router is None:
            return False
        if name is None or self._names.get(name) is self.models[self.router.entry]:
            return True
        return name == self.declared.cluster and name not in self._names

    def find(self, name: str | None) -> Model:
        """The model of an id or alias; the entry model of the cluster's name or none.

        Raises:
            ModelNotFoundError: nobody is called so.
        """
        if self.is_routed(name) and self.router is not None:
            return self.models[self.router.entry]
        model = next(iter(self.models.values()), None) if name is None else self._names.get(name)
        if model is None:
            raise ModelNotFoundError(f"The model `{name}` does not exist.", param="model")
        return model

    def warmed_by(self, id_: str) -> tuple[Model, ...]:
        """Models that name this one in `co_activation`."""
        return self._warmed_by[id_]
