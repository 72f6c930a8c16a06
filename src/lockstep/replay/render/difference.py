"""Rendering of differences from `lockstep diff` and `lockstep bisect`: as findings for people and objects for
programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from lockstep.core.policy import SchedulerConfig
from lockstep.core.step import Chunk
from lockstep.replay.causes import Bisection, Cause
from lockstep.replay.diff import Diff, EngineDiff
from lockstep.replay.divergence import Divergence, rows_of
from lockstep.replay.explain import names_of, sentences, state_line
from lockstep.replay.snapshot import Snapshot
from lockstep.replay.workload import PS_PER_MS
from lockstep.report.document import ABSENT, Cell, Finding, Number, Style, Table, numbers, words

MAX_ROWS = 24
"""Maximum rows of the two plans; differing rows come first."""
MAX_BLOCKS = 4
"""Maximum block ids of a table, from its end."""
VERSION = 1
"""Version of the JSON form."""
_HINT = (
    "A row `67+1 samples in 3 4 5` computes one token from position 67 on and samples; its table ends with "
    "the blocks 3,"
    " 4 and 5."
)


def finding_of(found: Diff, a: SchedulerConfig, b: SchedulerConfig, *, is_timed: bool) -> Finding:
    """Difference between two configs or workloads as sentences.

    Args:
        is_timed: True if the duration of a step is given; otherwise times are omitted.
    """
    divergence = found.divergence
    if divergence is None or found.a is None or found.b is None:
        return Finding(f"identical: all {found.num_equal_steps:,} steps are decided the same")
    place = f"tick {divergence.a.tick:,}"
    if is_timed:
        place += f" at {divergence.a.start_ps / PS_PER_MS:,.3f} ms"
    verdict = f"equal for {found.num_equal_steps:,} steps, until {place}; first difference ({divergence.change.value}):"
    rest = (found.input_difference,) if found.input_difference else ()
    return _finding(found.a, found.b, divergence, verdict, (*rest, *_rest(found, a, b)))


def finding_of_engine(found: EngineDiff) -> Finding:
    """Difference between two recordings of one engine as sentences."""
    diff = found.diff
    head = f"engine {found.engine} ({found.name_a or found.name_b})"
    if diff.divergence is None:
        return Finding(f"{head}: identical, {diff.num_equal_steps:,} steps")
    if diff.a is None or diff.b is None:
        return Finding(f"{head}: exists only in {'B' if diff.a is None else 'A'}")
    fields = f"; the configs differ in {', '.join(diff.fields)}" if diff.fields else ""
    change = diff.divergence.change.value
    verdict = f"{head}: equal for {diff.num_equal_steps:,} steps{fields}; first difference ({change}):"
    answers = () if found.answers is None else found.answers.sentences
    return _finding(diff.a, diff.b, diff.divergence, verdict, (_input_line(diff), *answers))


def _finding(a: Snapshot, b: Snapshot, divergence: Divergence, verdict: str, rest: tuple[str, ...]) -> Finding:
    reasons = tuple(sentences(divergence.difference, a, b))
    return Finding(verdict, reasons, (state_line(a), state_line(b)), _plans(a, b), _HINT, rest)


def _input_line(found: Diff) -> str:
    if found.input_difference:
        return found.input_difference
    if found.fields:
        return "the inputs are equal up to this step, so the configs cause the difference"
    return "the inputs and configs are equal up to this step: only the recorded decisions differ"


def configs_line(found: Diff, a: SchedulerConfig, b: SchedulerConfig) -> str:
    """Config fields that differ, with both values."""
    differing = (f"{field}: {getattr(a, field)} and {getattr(b, field)}" for field in found.fields)
    return f"A and B differ in {'; '.join(differing) or 'no field'}"


def _rest(found: Diff, a: SchedulerConfig, b: SchedulerConfig) -> Iterator[str]:
    if found.cause is not None:
        yield _cause_line(found.cause, a, b)
    reproducer = found.reproducer
    if reproducer is not None:
        requests = list(reproducer.workload.requests)
        size = f"{len(requests)} of the first {found.num_arrived:,} requests"
        how = "none of them can be removed" if reproducer.is_minimal else "the search reached its limit: fewer may do"
        yield f"reproducer: {size} show it in step {reproducer.divergence.num_equal_steps:,}; {how}"
        yield "  requests " + ", ".join(request.name for request in requests)


def _cause_line(cause: Cause, a: SchedulerConfig, b: SchedulerConfig) -> str:
    def taken(names: tuple[str, ...]) -> str:
        return ", ".join(f"{name} = {getattr(b, name)} instead of {getattr(a, name)}" for name in names)

    if cause.alone:
        several = f"any of {', '.join(cause.alone)} alone" if len(cause.alone) > 1 else cause.alone[0]
        return f"decided by {several}: with {taken(cause.alone[:1])}, A decides this step like B"
    if cause.together:
        return f"decided by several fields together; with {taken(cause.together)}, A decides this step like B"
    return "decided by more than one field; the search reached its limit before it found which"


def _plans(a: Snapshot, b: Snapshot) -> Table:
    rows = list(_pairs(a, b))
    table = Table("Plans of this step", words("", "request", "A", "B"), id="plans")
    for name, cell_a, cell_b in sorted(rows, key=lambda row: row[1] == row[2])[:MAX_ROWS]:
        table.rows.append(("" if cell_a == cell_b else "*", name, cell_a or ABSENT, cell_b or ABSENT))
    if len(rows) > MAX_ROWS:
        table.rows.append(("", f"and {len(rows) - MAX_ROWS} more", "", ""))
    return table


def _pairs(a: Snapshot, b: Snapshot) -> Iterator[tuple[str, str, str]]:
    """Request and its row on each side, empty if it has none; then the lists of ids that are not empty."""
    rows_a, rows_b = rows_of(a.decision.plan), rows_of(b.decision.plan)
    for seq_id in dict.fromkeys((*rows_a, *rows_b)):
        yield a.name(seq_id), _cell(rows_a.get(seq_id)), _cell(rows_b.get(seq_id))
    for what in ("admitted", "resumed", "preempted"):
        lists = [", ".join(side.name(seq_id) for seq_id in getattr(side.decision.plan, what, ())) for side in (a, b)]
        if any(lists):
            yield what, lists[0], lists[1]


def _cell(row: Chunk | None) -> str:
    if row is None:
        return ""
    dots = "..." if len(row.table) > MAX_BLOCKS else ""
    blocks = dots + " ".join(map(str, row.table[-MAX_BLOCKS:]))
    return f"{row.start}+{row.length}{' samples' if row.samples else ''} in {blocks}"


def facts(found: Diff, a: SchedulerConfig, b: SchedulerConfig) -> dict[str, Any]:
    """Difference of two configs or workloads as an object."""
    described: dict[str, Any] = {
        "version": VERSION,
        "identical": found.divergence is None,
        "fields": {name: [getattr(a, name), getattr(b, name)] for name in found.fields},
        "requests": found.num_requests,
        "equal_steps": found.num_equal_steps,
    }
    if found.divergence is None:
        return described
    described |= {"tick": found.divergence.a.tick, "start_ps": found.divergence.a.start_ps, **_divergence_facts(found)}
    described["reproducer"] = None
    if found.reproducer is not None:
        described["reproducer"] = {
            "requests": [request.name for request in found.reproducer.workload.requests],
            "equal_steps": found.reproducer.divergence.num_equal_steps,
            "is_minimal": found.reproducer.is_minimal,
            "probes": found.reproducer.num_probes,
        }
    return described


def engine_facts(found: EngineDiff) -> dict[str, Any]:
    """Difference of one engine in two recordings as an object."""
    diff = found.diff
    described: dict[str, Any] = {
        "engine": found.engine,
        "name_a": found.name_a or None,
        "name_b": found.name_b or None,
        "identical": diff.divergence is None,
        "fields": list(diff.fields),
        "equal_steps": diff.num_equal_steps,
    }
    known = _divergence_facts(diff)
    if found.answers is not None:
        described["answers"] = found.answers._asdict() | {
            "a": found.answers.a._asdict(),
            "b": found.answers.b._asdict(),
        }
    return described | {key: known[key] for key in ("change", "reasons", "plans", "input") if known}


def _divergence_facts(found: Diff) -> dict[str, Any]:
    """First difference as an object; empty: none, or one side has nothing to compare."""
    divergence, a, b = found.divergence, found.a, found.b
    if divergence is None or a is None or b is None:
        return {}
    return {
        "change": divergence.change.value,
        "about": names_of(divergence.difference, a, b),
        "reasons": sentences(divergence.difference, a, b),
        "decided_by": None if found.cause is None else asdict(found.cause),
        "plans": [{"request": name, "a": x, "b": y} for name, x, y in _pairs(a, b)],
        "input": found.input_difference or None,
    }


# -- bisections -------------------------------------------------------------------------------------------------------


def effects_table(found: Bisection) -> Table:
    """Fields that differ, with the metric of each alone and of all but each."""
    shares = numbers("A with it", "share", "B without it", "share")
    table = Table("Effects", (*words("field", "A", "B"), *shares))
    for effect in found.effects:
        cells: list[Cell] = [effect.name, str(effect.value_a), str(effect.value_b)]
        for metric in (effect.alone, effect.all_but):
            share = found.share(metric)
            cells.append("invalid" if metric is None else Number(metric, Style.GENERAL))
            cells.append("" if share is None else f"{round(100 * share)}%")
        table.rows.append(tuple(cells))
    return table


def conclusion(found: Bisection, metric: str) -> str:
    """Sentence about the fields that cause the difference of a metric."""
    alone, together = found.cause.alone, found.cause.together
    if not found.effects:
        return "A and B are equal configs"
    if found.metric_a == found.metric_b:
        return f"{metric} is equal with A and B, so there is no cause to find"
    if len(alone) == 1:
        return f"{alone[0]} explains {metric}: with it alone, A reaches B's value"
    if alone:
        return f"each of {', '.join(alone)} alone changes {metric} from A's value to B's"
    if together:
        return f"no single field explains {metric}; {' and '.join(together)} together do, and all of them are needed"
    return f"the search reached its limit before it found the cause of {metric}"


def bisection_facts(found: Bisection, metric: str) -> dict[str, Any]:
    """Bisection as an object."""
    return {
        "version": VERSION,
        "metric": metric,
        "a": found.metric_a,
        "b": found.metric_b,
        "fields": [
            {
                "name": effect.name,
                "values": [effect.value_a, effect.value_b],
                "alone": effect.alone,
                "all_but": effect.all_but,
            }
            for effect in found.effects
        ],
        "decided_by": asdict(found.cause),
        "conclusion": conclusion(found, metric),
        "replays": found.num_replays,
    }
