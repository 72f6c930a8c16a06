"""Whether a recording is what the scheduler decides: every step of every engine, and every turn, once more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.core.scheduler import Scheduler
from lockstep.core.step import StepPlan
from lockstep.replay.playback import TURNS, Playback
from lockstep.replay.rerun import PartedError, SchedulerOf
from lockstep.replay.trace import Trace
from lockstep.replay.wholeness import Finding, are_in_order, is_whole, with_losses

_COLUMN = 58
_LISTS = ("admitted", "resumed", "preempted", "evicted", "swap_out", "swap_in", "copies")
MAX_SHOWN = 40
"""Lines of two plans that are shown beside each other."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What deciding again came to."""

    num_files: int
    num_engines: int
    num_steps: int
    """That were decided as recorded."""
    num_turns: int
    """That were taken as recorded."""
    num_unchecked_steps: int
    """That had begun when the recording broke off."""
    num_foreign_checkpoints: int
    """That another version made: what leads to them was decided again, and they were not compared."""
    findings: tuple[Finding, ...]
    """What of the recording is not there, or not where it belongs."""
    parted: PartedError | None
    """The first step that differs; None: everything is identical."""

    @property
    def is_identical(self) -> bool:
        """Whether what is there is decided as it was recorded."""
        return self.parted is None

    def is_in_order(self, allows_gaps: bool) -> bool:
        """Whether it is identical and nothing is missing; see `wholeness.are_in_order`."""
        return self.is_identical and are_in_order(self.findings, allows_gaps)


def verify(trace: Trace, scheduler_of: SchedulerOf = Scheduler) -> Verification:
    """Decide everything again, up to the first difference.

    Raises:
        TraceError: the recording cannot be read on.
    """
    playback = Playback(trace.entries(), scheduler_of)
    parted = None
    try:
        for _ in playback.play():
            pass
    except PartedError as difference:
        parted = difference
    return Verification(
        len(trace.files),
        playback.num_engines,
        playback.num_steps,
        playback.num_turns,
        playback.num_unchecked_steps,
        playback.num_foreign_checkpoints,
        with_losses(trace.findings, playback.losses),
        parted,
    )


def describe(verification: Verification, trace: Trace) -> Iterator[str]:
    """The verdict, line by line; the first is the short one."""
    parted = verification.parted
    engines = "1 engine" if verification.num_engines == 1 else f"{verification.num_engines} engines"
    counted = f"replay: {verification.num_steps:,} steps of {engines}"
    if parted is None:
        rest = "" if is_whole(verification.findings) else ", but the files are not as they were recorded"
        yield f"{counted}, {verification.num_turns:,} turns, identical{rest}"
    elif parted.engine == TURNS:
        yield f"{counted} are identical, but turn {parted.step} is not"
    else:
        names = {engine.number: engine.name for engine in trace.engines}
        name = names.get(parted.engine, "loaded later")
        yield f"{counted} are identical, but step {parted.step} of engine {parted.engine} ({name}) is not"
    yield from map(str, verification.findings)
    if verification.num_unchecked_steps:
        yield f"{verification.num_unchecked_steps} steps had begun whose records were not written; they are left out"
    if verification.num_foreign_checkpoints:
        count = verification.num_foreign_checkpoints
        yield f"{count} checkpoints are of another version's scheduler: they are not compared, all steps are"
    if parted is not None:
        yield parted.what
        yield from side_by_side(parted.recorded, parted.decided)


def facts(verification: Verification) -> dict[str, Any]:
    """The same as an object."""
    return {
        "identical": verification.is_identical,
        "whole": is_whole(verification.findings),
        "files": verification.num_files,
        "engines": verification.num_engines,
        "steps": verification.num_steps,
        "turns": verification.num_turns,
        "unchecked_steps": verification.num_unchecked_steps,
        "foreign_checkpoints": verification.num_foreign_checkpoints,
        "findings": [finding.facts() for finding in verification.findings],
        "parted": None if verification.parted is None else parted_facts(verification.parted),
    }


def parted_facts(parted: PartedError) -> dict[str, Any]:
    """Where a recording and what is decided again part; a step of no engine is a turn of the device."""
    return {
        "engine": None if parted.engine == TURNS else parted.engine,
        "step": parted.step,
        "what": parted.what,
        "recorded": list(_lines(parted.recorded).values()),
        "decided": list(_lines(parted.decided).values()),
    }


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
