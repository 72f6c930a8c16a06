"""Pages of replays: one replay with its figures and timeline, a comparison of two, and a comparison of recordings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.replay.render.charts import Mark, timeline_of, to_ms
from lockstep.replay.render.side import Side
from lockstep.replay.render.tables import (
    comparison_notes,
    difference,
    figure_comparison,
    figure_tables,
    latency_strips,
    latency_tables,
    same_or_not,
    settings_table,
    tiles_of,
    twin_tiles,
)
from lockstep.replay.report import Report
from lockstep.replay.timeline import RequestOutcome, SequenceRef, TickRecorder, names_of
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit
from lockstep.report.document import (
    ABSENT,
    Block,
    Cell,
    Column,
    Document,
    Finding,
    Folded,
    Lead,
    Number,
    Paragraph,
    Section,
    Style,
    Table,
    Tables,
    changes,
    numbers,
    words,
)
from lockstep.report.page import to_html

SHORT_LINES = 60
"""Maximum lines of a table that is initially open."""
MAX_IDS = 64
"""Maximum names in one cell of the table of ticks."""
MAX_SETTINGS = 3
"""Maximum settings beside a side's name; the table has all."""
MAX_CHANGED = 20
"""Maximum listed requests; those with the largest change come first."""


def replay_page(side: Side) -> str:
    """Page of one replay; equal replays give equal pages."""
    report = side.report
    latencies: tuple[Block, ...] = tuple(latency_tables(report))
    sections = [
        Section("", (tiles_of(report),)),
        Section("Timeline", (timeline_of([side]),)),
        Section("Latencies", latencies or (Paragraph("No request was completed.", "hint"),)),
        Section("All figures", (Tables(figure_tables(report), "figures"), Folded("Settings", _settings(report)))),
        Section("Ticks", (_ticks(side.recorder, side.outcomes, is_timed=report.latency_ms is not None),)),
    ]
    lead = Lead(_what(report), report.fingerprint)
    return to_html(Document(f"Replay of {report.name}", sections, [lead], notes=report.notes))


def comparison_page(a: Side, b: Side, found: Finding | None = None, mark: Mark | None = None) -> str:
    """Page of two replays; equal replays give equal pages.

    Args:
        found: first difference of the replays; None: they were not compared.
        mark: time of the first difference, which the charts mark.
    """
    sides, one, other = (a, b), a.report, b.report
    settings = settings_table(one, other)
    sections = [
        Section("", (twin_tiles(one, other),)),
        Section(settings.title, (settings,)),
        *(_difference([] if found is None else [found])),
        Section("Timeline", (timeline_of(sides, mark),)),
        Section("Latencies", (latency_strips(one, other),)),
        _changed(a, b),
        Section("All figures", (Tables(figure_comparison(one, other), "figures"),)),
    ]
    leads = [
        Lead(_with_settings(side.report, settings, place), side.report.fingerprint, letter)
        for place, (letter, side) in enumerate(zip("AB", sides, strict=True), 1)
    ]
    names = " and ".join(dict.fromkeys(side.report.name for side in sides))
    verdict = same_or_not(one, other).split(",")[0].capitalize() + "."
    return to_html(Document(f"A and B on {names}", sections, leads, verdict, comparison_notes(one, other)))


def recordings_page(name_a: str, name_b: str, engines: Sequence[Finding]) -> str:
    """Page of two recordings: the first difference of each engine."""
    verdict = "Two recordings, engine by engine; sequences are matched by their ids."
    return to_html(Document(f"A and B: {name_a} and {name_b}", list(_difference(engines)), verdict=verdict))


def changed_requests(a: Sequence[RequestOutcome], b: Sequence[RequestOutcome], *, is_timed: bool) -> Table:
    """Requests of both sides with the largest change of their total time; empty if the requests differ."""
    unit = "ms" if is_timed else "ticks"
    first_token = (*numbers(f"first token, {unit}: A", "B"), *changes("B - A"))
    end = (*numbers(f"end to end, {unit}: A", "B"), *changes("B - A", "change"))
    table = Table("Requests that changed most", (*words("request"), *first_token, *end), id="requests")
    if [outcome.name for outcome in a] != [outcome.name for outcome in b]:
        return table
    both = [(x.name, _times(x, is_timed), _times(y, is_timed)) for x, y in zip(a, b, strict=True)]
    changed = [(name, before, after) for name, before, after in both if before != after]
    changed.sort(key=lambda each: -_weight(*each[1:]))
    table.rows += [(name, *_cells(before, after)) for name, before, after in changed[:MAX_CHANGED]]
    if len(changed) > MAX_CHANGED:
        table.title += f": {MAX_CHANGED} of {len(changed):,}"
    return table


