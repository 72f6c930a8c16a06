"""Reports and comparisons as tables, before it is known who draws them."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.replay.render.figures import (
    LATENCY_COLUMNS,
    Figure,
    columns_of,
    groups_of,
    latencies_of,
    latency_rows,
    printable,
    short_text,
    value_text,
)
from lockstep.replay.report import Report

ABSENT = "-"
"""In the place of a value that there is not."""
_DIFFERENCES = ("B - A", "change")


@dataclass(slots=True)
class Table:
    """Rows of text under their columns' names."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    num_words: int = 1
    """Leading columns of words; those behind them are figures."""
    num_differences: int = 0
    """Last columns that say by how much two of the others differ."""


def report_tables(report: Report) -> list[Table]:
    """All figures of a report."""
    tables = []
    for group in groups_of(report):
        table = Table(group.title, (group.title.lower(), "value"))
        table.rows.extend((figure.label, figure.text) for figure in group.figures)
        tables.append(table)
    latencies, unit = latencies_of(report)
    table = Table("Latencies", (f"latencies, {unit}", *LATENCY_COLUMNS))
    table.rows.extend(
        (label, *map(short_text, columns_of(distribution))) for label, distribution in latency_rows(latencies)
    )
    return [*tables, table] if table.rows else tables


def comparison_head(one: Report, other: Report) -> str:
    """Whether the same was decided."""
    names = f"A: {printable(one.name)}, B: {printable(other.name)}"
    return f"{names}; {same_or_not(one, other)}"


def same_or_not(one: Report, other: Report) -> str:
    """Whether the same was decided, without the names."""
    if one.fingerprint == other.fingerprint:
        return f"identical decisions, fingerprint {one.fingerprint}"
    return f"decisions differ, fingerprints {one.fingerprint} and {other.fingerprint}"


def comparison_notes(one: Report, other: Report) -> list[str]:
    """Those of both, each once; what only one of them has says whose it is."""
    return [
        *(note if note in other.notes else f"A: {note}" for note in one.notes),
        *(f"B: {note}" for note in other.notes if note not in one.notes),
    ]


def comparison_tables(one: Report, other: Report) -> list[Table]:
    """What was set differently, and all figures of both with the difference that B makes."""
    settings = settings_table(one, other)
    first = [settings] if settings.rows else []
    return [*first, *figure_comparison(one, other), *latency_comparison(one, other)]


def figure_comparison(one: Report, other: Report) -> list[Table]:
    """All figures of both but latencies."""
    columns = ("A", "B", *_DIFFERENCES)
    tables = []
    others = {(group.title, figure.label): figure for group in groups_of(other) for figure in group.figures}
    for group in groups_of(one):
        table = Table(group.title, (group.title.lower(), *columns), num_differences=len(_DIFFERENCES))
        for figure in group.figures:
            table.rows.append(_beside(figure, others.pop((group.title, figure.label), None)))
        tables.append(table)
    if others:
        rest = Table("Only in B", ("only in B", *columns), num_differences=len(_DIFFERENCES))
        rest.rows.extend((figure.label, ABSENT, figure.text, ABSENT, ABSENT) for figure in others.values())
        tables.append(rest)
    return tables


def settings_table(one: Report, other: Report) -> Table:
    """What was set differently."""
    settings = Table("Settings", ("settings that differ", "A", "B"))
    for name in sorted({*one.config, *other.config}):
        values = one.config.get(name), other.config.get(name)
        if values[0] != values[1]:
            settings.rows.append((name, *(_setting_text(value) for value in values)))
    for name in sorted({*one.cost_ps, *other.cost_ps}):
        costs = one.cost_ps.get(name, 0), other.cost_ps.get(name, 0)
        if costs[0] != costs[1]:
            settings.rows.append((f"cost: {name}", *map(value_text, costs)))
    return settings


def latency_comparison(one: Report, other: Report) -> list[Table]:
    """The latencies of both, where both have some: one table, or none."""
    (latencies, unit), (others, other_unit) = latencies_of(one), latencies_of(other)
    if unit != other_unit:
        latencies, others, unit = one.latency_ticks, other.latency_ticks, "ticks"
    there = dict(latency_rows(others))
    columns = (f"latencies, {unit}", "A", "B", *_DIFFERENCES)
    table = Table("Latencies", columns, num_differences=len(_DIFFERENCES))
    for label, distribution in latency_rows(latencies):
        if label not in there:
            continue
        pairs = zip(LATENCY_COLUMNS, columns_of(distribution), columns_of(there[label]), strict=True)
        for name, before, after in pairs:
            table.rows.append(
                (f"{label}, {name}", short_text(before), short_text(after), *difference(before, after, short=True))
            )
    return [table] if table.rows else []


def _beside(figure: Figure, other: Figure | None) -> tuple[str, ...]:
    if other is None:
        return figure.label, figure.text, ABSENT, ABSENT, ABSENT
    if isinstance(figure.value, str) or isinstance(other.value, str):
        return figure.label, figure.text, other.text, "" if figure.value == other.value else "differs", ""
    return figure.label, figure.text, other.text, *difference(figure.value, other.value, short=figure.is_measure)


def difference(before: float, after: float, *, short: bool = False) -> tuple[str, str]:
    """B - A with its sign, and in percent of A; nothing where they are equal."""
    if before == after:
        return "", ""
    change = round(after - before, 6)
    text = short_text(abs(change)) if short else value_text(abs(change))
    return ("+" if change > 0 else "-") + text, f"{100 * change / before:+.1f} %" if before else ABSENT


def _setting_text(value: object) -> str:
    return ABSENT if value is None else printable(str(value))
