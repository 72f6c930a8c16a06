"""Documents of figures: sections of tables, tiles, charts and findings, independent of their writer.

A document has content and no layout: numbers keep their value, and their style gives the number of significant digits;
writers align, escape and draw. Writers of text leave out what only a page can show (tiles, charts, folded tables).
Programs do not read documents: their JSON has the values that documents are made from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

from lockstep.shown import printable

ABSENT = "-"
"""Text in the place of a value that there is not."""


class Style(Enum):
    """Form of a written number."""

    EXACT = "exact"
    """Thousands apart; a fraction with six decimals, without zeros at the end."""
    SHORT = "short"
    """Four significant digits, or all of a whole number: for speeds and times."""
    GENERAL = "general"
    """Six significant digits."""


class Number(NamedTuple):
    """A number as it is read."""

    value: float
    style: Style = Style.EXACT
    unit: str = ""
    """Written behind it: ``%`` or a word."""


class Flag(NamedTuple):
    """The mark of a row that is better than others."""

    is_set: bool
    meaning: str
    """Words for the mark on a page."""
    badge: str = ""
    """A distinction beside it; only on pages."""


class Remark(NamedTuple):
    """Words in the place of all further cells of a row. Text has them among its notes."""

    text: str


class Strip(NamedTuple):
    """A distribution as a strip from 0 to ``whole``; only on pages."""

    p50: float
    p90: float
    p99: float
    mean: float
    whole: float
    side: str = ""
    """``a`` or ``b`` where two are compared."""

    def place(self, value: float) -> float:
        """Percent of the strip's width."""
        return round(100 * value / self.whole, 2)


Cell = str | Number | Flag | Remark | Strip


class Column(NamedTuple):
    """Name and kind of the cells below each other."""

    name: str
    kind: Literal["word", "number", "change", "alarm", "strip"] = "number"
    """``change``: by how much two of the others differ; ``alarm``: words that report a loss."""

    @property
    def is_word(self) -> bool:
        """True if it stands to the left."""
        return self.kind in ("word", "alarm")


def words(*names: str) -> tuple[Column, ...]:
    """Columns of words."""
    return tuple(Column(name, "word") for name in names)


def numbers(*names: str) -> tuple[Column, ...]:
    """Columns of numbers."""
    return tuple(Column(name) for name in names)


def changes(*names: str) -> tuple[Column, ...]:
    """Columns of differences."""
    return tuple(Column(name, "change") for name in names)


