"""A loaded artifact with its engine, and what is told of it when it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.engine.engine import Engine, Observer
from lockstep.engine.loading import Progress, load_model
from lockstep.engine.sessions import SessionChange
from lockstep.worker.messages import Load, Loaded
from lockstep.worker.text import TextSide
from lockstep.worker.trial import try_unknown

MIN_PROGRESS_INTERVAL_S = 0.1
"""Reports of one stage follow each other no faster."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine of a device worker."""

    key: str
    engine: Engine

    def close(self) -> None:
        self.engine.model.close()


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who is told what, on the step thread."""

    added: Callable[[int], None]
    stepped: Observer
    session_changed: Callable[[SessionChange], None]


def open_replica(load: Load, progress: Progress, listeners: Listeners) -> tuple[Replica, Loaded]:
    """Try the artifact where it is unknown, then load it here.

    Raises:
        LockstepError: it cannot be loaded; the message says why.
    """
    started_s = time.perf_counter()
    try_unknown(load, progress)
    model, config = load_model(load.source, load.options, progress)
    engine = Engine(
        model,
        config,
        observer=listeners.stepped,
        on_added=listeners.added,
        on_session=listeners.session_changed,
    )
    executor = model.executor
    return Replica(load.replica, engine), Loaded(
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
