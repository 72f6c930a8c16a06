"""Tables and tiles with the figures of one report or of two, for terminals and pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from lockstep.replay.fleet import FleetReport
from lockstep.replay.latencies import Distribution, Latencies
from lockstep.replay.report import Report
from lockstep.report.document import (
    ABSENT,
    Cell,
    Column,
    Document,
    Number,
    Section,
    Strip,
    Style,
    Table,
    Tables,
    Tile,
    Tiles,
    changes,
    format_number,
    numbers,
    words,
)

LATENCY_COLUMNS = ("mean", "p50", "p90", "p95", "p99")
_LATENCY_LABELS = {
    "queue": "queue",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between tokens",
    "e2e": "end to end",
}
_SIDE_COLUMNS = (*numbers("A", "B"), *changes("B - A", "change"))
_measure = partial(Number, style=Style.SHORT)
_short = partial(format_number, style=Style.SHORT)

Rows = Iterable[tuple[str, Cell]]


def report_document(report: Report) -> Document:
    """Figures of a report, for a terminal."""
    blocks = (Tables([*figure_tables(report), *latency_tables(report)]),)
    return Document(f"{report.name}: fingerprint {report.fingerprint}", [Section("", blocks)], notes=report.notes)


def comparison_document(one: Report, other: Report) -> Document:
    """Settings that differ, and the figures of both reports with their differences, for a terminal."""
    settings = settings_table(one, other)
    tables = [settings] if settings.rows else []
    tables += [*figure_comparison(one, other), *latency_comparison(one, other)]
    title = f"A: {one.name}, B: {other.name}; {same_or_not(one, other)}"
    return Document(title, [Section("", (Tables(tables),))], notes=comparison_notes(one, other))


def fleet_document(reports: Sequence[FleetReport]) -> Document:
    """Figures of the same requests with several policies, one column each."""
    first = reports[0]
    rows: list[tuple[Cell, ...]] = []

    def row(label: str, value: Callable[[FleetReport], Cell]) -> None:
        rows.append((label, *[value(each) for each in reports]))

    def latency(label: str, measure: str) -> None:
        for point in ("p50", "p99"):
            found = [getattr(each.latency_ms, measure) for each in reports]
            cells = [ABSENT if each is None else _measure(getattr(each, point)) for each in found]
            rows.append((f"{label} {point}, ms", *cells))

    row("requests completed", lambda each: Number(each.requests_completed))
    row("requests/s", lambda each: _measure(each.requests_per_s))
    if first.prefix_queried_tokens:
        row("prompt tokens cached, %", lambda each: _measure(100 * each.prefix_hit_rate))
    latency("time to first token", "ttft")
    latency("end to end", "e2e")
    row("requests of the replica with the fewest", lambda each: Number(each.requests_least))
    row("requests of the replica with the most", lambda each: Number(each.requests_most))
    row("deviation of requests, % of the mean", lambda each: _measure(100 * each.requests_spread))
    row("busy, % of the time, minimum", lambda each: _measure(100 * each.busy_least))
    row("busy, % of the time, maximum", lambda each: _measure(100 * each.busy_most))
    for why in dict.fromkeys(why for each in reports for why in each.routed_by):
        row(f"routed by {why}", lambda each, why=why: Number(each.routed_by.get(why, 0)))  # type: ignore[misc]  # bound now
    row("fingerprint", lambda each: each.fingerprint)
    table = Table("", (*words("figure"), *numbers(*(each.routing for each in reports))), rows)
    title = f"{first.name}: {first.replicas} replicas, max_imbalance {first.max_imbalance}"
    return Document(title, [Section("", (Tables([table]),))], notes=first.notes)


def same_or_not(one: Report, other: Report) -> str:
    """Verdict of a comparison: equal decisions, or different ones."""
    if one.fingerprint == other.fingerprint:
        return f"identical decisions, fingerprint {one.fingerprint}"
    return f"decisions differ, fingerprints {one.fingerprint} and {other.fingerprint}"


def comparison_notes(one: Report, other: Report) -> list[str]:
    """Warnings of both reports, each once; a warning of one report begins with ``A:`` or ``B:``."""
    return [
        *(note if note in other.notes else f"A: {note}" for note in one.notes),
        *(f"B: {note}" for note in other.notes if note not in one.notes),
    ]


# ---- figures


def figure_tables(report: Report) -> list[Table]:
    """All figures except latencies, without the tables of features that were not used."""
    groups: list[tuple[str, Rows]] = [
        ("Requests", _requests(report)),
        ("Tokens", _tokens(report)),
        ("Load", _load(report)),
        ("KV cache", _blocks(report)),
        ("Prefix cache", _prefix(report) if report.prefix_queried_tokens else ()),
        ("Preemption", _preemption(report) if report.preemptions else ()),
        ("Tenants", _tenants(report) if report.tenants > 1 else ()),
        ("Goals", _goals(report)),
    ]
    tables = [Table(title, (*words(title.lower()), *numbers("value")), list(rows)) for title, rows in groups]
    return [table for table in tables if table.rows]


def figure_comparison(one: Report, other: Report) -> list[Table]:
    """All figures of both reports except latencies."""
    there = {(table.title, row[0]): row[1] for table in figure_tables(other) for row in table.rows}
    tables = []
    for table in figure_tables(one):
        rows = [_beside(str(label), value, there.pop((table.title, label), None)) for label, value in table.rows]
        tables.append(Table(table.title, (*words(table.title.lower()), *_SIDE_COLUMNS), rows))
    if there:
        rest: list[tuple[Cell, ...]] = [(label, ABSENT, value, ABSENT, ABSENT) for (_, label), value in there.items()]
        tables.append(Table("Only in B", (*words("only in B"), *_SIDE_COLUMNS), rest))
    return tables


def _beside(label: str, value: Cell, other: Cell | None) -> tuple[Cell, ...]:
    if other is None:
        return label, value, ABSENT, ABSENT, ABSENT
    if not isinstance(value, Number) or not isinstance(other, Number):
        return label, value, other, "" if value == other else "differs", ""
    return label, value, other, *difference(value.value, other.value, value.style)


def difference(before: float, after: float, style: Style = Style.EXACT) -> tuple[str, str]:
    """B - A with its sign, and in percent of A; empty if they are equal."""
    if before == after:
        return "", ""
    change = round(after - before, 6)
    text = ("+" if change > 0 else "-") + format_number(abs(change), style)
    return text, f"{100 * change / before:+.1f} %" if before else ABSENT


def settings_table(one: Report, other: Report) -> Table:
    """Settings that differ."""
    settings = Table("Settings that differ", (*words("settings that differ"), *numbers("A", "B")), id="settings")
    for name in sorted({*one.config, *other.config}):
        values = one.config.get(name), other.config.get(name)
        if values[0] != values[1]:
            settings.rows.append((name, *(ABSENT if value is None else str(value) for value in values)))
    for name in sorted({*one.cost_ps, *other.cost_ps}):
        costs = one.cost_ps.get(name, 0), other.cost_ps.get(name, 0)
        if costs[0] != costs[1]:
            settings.rows.append((f"cost: {name}", *map(Number, costs)))
    return settings


def _requests(report: Report) -> Iterator[tuple[str, Cell]]:
    yield "requests", Number(report.requests)
    yield "completed", Number(report.requests_completed)
    yield "refused", Number(report.requests_refused)
    yield "ticks", Number(report.total_ticks)
    if report.busy_ticks != report.total_ticks:
        yield "ticks with work", Number(report.busy_ticks)
    if report.latency_ms is not None:
        yield "duration", _measure(report.duration_ms, unit="ms")
        yield "completed per second", _measure(report.requests_per_s)


def _tokens(report: Report) -> Iterator[tuple[str, Cell]]:
    yield "prompt tokens", Number(report.prompt_tokens)
    yield "prompt tokens computed", Number(report.prefill_tokens)
    yield "decode tokens", Number(report.decode_tokens)
    if report.latency_ms is not None:
        yield "output tokens per second", _measure(report.output_tokens_per_s)


def _load(report: Report) -> Iterator[tuple[str, Cell]]:
    yield "maximum queue", Number(report.max_queued)
    yield "maximum running", Number(report.max_active)
    yield "ticks with a queue", Number(report.queue_pressure_ticks)
    yield "ticks at the limit of running requests", Number(report.active_capacity_ticks)
    yield "prefill capacity", Number(report.prefill_capacity, unit="tokens per tick")
    yield "prefill utilisation", Number(report.prefill_utilization)
    yield "decode capacity", Number(report.decode_capacity, unit="sequences per tick")
    yield "decode utilisation", Number(report.decode_utilization)


def _blocks(report: Report) -> Iterator[tuple[str, Cell]]:
    yield "capacity", Number(report.kv_capacity, unit="blocks")
    yield "reserved", Number(report.reserved_blocks, unit="blocks")
    yield "peak", Number(report.peak_blocks, unit="blocks")
    yield "peak, % of capacity", Number(report.peak_blocks_percent, unit="%")
    yield "occupancy", Number(report.kv_occupancy)
    yield "evicted", Number(report.evicted_blocks, unit="blocks")
    yield "all returned", "yes" if report.all_blocks_returned else "no"


def _prefix(report: Report) -> Iterator[tuple[str, Cell]]:
    yield "queried", Number(report.prefix_queried_tokens, unit="tokens")
    yield "hit", Number(report.prefix_hit_tokens, unit="tokens")
    yield "hit rate", Number(report.prefix_hit_rate)
    if report.prefix_unbounded_hit_tokens is not None and report.prefix_unbounded_hit_rate is not None:
        yield "hits of a cache without bounds", Number(report.prefix_unbounded_hit_tokens, unit="tokens")
        yield "hit rate without bounds", Number(report.prefix_unbounded_hit_rate)


def _preemption(report: Report) -> Iterator[tuple[str, Cell]]:
    yield "preemptions", Number(report.preemptions)
    yield "recomputed", Number(report.recomputed_tokens, unit="tokens")
    yield "swapped out", Number(report.swapped_out_blocks, unit="blocks")
    yield "swapped in", Number(report.swapped_in_blocks, unit="blocks")


def _tenants(report: Report) -> Iterator[tuple[str, Cell]]:
    yield "tenants", Number(report.tenants)
    yield "fairness between tenants (Jain)", Number(report.fairness)


def _goals(report: Report) -> Iterator[tuple[str, Cell]]:
    goodput = report.goodput
    if goodput is not None:
        yield "goals", ", ".join(f"{name} {format_number(limit)} ms" for name, limit in goodput.goals_ms.items())
        yield "requests that met the goals", Number(goodput.requests)
        yield "share of all requests", Number(goodput.ratio)
        yield "goodput", _measure(goodput.requests_per_s, unit="requests per second")


# ---- latencies


def latencies_of(report: Report) -> tuple[Latencies, str]:
    """Distributions in milliseconds, or in ticks if the duration of a tick is unknown; and their unit."""
    if report.latency_ms is not None:
        return report.latency_ms, "ms"
    return report.latency_ticks, "ticks"


def latency_tables(report: Report) -> list[Table]:
    """Distributions with values, as one table or none. Pages also draw each as a strip."""
    latencies, unit = latencies_of(report)
    columns = (*words(f"latencies, {unit}"), *numbers(*LATENCY_COLUMNS), Column("0 to p99: median, p90, mean", "strip"))
    table = Table("Latencies", columns, id="latencies")
    for label, distribution in _distributions(latencies):
        whole = max(distribution.p99, distribution.mean, 1e-12)
        table.rows.append((label, *map(_measure, _values(distribution)), _strip(distribution, whole)))
    return [table] if table.rows else []


def latency_comparison(one: Report, other: Report) -> list[Table]:
    """Latencies of both reports, one figure per row, if both have some: one table or none."""
    pairs, unit = _pairs(one, other)
    rows: list[tuple[Cell, ...]] = [
        (f"{label}, {name}", _measure(before), _measure(after), *difference(before, after, Style.SHORT))
        for label, a, b in pairs
        for name, before, after in zip(LATENCY_COLUMNS, _values(a), _values(b), strict=True)
    ]
    return [Table("Latencies", (*words(f"latencies, {unit}"), *_SIDE_COLUMNS), rows)] if rows else []


def latency_strips(one: Report, other: Report) -> Table:
    """Latencies of both reports, for pages: three rows per distribution, strips up to the greater p99."""
    pairs, unit = _pairs(one, other)
    strip = Column("0 to the greater p99: median, p90, mean", "strip")
    columns = (*words(unit, "side"), *numbers(*LATENCY_COLUMNS), strip)
    table = Table("Latencies", columns, id="latencies", rows_per_head=3)
    for label, a, b in pairs:
        whole = max(a.p99, a.mean, b.p99, b.mean, 1e-12)
        for letter, each in (("A", a), ("B", b)):
            table.rows.append((label, letter, *map(_measure, _values(each)), _strip(each, whole, letter.lower())))
        changed = (difference(x, y)[1] for x, y in zip(_values(a), _values(b), strict=True))
        table.rows.append((label, "change", *changed, ""))
    return table


def _pairs(one: Report, other: Report) -> tuple[list[tuple[str, Distribution, Distribution]], str]:
    """Distributions of both reports, and their unit: milliseconds if both have them, otherwise ticks."""
    if one.latency_ms is not None and other.latency_ms is not None:
        a, b, unit = one.latency_ms, other.latency_ms, "ms"
    else:
        a, b, unit = one.latency_ticks, other.latency_ticks, "ticks"
    there = dict(_distributions(b))
    return [(label, each, there[label]) for label, each in _distributions(a) if label in there], unit


def _distributions(latencies: Latencies) -> Iterator[tuple[str, Distribution]]:
    for name, label in _LATENCY_LABELS.items():
        distribution: Distribution | None = getattr(latencies, name)
        if distribution is not None:
            yield label, distribution


def _values(distribution: Distribution) -> tuple[float, ...]:
    return tuple(getattr(distribution, name) for name in LATENCY_COLUMNS)


def _strip(each: Distribution, whole: float, side: str = "") -> Strip:
    return Strip(each.p50, each.p90, each.p99, each.mean, whole, side)


# ---- tiles


def tiles_of(report: Report) -> Tiles:
    """The most important figures."""
    return Tiles(list(_tiles(report)))


def twin_tiles(one: Report, other: Report) -> Tiles:
    """Tiles of both reports, where both have them."""
    there = {tile.label: (tile.value, tile.more) for tile in _tiles(other)}
    return Tiles([tile._replace(other=there[tile.label]) for tile in _tiles(one) if tile.label in there])


def _tiles(report: Report) -> Iterator[Tile]:
    refused = f"{report.requests_refused:,} refused" if report.requests_refused else "none refused"
    yield Tile("Completed", f"{report.requests_completed:,} of {report.requests:,}", refused)
    if report.latency_ms is None:
        yield Tile("Ticks", f"{report.total_ticks:,}", f"{report.busy_ticks:,} with work")
    else:
        yield Tile("Duration", _time_text(report.duration_ms, "ms"), f"{report.total_ticks:,} ticks")
        yield Tile("Output", f"{_short(report.output_tokens_per_s)} tokens/s", f"{report.decode_tokens:,} tokens")
    yield Tile("Prompts", f"{report.prompt_tokens:,} tokens", f"{report.prefill_tokens:,} computed")
    if report.latency_ms is None:
        used = f"{_percent(report.decode_utilization)} of decode capacity"
        yield Tile("Output", f"{report.decode_tokens:,} tokens", used)
    peak = f"peak {_percent(report.peak_blocks / report.kv_capacity)}, mean {_percent(report.kv_occupancy)}"
    yield Tile("KV blocks", f"{report.peak_blocks:,} of {report.kv_capacity:,}", peak)
    latencies, unit = latencies_of(report)
    for label, distribution in (("First token", latencies.ttft), ("End to end", latencies.e2e)):
        if distribution is not None:
            median, tail = (_time_text(value, unit) for value in (distribution.p50, distribution.p99))
            yield Tile(label, median, f"median; p99 {tail}")
    yield Tile("Maximum queue", f"{report.max_queued:,}", f"{report.queue_pressure_ticks:,} ticks with a queue")
    if report.prefix_queried_tokens:
        most = report.prefix_unbounded_hit_rate
        note = "" if most is None else f"; {_percent(most)} without bounds"
        yield Tile("Prefix hits", _percent(report.prefix_hit_rate), f"{report.prefix_hit_tokens:,} tokens{note}")
    if report.preemptions:
        yield Tile("Preemptions", f"{report.preemptions:,}", f"{report.recomputed_tokens:,} tokens recomputed")
    if report.goodput is not None:
        met = f"{_percent(report.goodput.ratio)} met the goals"
        yield Tile("Goodput", f"{_short(report.goodput.requests_per_s)} requests/s", met)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _time_text(value: float, unit: str) -> str:
    if unit == "ms" and value >= 10_000:
        return f"{_short(value / 1000)} s"
    return f"{_short(value)} {unit}"
