"""Live cluster state: models, replicas and sessions of a cluster, and the events of their transitions."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lockstep.cluster.backend import Backend, OneModel, served_by
from lockstep.cluster.budget import cut_texts, refusal, table_text
from lockstep.cluster.controller_state import ControllerState
from lockstep.cluster.events import EventLog
from lockstep.cluster.manifest import PRIORITIES, Manifest, ModelEntry
from lockstep.cluster.models import Model, ModelSet, session_limit, unopened_model
from lockstep.cluster.multi_host import MultiHostBackend, OpenController, ray_controller
from lockstep.cluster.plan_recorder import PlanRecorder
from lockstep.cluster.planner import Phase, PlanPolicy, UnloadReason, plan
from lockstep.cluster.recorded import RecordedBackend, RecordedModel
from lockstep.cluster.remote import RemoteModel
from lockstep.cluster.replica_state import FAILED, STANDBY, ReplicaState
from lockstep.cluster.replicas import LOST, Replicas
from lockstep.cluster.resolve import (
    LoadProgress,
    OpenedManifest,
    corrected,
    has_device_alone,
    local_part,
    open_manifest,
)
from lockstep.cluster.route_recorder import RouteRecorder
from lockstep.cluster.session_locations import SessionLocations
from lockstep.cluster.sessions import ModelSessions, Session, SessionName, Sessions, StoredTokens
from lockstep.cluster.snapshot import BudgetSnapshot, ClusterCounters, ClusterSnapshot, TransitionSnapshot
from lockstep.cluster.threads import call_on, in_thread
from lockstep.engine.kv_tiers import HostStore, KVStoreOptions
from lockstep.engine.options import LoadOptions
from lockstep.engine.sessions import SessionChange
from lockstep.errors import LockstepError, OverBudgetError, UnavailableError
from lockstep.hosts.values import GatewayLimits
from lockstep.hosts.workers import GroupLost, HostedWorkers
from lockstep.worker.lifecycle import WorkerLost, WorkerRestarted
from lockstep.worker.link import WorkerOptions
from lockstep.worker.messages import KVRejected, SessionsChanged, StepReport
from lockstep.worker.supervised import Notice, SupervisedWorker

log = logging.getLogger(__name__)

MAX_TRANSITIONS = 256
"""Number of transitions that are kept for snapshots."""
REPLACED = "replaced"
"""Reason of the unload of a replica that a new manifest no longer declares."""
LRU_REASONS = ("room", "idle")
"""Reasons that evict the least recently used idle session; for others its KV goes with the model or worker."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Options of how a manifest is served."""

    backend: Backend | OneModel | RecordedBackend = Backend.AUTO
    load: LoadOptions = field(default_factory=LoadOptions)
    """Load options of every model; the model's own ``engine`` block overrides them."""
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    policy: PlanPolicy = field(default_factory=PlanPolicy)
    drain_s: float = 10.0
    """Time in seconds that open calls get to finish before a replica is unloaded; after it they are aborted."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables from which the API keys of remote models are read."""
    kv: KVStoreOptions = field(default_factory=KVStoreOptions)
    """Options of the KV store outside of the device; the manifest's budgets override them."""
    folder: Path | None = None
    """Directory of the operator's manifest. Manifests sent over HTTP may name any model in it."""
    open_controller: OpenController = ray_controller
    """Function that finds or starts the controller of a cluster on several hosts."""
    gateway: GatewayLimits = field(default_factory=GatewayLimits)
    is_fixed: bool = False
    """True if the manifest was built from command-line flags. HTTP requests may read it but not change it."""


