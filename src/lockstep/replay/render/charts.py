"""Chart data: prepares the timelines of one or two replays for a page's script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lockstep.replay.render.side import QUANTITIES, Side
from lockstep.replay.timeline import RequestOutcome
from lockstep.replay.workload import PS_PER_MS, ArrivalUnit
from lockstep.report.document import Chart, Series, Timeline
from lockstep.shown import printable

MAX_LANES = 60
"""Maximum requests of a chart, one lane each; more lanes would be too thin to distinguish. In a comparison each request
has two lanes."""
_LETTERS = ("A", "B")
_QUEUE = Chart(
    "chart-queue", "Queue", "Requests waiting after admission.", (Series("queued", "queued", "queued"),), 110
)
_RUNNING = Chart(
    *("chart-running", "Running", "Requests running after admission."),
    series=(Series("running", "running", "running"),),
    height=130,
    limit=("seqs", "max_num_seqs"),
)
_BLOCKS = Chart(
    *("chart-blocks", "KV blocks", "Blocks in use; red marks are preemptions."),
    series=(Series("held", "blocks", "blocks"),),
    height=140,
    limit=("blocks", "capacity"),
    has_marks=True,
)
_BATCH = Chart(
    *("chart-batch", "Batch", "Tokens computed per step: prefill tokens above decode tokens."),
    series=(Series("prefill tokens", "prefill", "prefill", "decode"), Series("decode tokens", "decode", "decode")),
    height=150,
    limit=("tokens", "max_num_batched_tokens"),
    has_band=False,
)
_LANES = Chart("chart-lanes", "Requests", "Each request from its arrival to its last token; red: preempted.")
_CHARTS = (_QUEUE, _RUNNING, _BLOCKS, _BATCH, _LANES)
_CHARTS_OF_TWO = (
    *(_QUEUE, _RUNNING),
    _BLOCKS._replace(summary="Blocks in use; marks above are preemptions."),
    _BATCH._replace(
        summary="Tokens computed per step, for prefill and decode.",
        series=(Series("tokens", "prefill", "tokens"),),
    ),
    _LANES._replace(summary="Each request from its arrival to its last token, A above B; red: preempted."),
)


class Mark(NamedTuple):
    """A point in time that all charts mark."""

    label: str
    tick: int
    start_ps: int


def timeline_of(sides: Sequence[Side], mark: Mark | None = None) -> Timeline:
    """Chart data of one replay, or of two in the same charts.

    Args:
        mark: point in time that all charts mark.
    """
    charts = _CHARTS if len(sides) == 1 else _CHARTS_OF_TWO
    return Timeline(
        charts if _has_lanes(sides) else charts[:-1],
        chart_data(sides, mark),
        has_times=all(side.report.latency_ms is not None for side in sides),
        sampling=_sampling_of(sides),
    )


def chart_data(sides: Sequence[Side], mark: Mark | None = None) -> dict[str, Any]:
    """Data of the page's script; columns by name."""
    letters = ("",) if len(sides) == 1 else _LETTERS
    in_ticks = any(side.report.latency_ms is None for side in sides)
    is_counted = in_ticks or all(side.report.arrivals == ArrivalUnit.TICKS.value for side in sides)
    return {
        "unit": "ticks" if is_counted else "ms",
        "sides": [_side(side, letter) for side, letter in zip(sides, letters, strict=True)],
        "lanes": _lanes(sides, letters) if _has_lanes(sides) else [],
        "mark": None if mark is None else {"label": mark.label, "ticks": mark.tick, "ms": to_ms(mark.start_ps)},
    }


def _sampling_of(sides: Sequence[Side]) -> str:
    """Sentences about omitted data."""
    if len(sides) > 1 and all(side.timeline.width == 1 for side in sides):
        words = ["The charts show every tick of both."]
    elif len(sides) > 1:
        words = [f"{letter}: {_sampling(side)}" for letter, side in zip(_LETTERS, sides, strict=True)]
    else:
        words = [_sampling(sides[0])]
    if not _has_lanes(sides):
        words.append(f"Single requests are shown for at most {MAX_LANES // len(sides)} requests.")
    return " ".join(words)


