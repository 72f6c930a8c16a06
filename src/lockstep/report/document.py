"""Documents of reports: sections of tables, tiles, charts and findings, independent of their writer.

A document has content and no layout: numbers have their full value, and their style gives the number of significant
digits. Writers align, escape and draw. Writers of text leave out blocks that only an HTML page can show (tiles, charts,
folded tables). Documents are for people; programs read the JSON with the values that documents are made from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

from lockstep.shown import printable

ABSENT = "-"
"""Text of an absent value."""


class Style(Enum):
    """Format of a number."""

    EXACT = "exact"
    """Separated thousands, and up to six decimals without zeros at the end."""
    SHORT = "short"
    """Four significant digits, or all digits of a whole number; for speeds and times."""
    GENERAL = "general"
    """Six significant digits, with separated thousands."""


class Number(NamedTuple):
    """Number with its format."""

    value: float
    style: Style = Style.EXACT
    unit: str = ""
    """Unit after the number: ``%`` or a word; empty: none."""


class Flag(NamedTuple):
    """Mark of a row that is better than others."""

    is_set: bool
    meaning: str
    """Description of the mark on an HTML page."""
    badge: str = ""
    """Label beside the mark; only on HTML pages."""


class Remark(NamedTuple):
    """Words that replace all further cells of a row. Writers of text have them among the document's notes."""

    text: str


class Strip(NamedTuple):
    """Distribution that is drawn as a strip from 0 to ``whole``; only on HTML pages."""

    p50: float
    p90: float
    p99: float
    mean: float
    whole: float
    side: str = ""
    """Side of a comparison, ``a`` or ``b``; empty: there is no comparison."""

    def position(self, value: float) -> float:
        """Position of a value, in percent of the strip's width."""
        return round(100 * value / self.whole, 2)


Cell = str | Number | Flag | Remark | Strip


class Column(NamedTuple):
    """Column of a table."""

    name: str
    kind: Literal["word", "number", "change", "alarm", "strip"] = "number"
    """Kind of the cells. ``change`` is the difference of two other columns; ``alarm`` is words that report a loss."""

    @property
    def is_word(self) -> bool:
        """True if the cells are aligned to the left."""
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
    """Table: columns and rows."""

    title: str
    columns: tuple[Column, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)
    id: str = ""
    """Id of the table's element on an HTML page."""
    rows_per_head: int = 1
    """Number of rows that share a first cell."""
    can_sort: bool = False
    """True if a click on a column's head sorts the table on an HTML page."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Group of tables. Tables with two columns are side by side, and wider ones below each other."""

    tables: Sequence[Table]
    id: str = ""


class Tile(NamedTuple):
    """One of the most important values, in large type."""

    label: str
    value: str
    more: str = ""
    """Second value beside it, in small type."""
    other: tuple[str, str] | None = None
    """``value`` and ``more`` of the other side of a comparison; None: there is no comparison."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Values at the head of an HTML page."""

    tiles: Sequence[Tile]

    @property
    def num_columns(self) -> int:
        """Number of columns with the fewest gaps in the last row."""
        return min(4, 5, 3, key=lambda columns: -len(self.tiles) % columns)


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Sentences. Text in backquotes is a command or a value to type."""

    text: str
    kind: Literal["plain", "hint"] = "plain"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a search. Its fields are written in this order."""

    verdict: str
    """Whether a difference was found, and its location."""
    reasons: tuple[str, ...] = ()
    """Reasons, one sentence each."""
    states: tuple[str, ...] = ()
    """States of both sides at the difference."""
    table: Table | None = None
    hint: str = ""
    """Explanation of the table; only on HTML pages."""
    rest: tuple[str, ...] = ()
    """Causes, and commands that show the difference again."""


@dataclass(frozen=True, slots=True)
class Folded:
    """Table that is folded until a click opens it; only on HTML pages."""

    summary: str
    table: Table
    is_open: bool = False


class Series(NamedTuple):
    """Line of a chart; in a comparison, one line per side."""

    label: str
    color: str
    """Name of a colour of the page's style. In a comparison, the sides have their own colours."""
    column: str
    """Name of the column of each side's data."""
    base: str = ""
    """Name of the column that the line is stacked on; empty: none."""


