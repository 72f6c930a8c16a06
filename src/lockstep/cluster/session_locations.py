"""Session locations: queries which KV the worker and its store hold for each session, on demand.

Events alone are not enough: stores evict blocks when space is needed, the device releases pinned blocks before a
request waits, and a new worker starts with the files of the previous one. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from lockstep.cluster.models import Model
from lockstep.cluster.sessions import Sessions, StoredTokens
from lockstep.executors.base import kv_environment
from lockstep.hosts.workers import HostedWorkers
from lockstep.worker.messages import KeptReport, Loaded, SessionsReport
from lockstep.worker.supervised import SupervisedWorker


class SessionLocations:
    """Query of session locations; concurrent callers share one query.

    Args:
        models: returns the current models, by id.
        has_store: returns whether KV that leaves the device is stored.
    """

    def __init__(
        self,
        worker: SupervisedWorker | HostedWorkers,
        sessions: Sessions,
        models: Callable[[], Mapping[str, Model]],
        has_store: Callable[[], bool],
    ) -> None:
        self._worker = worker
        self._sessions = sessions
        self._models = models
        self._has_store = has_store
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        """Next query; it serves all callers that arrived after the running query started."""

    async def find(self) -> None:
        """Update the stored and retained tokens of each session. If the worker does not answer, the stored tokens are
        unknown."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._find())
        await asyncio.shield(self._next)

    async def _find(self) -> None:
        async with self._lock:
            self._next = None
            if not self._sessions.by_id:
                return
            loaded = {
                model.replica.key: model.replica.loaded
                for model in self._models().values()
                if model.replica is not None and model.replica.loaded is not None
            }
            environments = [_environment_of(each) for each in loaded.values()]
            on_device, kept = await self._worker.session_locations(environments)
            if on_device is not None:
                self._update_device(on_device)
            self._update_stored(kept, {key: (index, each) for index, (key, each) in enumerate(loaded.items())})

    def _update_device(self, report: SessionsReport) -> None:
        by_id = self._sessions.by_id
        for session in by_id.values():
            session.kept_tokens.clear()
        for reports in report.replicas.values():
            for each in reports:
                if each.session_id in by_id and each.num_tokens:
                    by_id[each.session_id].kept_tokens[each.owner] = each.num_tokens

    def _update_stored(self, report: KeptReport | None, loaded: Mapping[str, tuple[int, Loaded]]) -> None:
        """Update the stored tokens of each session, by model."""
        known, by_id = None if report is None else report.sessions, self._sessions.by_id
        for session in by_id.values():
            session.is_stored_known = known is not None or not self._has_store()
            session.stored.clear()
        if known is None:
            return
        for model in self._models().values():
            if model.replica is None or model.replica.key not in loaded:
                continue
            index, engine = loaded[model.replica.key]
            size = engine.config.block_size
            for each in known[index]:
                if each.session_id in by_id and each.owner == model.id:
                    counts = (each.num_blocks, each.num_on_host, each.num_on_disk)
                    by_id[each.session_id].stored[model.id] = StoredTokens(*(count * size for count in counts))


def _environment_of(loaded: Loaded) -> bytes:
    return kv_environment(loaded.environment, loaded.geometry, loaded.fingerprint)
