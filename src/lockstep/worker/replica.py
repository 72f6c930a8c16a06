"""A loaded artifact with its engine, and what is told of it when it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lockstep.engine.engine import Engine
from lockstep.engine.loading import Progress, load_model
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.sessions import SessionChange
from lockstep.worker.messages import Load, Loaded
from lockstep.worker.text import TextSide
from lockstep.worker.trial import try_unknown

if TYPE_CHECKING:
    from lockstep.worker.flight.recorder import Recorder
    from lockstep.worker.flight.tape import EngineTape

MIN_PROGRESS_INTERVAL_S = 0.1
"""Reports of one stage follow each other no faster."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine of a device worker."""

    key: str
    engine: Engine
    tape: EngineTape | None = None
    """What records it."""

    def metrics(self) -> MetricsSnapshot:
        """The engine's; whether it is recorded, and what its recording lacks."""
        snapshot, tape = self.engine.metrics(), self.tape
        if tape is None:
            return snapshot
        gauges = {**snapshot.gauges, "trace_recording": float(tape.is_recorded)}
        return replace(snapshot, gauges=gauges, counters={**snapshot.counters, **tape.lost()})

    def close(self) -> None:
        self.engine.model.close()


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told what, on the step thread."""

    added: Callable[[int], None]
    session_changed: Callable[[SessionChange], None]


def open_replica(
    load: Load, progress: Progress, listeners: Listeners, recorder: Recorder | None = None
) -> tuple[Replica, Loaded]:
    """Try the artifact where it is unknown, then load it here.

    Args:
        recorder: of the device, where it has one.

    Raises:
        LockstepError: it cannot be loaded; the message says why.
    """
    started_s = time.perf_counter()
    try_unknown(load, progress)
    model, config = load_model(load.source, load.options, progress)
    tape = None if recorder is None else recorder.tape(load.replica, model, config)
    engine = Engine(
        model,
        config,
        on_added=listeners.added,
        on_session=listeners.session_changed,
        tape=tape,
    )
    executor = model.executor
    return Replica(load.replica, engine, tape), Loaded(
        load.replica,
        model.name,
        model.fingerprint,
        config,
        executor.geometry,
        dict(model.sampling_defaults),
        model.probe,
        dict(executor.environment),
        hasattr(type(executor), "hidden_states"),
        time.perf_counter() - started_s,
        TextSide.of(model.tokenizer.parts),
        model.weights_bytes,
    )


def throttled(report: Progress) -> Progress:
    """Every stage's beginning, and then now and then: a download reports each of its pieces."""
    last_stage, last_s = "", 0.0

    def pass_on(stage: str, fraction: float) -> None:
        nonlocal last_stage, last_s
        now_s = time.perf_counter()
        if stage != last_stage or now_s - last_s >= MIN_PROGRESS_INTERVAL_S:
            last_stage, last_s = stage, now_s
            report(stage, fraction)

    return pass_on
