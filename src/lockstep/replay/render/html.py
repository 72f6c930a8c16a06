"""A replay as one HTML file that needs nothing but itself: figures, latencies, a timeline and the first ticks.

Everything that comes from a workload is escaped: text by the template, data by ``_json_for_script``. The page's policy
forbids it the network and every script but the two that it brings, which are named by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.replay.records import TickRecord, TickRecorder
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
from lockstep.replay.render.sampler import QUANTITIES, TimelineSampler
from lockstep.replay.report import Report
from lockstep.replay.timeline import RequestOutcome, Tick
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit
from lockstep.vendored import read_vendored
from lockstep.version import __version__

MAX_LANES = 60
"""Requests that the page draws one below the other; those of a longer workload cannot be told apart."""
MAX_LINES = 500
"""Lines that the table of ticks has; more nobody reads, and a page that has them is slow."""
SHORT_LINES = 60
"""A table of so few is open from the beginning."""
MAX_IDS = 64
"""Names that one cell of the table of ticks has."""
_CHARTS = (
    ("chart-queue", "Queue", "Requests that wait after admission."),
    ("chart-running", "Running", "Requests that run after admission."),
    ("chart-blocks", "KV blocks", "Blocks that sequences hold; red marks are preemptions."),
    ("chart-batch", "Batch", "Tokens that a step computes: prompts on top of decoded ones."),
    ("chart-lanes", "Requests", "Each from its arrival to its last token."),
)


class HtmlPage:
    """A watcher that keeps what the page of a replay shows, in bounded memory; ``write`` makes the page."""

    def __init__(self) -> None:
        self._timeline = TimelineSampler()
        self._recorder = TickRecorder(MAX_LINES)

    def __call__(self, tick: Tick) -> None:
        """Take in what the replay did next."""
        self._timeline(tick)
        self._recorder(tick)

    def write(self, path: Path | str, report: Report, outcomes: Sequence[RequestOutcome]) -> None:
        """Write the page.

        Raises:
            UsageError: it cannot be written there.
        """
        try:
            Path(path).write_text(self.render(report, outcomes), encoding="utf-8", newline="\n")
        except OSError as error:
            raise UsageError(f"{path}: the page cannot be written there: {error.strerror}") from None

    def render(self, report: Report, outcomes: Sequence[RequestOutcome]) -> str:
        """The page; the same replay gives the same."""
        data = timeline_data(report, self._timeline, outcomes)
        charts = [dict(zip(("id", "title", "summary"), chart, strict=True)) for chart in _CHARTS]
        tiles = list(tiles_of(report))
        page = {
            "name": printable(report.name),
            "lead": _lead(report),
            "fingerprint": report.fingerprint,
            "notes": [printable(note) for note in report.notes],
            "tiles": tiles,
            "tiles_by": min(4, 5, 3, key=lambda number: -len(tiles) % number),
            "charts": charts if data["lanes"] else charts[:-1],
            "is_timed": report.latency_ms is not None,
            "sampling": _sampling(self._timeline, outcomes),
            "latencies": list(latency_strips(report)),
            "latency_unit": latencies_of(report)[1],
            "latency_columns": LATENCY_COLUMNS,
            "groups": [*groups_of(report)],
            "settings": _settings(report),
            "is_short": len(self._recorder.records) <= SHORT_LINES,
            "ticks_title": _ticks_title(self._recorder),
            "lines": list(tick_rows(self._recorder.records, outcomes)),
            "version": __version__,
        }
        return _rendered(page, data)


def _lead(report: Report) -> str:
    requests = "1 request" if report.requests == 1 else f"{report.requests:,} requests"
    unit = "ticks" if report.arrivals == ArrivalUnit.TICKS.value else "logical time"
    return f"{requests} on the real scheduler, arrivals in {unit}."


def _settings(report: Report) -> list[Figure]:
    settings = [Figure(name, str(value)) for name, value in report.config.items() if value is not None]
    if report.latency_ms is not None:
        settings += [Figure(f"cost: {name.removesuffix('_ps')}", value, "ps") for name, value in report.cost_ps.items()]
    return settings


def _sampling(timeline: TimelineSampler, outcomes: Sequence[RequestOutcome]) -> str:
    """What the charts leave out, in words."""
    if timeline.width == 1:
        words = f"Every one of the {timeline.num_ticks:,} ticks is drawn."
    else:
        words = (
            f"Of {timeline.num_ticks:,} ticks, each {timeline.width:,} in a row are drawn as one: a line is their mean,"
            " the band around it reaches from the least to the greatest; bars of the batch are means."
        )
    if len(outcomes) > MAX_LANES:
        words += f" Single requests are drawn for at most {MAX_LANES}."
    return words


def _ticks_title(recorder: TickRecorder) -> str:
    number = len(recorder.records)
    if recorder.num_left_out:
        return f"The first {number:,} of {number + recorder.num_left_out:,} lines"
    return "All ticks"


def _ms(ps: int) -> float:
    return round(ps / PS_PER_MS, 6)


def timeline_data(report: Report, timeline: TimelineSampler, outcomes: Sequence[RequestOutcome]) -> dict[str, Any]:
    """What the script draws; columns by name."""
    buckets = timeline.buckets
    means = [bucket.means for bucket in buckets]
    columns: dict[str, Any] = {
        "tick": [bucket.tick for bucket in buckets],
        "end_tick": [bucket.tick + bucket.num_ticks for bucket in buckets],
        "start_ms": [_ms(bucket.start_ps) for bucket in buckets],
        "end_ms": [_ms(bucket.end_ps) for bucket in buckets],
        "preempted": [bucket.num_preempted for bucket in buckets],
    }
    for index, name in enumerate(QUANTITIES):
        columns[name] = {
            "mean": [each[index] for each in means],
            "low": [bucket.lows[index] for bucket in buckets],
            "high": [bucket.highs[index] for bucket in buckets],
        }
    return {
        "unit": "ticks" if report.latency_ms is None or report.arrivals == ArrivalUnit.TICKS.value else "ms",
        "width": timeline.width,
        "capacity": {
            "seqs": report.config["max_num_seqs"],
            "blocks": report.kv_capacity,
            "tokens": report.config["max_num_batched_tokens"],
        },
        "buckets": columns,
        "lanes": [_lane(outcome) for outcome in outcomes] if len(outcomes) <= MAX_LANES else [],
    }


def _lane(outcome: RequestOutcome) -> dict[str, Any]:
    """The borders of a request's phases in ticks and ms, null for what it never came to; a tick ends with the next."""
    ticks = (outcome.arrival_tick, outcome.admitted_tick, outcome.first_token_tick, outcome.finished_tick)
    times = (outcome.arrival_ps, outcome.admitted_ps, outcome.first_token_ps, outcome.finished_ps)
    words = f"{outcome.num_prompt_tokens:,} prompt tokens, {outcome.num_output_tokens:,} output tokens"
    if outcome.num_cached_tokens:
        words += f", {outcome.num_cached_tokens:,} cached"
    if outcome.num_preemptions:
        words += f", preempted {outcome.num_preemptions} times"
    return {
        "name": printable(outcome.name),
        "ticks": [None if tick < 0 else tick + (index >= 2) for index, tick in enumerate(ticks)],
        "ms": [None if time < 0 else _ms(time) for time in times],
        "text": printable(outcome.refusal) or words,
    }


