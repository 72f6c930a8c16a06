"""Documents for the tests of writers: every block, every kind of cell, names that would break what holds them."""

from __future__ import annotations

from lockstep.report.document import (
    Axis,
    Block,
    Column,
    Document,
    Finding,
    Flag,
    Folded,
    Lead,
    Level,
    Line,
    Number,
    Paragraph,
    Plot,
    Plots,
    Point,
    Remark,
    Scatter,
    Section,
    Strip,
    Style,
    Table,
    Tables,
    Tile,
    Tiles,
    changes,
    numbers,
    words,
)

HOSTILE = "<img src=x onerror=\"document.title='taken'\">\x1b[2J|\\`{{ 7 * 7 }}</script>\nnext"


def document_of(*blocks: Block, notes: tuple[str, ...] = ()) -> Document:
    """A document of one section."""
    return Document("Title", [Section("Section", blocks)], notes=notes)


def candidates(can_sort: bool = True) -> Table:
    """Three rows: one on the front, one chosen, one that cannot work."""
    table = Table("Candidates", (*words("", "name"), *numbers("speed", "loss")), id="candidates", can_sort=can_sort)
    table.rows += [
        (Flag(True, "on the front of speed"), "b", Number(1234.5), Number(0.25)),
        (Flag(True, "on the front of speed", "cheapest"), "a", Number(20.0), ""),
        (Flag(False, "on the front of speed"), "c", Remark("cannot work: too small")),
    ]
    return table


def latencies() -> Table:
    """Rows that share a head, with strips."""
    columns = (*words("ms", "side"), *numbers("p50"), Column("0 to p99", "strip"))
    table = Table("Latencies", columns, id="latencies", rows_per_head=3)
    for label in ("queue", "end"):
        table.rows += [
            (label, "A", Number(5.0), Strip(5.0, 8.0, 10.0, 6.0, 20.0, "a")),
            (label, "B", Number(10.0), Strip(10.0, 16.0, 20.0, 12.0, 20.0, "b")),
            (label, "change", "+100.0 %", ""),
        ]
    return table


def scatter(*names: str) -> Scatter:
    """Three points of two figures."""
    axes = [Axis(name, f"{name}, long", name, "more") for name in names]
    points = [
        Point("first", {"x": 0.0, "y": 0.0}, is_best=True),
        Point("second", {"x": 10.0, "y": 4.0}, is_chosen=True),
        Point("third", {"x": 5.0, "y": 2.0}),
        Point("without y", {"x": 7.0}),
    ]
    return Scatter(axes, points, "the chosen one")


def everything(text: str = "words") -> Document:
    """Every block but a timeline, with a text in each place that takes one."""
    comparison = Table(text, (*words(text), *numbers("A"), *changes("B - A")), [(text, Number(1), "+1")])
    figures = Table(text, (*words(text), *numbers("value")), [(text, Number(2, Style.SHORT, "ms"))])
    plans = Table("", (*words(text), Column("lost", "alarm")), [(text, text)], id="plans")
    blocks: tuple[Block, ...] = (
        Tiles([Tile(text, text, text), Tile(text, text, text, (text, text))]),
        Tables([figures]),
        Tables([comparison, comparison], "figures"),
        Finding(text, (text,), (text,), plans, text, (text,)),
        Paragraph(text, "hint"),
        Folded(text, Table(text, words(text), [(text,)])),
        Table(text, words("", text), [(Flag(True, text, text), Remark(text))], can_sort=True),
        Scatter([Axis(text, text, text, "less")], [Point(text, {text: 1.0})], text),
        Plots([Plot(text, text, text, text, [Line(text, "a", [(1.0, 2.0), (2.0, 3.0)])], [Level(text, 2.0)])]),
    )
    return Document(text, [Section(text, blocks)], [Lead(text, text, "A")], text, (text,))
