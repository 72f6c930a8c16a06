"""One placed replica: a device worker that listens for gateways, its model, and reports of its state.

Independent of Ray, whose actor runs it (`lockstep.hosts.ray_runtime`). The worker is started again when it is lost,
and the model is loaded again, until the controller removes the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import msgspec

from lockstep.engine.kv_tiers import HostStore, KVStoreOptions
from lockstep.errors import LockstepError, UnavailableError, WorkerLostError
from lockstep.hosts.values import Demand, LinkOptions, ReplicaName, ReplicaPhase, ReplicaStatus
from lockstep.worker.health import backoff_s
from lockstep.worker.lifecycle import WorkerLost
from lockstep.worker.link import WorkerOptions
from lockstep.worker.remote_clients import ListenOptions
from lockstep.worker.supervised import Notice, SupervisedWorker

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
"""After a load that failed; doubled by each further one."""
MAX_BACKOFF_S = 60.0
SUSPECT_LOADS = 2
"""Workers that ended over a load before it is tried in a throw-away process."""
FIRST_TELL_AGAIN_S = 0.2
"""Time until a report that could not be delivered is sent again."""
MAX_TELL_AGAIN_S = 5.0
CLOSE_LIMIT_S = 8.0
"""For an orderly end of the worker; it bounds itself to less."""


@dataclass(frozen=True, slots=True)
class Here:
    """The host that a replica is on, as others know it."""

    host: str
    node_id: str
    address: str
    """Where its workers listen."""


class ReplicaHost:
    """One replica and its workers, one after the other. Event loop only.

    Args:
        worker: options of the worker process; its kind and where it listens are set here.
        tell: called with the newest place whenever it has changed, and again until it does not raise. Places that
            changed meanwhile are passed over.
        store: the KV store that each worker opens, in folders of this replica's own; None: none.
    """

    def __init__(
        self,
        demand: Demand,
        number: int,
        worker: WorkerOptions,
        link: LinkOptions,
        here: Here,
        tell: Callable[[ReplicaStatus], Awaitable[None] | None],
        store: KVStoreOptions | None = None,
    ) -> None:
        self._demand = demand
        self._options = replace(
            worker, kind="process", address=None, prestarted=None, listen=_listen(link, here.address)
        )
        self._tell = tell
        self._worker: SupervisedWorker | None = None
        self._is_changed = asyncio.Event()
        self._is_untold = asyncio.Event()
        self._num_failures = 0
        """Loads that failed in a row."""
        self._num_lost = 0
        """Workers in a row that ended while they loaded the model."""
        self._tasks: list[asyncio.Task[None]] = []
        self.place = ReplicaStatus(
            demand.key,
            number,
            ReplicaPhase.STARTING,
            host=here.host,
            node_id=here.node_id,
            address=here.address,
            actor_pid=os.getpid(),
        )
        self._store = None if store is None else _own_store(store, self.place.name)
        self._kept = HostStore()

    @property
    def name(self) -> ReplicaName:
        return self.place.name

    @property
    def _label(self) -> str:
        return self._demand.label(self.place.number)

    async def start(self) -> None:
        """Start the worker, load the model, and see to it that both stay; returns at once."""
        loop = asyncio.get_running_loop()
        self._is_untold.set()
        self._tasks = [loop.create_task(self._live()), loop.create_task(self._tell_places())]

    async def close(self) -> None:
        """End the worker, and tell nothing more; within a bounded time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_worker()
        await asyncio.to_thread(self._kept.close)

    # -- the worker ---------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        while True:
            try:
                worker = await self._present_worker()
                await self._load(worker)
                await self._until_lost(worker)
            except WorkerLostError as error:
                self._num_lost += error.is_suspect
                self._set(state=ReplicaPhase.STARTING, reason=str(error), port=0, pid=0)
            except Exception as error:  # whatever it is, nothing else would ever load it
                await self._failed(error)

    async def _present_worker(self) -> SupervisedWorker:
        """The worker, started where there is none, or as soon as its successor is there.

        Raises:
            UsageError, ExecutorError: no process can be started.
        """
        if self._worker is None:
            self._set(state=ReplicaPhase.STARTING)  # why it failed before stays said
            self._worker = SupervisedWorker(self._options, self._notified)
            await self._worker.start()
            if self._store is not None:
                self._worker.open_store(await asyncio.to_thread(self._kept.opened, self._store))
        while not self._worker.is_up:
            self._is_changed.clear()
            await self._is_changed.wait()
        self._set(pid=self._worker.pid or 0, num_starts=self.place.num_starts + 1)
        return self._worker

    async def _load(self, worker: SupervisedWorker) -> None:
        """Load the model, and be ready.

        Raises:
            LockstepError: it cannot be loaded, or no gateway could connect to it.
            WorkerLostError: the worker was lost over it.
        """
        demand = self._demand
        self._set(state=ReplicaPhase.LOADING)
        await worker.load(
            demand.key,
            demand.source,
            demand.options,
            priority=demand.priority,
            is_suspect=self._num_lost >= SUSPECT_LOADS,
        )
        listening = worker.listening  # said before anything that it was told to do
        if listening is None or worker.loaded(demand.key) is None:
            raise WorkerLostError("the device worker ended when it had just loaded the model")
        if listening.fault:
            raise UnavailableError(f"the worker cannot listen: {listening.fault}")
        self._num_failures = self._num_lost = 0
        self._set(state=ReplicaPhase.READY, reason="", address=listening.host, port=listening.port)

    async def _until_lost(self, worker: SupervisedWorker) -> None:
        """Wait as long as the worker has the model; WorkerLostError: how it ended."""
        loaded = worker.loaded(self._demand.key)
        while worker.loaded(self._demand.key) is loaded:
            self._is_changed.clear()
            await self._is_changed.wait()
        raise WorkerLostError(self.place.reason or "the device worker ended")

    async def _failed(self, error: Exception) -> None:
        """A load failed, or there is no worker: begin anew with another process after a while."""
        if not isinstance(error, LockstepError):
            log.error("a defect over %s", self._label, exc_info=error)
        self._num_failures += 1
        delay_s = backoff_s(self._num_failures, FIRST_BACKOFF_S, MAX_BACKOFF_S)
        reason = str(error) if isinstance(error, LockstepError) else repr(error)
        log.warning("%s cannot be loaded, and is tried again in %.0f s: %s", self._label, delay_s, reason)
        await self._end_worker()
        self._set(state=ReplicaPhase.FAILED, reason=reason, port=0, pid=0)
        await asyncio.sleep(delay_s)

    async def _end_worker(self) -> None:
        if self._worker is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await self._worker.close()
            self._worker = None

    def _notified(self, notice: Notice) -> None:
        if isinstance(notice, WorkerLost):
            reason = f"the device worker ended with {notice.reason}"
            self._set(state=ReplicaPhase.STARTING, reason=reason, port=0, pid=0)
        self._is_changed.set()

    # -- its place ----------------------------------------------------------------------------------------------------

    def _set(self, **changes: object) -> None:
        place = msgspec.structs.replace(self.place, **changes)
        if place != self.place:
            self.place = msgspec.structs.replace(place, version=place.version + 1)
            self._is_untold.set()

    async def _tell_places(self) -> None:
        num_failures = 0
        while True:
            await self._is_untold.wait()
            self._is_untold.clear()
            try:
                telling = self._tell(self.place)
                if telling is not None:
                    await telling
                num_failures = 0
            except Exception as error:  # nothing else would ever tell what comes later
                num_failures += 1
                log.debug("%s cannot report its place: %s", self._label, error)
                await asyncio.sleep(backoff_s(num_failures, FIRST_TELL_AGAIN_S, MAX_TELL_AGAIN_S))
                self._is_untold.set()


def _own_store(store: KVStoreOptions, name: ReplicaName) -> KVStoreOptions | None:
    """The store with a folder on disk that no other replica of this host has: a folder is one process's at a time."""
    if not (store.host_bytes or (store.disk_dir and store.disk_bytes)):
        return None
    folder = Path(store.disk_dir).expanduser() / blake2b(str(name).encode(), digest_size=8).hexdigest()
    return msgspec.structs.replace(store, disk_dir=str(folder) if store.disk_dir else "")


def _listen(link: LinkOptions, address: str) -> ListenOptions:
    """The listening end of a worker on this host; paths are those of this host's user."""
    cert, key = (os.path.expanduser(path) for path in (link.tls_cert, link.tls_key))
    secret = str(Path(link.secret_file).expanduser())
    return ListenOptions(address, 0, secret, cert, key, link.allows_plain)
