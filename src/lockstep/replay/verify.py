"""Verification of recordings: decides steps, turns, plans and routes again, up to the first difference of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.cluster.plan_recorder import PLAN_SUFFIX
from lockstep.cluster.route_recorder import ROUTE_SUFFIX
from lockstep.core.scheduler import Scheduler
from lockstep.replay.folder_integrity import folder_findings
from lockstep.replay.plans import verify_plans
from lockstep.replay.playback import Playback, Tally
from lockstep.replay.recorded_routes import verify_routes
from lockstep.replay.request_timeline import RequestTimeline
from lockstep.replay.rerun import SchedulerOf
from lockstep.replay.trace import Trace, files_in, open_trace
from lockstep.replay.trace_integrity import with_losses
from lockstep.replay.verify_report import TURNS, DivergedError, Verification
from lockstep.worker.flight.entries import SUFFIX


def verify_recording(path: Path, timeline: RequestTimeline | None = None) -> list[Verification[Any]]:
    """Verify the steps, plans and routes of a directory or a file, in this order.

    Args:
        timeline: timeline of one request, filled while the steps are decided.

    Raises:
        TraceError: the recording is damaged or incomplete, or does not have the request.
    """
    planned = [verify_plans(path)] if files_in(path, PLAN_SUFFIX) else []
    routed = [verify_routes(path)] if files_in(path, ROUTE_SUFFIX) else []
    others: list[Verification[Any]] = [*planned, *routed]
    noted = [finding for each in others for finding in each.findings]
    if timeline is not None or not others or any(path.glob(f"*{SUFFIX}")):
        return [verify(open_trace(path, noted), timeline=timeline), *others]
    return [*others, Verification("folder", "", {}, findings=folder_findings(path, noted))]


def verify(
    trace: Trace, scheduler_of: SchedulerOf = Scheduler, timeline: RequestTimeline | None = None
) -> Verification[DivergedError]:
    """Decide all steps and turns again, up to the first difference.

    Args:
        timeline: timeline of one request, filled while the steps are decided.

    Raises:
        TraceError: the recording is damaged or incomplete, or does not have the request.
    """
    playback = Playback(trace.entries(), scheduler_of)
    diverged = None
    try:
        for event in playback.play():
            if timeline is not None:
                timeline.take(event, playback)
    except DivergedError as error:
        diverged = error
    if timeline is not None:
        timeline.check_found(trace)
    tally = playback.tally
    counts = {name.removeprefix("num_"): count for name, count in asdict(tally).items()}
    return Verification(
        "",
        _summary(tally, diverged, trace),
        {"files": len(trace.files), **counts},
        diverged,
        with_losses(trace.findings, playback.losses),
        tuple(_notes(tally)),
    )


def _summary(tally: Tally, diverged: DivergedError | None, trace: Trace) -> str:
    engines = "1 engine" if tally.num_engines == 1 else f"{tally.num_engines} engines"
    counted = f"replay: {tally.num_steps:,} steps of {engines}"
    if diverged is None:
        return f"{counted}, {tally.num_turns:,} turns, identical"
    if diverged.engine == TURNS:
        return f"{counted} are identical, but turn {diverged.step} differs"
    names = {engine.number: engine.name for engine in trace.engines}
    name = names.get(diverged.engine, "loaded later")
    return f"{counted} are identical, but step {diverged.step} of engine {diverged.engine} ({name}) differs"


def _notes(tally: Tally) -> Iterator[str]:
    if tally.num_unchecked_steps:
        yield f"{tally.num_unchecked_steps} steps have no record and were not compared, because the recording was cut"
    if tally.num_foreign_checkpoints:
        count = tally.num_foreign_checkpoints
        yield f"{count} checkpoints of another version's scheduler were not compared; all steps were"
