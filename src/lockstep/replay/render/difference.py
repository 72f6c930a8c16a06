"""Differences that `lockstep diff` found: as findings for people, as objects for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.core.policy import SchedulerConfig
from lockstep.core.step import Chunk
from lockstep.replay.causes import Cause
from lockstep.replay.diff import Diff, EngineDiff
from lockstep.replay.explain import names_of, sentences, state_line
from lockstep.replay.snapshot import Snapshot
from lockstep.replay.workload import PS_PER_MS
from lockstep.report.document import ABSENT, Finding, Table, words

MAX_ROWS = 24
"""Rows of the two plans that are shown; those that differ come first."""
MAX_BLOCKS = 4
"""Block ids that are shown of a table: its last ones."""
VERSION = 1
"""Version of the JSON form."""
_HINT = (
    "A row reads `67+1 samples in 3 4 5`: from position 67 on one token, sampling, in a table that ends with these"
    " blocks."
)


def finding_of(found: Diff, a: SchedulerConfig, b: SchedulerConfig, *, is_timed: bool) -> Finding:
    """Difference between two configs or workloads, in words.

    Args:
        is_timed: whether somebody said how long a step is; if not, a time means nothing.
    """
    divergence = found.divergence
    if divergence is None or found.a is None or found.b is None:
        return Finding(f"identical: all {found.num_equal_steps:,} steps are decided the same")
    place = f"tick {divergence.a.tick:,}"
    if is_timed:
        place += f" at {divergence.a.start_ps / PS_PER_MS:,.3f} ms"
    verdict = f"equal for {found.num_equal_steps:,} steps, until {place}; then another {divergence.change.value}:"
    reasons = tuple(sentences(divergence.difference, found.a, found.b))
    states = state_line(found.a), state_line(found.b)
    rest = (found.input,) if found.input else ()
    return Finding(verdict, reasons, states, _plans(found.a, found.b), _HINT, (*rest, *_rest(found, a, b)))


def finding_of_engine(found: EngineDiff) -> Finding:
    """Difference between two recordings of one engine, in words."""
    head = f"engine {found.engine} ({found.name_a or found.name_b})"
    if found.difference is None:
        return Finding(f"{head}: identical, {found.num_equal_steps:,} steps")
    if found.a is None or found.b is None:
        return Finding(f"{head}: only {'B' if found.a is None else 'A'} has it")
    fields = f"; the configs differ in {', '.join(found.fields)}" if found.fields else ""
    change = found.difference.change.value
    verdict = f"{head}: equal for {found.num_equal_steps:,} steps{fields}; then another {change}:"
    reasons = tuple(sentences(found.difference, found.a, found.b))
    states = state_line(found.a), state_line(found.b)
    return Finding(verdict, reasons, states, _plans(found.a, found.b), _HINT, (_input_line(found),))


def _input_line(found: EngineDiff) -> str:
    if found.input:
        return found.input
    if found.fields:
        return "both were told the same up to there, so what differs is what the configs say"
    return "both were told the same up to there under the same config: what was recorded differs by itself"


def configs_line(found: Diff, a: SchedulerConfig, b: SchedulerConfig) -> str:
    """Which fields differ, and how."""
    differing = (f"{field}: {getattr(a, field)} and {getattr(b, field)}" for field in found.fields)
    return f"A and B differ in {'; '.join(differing) or 'no field'}"


def _rest(found: Diff, a: SchedulerConfig, b: SchedulerConfig) -> Iterator[str]:
    if found.cause is not None:
        yield _cause_line(found.cause, a, b)
    reproducer = found.reproducer
    if reproducer is not None:
        requests = list(reproducer.workload.requests)
        size = f"{len(requests)} of the first {found.num_arrived:,} requests"
        how = "none of them can be left out" if reproducer.is_minimal else "fewer may do: the search was cut"
        yield f"reproducer: {size} show it in step {reproducer.divergence.num_equal_steps:,}; {how}"
        yield "  requests " + ", ".join(request.name for request in requests)


def _cause_line(cause: Cause, a: SchedulerConfig, b: SchedulerConfig) -> str:
    def taken(names: tuple[str, ...]) -> str:
        return ", ".join(f"{name} = {getattr(b, name)} in the place of {getattr(a, name)}" for name in names)

    if cause.alone:
        several = f"any of {', '.join(cause.alone)} alone" if len(cause.alone) > 1 else cause.alone[0]
        return f"decided by {several}: with {taken(cause.alone[:1])}, A decides this step as B does"
    if cause.together:
        return f"decided by no field alone; with {taken(cause.together)}, A decides this step as B does"
    return "decided by more than one field; which of them was not found within the bound of the search"


def _plans(a: Snapshot, b: Snapshot) -> Table:
    rows = list(_pairs(a, b))
    table = Table("Plans of this step", words("", "request", "A", "B"), id="plans")
    for name, cell_a, cell_b in sorted(rows, key=lambda row: row[1] == row[2])[:MAX_ROWS]:
        table.rows.append(("" if cell_a == cell_b else "*", name, cell_a or ABSENT, cell_b or ABSENT))
    if len(rows) > MAX_ROWS:
        table.rows.append(("", f"and {len(rows) - MAX_ROWS} more", "", ""))
    return table


def _pairs(a: Snapshot, b: Snapshot) -> Iterator[tuple[str, str, str]]:
    """Request, and its row on each side, empty where it has none; lists of ids where they are not empty."""
    rows_a, rows_b = _rows(a), _rows(b)
    for seq_id in dict.fromkeys((*rows_a, *rows_b)):
        yield a.name(seq_id), _cell(rows_a.get(seq_id)), _cell(rows_b.get(seq_id))
    for what in ("admitted", "resumed", "preempted"):
        lists = [", ".join(side.name(seq_id) for seq_id in getattr(side.decision.plan, what, ())) for side in (a, b)]
        if any(lists):
            yield what, lists[0], lists[1]


def _rows(side: Snapshot) -> dict[int, Chunk]:
    plan = side.decision.plan
    return {} if plan is None else {row.seq_id: row for row in plan.chunks()}


def _cell(row: Chunk | None) -> str:
    if row is None:
        return ""
    dots = "..." if len(row.table) > MAX_BLOCKS else ""
    blocks = dots + " ".join(map(str, row.table[-MAX_BLOCKS:]))
    return f"{row.start}+{row.length}{' samples' if row.samples else ''} in {blocks}"


def facts(found: Diff, a: SchedulerConfig, b: SchedulerConfig) -> dict[str, Any]:
    """Two configs or workloads, as an object."""
    described: dict[str, Any] = {
        "version": VERSION,
        "identical": found.divergence is None,
        "fields": {name: [getattr(a, name), getattr(b, name)] for name in found.fields},
        "requests": found.num_requests,
        "equal_steps": found.num_equal_steps,
    }
    if found.divergence is None or found.a is None or found.b is None:
        return described
    divergence = found.divergence
    described |= {
        "tick": divergence.a.tick,
        "start_ps": divergence.a.start_ps,
        "change": divergence.change.value,
        "about": names_of(divergence.difference, found.a, found.b),
        "reasons": sentences(divergence.difference, found.a, found.b),
        "decided_by": None if found.cause is None else cause_facts(found.cause),
        "plans": [{"request": name, "a": x, "b": y} for name, x, y in _pairs(found.a, found.b)],
        "input": found.input or None,
        "reproducer": None,
    }
    if found.reproducer is not None:
        described["reproducer"] = {
            "requests": [request.name for request in found.reproducer.workload.requests],
            "equal_steps": found.reproducer.divergence.num_equal_steps,
            "is_minimal": found.reproducer.is_minimal,
            "probes": found.reproducer.num_probes,
        }
    return described


def cause_facts(cause: Cause) -> dict[str, list[str]]:
    """The fields that decide."""
    return {"alone": list(cause.alone), "together": list(cause.together)}


def engine_facts(found: EngineDiff) -> dict[str, Any]:
    """One engine of two recordings, as an object."""
    described: dict[str, Any] = {
        "engine": found.engine,
        "name_a": found.name_a or None,
        "name_b": found.name_b or None,
        "identical": found.difference is None,
        "fields": list(found.fields),
        "equal_steps": found.num_equal_steps,
    }
    if found.difference is not None and found.a is not None and found.b is not None:
        described["change"] = found.difference.change.value
        described["reasons"] = sentences(found.difference, found.a, found.b)
        described["plans"] = [{"request": name, "a": x, "b": y} for name, x, y in _pairs(found.a, found.b)]
        described["input"] = found.input or None
    return described
