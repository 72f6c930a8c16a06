"""What a supervised worker is to have loaded, has, and is about to load or free. Event loop only."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from lockstep.engine.loading import Progress
from lockstep.errors import LockstepError
from lockstep.worker.correspondence import resolve
from lockstep.worker.messages import Load, Loaded, LoadFailed, Loading, Unloaded


class _Pending(NamedTuple):
    """A load that is under way."""

    answer: asyncio.Future[Loaded | LockstepError]
    progress: Progress


class Replicas:
    """Outlives the worker: what is wanted is loaded again by its successor."""

    def __init__(self) -> None:
        self._wanted: dict[str, Load] = {}
        """In order of loading."""
        self._loaded: dict[str, Loaded] = {}
        self._load_s: dict[str, float] = {}
        """How long what is wanted took to load."""
        self._failures: dict[str, LockstepError] = {}
        """Why what is wanted could not be loaded again."""
        self._loading: dict[str, _Pending] = {}
        self._unloading: dict[str, asyncio.Future[None]] = {}

    # -- what there is --------------------------------------------------------------------------------------------

    def loaded(self, replica: str) -> Loaded | None:
        return self._loaded.get(replica)

    def missing(self) -> list[Load]:
        """What is wanted and not there."""
        return [load for replica, load in self._wanted.items() if replica not in self._loaded]

    @property
    def load_s(self) -> float:
        """How long it takes to load all that is wanted, going by the last time."""
        return sum(self._load_s.values())

    def tier(self, replica: str) -> str:
        """``resident``, ``loading`` or ``failed``."""
        if replica in self._loaded:
            return "resident"
        return "failed" if replica in self._failures else "loading"

    def failure(self, replica: str) -> LockstepError | None:
        """Why it could not be loaded again; None: that was not tried, or not in vain."""
        return self._failures.get(replica)

    def absence(self, replica: str) -> str:
        """Why it is not there, in one sentence."""
        if replica in self._failures:
            return f"the model could not be loaded again: {self._failures[replica]}"
        return "the device worker is being restarted" if replica in self._wanted else "the model is loading"

    # -- what changes ---------------------------------------------------------------------------------------------

    def want(self, load: Load) -> None:
        """It was loaded, and is to be there from now on."""
        self._wanted[load.replica] = load

    def prioritise(self, replica: str, priority: int) -> bool:
        """Its class has changed; False: it is not wanted."""
        load = self._wanted.get(replica)
        if load is not None:
            self._wanted[replica] = msgspec.structs.replace(load, priority=priority)
        return load is not None

    def failed(self, load: Load, error: LockstepError) -> None:
        """It could not be loaded again."""
        self._failures[load.replica] = error

    def forget(self, replica: str) -> bool:
        """It is not wanted any more; whether it is there, or is being loaded again."""
        for known in (self._wanted, self._load_s, self._failures):
            known.pop(replica, None)
        return self._loaded.pop(replica, None) is not None or replica in self._loading

    async def load(self, load: Load, progress: Progress | None) -> Loaded:
        """Wait for what the worker says of a load.

        Raises:
            LockstepError: it failed, or the worker is gone.
        """
        answer: asyncio.Future[Loaded | LockstepError] = asyncio.get_running_loop().create_future()
        self._loading[load.replica] = _Pending(answer, progress or (lambda stage, fraction: None))
        try:
            loaded = await answer
        finally:
            del self._loading[load.replica]
        if isinstance(loaded, LockstepError):
            raise loaded
        return loaded

    def unload(self, replica: str) -> None:
        """The worker was told to free it, now or when the load under way has come to its end."""
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
                self._loaded.pop(replica, None)  # one that a lost worker's successor was still loading
                resolve(self._unloading.pop(replica, None), None)
            case Loading(_, stage, fraction) if pending is not None:
                pending.progress(stage, fraction)
            case LoadFailed(_, error) if pending is not None:
                resolve(pending.answer, error)
            case Loaded(replica) if pending is not None:
                self._failures.pop(replica, None)
                self._loaded[replica] = event
                self._load_s[replica] = event.load_s
                resolve(pending.answer, event)

    def lost(self) -> None:
        """The worker is gone, and all that it had."""
        self._loaded.clear()
        for unloading in self._unloading.values():
            resolve(unloading, None)
        self._unloading.clear()

    def end_loads(self, error: LockstepError) -> None:
        """No load that is under way will be answered."""
        for pending in self._loading.values():
            resolve(pending.answer, error)