def _changed(a: Side, b: Side) -> Section:
    table = changed_requests(a.outcomes, b.outcomes, is_timed=a.report.latency_ms is not None)
    return Section(table.title, (table,))


def _difference(findings: Sequence[Finding]) -> Iterator[Section]:
    return (Section("First difference", (finding,)) for finding in findings)


def _what(report: Report) -> str:
    """Description of the workload in one sentence."""
    requests = "1 request" if report.requests == 1 else f"{report.requests:,} requests"
    unit = "ticks" if report.arrivals == ArrivalUnit.TICKS.value else "logical time"
    return f"{requests} on the real scheduler, arrivals in {unit}."


def _with_settings(report: Report, settings: Table, place: int) -> str:
    """Name of a side's workload with its specific settings, if they are few."""
    own = ", ".join(f"{row[0]} {_plain(row[place])}" for row in settings.rows[:MAX_SETTINGS])
    return f"{report.name}{' with ' if own else ''}{own}. {_what(report)}"


def _plain(cell: Cell) -> str:
    return f"{cell.value:,}" if isinstance(cell, Number) else str(cell)


def _settings(report: Report) -> Table:
    rows: list[tuple[Cell, ...]] = [(name, str(each)) for name, each in report.config.items() if each is not None]
    if report.latency_ms is not None:
        rows += [
            (f"cost: {name.removesuffix('_ps')}", Number(each, unit="ps")) for name, each in report.cost_ps.items()
        ]
    return Table("Settings", (*words("setting"), *numbers("value")), rows)


def _ticks(recorder: TickRecorder, outcomes: Sequence[RequestOutcome], *, is_timed: bool) -> Folded:
    """Table of the first ticks, with the names of requests."""
    did = (*words("admitted"), *numbers("prefill tokens"), *words("decoded", "completed"))
    state = (Column("preempted", "alarm"), *numbers("queued", "running", "blocks"))
    columns = (*numbers(*(("tick", "ms") if is_timed else ("tick",))), *did, *state)
    names = names_of(outcomes)

    def named(seq_ids: Sequence[SequenceRef]) -> str:
        text = ", ".join(names.get(seq_id, str(seq_id)) for seq_id in seq_ids[:MAX_IDS])
        return text if len(seq_ids) <= MAX_IDS else f"{text} and {len(seq_ids) - MAX_IDS} more"

    table = Table("Ticks", columns, id="ticks")
    for first, num_ticks in recorder.spans:
        ticks = str(first.tick) if num_ticks == 1 else f"{first.tick} to {first.tick + num_ticks - 1}"
        start = (f"{to_ms(first.start_ps):,.3f}",) if is_timed else ()
        events = named(first.admitted), Number(first.prefill_tokens), named(first.decoded), named(first.completed)
        sizes = Number(first.queued), Number(first.active), Number(first.used_blocks)
        table.rows.append((ticks, *start, *events, named(first.preempted), *sizes))
    number, left_out = len(recorder.spans), recorder.num_left_out
    title = f"The first {number:,} of {number + left_out:,} lines" if left_out else "All ticks"
    return Folded(title, table, is_open=number <= SHORT_LINES)


Times = tuple[float, float] | None
"""Times of a request to its first token and to its end; None: not completed."""


def _times(outcome: RequestOutcome, is_timed: bool) -> Times:
    if not outcome.is_completed:
        return None
    course, per_unit = (outcome.in_ps, PS_PER_MS) if is_timed else (outcome.in_ticks, 1)
    return course.ttft / per_unit, course.e2e / per_unit


def _weight(before: Times, after: Times) -> float:
    """Change of the total time; a request that only one side completed comes first."""
    return float("inf") if before is None or after is None else abs(after[1] - before[1])


def _cells(times_a: Times, times_b: Times) -> Iterator[Cell]:
    for place in range(2):
        before, after = (None if times is None else times[place] for times in (times_a, times_b))
        yield ABSENT if before is None else Number(before, Style.SHORT)
        yield ABSENT if after is None else Number(after, Style.SHORT)
        change = ("", "") if before is None or after is None else difference(before, after, Style.SHORT)
        yield from change[: place + 1]
