"""Verification of recordings: every step of each engine and every turn, decided again up to the first difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan
from lockstep.replay.playback import Playback, Tally
from lockstep.replay.request_timeline import RequestTimeline
from lockstep.replay.rerun import TURNS, DivergedError, SchedulerOf
from lockstep.replay.trace import Trace
from lockstep.replay.trace_integrity import Finding, are_in_order, is_whole, with_losses

_COLUMN = 58
_LISTS = ("admitted", "resumed", "preempted", "evicted", "swap_out", "swap_in", "copies")
MAX_SHOWN = 40
"""Lines of two plans that are shown beside each other."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of deciding a recording again."""

    tally: Tally
    findings: tuple[Finding, ...]
    """Files that are missing, or not where they belong."""
    diverged: DivergedError | None
    """The first step that differs; None: everything is identical."""

    @property
    def is_identical(self) -> bool:
        """True if all that is there is decided as it was recorded."""
        return self.diverged is None

    def is_in_order(self, allows_gaps: bool) -> bool:
        """True if it is identical and nothing is missing; see `trace_integrity.are_in_order`."""
        return self.is_identical and are_in_order(self.findings, allows_gaps)


def verify(
    trace: Trace, scheduler_of: SchedulerOf = Scheduler, timeline: RequestTimeline | None = None
) -> Verification:
    """Decide everything again, up to the first difference.

    Args:
        timeline: of one request; it is filled on the way.

    Raises:
        TraceError: the recording cannot be read on.
    """
    entries = trace.entries() if timeline is None else timeline.read(trace.entries())
    playback = Playback(entries, scheduler_of)
    diverged = None
    try:
        for event in playback.play():
            if timeline is not None:
                timeline.take(event, playback)
    except DivergedError as error:
        diverged = error
    return Verification(playback.tally, with_losses(trace.findings, playback.losses), diverged)


def describe(verification: Verification, trace: Trace) -> Iterator[str]:
    """The verdict, line by line; the first is the short one."""
    tally, diverged = verification.tally, verification.diverged
    engines = "1 engine" if tally.num_engines == 1 else f"{tally.num_engines} engines"
    counted = f"replay: {tally.num_steps:,} steps of {engines}"
    if diverged is None:
        rest = "" if is_whole(verification.findings) else ", but the files are not as they were recorded"
        yield f"{counted}, {tally.num_turns:,} turns, identical{rest}"
    elif diverged.engine == TURNS:
        yield f"{counted} are identical, but turn {diverged.step} is not"
    else:
        names = {engine.number: engine.name for engine in trace.engines}
        name = names.get(diverged.engine, "loaded later")
        yield f"{counted} are identical, but step {diverged.step} of engine {diverged.engine} ({name}) is not"
    yield from map(str, verification.findings)
    if tally.num_unchecked_steps:
        yield f"{tally.num_unchecked_steps} steps had begun whose records were not written; they are left out"
    if tally.num_foreign_checkpoints:
        count = tally.num_foreign_checkpoints
        yield f"{count} checkpoints are of another version's scheduler: they are not compared, all steps are"
    yield from divergence_lines(diverged)


def facts(verification: Verification, trace: Trace) -> dict[str, Any]:
    """The verdict as an object."""
    return {
        "identical": verification.is_identical,
        "whole": is_whole(verification.findings),
        "files": len(trace.files),
        **{name.removeprefix("num_"): count for name, count in asdict(verification.tally).items()},
        "findings": [finding.facts() for finding in verification.findings],
        "parted": divergence_facts(verification.diverged),
    }


def divergence_facts(diverged: DivergedError | None) -> dict[str, Any] | None:
    """Divergence of a recording and what is decided again; a step of no engine is a turn of the device."""
    if diverged is None:
        return None
    return {
        "engine": None if diverged.engine == TURNS else diverged.engine,
        "step": diverged.step,
        "what": diverged.what,
        "recorded": list(_lines(diverged.recorded).values()),
        "decided": list(_lines(diverged.decided).values()),
    }


def divergence_lines(diverged: DivergedError | None) -> Iterator[str]:
    """The same in words, with both plans; nothing where there is none."""
    if diverged is not None:
        yield diverged.what
        yield from side_by_side(diverged.recorded, diverged.decided)


def side_by_side(recorded: StepPlan | None, decided: StepPlan | None) -> Iterator[str]:
    """Two plans in two columns, the lines that differ marked; nothing, where there is none."""
    if recorded is None and decided is None:
        return
    left, right = _lines(recorded), _lines(decided)
    keys = [*left, *(key for key in right if key not in left)]
    yield f"   {'recorded':{_COLUMN}}decided here"
    for key in keys[:MAX_SHOWN]:
        a, b = left.get(key, "-"), right.get(key, "-")
        yield f"{' ' if a == b else '>'}  {_cut(a):{_COLUMN}}{_cut(b)}".rstrip()
    if len(keys) > MAX_SHOWN:
        yield f"   and {len(keys) - MAX_SHOWN} lines more"


def _lines(plan: StepPlan | None) -> dict[str, str]:
    if plan is None:
        return {}
    lines = {name: f"{name} {list(value)}" for name in _LISTS if (value := getattr(plan, name))}
    for chunk in plan.chunks():
        samples = ", samples" if chunk.samples else ""
        where = f"{chunk.start}..{chunk.start + chunk.length - 1}"
        lines[f"row {chunk.seq_id}"] = f"sequence {chunk.seq_id}: {where}{samples}, blocks {list(chunk.table)}"
    lines["order"] = f"rows in order {list(plan.seq_ids)}"
    return lines


def _cut(text: str) -> str:
    return text if len(text) < _COLUMN else f"{text[: _COLUMN - 5]}..."
