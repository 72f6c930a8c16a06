"""Two replays as one page: figures beside each other, both timelines in one picture, and where they first differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.replay.latencies import e2e_ps, ttft_ps
from lockstep.replay.render.charts import Mark, chart_data, charts_of, sampling_words
from lockstep.replay.render.difference import Told
from lockstep.replay.render.document import rendered
from lockstep.replay.render.figures import LATENCY_COLUMNS, columns_of, latency_rows, printable, short_text
from lockstep.replay.render.replay_page import lead_of
from lockstep.replay.render.side import Side
from lockstep.replay.render.tables import (
    ABSENT,
    Table,
    comparison_notes,
    difference,
    figure_comparison,
    same_or_not,
    settings_table,
)
from lockstep.replay.render.tiles import tiles_by, twin_tiles
from lockstep.replay.report import Report
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.workload import PS_PER_MS

MAX_TOLD = 3
"""Settings that stand beside a side's name; the table has them all."""
MAX_CHANGED = 20
"""Requests that are listed, those that changed most first."""


def comparison_page(a: Side, b: Side, told: Told | None = None, mark: Mark | None = None) -> str:
    """The page of two replays; the same ones give the same.

    Args:
        told: where they first differ, if somebody has looked.
        mark: the moment of that, which the charts show.
    """
    sides = (a, b)
    tiles = list(twin_tiles(a.report, b.report))
    settings = settings_table(a.report, b.report)
    page = {
        "title": f"A and B on {_names(sides)}",
        "sides": [
            {"letter": letter, "name": _told_apart(side, settings, place), "fingerprint": side.report.fingerprint}
            for place, (letter, side) in enumerate(zip("AB", sides, strict=True), 1)
        ],
        "verdict": same_or_not(a.report, b.report).split(",")[0].capitalize() + ".",
        "notes": [printable(note) for note in comparison_notes(a.report, b.report)],
        "tiles": tiles,
        "tiles_by": tiles_by(len(tiles)),
        "settings": settings,
        "differences": [] if told is None else [told],
        "charts": charts_of(sides),
        "is_timed": all(side.report.latency_ms is not None for side in sides),
        "sampling": sampling_words(sides),
        "latencies": list(twin_latencies(a.report, b.report)),
        "latency_unit": _latency_unit(a.report, b.report),
        "latency_columns": LATENCY_COLUMNS,
        "requests": changed_requests(a.outcomes, b.outcomes, is_timed=a.report.latency_ms is not None),
        "groups": figure_comparison(a.report, b.report),
    }
    return rendered("comparison.html.jinja", page, chart_data(sides, mark), ["timeline.js"], has_plots=True)


def recordings_page(name_a: str, name_b: str, engines: Sequence[Told]) -> str:
    """The page of two recordings: where each engine first differs."""
    page = {
        "title": f"A and B: {printable(name_a)} and {printable(name_b)}",
        "sides": [],
        "verdict": "Two recordings, engine by engine; sequences are matched by their ids.",
        "notes": [],
        "tiles": [],
        "tiles_by": 1,
        "settings": Table("Settings", ()),
        "differences": engines,
        "charts": [],
        "latencies": [],
        "latency_unit": "",
        "latency_columns": LATENCY_COLUMNS,
        "requests": Table("Requests", ()),
        "groups": [],
    }
    return rendered("comparison.html.jinja", page, {}, [], has_plots=False)


def changed_requests(a: Sequence[RequestOutcome], b: Sequence[RequestOutcome], *, is_timed: bool) -> Table:
    """Those requests of both whose time to the end changed most; empty where the requests are not the same."""
    unit = "ms" if is_timed else "ticks"
    columns = ("request", f"first token, {unit}: A", "B", "B - A", f"end to end, {unit}: A", "B", "B - A", "change")
    table = Table("Requests that changed most", columns)
    if [outcome.name for outcome in a] != [outcome.name for outcome in b]:
        return table
    changed = [(x, y) for x, y in zip(a, b, strict=True) if _times(x, is_timed) != _times(y, is_timed)]
    changed.sort(key=lambda pair: -_weight(pair[0], pair[1], is_timed))
    for x, y in changed[:MAX_CHANGED]:
        table.rows.append((printable(x.name), *_cells(x, y, is_timed)))
    if len(changed) > MAX_CHANGED:
        table.title += f": {MAX_CHANGED} of {len(changed):,}"
    return table


def twin_latencies(one: Report, other: Report) -> Iterator[dict[str, Any]]:
    """A row of each distribution that both have: texts of A, of B and of the change, and places within 0 to the
    greater p99 in percent."""
    unit = _latency_unit(one, other)
    latencies = [report.latency_ms if unit == "ms" else report.latency_ticks for report in (one, other)]
    there = dict(latency_rows(latencies[1] or other.latency_ticks))
    for label, before in latency_rows(latencies[0] or one.latency_ticks):
        if label not in there:
            continue
        after = there[label]
        pairs = list(zip(columns_of(before), columns_of(after), strict=True))
        whole = max(before.p99, before.mean, after.p99, after.mean, 1e-12)
        yield {
            "label": label,
            "texts": [list(map(short_text, columns_of(each))) for each in (before, after)],
            "changes": [difference(x, y)[1] for x, y in pairs],
            "places": [
                {name: round(100 * getattr(each, name) / whole, 2) for name in LATENCY_COLUMNS}
                for each in (before, after)
            ],
        }


def _latency_unit(one: Report, other: Report) -> str:
    return "ms" if one.latency_ms is not None and other.latency_ms is not None else "ticks"


def _told_apart(side: Side, settings: Table, place: int) -> str:
    """A side's workload, and the settings that are its own where they are few."""
    own = ", ".join(f"{row[0]} {row[place]}" for row in settings.rows[:MAX_TOLD])
    return f"{printable(side.report.name)}{' with ' if own else ''}{own}. {lead_of(side.report)}"


def _names(sides: Sequence[Side]) -> str:
    return " and ".join(dict.fromkeys(printable(side.report.name) for side in sides))


def _times(outcome: RequestOutcome, is_timed: bool) -> tuple[float, float] | None:
    """To the first token and to the end; None: it was never completed."""
    if outcome.finished_tick < 0:
        return None
    if is_timed:
        return ttft_ps(outcome) / PS_PER_MS, e2e_ps(outcome) / PS_PER_MS
    first, last = outcome.first_token_tick, outcome.finished_tick
    return first - outcome.arrival_tick + 1, last - outcome.arrival_tick + 1


def _weight(a: RequestOutcome, b: RequestOutcome, is_timed: bool) -> float:
    """By how much the time to the end changed; a request that only one side completed comes first."""
    times = _times(a, is_timed), _times(b, is_timed)
    return float("inf") if times[0] is None or times[1] is None else abs(times[1][1] - times[0][1])


def _cells(a: RequestOutcome, b: RequestOutcome, is_timed: bool) -> Iterator[str]:
    times_a, times_b = _times(a, is_timed), _times(b, is_timed)
    for place in range(2):
        before, after = (None if times is None else times[place] for times in (times_a, times_b))
        yield ABSENT if before is None else short_text(before)
        yield ABSENT if after is None else short_text(after)
        change = ("", "") if before is None or after is None else difference(before, after, short=True)
        yield change[0]
        if place == 1:
            yield change[1]
