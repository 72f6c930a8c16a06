"""Replica host: runs one placed replica, i.e. a device worker that listens for gateways, and reports its status.

It does not depend on Ray, whose actor runs it (`lockstep.hosts.ray_runtime`). When the worker is lost, it is restarted
and the model is loaded again, until the controller removes the replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
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

SUSPECT_LOADS = 2
"""Number of workers that ended during a load before the model is first tried in a throw-away process."""
CLOSE_LIMIT_S = 8.0
"""Time in seconds for the worker to end in an orderly way; its own limit is shorter."""


@dataclass(frozen=True, slots=True)
class RetryDelays:
    """Delays in seconds before something is tried again; each is doubled with each consecutive failure."""

    first_load_s: float = 1.0
    """Delay after the first failed load or start of a worker."""
    max_load_s: float = 60.0
    first_report_s: float = 0.2
    """Delay before a report that could not be delivered is sent again."""
    max_report_s: float = 5.0


@dataclass(frozen=True, slots=True)
class LocalHost:
    """Host of a replica: its name, Ray node id and address."""

    host: str
    node_id: str
    address: str
    """Address on which the replica's workers listen."""


class ReplicaHost:
    """One replica and its successive workers. Event loop only.

    Args:
        worker: options of the worker process; its kind and listening address are set here.
        report: called with the current status whenever it changes, and again until it raises no error. Intermediate
            statuses are skipped.
        store: KV store that each worker opens, in this replica's own directory; None: there is no store.
    """

    def __init__(
        self,
        demand: Demand,
        number: int,
        worker: WorkerOptions,
        link: LinkOptions,
        here: LocalHost,
        report: Callable[[ReplicaStatus], Awaitable[None] | None],
        store: KVStoreOptions | None = None,
        delays: RetryDelays | None = None,
    ) -> None:
        self._delays = delays or RetryDelays()
        self._demand = demand
        self._options = replace(
            worker, kind="process", address=None, prestarted=None, listen=_listen(link, here.address)
        )
        self._report = report
        self._worker: SupervisedWorker | None = None
        self._is_changed = asyncio.Event()
        self._is_unreported = asyncio.Event()
        self._num_failures = 0
        """Number of consecutive failed loads."""
        self._num_lost = 0
        """Number of consecutive workers that ended while they loaded the model."""
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
        self._host_store = HostStore()

    @property
    def name(self) -> ReplicaName:
        return self.place.name

    @property
    def _label(self) -> str:
        return self._demand.label(self.place.number)

    async def start(self) -> None:
        """Start the worker and load the model in the background, and restart both when they are lost."""
        loop = asyncio.get_running_loop()
        self._is_unreported.set()
        self._tasks = [loop.create_task(self._run()), loop.create_task(self._send_reports())]

    async def close(self) -> None:
        """End the worker and stop reporting, within a limited time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_worker()
        await self._options.system.run_in_thread(self._host_store.close)

    # -- the worker ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                worker = await self._current_worker()
                await self._load(worker)
                await self._until_lost(worker)
            except WorkerLostError as error:
                self._num_lost += error.is_suspect
                self._set(state=ReplicaPhase.STARTING, reason=str(error), port=0, pid=0)
            except Exception as error:  # without this loop the model would not be loaded again
                await self._failed(error)

    async def _current_worker(self) -> SupervisedWorker:
        """Return the current worker, after starting it if there is none, or waiting for its restart.

        Raises:
            UsageError, ExecutorError: no process can be started.
        """
        if self._worker is None:
            self._set(state=ReplicaPhase.STARTING)  # keeps the reason of an earlier failure
            self._worker = SupervisedWorker(self._options, self._on_notice)
            await self._worker.start()
            if self._store is not None:
                self._worker.open_store(
                    await self._options.system.run_in_thread(partial(self._host_store.opened, self._store))
                )
        while not self._worker.is_up:
            self._is_changed.clear()
            await self._is_changed.wait()
        self._set(pid=self._worker.pid or 0, num_starts=self.place.num_starts + 1)
        return self._worker

    async def _load(self, worker: SupervisedWorker) -> None:
        """Load the model and become ready.

        Raises:
            LockstepError: the model or one of its adapters cannot be loaded, or the worker cannot listen.
            WorkerLostError: the worker was lost during the load.
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
        listening = worker.listening  # reported before any reply to a command
        if listening is None or worker.loaded(demand.key) is None:
            raise WorkerLostError("the device worker ended right after it had loaded the model")
        if listening.fault:
            raise UnavailableError(f"the worker cannot listen: {listening.fault}")
        if demand.options.adapters:  # a worker loads a model without those that it cannot open
            await worker.use_adapters(demand.key, demand.options.adapters)
        self._num_failures = self._num_lost = 0
        self._set(state=ReplicaPhase.READY, reason="", address=listening.host, port=listening.port)

    async def _until_lost(self, worker: SupervisedWorker) -> None:
        """Wait until the worker no longer has the model; WorkerLostError: the reason."""
        loaded = worker.loaded(self._demand.key)
        while worker.loaded(self._demand.key) is loaded:
            self._is_changed.clear()
            await self._is_changed.wait()
        raise WorkerLostError(self.place.reason or "the device worker ended")

    async def _failed(self, error: Exception) -> None:
        """Handle a failed load or worker start: after a delay, a new process is started."""
        if not isinstance(error, LockstepError):
            log.error("internal error in %s", self._label, exc_info=error)
        self._num_failures += 1
        delay_s = backoff_s(self._num_failures, self._delays.first_load_s, self._delays.max_load_s)
        reason = str(error) if isinstance(error, LockstepError) else repr(error)
        log.warning("%s could not be loaded; next attempt in %.0f s: %s", self._label, delay_s, reason)
        await self._end_worker()
        self._set(state=ReplicaPhase.FAILED, reason=reason, port=0, pid=0)
        await self._options.system.sleep(delay_s)

    async def _end_worker(self) -> None:
        if self._worker is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await self._worker.close()
            self._worker = None

    def _on_notice(self, notice: Notice) -> None:
        if isinstance(notice, WorkerLost):
            reason = f"the device worker ended with {notice.reason}"
            self._set(state=ReplicaPhase.STARTING, reason=reason, port=0, pid=0)
        self._is_changed.set()

    # -- status -------------------------------------------------------------------------------------------------------

    def _set(self, **changes: object) -> None:
        place = msgspec.structs.replace(self.place, **changes)
        if place != self.place:
            self.place = msgspec.structs.replace(place, version=place.version + 1)
            self._is_unreported.set()

    async def _send_reports(self) -> None:
        num_failures = 0
        while True:
            await self._is_unreported.wait()
            self._is_unreported.clear()
            try:
                sending = self._report(self.place)
                if sending is not None:
                    await sending
                num_failures = 0
            except Exception as error:  # without this loop later changes would not be reported
                num_failures += 1
                log.debug("%s could not report its status: %s", self._label, error)
                delays = self._delays
                await self._options.system.sleep(backoff_s(num_failures, delays.first_report_s, delays.max_report_s))
                self._is_unreported.set()


def _own_store(store: KVStoreOptions, name: ReplicaName) -> KVStoreOptions | None:
    """KV store options with a directory that no other replica on this host uses, because only one process may use a
    directory."""
    if not (store.host_bytes or (store.disk_dir and store.disk_bytes)):
        return None
    folder = Path(store.disk_dir).expanduser() / blake2b(str(name).encode(), digest_size=8).hexdigest()
    return msgspec.structs.replace(store, disk_dir=str(folder) if store.disk_dir else "")


def _listen(link: LinkOptions, address: str) -> ListenOptions:
    """Listening options of a worker on this host; paths refer to this host's user."""
    cert, key = (os.path.expanduser(path) for path in (link.tls_cert, link.tls_key))
    secret = str(Path(link.secret_file).expanduser())
    return ListenOptions(address, 0, secret, cert, key, link.allows_plain)
