"""A replay as one page: figures, latencies, a timeline and the first ticks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.replay.records import TickRecorder, TickSpan, names_of
from lockstep.replay.render.charts import chart_data, charts_of, sampling_words, to_ms
from lockstep.replay.render.document import rendered
from lockstep.replay.render.figures import (
    LATENCY_COLUMNS,
    Figure,
    columns_of,
    groups_of,
    latencies_of,
    latency_rows,
    printable,
    short_text,
)
from lockstep.replay.render.side import Side
from lockstep.replay.render.tiles import tiles_by, tiles_of
from lockstep.replay.report import Report
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.workload import ArrivalUnit

SHORT_LINES = 60
"""A table of so few is open from the beginning."""
MAX_IDS = 64
"""Names that one cell of the table of ticks has."""


def replay_page(side: Side) -> str:
    """The page; the same replay gives the same."""
    report, outcomes, recorder = side.report, side.outcomes, side.recorder
    tiles = list(tiles_of(report))
    page = {
        "title": f"Replay of {printable(report.name)}",
        "lead": lead_of(report),
        "fingerprint": report.fingerprint,
        "notes": [printable(note) for note in report.notes],
        "tiles": tiles,
        "tiles_by": tiles_by(len(tiles)),
        "charts": charts_of([side]),
        "is_timed": report.latency_ms is not None,
        "sampling": sampling_words([side]),
        "latencies": list(latency_strips(report)),
        "latency_unit": latencies_of(report)[1],
        "latency_columns": LATENCY_COLUMNS,
        "groups": [*groups_of(report)],
        "settings": _settings(report),
        "is_short": len(recorder.spans) <= SHORT_LINES,
        "ticks_title": _ticks_title(recorder),
        "lines": list(tick_rows(recorder.spans, outcomes)),
    }
    return rendered("replay.html.jinja", page, chart_data([side]), ["timeline.js"], has_plots=True)


def lead_of(report: Report) -> str:
    """What was replayed, in a sentence."""
    requests = "1 request" if report.requests == 1 else f"{report.requests:,} requests"
    unit = "ticks" if report.arrivals == ArrivalUnit.TICKS.value else "logical time"
    return f"{requests} on the real scheduler, arrivals in {unit}."


def _settings(report: Report) -> list[Figure]:
    settings = [Figure(name, str(value)) for name, value in report.config.items() if value is not None]
    if report.latency_ms is not None:
        settings += [Figure(f"cost: {name.removesuffix('_ps')}", value, "ps") for name, value in report.cost_ps.items()]
    return settings


def _ticks_title(recorder: TickRecorder) -> str:
    number = len(recorder.spans)
    if recorder.num_left_out:
        return f"The first {number:,} of {number + recorder.num_left_out:,} lines"
    return "All ticks"


def tick_rows(spans: Sequence[TickSpan], outcomes: Sequence[RequestOutcome]) -> Iterator[dict[str, str]]:
    """The table of ticks, with the names of requests."""
    names = {seq_id: printable(name) for seq_id, name in names_of(outcomes).items()}

    def words(seq_ids: Sequence[int]) -> str:
        text = ", ".join(names.get(seq_id, str(seq_id)) for seq_id in seq_ids[:MAX_IDS])
        return text if len(seq_ids) <= MAX_IDS else f"{text} and {len(seq_ids) - MAX_IDS} more"

    for span in spans:
        last = span.tick + span.num_ticks - 1
        yield {
            "ticks": str(span.tick) if last == span.tick else f"{span.tick} to {last}",
            "start": f"{to_ms(span.start_ps):,.3f}",
            "admitted": words(span.admitted),
            "prefill": f"{span.prefill_tokens:,}",
            "decoded": words(span.decoded),
            "completed": words(span.completed),
            "preempted": words(span.preempted),
            "queued": f"{span.queued:,}",
            "running": f"{span.active:,}",
            "blocks": f"{span.used_blocks:,}",
        }


def latency_strips(report: Report) -> Iterator[dict[str, Any]]:
    """Rows of the table of latencies: texts, and places within 0 to p99 in percent."""
    for label, distribution in latency_rows(latencies_of(report)[0]):
        whole = max(distribution.p99, distribution.mean, 1e-12)
        places = {name: round(100 * getattr(distribution, name) / whole, 2) for name in LATENCY_COLUMNS}
        yield {"label": label, "texts": [short_text(value) for value in columns_of(distribution)], **places}