@dataclass(slots=True)
class Table:
    """Rows under their columns' names."""

    title: str
    columns: tuple[Column, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    id: str = ""
    """Of its element in a page."""
    rows_per_head: int = 1
    """Rows that share the first cell of the first of them."""
    can_sort: bool = False
    """Whether a page sorts it by a head that is clicked at."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables that belong together. Those of two columns stand beside each other, wider ones below each other."""

    tables: Sequence[Table]
    id: str = ""


class Tile(NamedTuple):
    """One of the most important figures, in large type."""

    label: str
    value: str
    more: str = ""
    """A second figure beside it, small."""
    other: tuple[str, str] | None = None
    """Value and more of the other side of a comparison."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """The figures at the head of a page."""

    tiles: Sequence[Tile]

    @property
    def num_columns(self) -> int:
        """Columns of tiles that leave the fewest gaps."""
        return min(4, 5, 3, key=lambda columns: -len(self.tiles) % columns)


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A few sentences. Text in backquotes is something to type."""

    text: str
    kind: Literal["plain", "hint"] = "plain"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a search; the fields are written in this order."""

    verdict: str
    """Whether, and where."""
    reasons: tuple[str, ...] = ()
    """Why, a sentence each."""
    states: tuple[str, ...] = ()
    """Circumstances in which it was found."""
    table: Table | None = None
    hint: str = ""
    """Reading aid for the table; only on pages."""
    rest: tuple[str, ...] = ()
    """Causes, and ways to see it again."""


@dataclass(frozen=True, slots=True)
class Folded:
    """A table that opens when it is requested; only on pages."""

    summary: str
    table: Table
    is_open: bool = False


class Series(NamedTuple):
    """A line of a chart, one for each side of its timeline."""

    label: str
    color: str
    """Name of a colour of pages; sides of a comparison have their own."""
    column: str
    """Name of the column of each side's data."""
    base: str = ""
    """Name of a column that it stands on; empty: none."""


class Chart(NamedTuple):
    """One of the pictures of a timeline."""

    id: str
    title: str
    summary: str
    series: tuple[Series, ...] = ()
    """Lines over time; none: the chart of single requests."""
    height: int = 0
    limit: tuple[str, str] | None = None
    """Name of a capacity of each side, and its label; drawn as a dashed line."""
    has_band: bool = True
    """Whether extremes are drawn around a line whose side is sampled."""
    has_marks: bool = False
    """Whether ticks with a preemption are marked."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Charts over one axis of time; only on pages."""

    charts: Sequence[Chart]
    data: Mapping[str, Any]
    """Data of the page's script, columns by name (assets/timeline.js)."""
    has_times: bool
    """Whether the axis may count time, beside ticks."""
    sampling: str
    """Sentence on what the charts leave out."""


class Axis(NamedTuple):
    """A figure that a scatter can show."""

    name: str
    label: str
    short: str
    """Its label in text."""
    better: Literal["more", "less"]


class Point(NamedTuple):
    """One of several candidates, by its figures."""

    label: str
    figures: Mapping[str, float]
    is_best: bool = False
    """Whether no other beats it in what was requested."""
    is_chosen: bool = False


@dataclass(frozen=True, slots=True)
class Scatter:
    """Candidates as points of any two figures; in text of the first two."""

    axes: Sequence[Axis]
    """None: nothing is drawn, but a page can still sort its table of candidates."""
    points: Sequence[Point]
    chosen: str = ""
    """Meaning of being chosen; empty: none is."""

    @property
    def first(self) -> tuple[Axis, Axis]:
        """Across, and up."""
        return self.axes[0], self.axes[min(1, len(self.axes) - 1)]


class Line(NamedTuple):
    """One line of a plot."""

    label: str
    color: str
    """Name of a colour of pages: ``a`` and ``b`` are the sides of a comparison."""
    points: Sequence[tuple[float, float]]
    """From left to right."""
    band: Sequence[tuple[float, float, float]] = ()
    """A position and the range that is shaded around the line there."""


class Level(NamedTuple):
    """A horizontal line with words at it."""

    label: str
    value: float


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines over two axes that need no script; only on pages."""

    title: str
    summary: str
    """What it shows, for who cannot see it."""
    x: str
    """What the axis across counts."""
    y: str
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    is_log: bool = False
    """Whether the axis across is logarithmic; positions are above 0 then."""


@dataclass(frozen=True, slots=True)
class Plots:
    """Plots beside each other."""

    plots: Sequence[Plot]
    id: str = ""


Block = Table | Tables | Tiles | Paragraph | Finding | Folded | Timeline | Scatter | Plots


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under a title."""

    title: str
    blocks: tuple[Block, ...]
    id: str = ""
    """Of its element in a page."""


class Lead(NamedTuple):
    """Subject of a document in a sentence."""

    text: str
    code: str = ""
    """Fingerprint behind it, to be copied."""
    side: str = ""
    """A letter where two are compared."""


@dataclass(frozen=True, slots=True)
class Document:
    """A report."""

    title: str
    sections: Sequence[Section]
    leads: Sequence[Lead] = ()
    verdict: str = ""
    notes: Sequence[str] = ()
    """Caveats beside the figures."""


def format_number(value: float, style: Style = Style.EXACT) -> str:
    """A number in its style."""
    if style is Style.GENERAL:
        return f"{value:,g}"
    is_whole = value == int(value)
    if style is Style.SHORT:
        return f"{value:,.0f}" if is_whole or abs(value) >= 1000 else f"{value:.4g}"
    return f"{int(value):,}" if is_whole else f"{value:,.6f}".rstrip("0")


def cell_text(cell: Cell) -> str:
    """A cell in words; empty for what only a page can show."""
    match cell:
        case str():
            return printable(cell)
        case Number():
            return " ".join(filter(None, (format_number(cell.value, cell.style), cell.unit)))
        case Flag():
            return "*" if cell.is_set else ""
        case Remark() | Strip():
            return ""
