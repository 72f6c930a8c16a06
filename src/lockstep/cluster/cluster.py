"""Cluster of a manifest: serves requests by local and remote models; the server's only interface to them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from lockstep.artifacts.source import open_artifact
from lockstep.cluster.backend import Backend
from lockstep.cluster.base import EventStream, Health, ModelCard, ShownChunk
from lockstep.cluster.cluster_stats import ClusterStats, History, stats_of
from lockstep.cluster.events import EventLog
from lockstep.cluster.manifest import Manifest, Tier
from lockstep.cluster.manifest_file import Validator, dump, parse, plain
from lockstep.cluster.manifest_permissions import NONE, OperatorNames, Permissions
from lockstep.cluster.models import Model
from lockstep.cluster.multi_host import MultiHostBackend
from lockstep.cluster.recorded import RecordedBackend, RecordedModel
from lockstep.cluster.reload import Reloads, first_of
from lockstep.cluster.replica_state import ReplicaState
from lockstep.cluster.requests import RequestHandler
from lockstep.cluster.resolve import LoadProgress, OpenedManifest
from lockstep.cluster.runtime_adapters import RuntimeAdapters
from lockstep.cluster.sessions import SessionName
from lockstep.cluster.snapshot import ClusterSnapshot, Replaced, SessionSnapshot, host_named
from lockstep.cluster.state import ClusterOptions, ClusterState
from lockstep.engine.kv_tiers import TierStats
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.request import GenerationRequest
from lockstep.errors import (
    HostNotFoundError,
    InvalidParameterError,
    LockstepError,
    SessionNotFoundError,
    UnavailableError,
)
from lockstep.worker.messages import AnswerShown
from lockstep.worker.progress import CallProgress
from lockstep.worker.supervised import SupervisedWorker

log = logging.getLogger(__name__)

STEPS_PER_S = 4.0
"""Step reports per second and replica while steps are watched."""

Validators = Mapping[str, Validator]


class Cluster:
    """Server of requests to the models of a manifest. Used from one event loop.

    Args:
        manifest: the first manifest to serve.
        validators: validators of the blocks that other packages own, for manifests that replace the first one.
        progress: called with the stages of the first loads.
    """

    def __init__(
        self,
        manifest: Manifest,
        options: ClusterOptions | None = None,
        *,
        validators: Validators | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        self._manifest = manifest
        self._validators = validators or {}
        self._progress = progress
        self._state = state = ClusterState(options or ClusterOptions(), manifest)
        self._handler = RequestHandler(state)
        self._prepared: OpenedManifest | None = None
        self._created_s = int(state.events.unix_time_s())
        self._history = History(self._state.now_s)
        self._sweeping: asyncio.Task[None] | None = None
        self._reloads = Reloads(state, self._read)
        self._operator_names = OperatorNames(
            manifest,
            state.options.folder,
            lambda path: open_artifact(path, cache_dir=state.options.load.cache_dir),
            opens_sources=state.options.backend is Backend.AUTO,
        )
        self.adapters = RuntimeAdapters(state, self._reloads, self._operator_names)
        """Adapters that are loaded and unloaded at runtime."""

    @property
    def events(self) -> EventLog:
        """Log of its transitions, hops and steps."""
        return self._state.events

    @property
    def recording(self) -> str | None:
        """Directory of the step recordings; None: nothing is recorded."""
        trace = self._state.options.worker.trace
        return None if trace is None else trace.directory

    @property
    def worker_pid(self) -> int | None:
        """Process id of the device worker; None: it runs as a thread, or is lost."""
        return self._state.worker.pid

    # -- models and their answers ---------------------------------------------------------------------------------

    def cards(self) -> tuple[ModelCard, ...]:
        """Cards of all served models, in order of definition."""
        return tuple(map(self._card, self._state.models.by_id.values()))

    def card(self, name: str | None) -> ModelCard:
        """Card of the model with a name or alias; ModelNotFoundError: there is none."""
        return self._card(self._state.models.find(name))

    def stream(self, request: GenerationRequest, progress: CallProgress | None = None) -> EventStream:
        """Answer a request. Closing the stream early aborts the request within one step.

        Args:
            progress: records the stations of the call, and its wait reasons.

        Raises (on the first ``anext`` if known by then):
            ModelNotFoundError, InvalidParameterError, PromptTooLongError, ChatTemplateError: the request is invalid.
            QueueFullError, UnavailableError: the request cannot be served now.
            QueueDeadlineError, DeadlineError, RequestFailedError, WorkerLostError: the request was accepted and then
            ended.
        """
        return self._handler.stream(request, progress or CallProgress())

    @property
    def keeps_chunks(self) -> bool:
        """True if each batch of stream events is delivered separately, however slow the reader is."""
        return isinstance(self._state.options.backend, RecordedBackend)

    @property
    def records_chunks(self) -> bool:
        """True if `shown` is needed: content is recorded, on this machine."""
        trace = self._state.options.worker.trace
        return trace is not None and trace.has_content and self._state.hosts is None

    def shown(self, progress: CallProgress, chunks: Sequence[ShownChunk]) -> None:
        """Record the chunks in which an answer was streamed, so that a replay can repeat them."""
        worker = self._state.worker
        if chunks and progress.sequences and isinstance(worker, SupervisedWorker):
            place = progress.sequences[-1]  # an entry model's part comes before
            worker.record(AnswerShown(place.replica, place.seq_id, tuple(chunks)))

    async def metrics(self) -> Mapping[str, MetricsSnapshot]:
        """Metrics of each replica, under the first of the models that share it. Can be read while a step runs."""
        by_replica = await self._state.worker.metrics()
        found = {}
        for replica in self._state.replicas.all():
            models = self._state.models_on(replica)
            if replica.key in by_replica and models:
                found[models[0].id] = by_replica[replica.key]
        return found

    async def stats(self, window_s: float) -> ClusterStats:
        """Rates and times over the last seconds, as far back as stats were read."""
        metrics, num_requests = await self.metrics(), self.snapshot().counters.requests_total
        return stats_of(self._history, metrics, self.kv_tiers, num_requests, window_s)

    @property
    def kv_tiers(self) -> Mapping[str, TierStats]:
        """Tiers of the KV store, host and disk, as of the last metrics; empty: there is no store."""
        return self._state.worker.kv_tiers

    def health(self) -> Health:
        """Health of the cluster: ready while every model that is declared resident can answer."""
        reason = self._trouble()
        return Health(not reason, reason, self._state.warnings())

    def _trouble(self) -> str:
        if not self._state.is_booted:
            return self._state.loading
        models = self._state.models.by_id
        for model in models.values():
            replica = model.replica
            if replica is None or model.entry.tier is not Tier.RESIDENT or not replica.is_pinned:
                continue
            if reason := self._state.trouble(replica):
                return reason if len(models) == 1 else f"{model.id}: {reason}"
        return ""

    async def check(self) -> str:
        """Check the invariants of the KV blocks between two steps. Returns the violated one; empty: all hold."""
        checked = await self._state.worker.check()
        return "the worker does not answer" if checked is None else checked.fault

    async def reset_prefix_cache(self) -> int:
        """Drop cached blocks that are not in use; returns their number."""
        return await self._state.worker.reset_prefix_cache()

    @property
    def state(self) -> ClusterState:
        """Current models, and the replicas that serve them."""
        return self._state

    @property
    def num_gateways(self) -> int:
        """Number of gateways that serve this cluster and share its rate limits; 1 without ``hosts:``."""
        return 1 if self._state.hosts is None else self._state.hosts.state.num_gateways

    @property
    def num_open(self) -> int:
        """Number of calls in progress."""
        return self._handler.num_open

    async def prepare(self) -> None:
        """Open the local models and check their sizes; nothing is downloaded or loaded. LockstepError: `start` would
        fail."""
        opened = await self._state.open(self._manifest, self._progress, fetches=False)
        if len(opened.needs) == len(self._manifest.entries):
            self._prepared = opened

    async def start(self) -> None:
        """Start the worker and load the models; returns when requests can be served. LockstepError: a model cannot be
        loaded."""
        state = self._state
        try:
            await state.worker.start()  # first, as the process imports its modules while the sources are opened
            if state.hosts is not None:
                await self._join(state.hosts)
            opened = self._prepared or await state.open(self._manifest, self._progress)
            models = state.build(self._manifest, opened)
            state.replicas.progress = self._report_load
            state.apply(models, opened)
            async with asyncio.TaskGroup() as loads:
                for replica in state.replicas.all():
                    loads.create_task(
                        state.bring_up(replica) if replica.is_pinned else state.replicas.read_text(replica)
                    )
        except BaseException as error:
            await self.close()
            raise first_of(error) from None
        state.replicas.progress = None
        state.is_booted = True
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    async def _join(self, hosts: MultiHostBackend) -> None:
        """Join a cluster on several hosts. If it already has gateways, their manifest applies."""
        own, text = dump(self._manifest), await hosts.start()
        if text != own:
            log.warning(
                "other gateways already serve %s; their manifest applies instead of this one", self._manifest.cluster
            )
            self._manifest, self._prepared = await self._state.system.run_in_thread(partial(self._read, text)), None
            self._state.declare(self._manifest)
        self._state.on_manifest = self._reloads.follow

    def abort_all(self, error: LockstepError) -> None:
        """End every open call with this error."""
        self._state.worker.abort_all(error)
        self._state.replicas.fail_all(error)
        for model in self._state.models.by_id.values():
            model.sessions.fail_all(error)
            if model.remote is not None:
                model.remote.abort_all(error)

    async def close(self) -> None:
        """End open calls, unload the models, and end the processes that were started."""
        self.abort_all(UnavailableError("the server is closing"))
        tasks = [task for task in (self._sweeping, *self._reloads.tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await self._state.replicas.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in self._state.models.by_id.values():
            if model.remote is not None:
                await model.remote.close()
        await self._state.close()

    # -- management -----------------------------------------------------------------------------------------------

    @property
    def is_fixed(self) -> bool:
        """True if HTTP requests cannot change what is served, because it was built from a command line. Such a cluster
        has no manifest to show, and does not offer the operations below on manifests, loading and unloading."""
        return self._state.options.is_fixed

    def snapshot(self) -> ClusterSnapshot:
        """Snapshot of the whole cluster; UnavailableError: its models have not been opened yet."""
        self._state.check_opened()
        return self._state.snapshot(self._reloads.is_replacing)

    def manifest_text(self) -> str:
        """Effective manifest as YAML, in a form that `replace` accepts."""
        return dump(self._declared)

    def manifest_plain(self) -> Mapping[str, Any]:
        """Effective manifest as maps, lists and scalars, in a form that `replace` accepts as JSON."""
        return plain(self._declared)

    async def replace(
        self, text: str, environment: Mapping[str, str] | None = None, permissions: Permissions = NONE
    ) -> Replaced:
        """Replace the manifest as a whole; see `lockstep.cluster.reload`. Continues if the caller disconnects.

        Args:
            environment: environment variables that the text may use; None: none, as the text came over the network.
            permissions: permissions of the sender of a text that came over the network; the operator's own text has
                all.

        Raises:
            ManifestError: the text is not a valid manifest; the error lists every problem.
            UnavailableError: another manifest is being applied, or the first models are still loading.
            LockstepError: the manifest cannot be served; the previous one stays in effect.
        """
        permission_check = (
            None
            if environment is not None
            else self._operator_names.check_for(permissions, self._state.models.declared.hosts)
        )
        manifest = await self._state.system.run_in_thread(
            partial(parse, text, validators=self._validators, environment=environment, author_check=permission_check)
        )
        self._check_booted()
        self._reloads.check(manifest)
        if environment is not None:
            self._operator_names.add(manifest)
        return await self._reloads.replace(manifest, permission_check)

    async def load_model(self, id_: str) -> None:
        """Load a model; returns when it can answer at once.

        Raises:
            ModelNotFoundError: no model has this id or alias.
            InvalidParameterError: the model is remote.
            LockstepError: the model cannot be loaded.
        """
        replica = self._replica(id_)
        replica.is_dismissed = False
        self._state.pin(replica, self._state.models)
        await self._state.bring_up(replica)

    async def unload_model(self, id_: str) -> None:
        """Unload a model, and the models that share its replica. The next request loads it again. Returns when its
        calls have ended and its memory is free.

        Raises:
            ModelNotFoundError, InvalidParameterError: as in `load_model`.
        """
        replica = self._replica(id_)
        replica.is_dismissed = True
        replica.is_pinned = False
        await self._state.replicas.unload(replica, self._state.options.drain_s, "by hand")
        if self._state.hosts is not None:
            await self._state.hosts.client.dismiss(replica.key)

    async def drain_host(self, name: str, is_drained: bool) -> str:
        """Drain a host, so that its replicas, requests and sessions move to other hosts, or make it available again.
        Returns the host's name as soon as the controller has accepted; replicas finish their open requests first.

        Args:
            name: name of the host, or an address that only one host has.

        Raises:
            HostNotFoundError: no host has this name or address, or the manifest has no ``hosts:``.
        """
        hosts = self._state.hosts
        if hosts is None:
            raise HostNotFoundError(
                "the manifest has no `hosts:`, so everything runs on one machine and no host can be drained"
            )
        found = host_named(self.snapshot().hosts, name)
        await hosts.drain(found, is_drained)
        return found

    async def locate_sessions(self, limit_s: float | None = None) -> None:
        """Query the worker for the locations of sessions. If it does not answer in time, the last known locations are
        kept.

        Args:
            limit_s: time limit in seconds; None: waits until the worker answers or fails.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._state.session_locations.find()

    def sessions(self) -> tuple[SessionSnapshot, ...]:
        """All named sessions, least recently used first."""
        return self._state.sessions.snapshot(self._state.now_s())

    async def end_session(self, id_: str, caller: str | None = None) -> None:
        """Evict a session's KV and forget the session.

        Args:
            caller: key name of the session's caller; None: the sessions of all callers that have this id.

        Raises:
            SessionNotFoundError: there is no such session.
            UnavailableError: a restarted worker has not opened its KV store yet, so the stored KV cannot be deleted.
        """
        await self.locate_sessions()
        known = self._state.sessions.by_id
        names = map(SessionName.of, known) if caller is None else (SessionName(caller, id_),)
        keys = [name.key for name in names if name.id == id_ and name.key in known]
        if not keys:
            raise SessionNotFoundError(f"No session with id '{id_}'.", param="session_id")
        if not all(known[key].is_stored_known for key in keys):
            raise UnavailableError("the session's stored KV is not known yet; try again in a moment", retry_after_s=1.0)
        for key in keys:
            self._state.sessions.forget(key)
        for key, model in itertools.product(keys, tuple(self._state.models.by_id.values())):
            model.sessions.drop(key)
            if model.replica is not None:
                await self._state.worker.end_session(model.replica.key, key, model.id)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _read(self, text: str) -> Manifest:
        """Parse a manifest from another gateway of this cluster; it may use this server's environment."""
        return parse(text, validators=self._validators, environment=self._state.options.environment)

    @property
    def _declared(self) -> Manifest:
        self._state.check_opened()
        return self._state.models.declared

    async def _sweep(self) -> None:
        """Periodically evict the KV of idle sessions, and check whether steps are still watched."""
        was_watched = False
        while True:
            await self._state.system.sleep(self._state.models.declared.sessions.sweep_interval_s)
            try:
                await self._state.sweep_idle(self._state.now_s())
            except Exception:  # an internal error must not stop the eviction of sessions
                log.exception("internal error while evicting idle sessions")
            is_watched = self.events.num_watchers > 0
            if is_watched != was_watched:
                self._state.worker.watch_steps(STEPS_PER_S if is_watched else 0.0)
                was_watched = is_watched

    def _report_load(self, replica: ReplicaState, stage: str, fraction: float) -> None:
        """Report the stage of a first load, under the first of the models that share the replica."""
        models = self._state.models_on(replica)
        if self._progress is not None and models:
            self._progress(models[0].id, stage, fraction)

    def _check_booted(self) -> None:
        """Reject what would make startup fail: removing models while the first ones are loading."""
        if not self._state.is_booted:
            raise UnavailableError("the models are being loaded for the first time; try again when they are loaded")

    def _replica(self, id_: str) -> ReplicaState:
        self._state.check_opened()
        replica = self._state.models.find(id_).replica
        self._check_booted()
        if replica is None:
            raise InvalidParameterError(f"{id_} is remote; it cannot be loaded or unloaded here", param="model")
        return replica

    def _card(self, model: Model) -> ModelCard:
        replica, remote, is_booted = model.replica, model.remote, self._state.is_booted
        recorded = remote.text if isinstance(remote, RecordedModel) else None
        known = recorded.tokenizer if recorded else replica.tokenizer if replica else None
        loaded = None if replica is None else replica.loaded
        mates = () if replica is None else self._state.models_on(replica)
        return ModelCard(
            name=model.id,
            aliases=model.entry.aliases,
            root=model.entry.adapter or model.entry.source,
            created_s=self._created_s,
            tier=model.status(self._state.now_s()),
            max_model_len=recorded.max_model_len if recorded else loaded.max_model_len if loaded else None,
            has_chat_template=None if known is None else known.has_chat_template,
            parent=_parent(model, mates),
            adapter=model.entry.adapter,
            text=None if not is_booted else known if remote is None else remote.tokenizer,
            absence="the model is loading" if is_booted else self._state.loading,
            task=None if replica is None else replica.spec.options.task,
            scoring=None if loaded is None else loaded.scoring,
        )


def _parent(model: Model, mates: Sequence[Model]) -> str | None:
    """Id of the first model without an adapter on the same replica; None: the model itself is that, or has none. The
    parent of an adapter whose base has no name of its own is the source."""
    base = next((each for each in mates if each.entry.adapter is None), None)
    if base is None:
        return model.entry.source if model.entry.adapter is not None else None
    return None if base is model else base.id
