"""A replay as one HTML file that needs nothing but itself: figures, latencies, a timeline and the first ticks.

Everything that comes from a workload is escaped: text by the template, data by ``_json_for_script``. The page's policy
forbids it the network and every script but the two that it brings, which are named by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from lockstep.replay.render.sampler import QUANTITIES, TimelineSampler
from lockstep.replay.render.step_log import StepLine, StepLog
from lockstep.replay.timeline import RequestOutcome
from lockstep.vendored import read_vendored
from lockstep.version import __version__

MAX_LANES = 60
"""Requests that the page draws one below the other; those of a longer workload cannot be told apart."""
SHORT_LINES = 60
"""A table of so many ticks is open from the beginning."""
MAX_IDS = 64
"""Names that one cell of the table of ticks has."""
_PS_PER_MS = 1e9
_CHARTS = (
    ("chart-queue", "Queue", "Requests that wait after admission."),
    ("chart-running", "Running", "Requests that run after admission."),
    ("chart-blocks", "KV blocks", "Blocks that sequences hold; red marks are preemptions."),
    ("chart-batch", "Batch", "Tokens that a step computes: prompts on top of decoded ones."),
)
_LANES = ("chart-lanes", "Each request", "From its arrival to its last token.")


def _ms(ps: int) -> float:
    return round(ps / _PS_PER_MS, 6)


def timeline_data(
    timeline: TimelineSampler, outcomes: Sequence[RequestOutcome], unit: str, capacity: Mapping[str, int]
) -> dict[str, Any]:
    """What the script draws; columns by name. Nothing here depends on anything but the replay."""
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
        "unit": unit,
        "width": timeline.width,
        "capacity": dict(capacity),
        "buckets": columns,
        "lanes": [_lane(outcome) for outcome in outcomes] if len(outcomes) <= MAX_LANES else [],
    }


def _lane(outcome: RequestOutcome) -> dict[str, Any]:
    """The four borders of a request in both units; null where it never came so far. A tick ends where the next begins."""
    ticks = (outcome.arrival_tick, outcome.admitted_tick, outcome.first_token_tick, outcome.finished_tick)
    times = (outcome.arrival_ps, outcome.admitted_ps, outcome.first_token_ps, outcome.finished_ps)
    words = f"{outcome.num_prompt_tokens} prompt tokens ({outcome.num_cached_tokens} cached), {outcome.num_output_tokens} output"
    if outcome.num_preemptions:
        words += f", preempted {outcome.num_preemptions} times"
    return {
        "name": outcome.name,
        "ticks": [None if tick < 0 else tick + (index >= 2) for index, tick in enumerate(ticks)],
        "ms": [None if time < 0 else _ms(time) for time in times],
        "text": outcome.refusal or words,
    }


@dataclass(frozen=True, slots=True)
class TickRow:
    """One line of the table of ticks, in words."""

    ticks: str
    start: str
    admitted: str
    prefill: str
    decoded: str
    completed: str
    preempted: str
    queued: str
    running: str
    blocks: str


def tick_rows(log: StepLog, outcomes: Sequence[RequestOutcome]) -> list[TickRow]:
    """The kept lines with the names of requests."""
    names = {outcome.seq_id: outcome.name for outcome in outcomes}
    return [_tick_row(line, names) for line in log.lines]


def _tick_row(line: StepLine, names: Mapping[int, str]) -> TickRow:
    def words(seq_ids: Sequence[int]) -> str:
        text = " ".join(names.get(seq_id, str(seq_id)) for seq_id in seq_ids[:MAX_IDS])
        return text if len(seq_ids) <= MAX_IDS else f"{text} and {len(seq_ids) - MAX_IDS} more"

    last = line.tick + line.num_ticks - 1
    ended = [f"{names.get(seq_id, str(seq_id))} ({reason})" for seq_id, reason in line.completed]
    return TickRow(
        ticks=str(line.tick) if last == line.tick else f"{line.tick}–{last}",  # noqa: RUF001 - a range has a dash
        start=f"{_ms(line.start_ps):,.3f}",
        admitted=words(line.admitted),
        prefill=f"{line.num_prefill_tokens:,}",
        decoded=words(line.decoded),
        completed=", ".join(ended),
        preempted=words(line.preempted),
        queued=f"{line.num_queued:,}",
        running=f"{line.num_active:,}",
        blocks=f"{line.num_used_blocks:,}",
    )


def render(page: Mapping[str, Any], data: Mapping[str, Any]) -> str:
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
        version=__version__,
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