def tick_rows(records: Sequence[TickRecord], outcomes: Sequence[RequestOutcome]) -> Iterator[dict[str, str]]:
    """The table of ticks, with the names of requests."""
    names = {outcome.seq_id: printable(outcome.name) for outcome in outcomes if outcome.seq_id >= 0}

    def words(seq_ids: Sequence[int]) -> str:
        text = ", ".join(names.get(seq_id, str(seq_id)) for seq_id in seq_ids[:MAX_IDS])
        return text if len(seq_ids) <= MAX_IDS else f"{text} and {len(seq_ids) - MAX_IDS} more"

    for record in records:
        last = record.tick + record.num_ticks - 1
        yield {
            "ticks": str(record.tick) if last == record.tick else f"{record.tick} to {last}",
            "start": f"{_ms(record.start_ps):,.3f}",
            "admitted": words(record.admitted),
            "prefill": f"{record.prefill_tokens:,}",
            "decoded": words(record.decoded),
            "completed": words(record.completed),
            "preempted": words(record.preempted),
            "queued": f"{record.queued:,}",
            "running": f"{record.active:,}",
            "blocks": f"{record.used_blocks:,}",
        }


def latency_strips(report: Report) -> Iterator[dict[str, Any]]:
    """Rows of the table of latencies: texts, and places within 0 to p99 in percent."""
    for label, distribution in latency_rows(latencies_of(report)[0]):
        whole = max(distribution.p99, distribution.mean, 1e-12)
        places = {name: round(100 * getattr(distribution, name) / whole, 2) for name in LATENCY_COLUMNS}
        yield {"label": label, "texts": [short_text(value) for value in columns_of(distribution)], **places}


