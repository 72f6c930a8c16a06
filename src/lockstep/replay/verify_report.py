"""Report of a verification: decisions compared, the first difference, and missing parts of a recording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lockstep.core.step import StepPlan
from lockstep.replay.trace_integrity import Finding, are_in_order, is_whole

TURNS = -1
"""Engine number for divergences in the turns of the device."""
_COLUMN = 58
_LISTS = ("admitted", "resumed", "preempted", "evicted", "swap_out", "swap_in", "copies")
MAX_SHOWN = 40
"""Maximum lines of two plans that are shown side by side."""


class Divergence(Protocol):
    """First difference from a recording."""

    def lines(self) -> Iterator[str]:
        """The divergence as text."""

    def facts(self) -> dict[str, Any]:
        """The divergence as an object."""


DivergenceT = TypeVar("DivergenceT", bound=Divergence)


@dataclass(frozen=True, slots=True)
class Verification(Generic[DivergenceT]):
    """Result of comparing the steps, plans or routes of a recording, or of checking its files."""

    key: str
    """Key of the part in the JSON form; empty: steps."""
    summary: str
    """Counts and the result in one line; empty: nothing was decided again."""
    counts: Mapping[str, int]
    """Number of compared items, by kind."""
    diverged: DivergenceT | None = None
    """First difference; None: all compared items are identical."""
    findings: tuple[Finding, ...] = ()
    """Findings about files that are missing or misplaced."""
    notes: tuple[str, ...] = ()
    """Warnings about parts that were not compared."""

    @property
    def is_identical(self) -> bool:
        """True if all existing parts were decided as recorded."""
        return self.diverged is None

    def is_in_order(self, allows_gaps: bool) -> bool:
        """True if it is identical and no part is missing; see `trace_integrity.are_in_order`."""
        return self.is_identical and are_in_order(self.findings, allows_gaps)

    def lines(self) -> Iterator[str]:
        """The result as lines; the first is a summary."""
        is_different = self.is_identical and not is_whole(self.findings)
        if self.summary:
            yield self.summary + (", but the files differ from the recorded ones" if is_different else "")
        yield from map(str, self.findings)
        yield from self.notes
        if self.diverged is not None:
            yield from self.diverged.lines()

    def facts(self) -> dict[str, Any]:
        """The result as an object."""
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
    """Result of comparing plans or routes one by one, up to the first difference."""
    count, diverged = 0, None
    for diverged in compared:
        count += 1
        if diverged is not None:
            break
    result = "identical" if diverged is None else "not identical"
    return Verification(key, f"{key}: {count:,} {what}, {result}", {what: count}, diverged, findings)


class DivergedError(Exception):
    """Difference between a recording and the decisions of this version.

    Args:
        engine: number of the engine, or `TURNS`.
        step: step of the engine; for turns, the turn.
        what: description as a sentence.
        recorded: recorded plan, if readable.
        decided: plan computed here, if any.
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
        """The divergence as an object; a difference without an engine is a turn of the device."""
        return {
            "engine": None if self.engine == TURNS else self.engine,
            "step": self.step,
            "what": self.what,
            "recorded": list(_lines(self.recorded).values()),
            "decided": list(_lines(self.decided).values()),
        }

    def lines(self) -> Iterator[str]:
        """The divergence as text, with both plans."""
        yield self.what
        yield from side_by_side(self.recorded, self.decided)


def side_by_side(recorded: StepPlan | None, decided: StepPlan | None) -> Iterator[str]:
    """Two plans in two columns, with marks at differing lines; empty if either is missing."""
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
