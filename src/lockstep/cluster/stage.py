"""What is on: the models that there are now, the replicas under them, and what is told of their comings and goings."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from lockstep.cluster.aside import aside, tell
from lockstep.cluster.backend import Backend, OneModel, served_by
from lockstep.cluster.base import recording_warnings
from lockstep.cluster.budget import cut_texts, refusal, table_text
from lockstep.cluster.events import EventLog
from lockstep.cluster.held import Held
from lockstep.cluster.manifest import PRIORITIES, Entry, Manifest, Tier
from lockstep.cluster.models import Model, Names, Roster
from lockstep.cluster.opening import LoadProgress, Opened, corrected, has_device_alone, here, open_manifest
from lockstep.cluster.plan_flight import PlanRecorder
from lockstep.cluster.planner import Phase, PlanPolicy, UnloadReason
from lockstep.cluster.remote import MAX_CONNECTIONS, RemoteModel
from lockstep.cluster.replicas import FAILED, LOST, Replicas
from lockstep.cluster.sessions import ModelSessions, Session, Sessions
from lockstep.cluster.snapshot import Counters, TransitionSnapshot
from lockstep.engine.options import LoadOptions
from lockstep.engine.sessions import SessionChange
from lockstep.errors import LockstepError, OverBudgetError, UnavailableError
from lockstep.worker.life import Back, Lost
from lockstep.worker.link import WorkerOptions
from lockstep.worker.messages import SessionsChanged, StepReport
from lockstep.worker.supervised import Notice, SupervisedWorker

log = logging.getLogger(__name__)

MAX_TRANSITIONS = 256
"""That are remembered."""
DRAIN_S = 10.0
"""For calls to what goes; then they are cut."""
REPLACED = "replaced"
"""Why a replica goes that the manifest does not have any more."""
LRU_REASONS = ("room", "idle")
"""Why an idle session gives up its KV, least recently used first; else it goes with the model or worker that has it."""
_STATES = {
    Phase.ABSENT: "standby",
    Phase.LOADING: "loading",
    Phase.RESIDENT: "resident",
    Phase.UNLOADING: "unloading",
}


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How a manifest is served."""

    backend: Backend | OneModel = Backend.AUTO
    load: LoadOptions = field(default_factory=LoadOptions)
    """Of every model, where its own ``engine`` says nothing else."""
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    policy: PlanPolicy = field(default_factory=PlanPolicy)
    drain_s: float = DRAIN_S
    environment: Mapping[str, str] = field(default_factory=dict)
    """Where the keys of remote models are looked up."""
    folder: Path | None = None
    """Where the operator's manifest lies: of the models there, any may be named over HTTP."""
    is_fixed: bool = False
    """Requests may look at it and not change it: it was made of a command line, and no file says what is served."""


