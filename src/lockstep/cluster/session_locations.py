"""Session locations: the KV that the worker and its store hold of each session, read on demand.

Events alone do not tell: stores evict blocks when others need the room, the device releases pinned blocks before a
request waits, and a new worker starts with the files of the one before it. Event loop only.
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
    """Asks where sessions are, one question at a time however many want to know.

    Args:
        models: those that there are, by id.
        has_store: whether KV that leaves the device is kept.
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
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        """The next query, which answers every caller that came after the running one began."""

    async def find(self) -> None:
        """Bring what is known of each session up to date; where the worker does not answer, it is unknown."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._find())
        await asyncio.shield(self._next)

    async def _find(self) -> None:
        async with self._turn:
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
                self._note_device(on_device)
            self._note_kept(kept, {key: (index, each) for index, (key, each) in enumerate(loaded.items())})

    def _note_device(self, report: SessionsReport) -> None:
        by_id = self._sessions.by_id
        for session in by_id.values():
            session.kept_tokens.clear()
        for reports in report.replicas.values():
            for each in reports:
                if each.session_id in by_id and each.num_tokens:
                    by_id[each.session_id].kept_tokens[each.owner] = each.num_tokens

    def _note_kept(self, report: KeptReport | None, loaded: Mapping[str, tuple[int, Loaded]]) -> None:
        """Note what the store has, by models whose blocks it would be."""
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
