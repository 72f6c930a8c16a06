"""The figures that one asks for first, as the tiles at the head of a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lockstep.replay.render.figures import latencies_of, short_text
from lockstep.replay.report import Report


class Tile(NamedTuple):
    """One figure, large."""

    label: str
    value: str
    more: str = ""
    """What else is said of it, small."""


def tiles_by(number: int) -> int:
    """Columns in which so many tiles leave the fewest gaps."""
    return min(4, 5, 3, key=lambda columns: -number % columns)


def tiles_of(report: Report) -> Iterator[Tile]:
    """The figures that one asks for first."""
    refused = f"{report.requests_refused:,} refused" if report.requests_refused else "none refused"
    yield Tile("Completed", f"{report.requests_completed:,} of {report.requests:,}", refused)
    if report.latency_ms is None:
        yield Tile("Ticks", f"{report.total_ticks:,}", f"{report.busy_ticks:,} with work")
    else:
        yield Tile("Duration", _time_text(report.duration_ms, "ms"), f"{report.total_ticks:,} ticks")
        yield Tile("Output", f"{short_text(report.output_tokens_per_s)} tokens/s", f"{report.decode_tokens:,} tokens")
    yield Tile("Prompts", f"{report.prompt_tokens:,} tokens", f"{report.prefill_tokens:,} computed")
    if report.latency_ms is None:
        yield Tile(
            "Output", f"{report.decode_tokens:,} tokens", f"{_percent(report.decode_utilization)} of decode capacity"
        )
    peak = f"peak {_percent(report.peak_blocks / report.kv_capacity)}, mean {_percent(report.kv_occupancy)}"
    yield Tile("KV blocks", f"{report.peak_blocks:,} of {report.kv_capacity:,}", peak)
    latencies, unit = latencies_of(report)
    for label, distribution in (("First token", latencies.ttft), ("End to end", latencies.e2e)):
        if distribution is not None:
            median, tail = (_time_text(value, unit) for value in (distribution.p50, distribution.p99))
            yield Tile(label, median, f"median; p99 {tail}")
    yield Tile("Greatest queue", f"{report.max_queued:,}", f"{report.queue_pressure_ticks:,} ticks with a queue")
    if report.prefix_queried_tokens:
        most = report.prefix_unbounded_hit_rate
        note = "" if most is None else f"; {_percent(most)} without bounds"
        yield Tile("Prefix hits", _percent(report.prefix_hit_rate), f"{report.prefix_hit_tokens:,} tokens{note}")
    if report.preemptions:
        yield Tile("Preemptions", f"{report.preemptions:,}", f"{report.recomputed_tokens:,} tokens computed again")
    if report.goodput is not None:
        yield Tile(
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


def twin_tiles(one: Report, other: Report) -> Iterator[tuple[str, Tile, Tile]]:
    """Those that both have, by their label."""
    there = {tile.label: tile for tile in tiles_of(other)}
    for tile in tiles_of(one):
        if tile.label in there:
            yield tile.label, tile, there[tile.label]