def tiles_of(report: Report) -> Iterator[dict[str, str]]:
    """The figures that one asks for first."""

    def tile(label: str, value: str, more: str = "") -> dict[str, str]:
        return {"label": label, "value": value, "more": more}

    refused = f"{report.requests_refused:,} refused" if report.requests_refused else "none refused"
    yield tile("Completed", f"{report.requests_completed:,} of {report.requests:,}", refused)
    if report.latency_ms is None:
        yield tile("Ticks", f"{report.total_ticks:,}", f"{report.busy_ticks:,} with work")
    else:
        yield tile("Duration", _time_text(report.duration_ms, "ms"), f"{report.total_ticks:,} ticks")
        yield tile("Output", f"{short_text(report.output_tokens_per_s)} tokens/s", f"{report.decode_tokens:,} tokens")
    yield tile("Prompts", f"{report.prompt_tokens:,} tokens", f"{report.prefill_tokens:,} computed")
    if report.latency_ms is None:
        yield tile(
            "Output", f"{report.decode_tokens:,} tokens", f"{_percent(report.decode_utilization)} of decode capacity"
        )
    peak = f"peak {_percent(report.peak_blocks / report.kv_capacity)}, mean {_percent(report.kv_occupancy)}"
    yield tile("KV blocks", f"{report.peak_blocks:,} of {report.kv_capacity:,}", peak)
    latencies, unit = latencies_of(report)
    for label, distribution in (("First token", latencies.ttft), ("End to end", latencies.e2e)):
        if distribution is not None:
            median, tail = (_time_text(value, unit) for value in (distribution.p50, distribution.p99))
            yield tile(label, median, f"median; p99 {tail}")
    yield tile("Greatest queue", f"{report.max_queued:,}", f"{report.queue_pressure_ticks:,} ticks with a queue")
    if report.prefix_queried_tokens:
        yield tile("Prefix hits", _percent(report.prefix_hit_rate), f"{report.prefix_hit_tokens:,} tokens")
    if report.preemptions:
        yield tile("Preemptions", f"{report.preemptions:,}", f"{report.recomputed_tokens:,} tokens computed again")
    if report.goodput is not None:
        yield tile(
            "Goodput",
            f"{short_text(report.goodput.requests_per_s)} requests/s",
            f"{_percent(report.goodput.ratio)} met the goals",
        )


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _time_text(value: float, unit: str) -> str:
    if unit == "ms" and value >= 10_000:
        return f"{short_text(value / 1000)} s"
    return f"{short_text(value)} {unit}"


def _rendered(page: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The whole file."""
    from jinja2 import Environment, select_autoescape
    from markupsafe import Markup

    style = read_vendored("uplot/uPlot.min.css") + _own("report.css")
    plot_script, script = read_vendored("uplot/uPlot.iife.min.js"), _own("report.js")
    policy = (
        f"default-src 'none'; script-src {_digest(plot_script)} {_digest(script)}; style-src {_digest(style)};"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )
    template = Environment(autoescape=select_autoescape(default=True, default_for_string=True)).from_string(
        _own("report.html.jinja")
    )
    # Only files of this package and escaped JSON are markup.
    return template.render(
        page=page,
        policy=policy,
        style=Markup(style),
        plot_script=Markup(plot_script),
        script=Markup(script),
        data=Markup(_json_for_script(data)),
    )


def _own(name: str) -> str:
    return files("lockstep.replay.render.page").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json_for_script(data: Mapping[str, Any]) -> str:
    """JSON in which no sequence of characters ends a script element or begins a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
