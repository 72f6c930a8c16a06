"""Replicas of a device: opens loaded artifacts with their engines, and registers them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace as struct_with

from lockstep.engine.draft_prices import speculator_for
from lockstep.engine.engine import Engine
from lockstep.engine.kv_store import KVStore
from lockstep.engine.loading import checked_adapter, load_model
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.options import AdapterSource, Progress
from lockstep.engine.sessions import SessionChange
from lockstep.errors import LockstepError, UsageError
from lockstep.system import SYSTEM, System
from lockstep.worker.messages import Load, Loaded, TokenizerPayload
from lockstep.worker.preflight import try_unknown

if TYPE_CHECKING:
    from lockstep.worker.flight.recorder import EngineRecorder, Recorder
    from lockstep.worker.kv_events import KVEventPublisher, KVEventSource

log = logging.getLogger(__name__)

MIN_PROGRESS_INTERVAL_S = 0.1
"""Minimum interval in seconds between two reports of one stage."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine of a device worker."""

    key: str
    engine: Engine
    recorder: EngineRecorder | None = None
    kv_events: KVEventSource | None = None
    """Source of its KV events; None: they are not published."""

    def metrics(self) -> MetricsSnapshot:
        """The engine's metrics, with the state and the losses of its recording."""
        snapshot, recorder = self.engine.metrics(), self.recorder
        if recorder is None:
            return snapshot
        gauges = {**snapshot.gauges, "trace_recording": float(recorder.is_recorded)}
        return replace(snapshot, gauges=gauges, counters={**snapshot.counters, **recorder.lost()})

    def close(self) -> None:
        self.engine.model.close()


def open_replica(
    load: Load,
    progress: Progress,
    on_session: Callable[[SessionChange], None],
    recorder: Recorder | None = None,
    store: KVStore | None = None,
    wake: Callable[[], None] | None = None,
    publisher: KVEventPublisher | None = None,
    system: System = SYSTEM,
) -> tuple[Replica, Loaded]:
    """Try the artifact in another process if it is unknown, then load it here.

    Args:
        on_session: called on the step thread with each change of a session.
        recorder: recorder of the device, if it has one.
        store: KV store of the device, if it has one.
        wake: called by any thread when the engine has work that no client submitted.
        publisher: publisher of KV events, if the device has one.

    Raises:
        LockstepError: it cannot be loaded; the message states why.
    """
    started_s = system.now_s()
    adapters = load.options.adapters
    if adapters:  # without its adapters, since none of them may keep the base from being loaded
        slots = replace(load.options.engine, enable_lora=True)
        load = struct_with(load, options=replace(load.options, engine=slots, adapters=()))
    try_unknown(load, progress, system=system)
    model, config = load_model(load.source, load.options, progress)
    drafter = speculator_for(model, config, load.options.engine.speculative_config, system.now_s)
    speculation = "" if drafter is None else drafter.text()
    own_recorder = None if recorder is None else recorder.of_engine(load.replica, model, config, speculation)
    engine = Engine(
        model,
        config,
        on_session=on_session,
        recorder=own_recorder,
        store=store,
        kv_class=load.priority,
        drafter=drafter,
        wake=wake,
    )
    for each in adapters:
        try:
            use_adapters(engine, (each,), keeps_others=True)
        except LockstepError as error:  # its files were changed since the manifest was read
            log.error("adapter %r cannot be loaded, so its requests fail: %s", each.name, error)
    kv_events = None if publisher is None else publisher.source(model.name, config.block_size)
    if kv_events is not None:
        engine.follow(kv_events)
    executor = model.executor
    return Replica(load.replica, engine, own_recorder, kv_events), Loaded(
        load.replica,
        model.name,
        model.fingerprint,
        config,
        executor.geometry,
        dict(model.sampling_defaults),
        dict(executor.environment),
        dict(executor.machine),
        hasattr(type(executor), "hidden_states"),
        system.now_s() - started_s,
        TokenizerPayload.of(model.tokenizer.parts),
        model.weights_bytes,
        model.task,
        model.text_limit(config),
        0 if model.adapters is None else model.adapters.max_bytes,
        {name: (each.fingerprint, tuple(each.invocation_ids)) for name, each in engine.adapters.names.items()},
    )


