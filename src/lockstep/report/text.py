"""Writer of documents as text: drawn by rich on a terminal, as Markdown elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from lockstep.report.document import (
    ABSENT,
    Axis,
    Block,
    Cell,
    Column,
    Document,
    Finding,
    Paragraph,
    Point,
    Scatter,
    Table,
    Tables,
    cell_text,
)
from lockstep.shown import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

PLOT_WIDTH = 60
PLOT_HEIGHT = 15


def show(document: Document, out: TextIO | None = None) -> None:
    """Write a document: its title, its blocks and its notes.

    Args:
        out: stream to write to; None: standard output.
    """
    out = sys.stdout if out is None else out
    if not out.isatty():
        out.write(to_markdown(document))
        return
    from rich.text import Text

    console = _console(out)
    console.print(Text(printable(document.title), style="bold"))
    for block in _blocks(document):
        _draw(block, console)
    for note in document.notes:
        console.print(Text(f"note: {printable(note)}", style="yellow"))


def show_block(block: Block, out: TextIO | None = None) -> None:
    """Write one block; ``out`` is as in `show`."""
    out = sys.stdout if out is None else out
    if out.isatty():
        _draw(block, _console(out))
    else:
        out.write(_markdown(block) + "\n")


def to_markdown(document: Document) -> str:
    """A document in Markdown, with a newline at its end."""
    parts = [_escaped(document.title), *filter(None, map(_markdown, _blocks(document)))]
    return "\n\n".join([*parts, *(f"Note: {_escaped(note)}" for note in document.notes)]) + "\n"


def to_lines(table: Table) -> str:
    """A table as plain lines, with two spaces between its columns."""
    columns, rows = _without_pictures(table)
    lines = [[printable(column.name) for column in columns], *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(_aligned(line, columns, widths)).rstrip() for line in lines)


def scatter_lines(
    points: Sequence[Point], x: Axis, y: Axis, width: int = PLOT_WIDTH, height: int = PLOT_HEIGHT
) -> list[str]:
    """Scatter plot as lines of text, with the smallest and the largest value at each axis.

    If several points have the same position, a best one is shown, otherwise the first. The result is empty if no point
    has both metrics.
    """
    there = [point for point in points if x.name in point.figures and y.name in point.figures]
    if not there:
        return []
    xs, ys = ([point.figures[axis.name] for point in there] for axis in (x, y))
    cells = [[" "] * width for _ in range(height)]
    marks = sorted(zip(there, xs, ys, strict=True), key=lambda mark: not mark[0].is_best)
    for point, across, up in reversed(marks):
        row = height - 1 - _place(up, min(ys), max(ys), height)
        cells[row][_place(across, min(xs), max(xs), width)] = "*" if point.is_best else "o"
    labels = [f"{max(ys):,g}", *[""] * (height - 2), f"{min(ys):,g}"]
    margin = max(map(len, labels))
    lines = [f"{label:>{margin}} |{''.join(cell)}".rstrip() for label, cell in zip(labels, cells, strict=True)]
    left, right = f"{min(xs):,g}", f"{max(xs):,g}"
    return [
        y.short,
        *lines,
        f"{'':>{margin}} +{'-' * width}",
        f"{'':>{margin}}  {left}{right:>{max(1, width - len(left))}}",
        f"{'':>{margin}}  {x.short:^{width}}".rstrip(),
    ]


def _place(value: float, least: float, most: float, count: int) -> int:
    return 0 if most == least else round((value - least) / (most - least) * (count - 1))


def _blocks(document: Document) -> Iterator[Block]:
    return (block for section in document.sections for block in section.blocks)


def _finding_markdown(finding: Finding) -> str:
    """A finding as Markdown whose lines also stay separate when it is rendered: a list of reasons, and paragraphs."""
    reasons = "\n".join(f"- {_escaped(reason)}" for reason in finding.reasons)
    table = "" if finding.table is None else _table_markdown(finding.table)
    parts = [_escaped(finding.verdict), reasons, *map(_escaped, finding.states), table, *map(_escaped, finding.rest)]
    return "\n\n".join(filter(None, parts))


def _scatter_text(block: Scatter) -> str:
    """Plot between two empty lines; empty if there are fewer than two points."""
    if not block.axes:
        return ""
    there = [point for point in block.points if all(axis.name in point.figures for axis in block.first)]
    return "\n".join(["", *scatter_lines(there, *block.first), ""]) if len(there) > 1 else ""


# ---- terminal


def _console(out: TextIO) -> Console:
    from rich.console import Console

    return Console(file=out, highlight=False)


def _draw(block: Block, console: Console) -> None:
    from rich.columns import Columns
    from rich.text import Text

    match block:
        case Table():
            console.print(_drawn(block))
        case Tables():
            narrow = [_drawn(table) for table in block.tables if len(table.columns) == 2]
            if narrow:
                console.print(Columns(narrow, padding=(0, 3)))
            for table in block.tables:
                if len(table.columns) != 2:
                    console.print(_drawn(table))
        case Finding():
            above = [block.verdict, *(f"  {reason}" for reason in block.reasons), *block.states]
            for part in ("\n".join(map(printable, above)), block.table, "\n".join(map(printable, block.rest))):
                if isinstance(part, Table):
                    console.print("", _drawn(part), sep="\n", end="\n\n")
                elif part:
                    console.print(Text(part), soft_wrap=True)
        case Scatter():
            console.print(Text(_scatter_text(block)), soft_wrap=True)
        case Paragraph():
            console.print(Text(printable(block.text)), soft_wrap=True)


def _drawn(table: Table) -> RichTable:
    """A table for the terminal, whose long cells are folded and never cut."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    columns, rows = _without_pictures(table)
    for column in columns:
        drawn.add_column(Text(printable(column.name)), justify="left" if column.is_word else "right", overflow="fold")
    for row in rows:
        cells = zip(columns, row, strict=True)
        drawn.add_row(*(Text(cell, _style(cell) if column.kind == "change" else "") for column, cell in cells))
    return drawn


