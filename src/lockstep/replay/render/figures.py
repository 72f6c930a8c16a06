"""Which figures of a report are shown, in which order and under which words; the same for terminals and pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lockstep.replay.latencies import Distribution, Latencies
from lockstep.replay.report import Report

LATENCY_COLUMNS = ("mean", "p50", "p90", "p95", "p99")
_LATENCY_LABELS = {
    "queue": "queue",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2e": "end to end",
}


class Figure(NamedTuple):
    """One figure."""

    label: str
    value: float | str
    unit: str = ""
    """Written behind the value: ``%`` or a word."""
    is_measure: bool = False
    """A speed or a time, of which four digits say all; else counts and ratios, which are shown whole."""

    @property
    def text(self) -> str:
        """As it is shown."""
        text = short_text(self.value) if self.is_measure and not isinstance(self.value, str) else value_text(self.value)
        return " ".join(filter(None, (text, self.unit)))


class Group(NamedTuple):
    """Figures that belong together."""

    title: str
    figures: tuple[Figure, ...]


def value_text(value: float | str) -> str:
    """Thousands are apart; a fraction has as many decimals as reports write, without zeros at the end."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.6f}".rstrip("0")


def short_text(value: float) -> str:
    """Four significant digits, or all of a whole number: for tables of times."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def printable(text: str) -> str:
    """Without what could steer a terminal or break a line of a table."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def groups_of(report: Report) -> Iterator[Group]:
    """All figures but latencies; groups of what did not happen are left out."""
    yield Group("Requests", _requests(report))
    yield Group("Tokens", _tokens(report))
    yield Group("Load", _load(report))
    yield Group("KV cache", _blocks(report))
    if report.prefix_queried_tokens:
        yield Group("Prefix cache", _prefix(report))
    if report.preemptions:
        yield Group("Preemption", _preemption(report))
    if report.tenants > 1:
        fairness = Figure("fairness between tenants (Jain)", report.fairness)
        yield Group("Tenants", (Figure("tenants", report.tenants), fairness))
    if report.goodput is not None:
        yield Group("Goals", _goals(report))


def latencies_of(report: Report) -> tuple[Latencies, str]:
    """The distributions in milliseconds, or in ticks where nothing said how long one is; and their unit."""
    if report.latency_ms is not None:
        return report.latency_ms, "ms"
    return report.latency_ticks, "ticks"


def latency_rows(latencies: Latencies) -> Iterator[tuple[str, Distribution]]:
    """Those that somebody has, with their words."""
    for name, label in _LATENCY_LABELS.items():
        distribution: Distribution | None = getattr(latencies, name)
        if distribution is not None:
            yield label, distribution


def columns_of(distribution: Distribution) -> tuple[float, ...]:
    """The values of ``LATENCY_COLUMNS``."""
    return tuple(getattr(distribution, name) for name in LATENCY_COLUMNS)


def _requests(report: Report) -> tuple[Figure, ...]:
    figures = [
        Figure("requests", report.requests),
        Figure("completed", report.requests_completed),
        Figure("refused", report.requests_refused),
        Figure("ticks", report.total_ticks),
    ]
    if report.busy_ticks != report.total_ticks:
        figures.append(Figure("ticks with work", report.busy_ticks))
    if report.latency_ms is not None:
        figures.append(Figure("duration", report.duration_ms, "ms", is_measure=True))
        figures.append(Figure("completed per second", report.requests_per_s, is_measure=True))
    return tuple(figures)


def _tokens(report: Report) -> tuple[Figure, ...]:
    figures = [
        Figure("prompt tokens", report.prompt_tokens),
        Figure("prompt tokens computed", report.prefill_tokens),
        Figure("decode tokens", report.decode_tokens),
    ]
    if report.latency_ms is not None:
        figures.append(Figure("output tokens per second", report.output_tokens_per_s, is_measure=True))
    return tuple(figures)


def _load(report: Report) -> tuple[Figure, ...]:
    return (
        Figure("greatest queue", report.max_queued),
        Figure("most running", report.max_active),
        Figure("ticks with a queue", report.queue_pressure_ticks),
        Figure("ticks with all places taken", report.active_capacity_ticks),
        Figure("prefill capacity", report.prefill_capacity, "tokens per tick"),
        Figure("prefill utilisation", report.prefill_utilization),
        Figure("decode capacity", report.decode_capacity, "sequences per tick"),
        Figure("decode utilisation", report.decode_utilization),
    )


def _blocks(report: Report) -> tuple[Figure, ...]:
    return (
        Figure("capacity", report.kv_capacity, "blocks"),
        Figure("reserved", report.reserved_blocks, "blocks"),
        Figure("peak", report.peak_blocks, "blocks"),
        Figure("peak of capacity", report.peak_blocks_percent, "%"),
        Figure("occupancy", report.kv_occupancy),
        Figure("evicted", report.evicted_blocks, "blocks"),
        Figure("all returned", "yes" if report.all_blocks_returned else "no"),
    )


def _prefix(report: Report) -> tuple[Figure, ...]:
    figures = [
        Figure("looked up", report.prefix_queried_tokens, "tokens"),
        Figure("hit", report.prefix_hit_tokens, "tokens"),
        Figure("hit rate", report.prefix_hit_rate),
    ]
    if report.prefix_unbounded_hit_tokens is not None and report.prefix_unbounded_hit_rate is not None:
        figures.append(Figure("hit by a cache without bounds", report.prefix_unbounded_hit_tokens, "tokens"))
        figures.append(Figure("hit rate without bounds", report.prefix_unbounded_hit_rate))
    return tuple(figures)


def _preemption(report: Report) -> tuple[Figure, ...]:
    return (
        Figure("preemptions", report.preemptions),
        Figure("computed again", report.recomputed_tokens, "tokens"),
        Figure("swapped out", report.swapped_out_blocks, "blocks"),
        Figure("swapped in", report.swapped_in_blocks, "blocks"),
    )


def _goals(report: Report) -> tuple[Figure, ...]:
    goodput = report.goodput
    assert goodput is not None
    goals = ", ".join(f"{name} {value_text(limit)} ms" for name, limit in goodput.goals_ms.items())
    return (
        Figure("goals", goals),
        Figure("requests that met them", goodput.requests),
        Figure("of all", goodput.ratio),
        Figure("goodput", goodput.requests_per_s, "requests per second", is_measure=True),
    )