def use_adapters(engine: Engine, wanted: Sequence[AdapterSource], *, keeps_others: bool = False) -> None:
    """Make an engine's adapters these: open those with a new content, then remove the others. Any thread may call it.

    Args:
        keeps_others: whether adapters of other names stay.

    Raises:
        LockstepError: one of them cannot be used; nothing was changed.
    """
    support, known = engine.model.adapters, engine.adapters.names
    changed = [each for each in wanted if each.name not in known or known[each.name].fingerprint != each.fingerprint]
    if support is None:
        if wanted:
            raise UsageError(f"{engine.model.name} was loaded without adapters; load it again")
        return
    opened = [checked_adapter(support.open(each.name, each.path), each) for each in changed]
    for adapter in opened:
        support.check(adapter)
    for adapter in opened:
        engine.load_adapter(adapter)
    names = [each.name for each in wanted]
    for name in known:
        if name not in names and not keeps_others:
            engine.unload_adapter(name)


def throttled(report: Progress, clock: Callable[[], float]) -> Progress:
    """Limit the reports of a progress callback to the start of each stage and a few more, since a download reports each
    piece."""
    last_stage, last_s = "", 0.0

    def pass_on(stage: str, fraction: float) -> None:
        nonlocal last_stage, last_s
        now_s = clock()
        if stage != last_stage or now_s - last_s >= MIN_PROGRESS_INTERVAL_S:
            last_stage, last_s = stage, now_s
            report(stage, fraction)

    return pass_on


class Present(NamedTuple):
    """Replicas that are loaded at one moment, in order of loading. It is replaced as a whole and never modified."""

    replicas: Mapping[str, Replica]
    classes: Mapping[str, int]
    """Priorities of the replicas."""


class ReplicaRegistry:
    """Registry of a device's replicas. Any thread may call its methods.

    A key is claimed when a load begins, and released when it has failed or the replica is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._classes: dict[str, int] = {}
        """Priorities of all claimed keys."""
        self._is_closed = False
        self.present = Present({}, {})

    @property
    def claimed(self) -> Mapping[str, int]:
        """Priorities of the replicas that are loaded or loading."""
        return self._classes

    def find(self, key: str) -> Replica | None:
        return self.present.replicas.get(key)

    def claim(self, key: str, priority: int) -> bool:
        """Claim a key for a load; False: it is taken."""
        with self._lock:
            is_free = key not in self._classes
            if is_free:
                self._classes[key] = priority
            return is_free

    def prioritise(self, key: str, priority: int) -> None:
        """Change the priority of a replica that is loaded or loading. Other keys are ignored."""
        with self._lock:
            if key in self._classes:
                self._classes[key] = priority
                self._replace(self.present.replicas)

    def add(self, replica: Replica) -> bool:
        """Add a loaded replica under its claimed key; False: the registry is closed, and the replica is not needed."""
        with self._lock:
            if not self._is_closed:
                self._replace({**self.present.replicas, replica.key: replica})
            return not self._is_closed

    def remove(self, key: str) -> None:
        """Remove a replica. Its key stays claimed until `release`."""
        with self._lock:
            self._replace({other: kept for other, kept in self.present.replicas.items() if other != key})

    def release(self, key: str) -> None:
        with self._lock:
            self._classes.pop(key, None)

    def close(self) -> tuple[Replica, ...]:
        """Close the registry: no replica can be found or added from now on. Returns the replicas."""
        with self._lock:
            replicas = tuple(self.present.replicas.values())
            self._is_closed = True
            self._replace({})
            return replicas

    def _replace(self, replicas: Mapping[str, Replica]) -> None:
        self.present = Present(replicas, {key: self._classes[key] for key in replicas})
