"""What `lockstep diff` found, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.cli.tables import new_table, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.core.policy import SchedulerConfig
    from lockstep.core.step import Chunk
    from lockstep.replay.causes import Cause
    from lockstep.replay.diff import Diff
    from lockstep.replay.situation import Situation
    from lockstep.replay.trace_diff import EngineDiff

MAX_ROWS = 24
"""Rows of the two plans that are printed; those that differ come first."""
MAX_BLOCKS = 4
"""Block ids that are printed of a table: its last ones."""
VERSION = 1
"""Of the JSON form."""


def print_diff(found: Diff, a: SchedulerConfig, b: SchedulerConfig, name: str) -> None:
    """Print it as text."""
    for line in _head(found, a, b, name):
        print(line)
    if found.divergence is None or found.a is None or found.b is None:
        return
    print()
    _print_plans(found.a, found.b)
    print()
    for line in _tail(found, a, b):
        print(line)


def _head(found: Diff, a: SchedulerConfig, b: SchedulerConfig, name: str) -> Iterator[str]:
    from lockstep.replay.reasons import sentences, state_line
    from lockstep.replay.workload import PS_PER_MS

    yield f"{name}: {found.num_requests:,} request{'s' * (found.num_requests != 1)}"
    yield "A and B differ in " + (
        "; ".join(f"{field}: {getattr(a, field)} and {getattr(b, field)}" for field in found.fields) or "no field"
    )
    divergence = found.divergence
    if divergence is None or found.a is None or found.b is None:
        yield f"identical: all {found.num_equal_steps:,} steps are decided the same"
        return
    yield f"equal for {found.num_equal_steps:,} steps, until tick {divergence.a.tick:,} at " + (
        f"{divergence.a.start_ps / PS_PER_MS:,.3f} ms; then another {divergence.change.value}:"
    )
    for sentence in sentences(divergence.difference, found.a, found.b):
        yield f"  {sentence}"
    yield state_line(found.a)
    yield state_line(found.b)


def _tail(found: Diff, a: SchedulerConfig, b: SchedulerConfig) -> Iterator[str]:
    if found.cause is not None:
        yield _cause_line(found.cause, a, b)
    reproducer = found.reproducer
    if reproducer is not None:
        requests = list(reproducer.workload.requests)
        size = f"{len(requests)} of the first {found.num_arrived:,} requests"
        how = "none of them can be left out" if reproducer.is_minimal else "fewer may do: the search was cut"
        yield f"reproducer: {size} show it in step {reproducer.divergence.num_equal_steps:,}; {how}"
        yield "  requests " + ", ".join(request.name for request in requests)


def print_engine(found: EngineDiff) -> None:
    """Print one engine of two recordings as text."""
    from lockstep.replay.reasons import sentences, state_line

    name = found.name_a or found.name_b
    if found.difference is None:
        print(f"engine {found.engine} ({name}): identical, {found.num_equal_steps:,} steps")
        return
    fields = f"; the configs differ in {', '.join(found.fields)}" if found.fields else ""
    print(f"engine {found.engine} ({name}): equal for {found.num_equal_steps:,} steps{fields}")
    if found.a is None or found.b is None:
        print(f"  only {'B' if found.a is None else 'A'} has this engine")
        return
    print(f"then another {found.difference.change.value}:")
    for sentence in sentences(found.difference, found.a, found.b):
        print(f"  {sentence}")
    print(state_line(found.a))
    print(state_line(found.b))
    print()
    _print_plans(found.a, found.b)


def engine_facts(found: EngineDiff) -> dict[str, Any]:
    """The same as an object."""
    from lockstep.replay.reasons import sentences

    told: dict[str, Any] = {
        "engine": found.engine,
        "name_a": found.name_a or None,
        "name_b": found.name_b or None,
        "identical": found.difference is None,
        "fields": list(found.fields),
        "equal_steps": found.num_equal_steps,
    }
    if found.difference is not None and found.a is not None and found.b is not None:
        told["change"] = found.difference.change.value
        told["reasons"] = sentences(found.difference, found.a, found.b)
        told["plans"] = [{"request": name, "a": x, "b": y} for name, x, y in _pairs(found.a, found.b)]
    return told


def _cause_line(cause: Cause, a: SchedulerConfig, b: SchedulerConfig) -> str:
    def taken(names: tuple[str, ...]) -> str:
        return ", ".join(f"{name} = {getattr(b, name)} in the place of {getattr(a, name)}" for name in names)

    if cause.alone:
        several = f"any of {', '.join(cause.alone)} alone" if len(cause.alone) > 1 else cause.alone[0]
        return f"decided by {several}: with {taken(cause.alone[:1])}, A decides this step as B does"
    if cause.together:
        return f"decided by no field alone; with {taken(cause.together)}, A decides this step as B does"
    return "decided by more than one field; which of them was not found within the bound of the search"


def _print_plans(a: Situation, b: Situation) -> None:
    rows = list(_pairs(a, b))
    shown = sorted(rows, key=lambda row: row[1] == row[2])[:MAX_ROWS]
    table = new_table("", "request", "A", "B")
    for name, cell_a, cell_b in shown:
        table.add_row("" if cell_a == cell_b else "*", name, cell_a or "-", cell_b or "-")
    print_table(table)
    if len(rows) > len(shown):
        print(f"and {len(rows) - len(shown)} more rows")


def _pairs(a: Situation, b: Situation) -> Iterator[tuple[str, str, str]]:
    """Request, and its row on each side, empty where it has none; lists of ids where they are not empty."""
    rows_a, rows_b = _rows(a), _rows(b)
    for seq_id in dict.fromkeys((*rows_a, *rows_b)):
        yield a.name(seq_id), _cell(rows_a.get(seq_id)), _cell(rows_b.get(seq_id))
    for what in ("admitted", "resumed", "preempted"):
        lists = [", ".join(side.name(seq_id) for seq_id in getattr(side.decision.plan, what, ())) for side in (a, b)]
        if any(lists):
            yield what, lists[0], lists[1]


def _rows(side: Situation) -> dict[int, Chunk]:
    plan = side.decision.plan
    return {} if plan is None else {row.seq_id: row for row in plan.chunks()}


def _cell(row: Chunk | None) -> str:
    if row is None:
        return ""
    dots = "..." if len(row.table) > MAX_BLOCKS else ""
    blocks = dots + " ".join(map(str, row.table[-MAX_BLOCKS:]))
    return f"{row.start}+{row.length}{' samples' if row.samples else ''} in {blocks}"


def facts(found: Diff, a: SchedulerConfig, b: SchedulerConfig) -> dict[str, Any]:
    """The same as an object."""
    told: dict[str, Any] = {
        "version": VERSION,
        "identical": found.divergence is None,
        "fields": {name: [getattr(a, name), getattr(b, name)] for name in found.fields},
        "requests": found.num_requests,
        "equal_steps": found.num_equal_steps,
    }
    if found.divergence is None or found.a is None or found.b is None:
        return told
    from lockstep.replay.reasons import names_of, sentences

    divergence = found.divergence
    told |= {
        "tick": divergence.a.tick,
        "start_ps": divergence.a.start_ps,
        "change": divergence.change.value,
        "about": names_of(divergence.difference, found.a, found.b),
        "reasons": sentences(divergence.difference, found.a, found.b),
        "decided_by": None
        if found.cause is None
        else {"alone": list(found.cause.alone), "together": list(found.cause.together)},
        "plans": [{"request": name, "a": x, "b": y} for name, x, y in _pairs(found.a, found.b)],
        "reproducer": None,
    }
    if found.reproducer is not None:
        told["reproducer"] = {
            "requests": [request.name for request in found.reproducer.workload.requests],
            "equal_steps": found.reproducer.divergence.num_equal_steps,
            "is_minimal": found.reproducer.is_minimal,
            "probes": found.reproducer.num_probes,
        }
    return told
