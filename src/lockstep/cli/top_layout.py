"""Layout of `lockstep ps` and `lockstep top`: tables, and sections of lines that fit a terminal of any size.

All functions are pure, except that `to_ascii` changes its lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Generic, NamedTuple, TypeVar

from rich.cells import set_cell_size
from rich.text import Text

from lockstep.report.document import ABSENT
from lockstep.shown import printable

Row = TypeVar("Row")
Value = str | float | None

GAP = "  "
_ASCII = str.maketrans({"█": "#", "░": ".", "…": "~", "·": '"', "→": ">", "▼": "v", "▲": "^", "↑": "k", "↓": "j"})


def text_of(value: Value, form: Callable[[float], str] = str) -> str:
    """Text of a value in a cell: words unchanged, numbers in their format, and `ABSENT` for None."""
    if value is None:
        return ABSENT
    return printable(value) if isinstance(value, str) else form(value)


class Column(NamedTuple, Generic[Row]):
    """Column of a table."""

    head: str
    rank: int
    """Priority for narrow terminals: columns of the highest rank are left out first."""
    value: Callable[[Row], Value]
    form: Callable[[float], str] = str
    """Format of numbers."""
    width: int = 0
    """Minimum width in cells, so that growing numbers do not move other columns."""
    is_word: bool = False
    """True if the cells are aligned to the left."""
    style: str | Callable[[Row], str] = ""
    """Style of a cell. Zeros and absent values are always dim."""
    key: Callable[[Row], Value] | None = None
    """Sort key of a row; None: its value."""

    def cell(self, row: Row) -> Text:
        """Styled text of a row's cell in this column."""
        value = self.value(row)
        style = self.style if isinstance(self.style, str) else self.style(row)
        style = "dim" if value is None or value == 0 else style
        return Text(text_of(value, self.form), style, overflow="ellipsis")


class Section(NamedTuple):
    """Lines that are shown together, with a count of the rows that do not fit."""

    head: Text | None
    rows: list[Text]
    offset: int = 0

    @property
    def height(self) -> int:
        return len(self.rows) + (self.head is not None)

    def fit(self, height: int) -> list[Text]:
        """At most ``height`` lines; empty if the head and one row do not fit."""
        head = [] if self.head is None else [self.head]
        room = height - len(head)
        if room < 1:
            return []
        if room >= len(self.rows):
            return [*head, *self.rows]
        first = min(self.offset, len(self.rows) - room + 1)
        shown = self.rows[first : first + room - 1]
        below = len(self.rows) - first - len(shown)
        hidden = f"… {below} more" if not first else f"… {first} above, {below} below"
        return [*head, *shown, Text(hidden, "dim")]


def table_lines(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int | None = None) -> list[Text]:
    """Lines of a table: a head and rows. If it is too wide, the first column is narrowed, then columns are left out.

    Args:
        width: maximum cells of a line; None: all columns are shown, as wide as their widest cell.
    """
    table = [[Text(column.head) for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    least = [0 if width is None else column.width for column in columns]
    columns_of_cells = zip(least, zip(*table, strict=True), strict=True)
    widths = [max(low, *(cell.cell_len for cell in cells)) for low, cells in columns_of_cells]
    shown = list(range(len(columns)))
    while width is not None:
        over = sum(widths[at] for at in shown) + len(GAP) * (len(shown) - 1) - width
        narrowed = max(columns[0].width, widths[0] - max(0, over))
        if over <= widths[0] - narrowed or len(shown) == 1:
            widths[0] = narrowed
            break
        shown.remove(max(shown[1:], key=lambda at: (columns[at].rank, at)))
    for cells in table:
        for column, cell, cell_width in zip(columns, cells, widths, strict=True):
            cell.align("left" if column.is_word else "right", cell_width)
    head, *lines = (Text(GAP).join(cells[at] for at in shown) for cells in table)
    return [head_line(head.plain, width or head.cell_len), *lines]


def head_line(text: str, width: int) -> Text:
    """Head of a table or section, filled to a width."""
    return Text(set_cell_size(text, width), "bold reverse")


def side_by_side(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    """Lines of two blocks next to each other; ``width`` is that of the left one in cells."""
    lines = []
    for one, other in zip_longest(left, right, fillvalue=Text()):
        line = one.copy()
        line.align("left", width)
        lines.append(Text.assemble(line, GAP, other))
    return lines


def joined(parts: Sequence[Text], width: int) -> Text:
    """Line of as many parts as fit, at least the first one."""
    line = Text()
    for part in parts:
        gap = GAP if line else ""
        if line and line.cell_len + len(gap) + part.cell_len > width:
            break
        line.append(gap)
        line.append_text(part)
    return line


def allot(height: int, wants: Sequence[int]) -> list[int]:
    """Distribute lines among sections; returns the height of each.

    In their order, sections get the height that they want, but at most three lines, and the first at most a third of
    all lines. Remaining lines are given to sections one at a time, in turn.

    Args:
        wants: heights that the sections want.
    """
    heights = [0] * len(wants)
    left = max(0, height)
    for index, want in enumerate(wants):
        least = min(want, 3 if index else max(3, height // 3))
        if least <= left:
            heights[index] = least
            left -= least
    while left > 0 and any(0 < have < want for have, want in zip(heights, wants, strict=True)):
        for index, want in enumerate(wants):
            if left > 0 and 0 < heights[index] < want:
                heights[index] += 1
                left -= 1
    return heights


def to_ascii(lines: Sequence[Text]) -> list[Text]:
    """Replace the characters of lines by ASCII ones, in place."""
    for line in lines:
        line.plain = line.plain.translate(_ASCII).encode("ascii", "replace").decode()
    return list(lines)