class Chart(NamedTuple):
    """Chart of a timeline."""

    id: str
    title: str
    summary: str
    series: tuple[Series, ...] = ()
    """Lines over time; empty: the chart shows single requests."""
    height: int = 0
    limit: tuple[str, str] | None = None
    """Name and label of a capacity of each side, which is drawn as a dashed line; None: no capacity."""
    has_band: bool = True
    """True if the range of values is drawn around the lines of a sampled side."""
    has_marks: bool = False
    """True if ticks with a preemption are marked."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Charts with a common axis of time; only on HTML pages."""

    charts: Sequence[Chart]
    data: Mapping[str, Any]
    """Data of the page's script, as columns by name (assets/timeline.js)."""
    has_times: bool
    """True if the axis can show time, in addition to ticks."""
    sampling: str
    """Sentence about ticks that the charts leave out."""


class Axis(NamedTuple):
    """Metric that can be an axis of a scatter plot."""

    name: str
    label: str
    short: str
    """Label in text output."""
    better: Literal["more", "less"]


class Point(NamedTuple):
    """Candidate with its metrics, a point of a scatter plot."""

    label: str
    figures: Mapping[str, float]
    """Values by the name of the metric."""
    is_best: bool = False
    """True if no other candidate is better in all objectives."""
    is_chosen: bool = False


@dataclass(frozen=True, slots=True)
class Scatter:
    """Scatter plot of candidates. An HTML page can show any two metrics; text shows the first two."""

    axes: Sequence[Axis]
    """Metrics; empty: no plot is drawn, but an HTML page can still sort its table of candidates."""
    points: Sequence[Point]
    chosen: str = ""
    """Label of chosen points; empty: no point is chosen."""

    @property
    def first(self) -> tuple[Axis, Axis]:
        """Horizontal and vertical axis in text."""
        return self.axes[0], self.axes[min(1, len(self.axes) - 1)]


class Line(NamedTuple):
    """Line of a plot."""

    label: str
    color: str
    """Name of a colour of the page's style: ``a`` and ``b`` are the sides of a comparison."""
    points: Sequence[tuple[float, float]]
    """Points (x, y) from left to right."""
    band: Sequence[tuple[float, float, float]] = ()
    """Shaded range around the line: (x, low, high)."""


class Level(NamedTuple):
    """Horizontal line with a label."""

    label: str
    value: float


@dataclass(frozen=True, slots=True)
class Plot:
    """Plot of lines that is drawn without a script; only on HTML pages."""

    title: str
    summary: str
    """Description of the plot for screen readers."""
    x: str
    """Label of the horizontal axis."""
    y: str
    """Label of the vertical axis."""
    lines: Sequence[Line]
    levels: Sequence[Level] = ()
    is_log: bool = False
    """True if the horizontal axis is logarithmic; all positions are then above 0."""


@dataclass(frozen=True, slots=True)
class Plots:
    """Plots side by side."""

    plots: Sequence[Plot]
    id: str = ""


Block = Table | Tables | Tiles | Paragraph | Finding | Folded | Timeline | Scatter | Plots


@dataclass(frozen=True, slots=True)
class Section:
    """Blocks under a title."""

    title: str
    blocks: tuple[Block, ...]
    id: str = ""
    """Id of the section's element on an HTML page."""


class Lead(NamedTuple):
    """Sentence about the subject of a document."""

    text: str
    code: str = ""
    """Fingerprint after the sentence, for copying; empty: none."""
    side: str = ""
    """Letter of the side of a comparison; empty: there is no comparison."""


@dataclass(frozen=True, slots=True)
class Document:
    """Content of a report."""

    title: str
    sections: Sequence[Section]
    leads: Sequence[Lead] = ()
    verdict: str = ""
    notes: Sequence[str] = ()
    """Caveats about the values."""


def format_number(value: float, style: Style = Style.EXACT) -> str:
    """Text of a number in a style."""
    if style is Style.GENERAL:
        return f"{value:,g}"
    is_whole = value == int(value)
    if style is Style.SHORT:
        return f"{value:,.0f}" if is_whole or abs(value) >= 1000 else f"{value:.4g}"
    return f"{int(value):,}" if is_whole else f"{value:,.6f}".rstrip("0")


def cell_text(cell: Cell) -> str:
    """Text of a cell; empty for cells that only an HTML page can show."""
    match cell:
        case str():
            return printable(cell)
        case Number():
            return " ".join(filter(None, (format_number(cell.value, cell.style), cell.unit)))
        case Flag():
            return "*" if cell.is_set else ""
        case Remark() | Strip():
            return ""