class ClusterState:
    """Current models of a cluster and the replicas that serve them. Startup, reloads and management requests change it.

    Args:
        manifest: the first manifest to serve.
    """

    def __init__(self, options: ClusterOptions, manifest: Manifest) -> None:
        self.options = options
        self.system, self.now_s = options.worker.system, options.worker.system.now_s
        self.models = ModelSet(manifest, served_by(manifest, options.backend), unopened_model)
        """Models that serve calls, or will serve them once their artifacts are opened."""
        self.sessions = Sessions(is_shared=manifest.hosts is not None)
        trace = options.worker.trace
        self._routes = None if trace is None or manifest.hosts is None else RouteRecorder(trace, self.system)
        self.hosts: MultiHostBackend | None = None
        """Backend of a cluster on several hosts; None: all models run on this machine."""
        self.worker: SupervisedWorker | HostedWorkers
        if manifest.hosts is None:
            self.worker = SupervisedWorker(options.worker, self._on_notice)
        else:
            self.hosts = MultiHostBackend(
                manifest,
                options.worker,
                options.kv,
                options.policy,
                lambda: self.models,
                self._on_notice,
                self._apply_controller_state,
                self.sessions,
                options.open_controller,
                self._routes,
                options.gateway,
            )
            self.worker = self.hosts.workers
        self.events = EventLog(self.system.unix_time_s)
        self.counters = ClusterCounters()
        self._host_store = HostStore()
        self.session_locations = SessionLocations(
            self.worker, self.sessions, lambda: self.models.by_id, lambda: self._host_store.is_open
        )
        self.transitions: deque[TransitionSnapshot] = deque(maxlen=MAX_TRANSITIONS)
        self._plans = None if trace is None or self.hosts is not None else PlanRecorder(trace, self.system)
        on_planned = None if self._plans is None else self._plans.planned
        decide = plan if self.hosts is None else self.hosts.decide
        self.replicas = Replicas(self.worker, options.policy, self._moved, on_planned, self.system, decide)
        if self.hosts is not None:
            self.hosts.replicas = self.replicas
        self.on_manifest: Callable[[str], None] = lambda text: None
        """Called with the text of a manifest that another gateway applied."""
        self.opened: OpenedManifest | None = None
        """Resolved artifacts of the models that serve calls; None: no artifact has been opened yet."""
        self.is_booted = False
        self._coming: ModelSet | None = None
        """Models of a manifest that is being applied."""

    @property
    def loading(self) -> str:
        """Error message for calls that arrive before startup has finished."""
        return "the model is loading" if len(self.models.by_id) == 1 else "the models are loading"

    def declare(self, manifest: Manifest) -> None:
        """Replace the declared models before any artifact is opened; they can then be found by name."""
        assert self.opened is None, "models that were opened are replaced"
        self.models = ModelSet(manifest, served_by(manifest, self.options.backend), unopened_model)

    def check_opened(self) -> None:
        """Raise UnavailableError until the models' sources have been opened."""
        if self.opened is None:
            raise UnavailableError(self.loading)

    def find(self, name: str | None) -> Model:
        """Find the model of a call.

        Raises:
            ModelNotFoundError: no model has this name.
            UnavailableError: the cluster has not started yet.
        """
        model = self.models.find(name)
        if not self.is_booted:
            raise UnavailableError(self.loading)
        return model

    # -- from a manifest to models --------------------------------------------------------------------------------

    async def open(
        self, manifest: Manifest, progress: LoadProgress | None = None, *, fetches: bool = True
    ) -> OpenedManifest:
        """Open a manifest's sources and check their sizes against its budgets.

        Args:
            fetches: whether models may be downloaded from the hub. If False, models that need a download are left out.

        Raises:
            ArtifactError: a source cannot be served.
            ConfigError: a remote model has no base URL.
            OverBudgetError: the models need more than the budgets allow.
        """
        served = served_by(manifest, self.options.backend)
        is_alone = has_device_alone(served)
        loop, held_bytes = asyncio.get_running_loop(), self.replicas.held_bytes
        report = None if progress is None else partial(call_on, loop, progress)

        def open_them() -> OpenedManifest:
            those = served if fetches else local_part(served)
            return open_manifest(those, self.options.load, held_bytes, report, is_alone=is_alone)

        return self.weighed(await in_thread(open_them, self.system))

    def weighed(self, opened: OpenedManifest) -> OpenedManifest:
        """Replace predicted sizes by the sizes measured at load. OverBudgetError: the models need more than the budgets
        allow."""
        loaded = {replica.key: replica.loaded for replica in self.replicas.all() if replica.loaded is not None}
        opened = corrected(opened, loaded)
        if reason := refusal(opened.table):
            raise OverBudgetError(reason, table_text(opened.table))
        return opened

    def build(self, manifest: Manifest, opened: OpenedManifest) -> ModelSet:
        """Build the models of a manifest. Models that it does not change are reused."""
        before = self.models.by_id if self.opened is not None else {}

        def make(declared: ModelEntry, entry: ModelEntry) -> Model:
            spec = opened.specs.get(entry.id)
            replica = None if spec is None else self.replicas.of(spec)
            old = before.get(entry.id)
            limit = session_limit(entry, manifest)
            if old is not None and (old.entry, old.declared, old.replica) == (entry, declared, replica):
                return old
            remote = self._remote(entry, old) if replica is None else None
            is_kept = old is not None and old.replica is replica  # the KV of its sessions stays too
            sessions = (
                old.sessions if old is not None and is_kept else ModelSessions(limit, self._eviction_callback(entry.id))
            )
            model = Model(entry, declared, replica, remote, sessions)
            if old is not None:
                model.num_requests = old.num_requests
            return model

        return ModelSet(manifest, opened.manifest, make)

    def _remote(self, entry: ModelEntry, old: Model | None) -> RemoteModel | RecordedModel:
        if isinstance(self.options.backend, RecordedBackend):
            return self.options.backend.model(entry)
        if old is not None and old.remote is not None and old.entry == entry:
            return old.remote
        key_name = None if entry.remote is None else entry.remote.api_key_env
        key = None if key_name is None else self.options.environment.get(key_name)
        if key_name is not None and not key:
            log.warning("%s: %s, which api_key_env names, is not set; no key is sent", entry.id, key_name)
        return RemoteModel(entry, key or None, system=self.system)

    def _eviction_callback(self, model: str) -> Callable[[str], None]:
        """Return a function that frees the KV of a session evicted for another one."""

        def evict(session: str) -> None:
            self.record_eviction(session, (model,), "room")
            self.replicas.run(self.free(session, model))

        return evict

    def announce(self, models: ModelSet | None) -> None:
        """Include these models in the shown transitions before they serve calls; None: stop including them."""
        self._coming = models

    def apply(self, models: ModelSet, opened: OpenedManifest) -> None:
        """Make these models serve calls from now on."""
        notes = (*models.declared.notes, *cut_texts(opened.table.budgets)) if opened is not self.opened else ()
        for note in notes:
            log.warning("%s", note)
        self.models, self._coming, self.opened = models, None, opened
        for model in models.by_id.values():
            model.sessions.resize(session_limit(model.entry, models.declared))
        self.replicas.budget_bytes = opened.table.budgets.gpu.effective_bytes
        for spec in reversed(list(opened.specs.values())):  # if several specs share a key, the first one wins
            self.replicas.take_over(spec)
        for replica in self.replicas.all():
            self.pin(replica, models)
        self.replicas.order(replica.key for replica in models.replicas)
        if self.hosts is None:
            self._open_store(models.declared)
        self.replicas.pump()

    def _open_store(self, manifest: Manifest) -> None:
        """Make the worker open its KV store with the manifest's budgets."""
        kv, resources = self.options.kv, manifest.resources
        host_bytes = kv.host_bytes if resources.swap_bytes is None else resources.swap_bytes
        disk_bytes = kv.disk_bytes if resources.disk_kv_budget_bytes is None else resources.disk_kv_budget_bytes
        self.worker.open_store(self._host_store.opened(replace(kv, host_bytes=host_bytes, disk_bytes=disk_bytes)))

    def pin(self, replica: ReplicaState, models: ModelSet) -> None:
        """Update a replica's pinning and priority from the models that share it."""
        replica.pin([model.entry for model in models.by_id.values() if model.replica is replica])
        self.worker.prioritise(replica.key, replica.priority)

    async def bring_up(self, replica: ReplicaState) -> None:
        """Wait until a replica is resident.

        Raises:
            LockstepError: the replica could not be loaded.
        """
        try:
            await self.replicas.acquire(replica, is_patient=False)
        except LockstepError as error:
            raise (replica.failure or error) from None
        self.replicas.release(replica)

    def warnings(self) -> tuple[str, ...]:
        """Warnings for the operator that do not stop the cluster from serving."""
        recorders = [each.fault for each in (self._plans, self._routes) if each is not None]
        faults = (self.worker.recording_fault, *recorders)
        why = "; ".join(dict.fromkeys(filter(None, faults)))
        recording = f"recording has stopped: {why}; requests are still served" if why else ""
        hosts = () if self.hosts is None else self.hosts.warnings()
        return tuple(filter(None, (recording, self._host_store.fault, self.worker.kv_fault, *hosts)))

    async def close(self) -> None:
        """Close the worker and the recorders."""
        await self.worker.close()
        if self.hosts is not None:
            await self.hosts.close()
        await self.system.run_in_thread(self._host_store.close)
        for recorder in (self._plans, self._routes):
            if recorder is not None:
                await self.system.run_in_thread(recorder.close)

    # -- snapshots ------------------------------------------------------------------------------------------------

    def models_on(self, replica: ReplicaState) -> tuple[Model, ...]:
        """Models that share a replica, including those of a manifest that is being applied."""
        sets = [models for models in (self._coming, self.models) if models is not None]
        found = {m.id: m for models in sets for m in models.by_id.values() if m.replica is replica}
        return tuple(found.values())

    def trouble(self, replica: ReplicaState) -> str:
        """Reason why a replica's calls would not be served at once, in one sentence; empty: they would be."""
        return self.worker.trouble or replica.trouble()

    def snapshot(self, is_replacing: bool) -> ClusterSnapshot:
        """Build a snapshot of the whole cluster.

        Args:
            is_replacing: whether a manifest is being applied.
        """
        models, now_s = self.models, self.now_s()
        return ClusterSnapshot(
            cluster=models.declared.cluster,
            backend=str(self.options.backend),
            entry=None if models.router is None else models.router.entry,
            fallback=models.declared.fallback,
            is_replacing=is_replacing,
            is_fixed=self.options.is_fixed,
            models=tuple(model.snapshot(self.worker.trouble, now_s) for model in models.by_id.values()),
            replicas=tuple(each.snapshot(tuple(m.id for m in self.models_on(each))) for each in self.replicas.all()),
            budgets=self._budgets(),
            sessions=self.sessions.snapshot(now_s),
            sessions_live=self.sessions.num_live,
            counters=msgspec.structs.replace(self.counters),
            transitions=tuple(self.transitions),
            remotes=tuple(m.remote.snapshot() for m in models.by_id.values() if isinstance(m.remote, RemoteModel)),
            warnings=(*models.declared.notes, *self.warnings()),
            hosts=() if self.hosts is None else self.hosts.hosts(),
            places=() if self.hosts is None else self.hosts.places(),
            report_age_s=None if self.hosts is None else self.hosts.report_age_s,
        )

    def _budgets(self) -> tuple[BudgetSnapshot, ...]:
        assert self.opened is not None
        gpu, ram = self.opened.table.budgets
        used = ((gpu, self.replicas.held_bytes), (ram, ram.needed_bytes))
        return tuple(
            BudgetSnapshot(budget.name, budget.declared_bytes, budget.effective_bytes, used_bytes)
            for budget, used_bytes in used
        )

    # -- sessions -------------------------------------------------------------------------------------------------

    def record_eviction(self, session_id: str, owners: Sequence[str], reason: str) -> None:
        """Record that models evicted a session's KV. All evictions of a session until its next request count as one.
        Remote models hold no KV, so they add none."""
        by_id, session = self.models.by_id, self.sessions.by_id.get(session_id)
        if session is None or not owners:
            return
        session.is_held = any(model.sessions.holds(session_id) for model in by_id.values())
        for owner in owners:
            session.kept_tokens.pop(owner, None)
        local = [owner for owner in owners if owner in by_id and by_id[owner].replica is not None]
        if local and not session.is_evicted:
            session.is_evicted = True
            self.counters.lru_evictions += reason in LRU_REASONS
            shown = session.model if session.model in local else local[0]
            self.session_event("session_evicted", session_id, model=shown, reason=reason)

    def ended(self, key: str | None, now_s: float) -> None:
        """Record the end of a request. A session whose requests were all rejected is forgotten."""
        self.sessions.end(key, now_s)
        if key is not None and self.sessions.forget_refused(key):
            for model in self.models.by_id.values():
                model.sessions.drop(key)

    def session_event(self, type_: str, key: str, **fields: str) -> None:
        """Emit a session event with the session's id and its caller."""
        name = SessionName.of(key)
        self.events.emit(type_, caller=name.caller, session=name.id, **fields)

    async def free(self, session: str, model: str) -> None:
        """Make the worker unpin the blocks that an idle session holds for a model."""
        found = self.models.by_id.get(model)
        if found is not None and found.replica is not None and found.replica.phase is Phase.RESIDENT:
            await self.worker.sweep(found.replica.key, session, model)

    def _drop_held(self, session: str, reason: str) -> None:
        self.record_eviction(session, [m.id for m in self.models.by_id.values() if m.sessions.drop(session)], reason)

    def _session_changed(self, change: SessionChange) -> None:
        if change.what == "kept":
            if (session := self.sessions.by_id.get(change.session_id)) is not None:
                session.kept_tokens[change.owner] = change.num_tokens
            return
        model = self.models.by_id.get(change.owner)
        is_evicted = change.what == "swept"  # plain: a value on the wire
        if model is not None and is_evicted:
            stored = StoredTokens(change.num_stored_tokens, 0, 0)
            self.sessions.store(change.session_id, change.owner, stored, self.now_s())
        if model is not None and is_evicted and model.sessions.drop(change.session_id):
            self.record_eviction(change.session_id, (change.owner,), change.reason or "")

    async def sweep_idle(self, now_s: float) -> None:
        """Evict the KV of sessions that have been idle too long. Sessions whose last answer came from a low-priority
        model go first, those of critical models last; within a priority, the least recently used go first."""
        by_id = self.models.by_id

        def urgency(session: Session) -> int:
            return -by_id[session.model].entry.priority if session.model in by_id else -PRIORITIES["low"]

        for session in sorted(self.sessions.idle(self.models.declared.sessions, now_s), key=urgency):
            holders = [model.id for model in by_id.values() if model.sessions.holds(session.id)]
            self._drop_held(session.id, "idle")
            session.is_held = False  # the model that held it may be gone from the manifest
            session.kept_tokens.clear()
            for model in holders:
                await self.free(session.id, model)

    # -- notices --------------------------------------------------------------------------------------------------

    def _apply_controller_state(self, state: ControllerState) -> None:
        """Apply the controller's state."""
        self.replicas.pump()
        if self.hosts is not None and (text := self.hosts.client.newer_manifest):
            self.on_manifest(text)

    def _on_notice(self, notice: Notice | GroupLost) -> None:
        """Update the state from a notice of the worker."""
        match notice:
            case StepReport():
                self.events.emit(
                    "step",
                    replica=notice.replica,
                    step=notice.step,
                    num_sequences=notice.num_sequences,
                    num_tokens=notice.num_tokens,
                    num_samples=notice.num_samples,
                    duration_ms=round(notice.duration_s * 1e3, 3),
                    num_unreported=notice.num_unreported,
                )
            case SessionsChanged(changes=changes):
                for change in changes:
                    self._session_changed(change)
            case KVRejected(reason=reason):
                self.events.emit("kv_rejected", reason=reason)
            case WorkerLost(reason=reason):
                self.events.emit("worker_restarted", reason=reason)
                for session in tuple(self.sessions.by_id.values()):
                    # A store may hold copies of the KV that the device has lost.
                    session.is_stored_known = not self._host_store.is_open
                    session.kept_tokens.clear()
                    self._drop_held(session.id, LOST)
                self.replicas.worker_lost()
            case GroupLost(key):
                self.events.emit("replica_lost", replica=key)
                self.replicas.lost(key)
            case WorkerRestarted():
                self.replicas.pump()

    def _moved(self, replica: ReplicaState, before: Phase, reason: str, duration_s: float) -> None:
        """Count, store and emit a replica's change of phase."""
        after = FAILED if reason == FAILED else _shown(replica.phase)
        duration_ms = 0.0 if replica.phase in (Phase.LOADING, Phase.UNLOADING) else round(duration_s * 1e3, 3)
        for model in self.models_on(replica):
            if self.is_booted:
                self._count(before, replica.phase, reason)
            change = TransitionSnapshot(self.events.unix_time_s(), model.id, _shown(before), after, reason, duration_ms)
            self.transitions.append(change)
            self.events.emit(
                "tier_changed",
                model=model.id,
                replica=replica.key,
                from_=change.before,
                to=after,
                reason=reason,
                duration_ms=duration_ms,
            )

    def _count(self, before: Phase, after: Phase, reason: str) -> None:
        if after is Phase.RESIDENT:
            self.counters.promotions += 1
        elif (before, after) == (Phase.RESIDENT, Phase.UNLOADING) and reason != REPLACED:
            self.counters.demotions += 1
            self.counters.model_evictions += reason == UnloadReason.ROOM


def _shown(phase: Phase) -> str:
    """Tier name that the snapshot shows for a replica's phase."""
    return STANDBY if phase is Phase.ABSENT else phase.value
