"""What a cluster of many models can be told and asked beside `Cluster`: an optional second interface.

Who serves one model without a manifest implements nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from lockstep.cluster.events import EventLog
from lockstep.cluster.snapshot import ClusterSnapshot, Replaced, SessionSnapshot


@runtime_checkable
class ManagedCluster(Protocol):
    """A cluster that a manifest describes. Used from one event loop."""

    @property
    def events(self) -> EventLog: ...

    def snapshot(self) -> ClusterSnapshot: ...

    def manifest_text(self) -> str:
        """The effective manifest as YAML; `replace` takes it."""
        ...

    async def replace(self, text: str, environment: Mapping[str, str] | None = None) -> Replaced:
        """Bring a new manifest in, as one unit.

        Args:
            environment: what the text may refer to; None: to nothing, as it came from the network.

        Raises:
            ManifestError: it has faults. Nothing has changed, as with all that follow.
            UnavailableError: another one is being brought in.
            LockstepError: what it names does not fit the budgets, or cannot be loaded.
        """
        ...

    async def load_model(self, id_: str) -> None:
        """Promote a model; returns when it can answer at once.

        Raises:
            ModelNotFoundError: there is none of that id or alias.
            InvalidParameterError: it is remote.
            LockstepError: it cannot be loaded.
        """
        ...

    async def unload_model(self, id_: str) -> None:
        """Demote a model; returns when its calls have ended and its memory is free.

        Raises:
            ModelNotFoundError, InvalidParameterError: as in `load_model`.
        """
        ...

    def sessions(self) -> tuple[SessionSnapshot, ...]: ...

    async def end_session(self, id_: str) -> None:
        """Forget a session and give up its KV; SessionNotFoundError when nobody knows it."""
        ...
