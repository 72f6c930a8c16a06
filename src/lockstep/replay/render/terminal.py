"""Reports and comparisons as tables: drawn by rich on a terminal, plain Markdown anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

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

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_ABSENT = "-"


@dataclass(slots=True)
class Table:
    """A table before it is known who draws it; the first column is words, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)


def show_report(report: Report, out: TextIO | None = None) -> None:
    """Write a report where ``out`` (default: standard output) leads."""
    head = f"{printable(report.name)}: fingerprint {report.fingerprint}"
    show(head, report_tables(report), report.notes, out)


def show_comparison(one: Report, other: Report, out: TextIO | None = None) -> None:
    """Write two reports beside each other, with what differs."""
    notes = [*one.notes, *(note for note in other.notes if note not in one.notes)]
    show(comparison_head(one, other), comparison_tables(one, other), notes, out)


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
    if one.fingerprint == other.fingerprint:
        return f"{names}; identical decisions, fingerprint {one.fingerprint}"
    return f"{names}; decisions differ, fingerprints {one.fingerprint} and {other.fingerprint}"


def comparison_tables(one: Report, other: Report) -> list[Table]:
    """What was set differently, and all figures of both with the difference that B makes."""
    columns = ("A", "B", "B - A", "change")
    tables = []
    settings = Table("Settings", ("settings that differ", "A", "B"))
    for name in sorted({*one.config, *other.config}):
        values = one.config.get(name), other.config.get(name)
        if values[0] != values[1]:
            settings.rows.append((name, *(_setting_text(value) for value in values)))
    for name in sorted({*one.cost_ps, *other.cost_ps}):
        costs = one.cost_ps.get(name, 0), other.cost_ps.get(name, 0)
        if costs[0] != costs[1]:
            settings.rows.append((f"cost: {name}", *map(value_text, costs)))
    if settings.rows:
        tables.append(settings)
    others = {(group.title, figure.label): figure for group in groups_of(other) for figure in group.figures}
    for group in groups_of(one):
        table = Table(group.title, (group.title.lower(), *columns))
        for figure in group.figures:
            table.rows.append(_beside(figure, others.pop((group.title, figure.label), None)))
        tables.append(table)
    if others:
        rest = Table("Only in B", ("only in B", *columns))
        rest.rows.extend((figure.label, _ABSENT, figure.text, _ABSENT, _ABSENT) for figure in others.values())
        tables.append(rest)
    return [*tables, *_latency_comparison(one, other)]


def _latency_comparison(one: Report, other: Report) -> list[Table]:
    (latencies, unit), (others, other_unit) = latencies_of(one), latencies_of(other)
    if unit != other_unit:
        latencies, others, unit = one.latency_ticks, other.latency_ticks, "ticks"
    there = dict(latency_rows(others))
    table = Table("Latencies", (f"latencies, {unit}", "A", "B", "B - A", "change"))
    for label, distribution in latency_rows(latencies):
        if label not in there:
            continue
        pairs = zip(LATENCY_COLUMNS, columns_of(distribution), columns_of(there[label]), strict=True)
        for name, before, after in pairs:
            table.rows.append(
                (f"{label}, {name}", short_text(before), short_text(after), *_difference(before, after, short=True))
            )
    return [table] if table.rows else []


def _beside(figure: Figure, other: Figure | None) -> tuple[str, ...]:
    if other is None:
        return figure.label, figure.text, _ABSENT, _ABSENT, _ABSENT
    if isinstance(figure.value, str) or isinstance(other.value, str):
        return figure.label, figure.text, other.text, "" if figure.value == other.value else "differs", ""
    return figure.label, figure.text, other.text, *_difference(figure.value, other.value)


def _difference(before: float, after: float, *, short: bool = False) -> tuple[str, str]:
    """B - A with its sign, and in percent of A; nothing where they are equal."""
    if before == after:
        return "", ""
    change = round(after - before, 6)
    text = short_text(abs(change)) if short else value_text(abs(change))
    return ("+" if change > 0 else "-") + text, f"{100 * change / before:+.1f} %" if before else _ABSENT


def _setting_text(value: object) -> str:
    return _ABSENT if value is None else printable(str(value))


def show(head: str, tables: Sequence[Table], notes: Sequence[str], out: TextIO | None = None) -> None:
    """Write tables under a headline, notes below them.

    Args:
        out: default: standard output.
    """
    out = sys.stdout if out is None else out
    if not out.isatty():
        out.write(to_markdown(head, tables, notes))
        return
    from rich.columns import Columns
    from rich.console import Console
    from rich.text import Text

    console = Console(file=out, highlight=False)
    console.print(Text(head, style="bold"))
    narrow = [_drawn(table) for table in tables if len(table.columns) == 2]
    if narrow:
        console.print(Columns(narrow, padding=(0, 3)))
    for table in tables:
        if len(table.columns) != 2:
            console.print(_drawn(table))
    for note in notes:
        console.print(Text(f"note: {printable(note)}", style="yellow"))


def _drawn(table: Table) -> RichTable:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(table.columns):
        drawn.add_column(Text(name), justify="right" if index else "left", no_wrap=index > 0)
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=_style(cell) if index >= 3 else "") for index, cell in enumerate(row)))
    return drawn


def _style(cell: str) -> str:
    """Of a difference: neither sign is better as such, so both are only made visible."""
    return "cyan" if cell != _ABSENT and cell.startswith(("+", "-", "differs")) else ""


def to_markdown(head: str, tables: Sequence[Table], notes: Sequence[str] = ()) -> str:
    """The same in Markdown, columns aligned for readers of the source."""
    parts = [_escaped(head)]
    for table in tables:
        rows = [tuple(map(_escaped, row)) for row in (table.columns, *table.rows)]
        widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(table.columns))]
        lines = [_line(row, widths) for row in rows]
        rule = "|".join(["", "-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:]), ""])
        parts.append("\n".join([lines[0], rule, *lines[1:]]))
    parts.extend(f"Note: {_escaped(note)}" for note in notes)
    return "\n\n".join(parts) + "\n"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace("|", "\\|")
