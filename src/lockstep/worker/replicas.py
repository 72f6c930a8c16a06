"""Replicas that the present worker has, loads and frees, by its own word. Event loop only."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from lockstep.engine.loading import Progress
from lockstep.errors import LockstepError, WorkerLostError
from lockstep.worker.correspondence import resolve
from lockstep.worker.messages import Loaded, LoadFailed, Loading, Unloaded


@dataclass(slots=True, eq=False)
class _Pending:
    """A load that is under way, or has its turn after others."""

    answer: asyncio.Future[Loaded | LockstepError]
    progress: Progress
    has_begun: bool = False
    """The worker has told of it."""


class Replicas:
    """Forgets everything when the worker is lost: what its successor is to load is others' to say."""

    def __init__(self) -> None:
        self._loaded: dict[str, Loaded] = {}
        self._loading: dict[str, _Pending] = {}
        """In the order in which the worker was told, and goes about them."""
        self._unloading: dict[str, asyncio.Future[None]] = {}

    def loaded(self, replica: str) -> Loaded | None:
        return self._loaded.get(replica)

    def all(self) -> tuple[Loaded, ...]:
        """In order of loading."""
        return tuple(self._loaded.values())

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    async def load(self, replica: str, progress: Progress | None) -> Loaded:
        """Wait for what the worker says of a load.

        Raises:
            LockstepError: it failed.
            WorkerLostError: the worker is gone.
        """
        answer: asyncio.Future[Loaded | LockstepError] = asyncio.get_running_loop().create_future()
        self._loading[replica] = _Pending(answer, progress or (lambda stage, fraction: None))
        try:
            loaded = await answer
        finally:
            del self._loading[replica]
        if isinstance(loaded, LockstepError):
            raise loaded
        return loaded

    def is_known(self, replica: str) -> bool:
        """Whether there is something to free, now or at the end of the load under way."""
        return replica in self._loaded or replica in self._loading

    def unload(self, replica: str) -> None:
        """The worker is told to free it."""
        self._loaded.pop(replica, None)
        self._unloading[replica] = asyncio.get_running_loop().create_future()

    async def unloaded(self, replica: str) -> None:
        """Wait until one that is on its way out is gone."""
        if replica in self._unloading:
            await asyncio.shield(self._unloading[replica])

    def received(self, event: Loading | Loaded | LoadFailed | Unloaded) -> None:
        """Take over what the worker says; of a load that nobody waits for any more, nothing."""
        pending = self._loading.get(event.replica)
        match event:
            case Unloaded(replica):
                self._loaded.pop(replica, None)
                resolve(self._unloading.pop(replica, None), None)
            case Loading(_, stage, fraction) if pending is not None:
                pending.has_begun = True
                pending.progress(stage, fraction)
            case LoadFailed(_, error) if pending is not None:
                resolve(pending.answer, error)
            case Loaded(replica) if pending is not None:
                self._loaded[replica] = event
                resolve(pending.answer, event)

    def lost(self, error: WorkerLostError, suspected: WorkerLostError) -> None:
        """The worker is gone, and all that it had.

        Args:
            error: what the loads are told that waited for their turn.
            suspected: what the load is told that the worker was about.
        """
        self._loaded.clear()
        for pending in self._loading.values():
            resolve(pending.answer, suspected if pending.has_begun else error)
        self._end_unloads()

    def end(self, error: LockstepError) -> None:
        """No worker will say anything any more."""
        self._loaded.clear()
        for pending in self._loading.values():
            resolve(pending.answer, error)
        self._end_unloads()

    def _end_unloads(self) -> None:
        for unloading in self._unloading.values():
            resolve(unloading, None)
        self._unloading.clear()
