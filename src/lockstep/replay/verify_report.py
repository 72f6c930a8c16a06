"""Report of a verification: decisions compared, the first difference, and missing parts of a recording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lockstep.core.step import StepPlan
from lockstep.replay.trace_integrity import Finding, are_in_order, is_whole

TURNS = -1
"""In the place of an engine's number: the turns of the device."""
_COLUMN = 58
_LISTS = ("admitted", "resumed", "preempted", "evicted", "swap_out", "swap_in", "copies")
MAX_SHOWN = 40
"""Lines of two plans that are shown beside each other."""


class Divergence(Protocol):
    """The first thing that is decided otherwise than it was recorded."""

    def lines(self) -> Iterator[str]:
        """The divergence in words."""

    def facts(self) -> dict[str, Any]:
        """The divergence as an object."""


DivergenceT = TypeVar("DivergenceT", bound=Divergence)


@dataclass(frozen=True, slots=True)
class Verification(Generic[DivergenceT]):
    """Verdict on the steps, the plans or the routes of a recording, or on its files alone."""

    key: str
    """Name of the part of the recording in the JSON form; empty: its steps."""
    summary: str
    """Counts and the result, in one line; empty: nothing was decided again."""
    counts: Mapping[str, int]
    """Number of things that were compared, by what they are."""
    diverged: DivergenceT | None = None
    """The first difference; None: everything that is there is identical."""
    findings: tuple[Finding, ...] = ()
    """Files that are missing, or not where they belong."""
    notes: tuple[str, ...] = ()
    """Parts that were not compared."""

    @property
    def is_identical(self) -> bool:
        """True if all that is there is decided as it was recorded."""
        return self.diverged is None

    def is_in_order(self, allows_gaps: bool) -> bool:
        """True if it is identical and nothing is missing; see `trace_integrity.are_in_order`."""
        return self.is_identical and are_in_order(self.findings, allows_gaps)

    def lines(self) -> Iterator[str]:
        """The verdict, line by line; the first is the short one."""
        is_different = self.is_identical and not is_whole(self.findings)
        if self.summary:
            yield self.summary + (", but the files are not as they were recorded" if is_different else "")
        yield from map(str, self.findings)
        yield from self.notes
        if self.diverged is not None:
            yield from self.diverged.lines()

    def facts(self) -> dict[str, Any]:
        """The verdict as an object."""
        return {
            "identical": self.is_identical,
            "whole": is_whole(self.findings),
            **self.counts,
            "findings": [finding.facts() for finding in self.findings],
            "parted": None if self.diverged is None else self.diverged.facts(),
        }


def verification_of(
    key: str, what: str, compared: Iterable[DivergenceT | None], findings: tuple[Finding, ...]
) -> Verification[DivergenceT]:
    """The verdict on plans or routes, which are compared one by one up to the first difference."""
    count, diverged = 0, None
    for diverged in compared:
        count += 1
        if diverged is not None:
            break
    result = "identical" if diverged is None else "not identical"
    return Verification(key, f"{key}: {count:,} {what}, {result}", {what: count}, diverged, findings)


class DivergedError(Exception):
    """A recording is not what is decided again.

    Args:
        engine: its number, or `TURNS`.
        step: of the engine; for turns, the turn.
        what: a sentence.
        recorded: the recorded plan, where one can be read.
        decided: the one that was decided again, where one was.
    """

    def __init__(
        self, engine: int, step: int, what: str, recorded: StepPlan | None = None, decided: StepPlan | None = None
    ) -> None:
        super().__init__(what)
        self.engine = engine
        self.step = step
        self.what = what
        self.recorded = recorded
        self.decided = decided

    def facts(self) -> dict[str, Any]:
        """The divergence as an object; a step of no engine is a turn of the device."""
        return {
            "engine": None if self.engine == TURNS else self.engine,
            "step": self.step,
            "what": self.what,
            "recorded": list(_lines(self.recorded).values()),
            "decided": list(_lines(self.decided).values()),
        }

    def lines(self) -> Iterator[str]:
        """The divergence in words, with both plans."""
        yield self.what
        yield from side_by_side(self.recorded, self.decided)


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