class Stage:
    """Changed by booting, by replacing, and by loading and unloading by hand.

    Args:
        manifest: what will be served at first.
    """

    def __init__(self, options: ClusterOptions, manifest: Manifest) -> None:
        self.options = options
        self.first = served_by(manifest, options.backend)
        self._first_names = Names(self.first)
        self.worker = SupervisedWorker(options.worker, self._noticed)
        self.events = EventLog()
        self.counters = Counters()
        self.sessions = Sessions()
        self.transitions: deque[TransitionSnapshot] = deque(maxlen=MAX_TRANSITIONS)
        trace = options.worker.trace
        self._plans = None if trace is None else PlanRecorder(trace)
        on_planned = None if self._plans is None else self._plans.planned
        self.replicas = Replicas(self.worker, options.policy, self._moved, on_planned)
        self.opened: Opened | None = None
        """Of the models that calls go to."""
        self.is_booted = False
        self._roster: Roster | None = None
        self._coming: Roster | None = None
        """The models of a manifest that is being brought in."""

    @property
    def roster(self) -> Roster:
        """The models that calls go to; UnavailableError until their sources have been opened."""
        if self._roster is None:
            raise UnavailableError(self.loading)
        return self._roster

    @property
    def names(self) -> Names:
        """Of the models that calls go to, or will."""
        return self._first_names if self._roster is None else self._roster.names

    @property
    def loading(self) -> str:
        """Why nobody is answered yet, in one sentence."""
        return "the model is loading" if len(self.names.ids) == 1 else "the models are loading"

    def find(self, name: str | None) -> Model:
        """The model that a call is for.

        Raises:
            ModelNotFoundError: nobody is called so.
            UnavailableError: nobody is answered yet.
        """
        id_ = self.names.find(name)
        if not self.is_booted:
            raise UnavailableError(self.loading)
        return self.roster.models[id_]

    @property
    def is_set(self) -> bool:
        """Whether there are models yet."""
        return self._roster is not None

    # -- a manifest's way onto the stage --------------------------------------------------------------------------

    async def open(self, manifest: Manifest, progress: LoadProgress | None = None, *, fetches: bool = True) -> Opened:
        """Open a manifest's sources and weigh them against its budgets.

        Args:
            fetches: whether models come from the hub; if not, those that would have to are left out.

        Raises:
            ArtifactError: a source cannot be served.
            ConfigError: a remote model says not where it is.
            OverBudgetError: the models need more than the budgets.
        """
        served = served_by(manifest, self.options.backend)
        is_alone = has_device_alone(served)
        loop, held_bytes = asyncio.get_running_loop(), self.replicas.held_bytes
        told = None if progress is None else partial(tell, loop, progress)

        def open_them() -> Opened:
            those = served if fetches else here(served)
            return open_manifest(those, self.options.load, held_bytes, told, is_alone=is_alone)

        return self.weighed(await aside(open_them))

    def weighed(self, opened: Opened) -> Opened:
        """The same by what loads have measured until now; OverBudgetError: its models need more than its budgets."""
        loaded = {held.key: held.loaded for held in self.replicas.all() if held.loaded is not None}
        opened = corrected(opened, loaded)
        if reason := refusal(opened.table):
            raise OverBudgetError(reason, table_text(opened.table))
        return opened

    def cast(self, manifest: Manifest, opened: Opened) -> Roster:
        """The models of a manifest; those that it does not change go on as they are."""
        before = self._roster

        def make(declared: Entry, entry: Entry) -> Model:
            spec = opened.specs.get(entry.id)
            held = None if spec is None else self.replicas.hold(spec)
            old = None if before is None else before.models.get(entry.id)
            limit = _session_limit(entry, manifest)
            if old is not None and (old.entry, old.declared, old.held) == (entry, declared, held):
                return old
            remote = self._remote(entry, old) if held is None else None
            is_kept = old is not None and old.held is held  # and so is the KV of its sessions
            sessions = old.sessions if old is not None and is_kept else ModelSessions(limit, self._sweeper(entry.id))
            model = Model(entry, declared, held, remote, sessions)
            if old is not None:
                model.num_requests = old.num_requests
            return model

        return Roster(manifest, opened.manifest, make)

    def _remote(self, entry: Entry, old: Model | None) -> RemoteModel:
        if old is not None and old.remote is not None and old.entry == entry:
            return old.remote
        key_name = None if entry.remote is None else entry.remote.api_key_env
        key = None if key_name is None else self.options.environment.get(key_name)
        if key_name is not None and not key:
            log.warning("%s: %s, which api_key_env names, is not set; it is asked without a key", entry.id, key_name)
        return RemoteModel(entry, key or None)

    def _sweeper(self, model: str) -> Callable[[str], None]:
        """What is done for a session that gives way to another one."""

        def sweep(session: str) -> None:
            self.swept(session, (model,), "room")
            self.replicas.run(self.free(session, model))

        return sweep

    def announce(self, roster: Roster | None) -> None:
        """These models are about to come; None: no longer."""
        self._coming = roster

    def enter(self, roster: Roster, opened: Opened) -> None:
        """From now on calls go to these models."""
        told = (*roster.declared.notes, *cut_texts(opened.table.budgets)) if opened is not self.opened else ()
        for text in told:
            log.warning("%s", text)
        self._roster, self._coming, self.opened = roster, None, opened
        for model in roster.models.values():
            model.sessions.resize(_session_limit(model.entry, roster.declared))
        self.replicas.budget_bytes = opened.table.budgets.gpu.effective_bytes
        for spec in reversed(list(opened.specs.values())):  # of several with one key, the first one's stands
            self.replicas.take_over(spec)
        for held in self.replicas.all():
            self.appoint(held, roster)
        self.replicas.order(dict.fromkeys(m.held.key for m in roster.models.values() if m.held is not None))
        self.replicas.pump()

    def appoint(self, held: Held, roster: Roster) -> None:
        """What a replica's models ask of it."""
        entries = [model.entry for model in roster.models.values() if model.held is held]
        limits = [entry.keep_alive_s for entry in entries]
        held.is_pinned = not held.is_dismissed and any(entry.tier is Tier.RESIDENT for entry in entries)
        held.priority = min((entry.priority for entry in entries), default=0)
        held.idle_limit_s = max((limit for limit in limits if limit is not None), default=None)
        if None in limits:
            held.idle_limit_s = None
        self.worker.prioritise(held.key, held.priority)

    async def bring(self, held: Held) -> None:
        """Wait until a replica is resident.

        Raises:
            LockstepError: why it is not.
        """
        try:
            await self.replicas.acquire(held, is_patient=False)
        except LockstepError as error:
            raise (held.failure or error) from None
        self.replicas.release(held)

    def warnings(self) -> tuple[str, ...]:
        """What somebody should look after although calls are answered."""
        return recording_warnings(self.worker.recording_fault, "" if self._plans is None else self._plans.fault)

    async def close(self) -> None:
        """End the worker, and what is recorded."""
        await self.worker.close()
        if self._plans is not None:
            await asyncio.to_thread(self._plans.close)

    # -- what is told of it ---------------------------------------------------------------------------------------

    def models_on(self, held: Held) -> tuple[Model, ...]:
        """Who shares a replica."""
        rosters = [roster for roster in (self._roster, self._coming) if roster is not None]
        found = {m.id: m for roster in reversed(rosters) for m in roster.models.values() if m.held is held}
        return tuple(found.values())

    def state_of(self, model: Model, now_s: float) -> str:
        """Where a model is: its declared tier says only where it is meant to be."""
        held = model.held
        if held is None:
            return "remote"
        if held.phase is Phase.ABSENT and held.failure is not None:
            return "failed" if now_s < held.retry_at_s else _STATES[Phase.ABSENT]
        if held.phase is Phase.ABSENT and (held.is_missed or held.is_pinned):
            return _STATES[Phase.LOADING]
        return _STATES[held.phase]

    def trouble(self, held: Held) -> str:
        """Why calls of a replica would not be answered at once, in one sentence; empty: they would."""
        if reason := self.worker.trouble:
            return reason
        return "" if held.phase is Phase.RESIDENT else held.absence or "the model is loading"

    def swept(self, session: str, models: Sequence[str], reason: str) -> None:
        """Models gave up a session's KV. However many they are, and when: until its next request that is one eviction.
        Of remote models, which keep none, it is none."""
        roster = self.roster.models
        is_held = any(other.sessions.holds(session) for other in roster.values())
        for model in models:
            self.sessions.dropped(session, model, is_held=is_held)
        local = [model for model in models if model in roster and roster[model].held is not None]
        if local and self.sessions.evict(session):
            last = self.sessions.last_model(session)
            self.counters.lru_evictions += reason in LRU_REASONS
            told = last if last in local else local[0]
            self.events.emit("session_evicted", session=session, model=told, reason=reason)

    async def free(self, session: str, model: str) -> None:
        """Let the worker unpin what an idle session keeps for a model."""
        held = self.roster.models[model].held if model in self.roster.models else None
        if held is not None and held.phase is Phase.RESIDENT:
            await self.worker.sweep(held.key, session, model)

    def _noticed(self, notice: Notice) -> None:
        """The worker says what nobody asked for."""
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
            case Lost(reason=reason):
                self.events.emit("worker_restarted", reason=reason)
                for session in self.sessions.ids:
                    self._gave_up(session, LOST)
                self.replicas.worker_lost()
            case Back():
                self.replicas.pump()

    def _session_changed(self, change: SessionChange) -> None:
        if change.what == "kept":
            self.sessions.kept(change.session_id, change.owner, change.num_tokens)
            return
        model = self.roster.models.get(change.owner)
        if model is not None and change.what == "swept" and model.sessions.drop(change.session_id):
            self.swept(change.session_id, (change.owner,), change.reason or "")

    def _gave_up(self, session: str, reason: str) -> None:
        self.swept(session, [m.id for m in self.roster.models.values() if m.sessions.drop(session)], reason)

    def idle_sessions(self, now_s: float) -> list[str]:
        """Whose KV may be given up: those of low models first and of critical ones last, by who answered last, and
        within a class the least recently used first."""
        models = self.roster.models

        def urgency(session: Session) -> int:
            return -models[session.model].entry.priority if session.model in models else -PRIORITIES["low"]

        return [session.id for session in sorted(self.sessions.idle(self.roster.declared.sessions, now_s), key=urgency)]

    async def sweep(self, session: str, reason: str) -> None:
        """Give up an idle session's KV, of all its models."""
        models = [model.id for model in self.roster.models.values() if model.sessions.holds(session)]
        self._gave_up(session, reason)
        self.sessions.dropped(session, is_held=False)  # also where the model that held it is gone from the manifest
        for model in models:
            await self.free(session, model)

    def _moved(self, held: Held, before: Phase, reason: str, duration_s: float) -> None:
        after = _STATES[held.phase] if reason != FAILED else "failed"
        duration_ms = 0.0 if held.phase in (Phase.LOADING, Phase.UNLOADING) else round(duration_s * 1e3, 3)
        for model in self.models_on(held):
            if self.is_booted:
                self._count(held.phase, reason)
            change = TransitionSnapshot(time.time(), model.id, _STATES[before], after, reason, duration_ms)
            self.transitions.append(change)
            self.events.emit(
                "tier_changed",
                model=model.id,
                replica=held.key,
                from_=change.before,
                to=after,
                reason=reason,
                duration_ms=duration_ms,
            )

    def _count(self, phase: Phase, reason: str) -> None:
        if phase is Phase.RESIDENT:
            self.counters.promotions += 1
        elif phase is Phase.UNLOADING and reason != REPLACED:
            self.counters.demotions += 1
            self.counters.model_evictions += reason == UnloadReason.ROOM


def _session_limit(entry: Entry, manifest: Manifest) -> int | None:
    """Sessions of a model at once; those of a remote one hold nothing on the device, so that its connections bound
    them."""
    if entry.max_active_sessions is not None:
        return entry.max_active_sessions
    return MAX_CONNECTIONS if entry.tier is Tier.REMOTE else manifest.sessions.max_active_sessions
