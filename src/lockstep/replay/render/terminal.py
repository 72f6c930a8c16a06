"""Tables on the terminal: drawn by rich where somebody looks, plain Markdown anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from lockstep.replay.render.figures import printable
from lockstep.replay.render.tables import (
    ABSENT,
    Table,
    comparison_head,
    comparison_notes,
    comparison_tables,
    report_tables,
)
from lockstep.replay.report import Report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable


def show_report(report: Report, out: TextIO | None = None) -> None:
    """Write a report where ``out`` (default: standard output) leads."""
    head = f"{printable(report.name)}: fingerprint {report.fingerprint}"
    show(head, report_tables(report), report.notes, out)


def show_comparison(one: Report, other: Report, out: TextIO | None = None) -> None:
    """Write two reports beside each other, with what differs."""
    show(comparison_head(one, other), comparison_tables(one, other), comparison_notes(one, other), out)


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
    from rich.text import Text

    console = _console(out)
    console.print(Text(head, style="bold"))
    narrow = [_drawn(table) for table in tables if len(table.columns) == 2]
    if narrow:
        console.print(Columns(narrow, padding=(0, 3)))
    for table in tables:
        if len(table.columns) != 2:
            console.print(_drawn(table))
    for note in notes:
        console.print(Text(f"note: {printable(note)}", style="yellow"))


def show_table(table: Table, out: TextIO | None = None) -> None:
    """Write one table by itself."""
    out = sys.stdout if out is None else out
    if out.isatty():
        _console(out).print(_drawn(table))
    else:
        out.write(table_markdown(table) + "\n")


def _console(out: TextIO) -> Console:
    from rich.console import Console

    return Console(file=out, highlight=False)


def _drawn(table: Table) -> RichTable:
    """Cells that are too long for the terminal are folded, never cut."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(table.columns):
        drawn.add_column(Text(name), justify="left" if index < table.num_words else "right", overflow="fold")
    num_plain = len(table.columns) - table.num_differences
    for row in table.rows:
        styles = ["" if index < num_plain else _style(cell) for index, cell in enumerate(row)]
        drawn.add_row(*(Text(printable(cell), style) for cell, style in zip(row, styles, strict=True)))
    return drawn


def _style(cell: str) -> str:
    """Of a difference: neither sign is better as such, so both are only made visible."""
    return "cyan" if cell != ABSENT and cell.startswith(("+", "-", "differs")) else ""


def to_markdown(head: str, tables: Sequence[Table], notes: Sequence[str] = ()) -> str:
    """The same in Markdown."""
    parts = [_escaped(head), *map(table_markdown, tables), *(f"Note: {_escaped(note)}" for note in notes)]
    return "\n\n".join(parts) + "\n"


def table_markdown(table: Table) -> str:
    """One table in Markdown, columns aligned for readers of the source; without a newline at its end."""
    rows = [tuple(map(_escaped, row)) for row in (table.columns, *table.rows)]
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(table.columns))]
    rules = [
        "-" * (width + 2) if column < table.num_words else "-" * (width + 1) + ":"
        for column, width in enumerate(widths)
    ]
    lines = [_line(row, widths, table.num_words) for row in rows]
    return "\n".join([lines[0], f"|{'|'.join(rules)}|", *lines[1:]])


def _line(row: Sequence[str], widths: Sequence[int], num_words: int) -> str:
    cells = [
        cell.ljust(width) if column < num_words else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace("|", "\\|")