def to_ms(ps: int) -> float:
    """Milliseconds with nanosecond resolution."""
    return round(ps / PS_PER_MS, 6)


def _sampling(side: Side) -> str:
    timeline = side.timeline
    if timeline.width == 1:
        return f"The charts show all {timeline.num_ticks:,} ticks."
    return (
        f"Each point is {timeline.width:,} consecutive ticks of {timeline.num_ticks:,}: lines are means,"
        " bands show minimum and maximum, and bars of the batch are means."
    )


def _has_lanes(sides: Sequence[Side]) -> bool:
    return 0 < sum(len(side.outcomes) for side in sides) <= MAX_LANES


def _side(side: Side, letter: str) -> dict[str, Any]:
    report, buckets = side.report, side.timeline.buckets
    means = [bucket.means for bucket in buckets]
    columns: dict[str, Any] = {
        "tick": [bucket.tick for bucket in buckets],
        "end_tick": [bucket.tick + bucket.num_ticks for bucket in buckets],
        "start_ms": [to_ms(bucket.start_ps) for bucket in buckets],
        "end_ms": [to_ms(bucket.end_ps) for bucket in buckets],
        "preempted": [bucket.num_preempted for bucket in buckets],
    }
    for index, name in enumerate(QUANTITIES):
        columns[name] = {
            "mean": [each[index] for each in means],
            "low": [bucket.lows[index] for bucket in buckets],
            "high": [bucket.highs[index] for bucket in buckets],
        }
    if letter:
        prefill, decode = (columns[name]["mean"] for name in ("prefill", "decode"))
        columns["tokens"] = {"mean": [round(one + other, 6) for one, other in zip(prefill, decode, strict=True)]}
    return {
        "name": letter,
        "width": side.timeline.width,
        "capacity": {
            "seqs": report.config["max_num_seqs"],
            "blocks": report.kv_capacity,
            "tokens": report.config["max_num_batched_tokens"],
        },
        "buckets": columns,
    }


def _lanes(sides: Sequence[Side], letters: Sequence[str]) -> list[dict[str, Any]]:
    """Requests in order of arrival; if the same request is on both sides, its two lanes are adjacent."""
    lanes = [
        [_lane(outcome, side, letter) for outcome in side.outcomes] for side, letter in zip(sides, letters, strict=True)
    ]
    most = max(map(len, lanes))
    return [column[index] for index in range(most) for column in lanes if index < len(column)]


def _lane(outcome: RequestOutcome, side: Side, letter: str) -> dict[str, Any]:
    """Borders of a request's phases in ticks and ms; null if a phase was not reached."""
    ticks, times = outcome.in_ticks[:-1], outcome.in_ps[:-1]
    stalls = side.stalls.of(outcome.seq_id)
    words = f"{outcome.num_prompt_tokens:,} prompt tokens, {outcome.num_output_tokens:,} output tokens"
    if outcome.num_cached_tokens:
        words += f", {outcome.num_cached_tokens:,} cached"
    if outcome.num_preemptions:
        words += f", preempted {outcome.num_preemptions:,} time{'s' * (outcome.num_preemptions != 1)}"
    return {
        "name": f"{letter} {printable(outcome.name)}".strip(),
        "ticks": [None if tick < 0 else tick for tick in ticks],
        "ms": [None if time < 0 else to_ms(time) for time in times],
        "stalls": {
            "ticks": [[stall.tick, stall.end_tick] for stall in stalls],
            "ms": [[to_ms(stall.start_ps), to_ms(stall.end_ps)] for stall in stalls],
        },
        "text": printable(outcome.refusal) or words,
    }