def _style(cell: str) -> str:
    """Style of a difference. It is the same for both signs, because neither is always better."""
    return "cyan" if cell != ABSENT and cell.startswith(("+", "-", "differs")) else ""


# ---- Markdown


def _markdown(block: Block) -> str:
    match block:
        case Table():
            return _table_markdown(block)
        case Tables():
            return "\n\n".join(map(_table_markdown, block.tables))
        case Finding():
            return _finding_markdown(block)
        case Scatter():
            return _scatter_text(block)
        case Paragraph():
            return printable(block.text)
        case _:
            return ""


def _table_markdown(table: Table) -> str:
    """A table as Markdown, with columns that are also aligned in the source."""
    columns, rows = _without_pictures(table)
    lines = [[_escaped(cell) for cell in row] for row in ([column.name for column in columns], *rows)]
    widths = [max(3, *map(len, cells)) for cells in zip(*lines, strict=True)]
    ends = ["-" if column.is_word else ":" for column in columns]
    rules = ["-" * (width + 1) + end for width, end in zip(widths, ends, strict=True)]
    head, *body = (_line(line, columns, widths) for line in lines)
    return "\n".join([head, f"|{'|'.join(rules)}|", *body])


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    return f"| {' | '.join(_aligned(cells, columns, widths))} |"


def _aligned(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> Iterator[str]:
    for cell, column, width in zip(cells, columns, widths, strict=True):
        yield cell.ljust(width) if column.is_word else cell.rjust(width)


def _escaped(text: str) -> str:
    """Text with escapes for Markdown, so that it cannot end a cell or begin an HTML element."""
    return re.sub(r"[\\|<]", r"\\\g<0>", printable(text))


def _without_pictures(table: Table) -> tuple[list[Column], list[list[str]]]:
    """Columns and cells that text can show; every row has a cell for each column."""

    kept = [index for index, column in enumerate(table.columns) if column.kind != "strip"]

    def text_of(row: Sequence[Cell], index: int) -> str:
        return cell_text(row[index]) if index < len(row) else ""

    return [table.columns[index] for index in kept], [[text_of(row, index) for index in kept] for row in table.rows]
