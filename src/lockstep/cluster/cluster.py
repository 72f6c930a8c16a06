"""A cluster as a manifest describes it: one model or many on one device worker, and some of other servers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from lockstep.artifacts.source import open_artifact
from lockstep.cluster.answering import Answering
from lockstep.cluster.backend import Backend
from lockstep.cluster.base import EventStream, Health, ModelCard
from lockstep.cluster.events import EventLog
from lockstep.cluster.held import Held
from lockstep.cluster.manifest import Manifest, Tier
from lockstep.cluster.manifest_file import Validator, dump, parse, plain
from lockstep.cluster.opening import LoadProgress, Opened
from lockstep.cluster.picture import picture
from lockstep.cluster.planner import Phase
from lockstep.cluster.replacing import replace_manifest
from lockstep.cluster.snapshot import ClusterSnapshot, Replaced, SessionSnapshot
from lockstep.cluster.stage import ClusterOptions, Stage
from lockstep.cluster.trust import NONE, Powers, Vetting, Vouchers
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.request import GenerationRequest
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError, LockstepError, SessionNotFoundError, UnavailableError

log = logging.getLogger(__name__)

STEPS_PER_S = 4.0
"""Of each replica, told while somebody watches."""

Validators = Mapping[str, Validator]


class ManifestCluster:
    """Implements `lockstep.cluster.base.Cluster`.

    Args:
        manifest: what is served at first.
        validators: of other rooms' blocks, for manifests that replace it.
        progress: told about the stages of the first loading.
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
        self._stage = stage = Stage(options or ClusterOptions(), manifest)
        self._answering = Answering(
            stage.worker, stage.replicas, lambda: stage.roster, stage.find, stage.sessions, stage.counters, stage.events
        )
        self._prepared: Opened | None = None
        self._created_s = int(time.time())
        self._sweeping: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[Replaced] | None = None
        self._vouchers = Vouchers(
            manifest,
            stage.options.folder,
            lambda path: open_artifact(path, cache_dir=stage.options.load.cache_dir),
            opens_sources=stage.options.backend is Backend.AUTO,
        )

    @property
    def events(self) -> EventLog:
        """What happens here."""
        return self._stage.events

    @property
    def worker_pid(self) -> int | None:
        """Of the device worker's process; None: it is a thread, or lost."""
        return self._stage.worker.pid

    # -- base.Cluster ---------------------------------------------------------------------------------------------

    def cards(self) -> tuple[ModelCard, ...]:
        return tuple(map(self._card, self._stage.names.ids))

    def card(self, name: str | None) -> ModelCard:
        return self._card(self._stage.names.find(name))

    def tokenizer(self, name: str | None) -> Tokenizer:
        model = self._stage.find(name)
        if model.remote is not None:
            return model.remote.tokenizer
        assert model.held is not None, "a model is local or remote"
        if model.held.tokenizer is None:
            raise UnavailableError("the model is loading")
        return model.held.tokenizer

    def stream(self, call: GenerationRequest) -> EventStream:
        return self._answering.stream(call)

    async def metrics(self) -> Mapping[str, MetricsSnapshot]:
        """Under the first model of each replica, since others that share it are counted with it."""
        by_replica = await self._stage.worker.metrics()
        found = {}
        for held in self._stage.replicas.all():
            models = self._stage.models_on(held)
            if held.key in by_replica and models:
                found[models[0].id] = by_replica[held.key]
        return found

    def health(self) -> Health:
        """Ready while every model that is declared resident can answer."""
        reason = self._trouble()
        return Health(not reason, reason, self._stage.warnings())

    def _trouble(self) -> str:
        if not self._stage.is_booted:
            return self._stage.loading
        models = self._stage.roster.models
        for model in models.values():
            held = model.held
            if held is None or model.entry.tier is not Tier.RESIDENT or not held.is_pinned:
                continue
            if reason := self._stage.trouble(held):
                return reason if len(models) == 1 else f"{model.id}: {reason}"
        return ""

    async def check(self) -> str:
        checked = await self._stage.worker.check()
        return "the worker does not answer" if checked is None else checked.fault

    async def reset_prefix_cache(self) -> int:
        return await self._stage.worker.reset_prefix_cache()

    @property
    def num_open(self) -> int:
        return self._answering.num_open

    async def prepare(self) -> None:
        opened = await self._stage.open(self._manifest, self._progress, fetches=False)
        if len(opened.needs) == len(self._manifest.entries):
            self._prepared = opened

    async def start(self) -> None:
        stage = self._stage
        try:
            await stage.worker.start()  # first: a process has its imports to do, while the sources are opened
            opened = self._prepared or await stage.open(self._manifest, self._progress)
            roster = stage.cast(self._manifest, opened)
            stage.replicas.progress = self._told
            stage.enter(roster, opened)
            async with asyncio.TaskGroup() as loads:
                for held in stage.replicas.all():
                    loads.create_task(stage.bring(held) if held.is_pinned else stage.replicas.read_text(held))
        except BaseException as error:
            await self.close()
            raise _first(error) from None
        stage.replicas.progress = None
        stage.is_booted = True
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    def abort_all(self, error: LockstepError) -> None:
        self._stage.worker.abort_all(error)
        self._stage.replicas.fail_all(error)
        if self._stage.is_set:
            for model in self._stage.roster.models.values():
                model.sessions.fail_all(error)
                if model.remote is not None:
                    model.remote.abort_all(error)

    async def close(self) -> None:
        self.abort_all(UnavailableError("the server is closing"))
        tasks: list[asyncio.Task[Any]] = [task for task in (self._sweeping, self._replacing) if task is not None]
        for task in tasks:
            task.cancel()
        await self._stage.replicas.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._stage.is_set:
            for model in self._stage.roster.models.values():
                if model.remote is not None:
                    await model.remote.close()
        await self._stage.close()

    # -- from above -----------------------------------------------------------------------------------------------

    @property
    def is_fixed(self) -> bool:
        return self._stage.options.is_fixed

    def snapshot(self) -> ClusterSnapshot:
        return picture(self._stage, self._is_replacing, self._answering.num_ephemeral)

    def manifest_text(self) -> str:
        """The manifest that holds, as text that could replace it."""
        return dump(self._stage.roster.declared)

    def manifest_plain(self) -> Mapping[str, Any]:
        return plain(self._stage.roster.declared)

    async def replace(self, text: str, environment: Mapping[str, str] | None = None, powers: Powers = NONE) -> Replaced:
        """Serve another manifest; see `lockstep.cluster.replacing`. Goes on when the caller leaves.

        Args:
            environment: what the text may refer to; None: to nothing, as it came from the network.
            powers: of who sent it over the network; the operator's own text has all.

        Raises:
            ManifestError: the text is no manifest; every fault is named.
            UnavailableError: another one is being brought in, or the first one's models are being loaded.
            LockstepError: it cannot be served; what was served still is.
        """
        vetting = None if environment is not None else self._vouchers.vetting(powers)
        manifest = await asyncio.to_thread(
            parse, text, validators=self._validators, environment=environment, vet=vetting
        )
        self._check_booted()
        if self._is_replacing:
            raise UnavailableError("another manifest is being brought in; try again when that is done")
        if environment is not None:
            self._vouchers.vouch(manifest)
        self._replacing = asyncio.get_running_loop().create_task(self._replace(manifest, vetting))
        return await asyncio.shield(self._replacing)

    async def load_model(self, id_: str) -> None:
        """Make a model resident; LockstepError says why it cannot be."""
        held = self._held(id_)
        held.is_dismissed = False
        self._stage.appoint(held, self._stage.roster)
        await self._stage.bring(held)

    async def unload_model(self, id_: str) -> None:
        """Take a model, and those that share its replica, off the device; the next request brings it back."""
        held = self._held(id_)
        held.is_dismissed = True
        held.is_pinned = False
        await self._stage.replicas.unload(held, self._stage.options.drain_s, "by hand")

    def sessions(self) -> tuple[SessionSnapshot, ...]:
        return self._stage.sessions.snapshot(time.monotonic())

    async def end_session(self, id_: str) -> None:
        """Give up a session's KV and forget it; SessionNotFoundError when nobody knows it."""
        if self._stage.sessions.forget(id_) is None:
            raise SessionNotFoundError(f"No session with id '{id_}'.", param="session_id")
        for model in self._stage.roster.models.values():
            model.sessions.drop(id_)
            if model.held is not None and model.held.phase is Phase.RESIDENT:
                await self._stage.worker.end_session(model.held.key, id_, model.id)

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def _is_replacing(self) -> bool:
        return self._replacing is not None and not self._replacing.done()

    async def _replace(self, manifest: Manifest, vetting: Vetting | None) -> Replaced:
        began_s = time.monotonic()
        self.events.emit("manifest_replacing", cluster=manifest.cluster)
        reason: str | None = None
        try:
            return await replace_manifest(self._stage, manifest)
        except BaseException as error:
            first = _first(error)
            told = first if vetting is None else vetting.veiled(first)
            if told is not first:
                log.warning("a manifest that was put is not brought in: %s", first)
            reason = str(told)
            raise told from None
        finally:
            cluster = self._stage.roster.declared.cluster
            duration_ms = round((time.monotonic() - began_s) * 1e3, 3)
            self.events.emit("manifest_replaced", cluster=cluster, error=reason, duration_ms=duration_ms)

    async def _sweep(self) -> None:
        """Now and then: give up the KV of sessions that nobody comes back to, and look who watches."""
        was_watched = False
        while True:
            await asyncio.sleep(self._stage.roster.declared.sessions.sweep_interval_s)
            for session in self._stage.idle_sessions(time.monotonic()):
                await self._stage.sweep(session, "idle")
            is_watched = self.events.num_watchers > 0
            if is_watched != was_watched:
                self._stage.worker.watch_steps(STEPS_PER_S if is_watched else 0.0)
                was_watched = is_watched

    def _told(self, held: Held, stage: str, fraction: float) -> None:
        """What the first loads tell, under the first of the models that each is for."""
        models = self._stage.models_on(held)
        if self._progress is not None and models:
            self._progress(models[0].id, stage, fraction)

    def _check_booted(self) -> None:
        """Whoever takes a model away while the first ones are loaded would make the boot fail."""
        if not self._stage.is_booted:
            raise UnavailableError("the models are being loaded for the first time; try again when they are there")

    def _held(self, id_: str) -> Held:
        held = self._stage.roster.find(id_).held
        self._check_booted()
        if held is None:
            raise InvalidParameterError(f"{id_} is remote: there is nothing to load here", param="model")
        return held

    def _card(self, id_: str) -> ModelCard:
        stage = self._stage
        if not stage.is_set:
            entry = stage.first.entry(id_)
            return ModelCard(id_, entry.aliases, entry.source, self._created_s, "loading", None, None, None)
        model = stage.roster.models[id_]
        held = model.held
        loaded = None if held is None else held.loaded
        probe = None if loaded is None else loaded.probe
        tokenizer = None if held is None else held.tokenizer
        mates = () if held is None else stage.models_on(held)
        return ModelCard(
            name=model.id,
            aliases=model.entry.aliases,
            root=model.entry.source,
            created_s=self._created_s,
            tier=stage.state_of(model, time.monotonic()),
            max_model_len=None if loaded is None else loaded.config.max_model_len,
            deterministic=None if probe is None else probe.deterministic,
            has_chat_template=None if tokenizer is None else tokenizer.has_chat_template,
            parent=mates[0].id if mates and mates[0] is not model else None,
        )


def _first(error: BaseException) -> BaseException:
    """The reason, out of the group that came with it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
