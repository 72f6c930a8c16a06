"""Layout of `lockstep top`: tables and sections of lines that fit a terminal of any size, and numbers as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from lockstep.report.document import ABSENT

GAP = "  "
_ASCII = str.maketrans({"█": "#", "░": ".", "…": "~", "·": '"', "→": ">", "▼": "v", "▲": "^", "↑": "k", "↓": "j"})


class Column(NamedTuple):
    """A column of a table."""

    head: str
    rank: int
    """Those of the highest rank are left out first where a terminal is narrow."""
    width: int = 0
    """Cells that it takes at least, so that figures that grow do not move their neighbours."""
    is_word: bool = False


class Section(NamedTuple):
    """Lines that are shown together; the rows that have no place are counted."""

    head: Text | None
    rows: list[Text]
    offset: int = 0

    @property
    def height(self) -> int:
        return len(self.rows) + (self.head is not None)

    def fit(self, height: int) -> list[Text]:
        """Lines of at most this height; none where not even a row has place below the head."""
        head = [] if self.head is None else [self.head]
        room = height - len(head)
        if room < 1:
            return []
        if room >= len(self.rows):
            return [*head, *self.rows]
        first = min(self.offset, len(self.rows) - room + 1)
        shown = self.rows[first : first + room - 1]
        below = len(self.rows) - first - len(shown)
        told = f"… {below} more" if not first else f"… {first} above, {below} below"
        return [*head, *shown, Text(told, "dim")]


def grid(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int) -> list[Text]:
    """A head and rows, each of at most ``width`` cells: the first column is narrowed, then columns are left out."""
    widths = [
        max([each.width, cell_len(each.head), *(row[at].cell_len for row in rows)]) for at, each in enumerate(columns)
    ]
    shown = list(range(len(columns)))
    while True:
        over = sum(widths[at] for at in shown) + len(GAP) * (len(shown) - 1) - width
        narrowed = max(columns[0].width, widths[0] - max(0, over))
        if over <= widths[0] - narrowed or len(shown) == 1:
            break
        shown.remove(max(shown[1:], key=lambda at: (columns[at].rank, at)))
    widths[0] = narrowed
    lines = [head_line(GAP.join(_cell(columns[at].head, widths[at], columns[at].is_word) for at in shown), width)]
    for row in rows:
        line = Text()
        for at in shown:
            cell = row[at].copy()
            cell.truncate(widths[at], overflow="ellipsis")
            pad = " " * (widths[at] - cell.cell_len)
            line.append(GAP if at else "")
            line.append_text(cell + pad if columns[at].is_word else Text(pad) + cell)
        lines.append(line)
    return lines


def _cell(text: str, width: int, is_word: bool) -> str:
    return set_cell_size(text, width) if is_word else " " * (width - cell_len(text)) + text


def head_line(text: str, width: int) -> Text:
    return Text(set_cell_size(text, width), "bold reverse")


def beside(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    lines = []
    for at in range(max(len(left), len(right))):
        line = left[at].copy() if at < len(left) else Text()
        line.append(" " * (width - line.cell_len) + GAP)
        lines.append(line.append_text(right[at]) if at < len(right) else line)
    return lines


def joined(parts: Sequence[Text], width: int) -> Text:
    """Parts beside each other, as many as fit; the first one always."""
    line = Text()
    for part in parts:
        gap = GAP if line else ""
        if line and line.cell_len + len(gap) + part.cell_len > width:
            break
        line.append(gap)
        line.append_text(part)
    return line


def allot(height: int, wants: Sequence[int]) -> list[int]:
    """Lines of each of some sections: in their order a few, or what they want, then one each in turn.

    The first has a third of all lines before others have more than three.
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
    """The same lines for a terminal that has no other letters."""
    for line in lines:
        line.plain = line.plain.translate(_ASCII).encode("ascii", "replace").decode()
    return list(lines)


def duration(seconds: float | None) -> str:
    """A time in its largest unit: ``90 s``, ``42 min``, ``3.1 h``."""
    if seconds is None:
        return ABSENT
    for unit, scale in (("d", 86_400), ("h", 3_600)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{max(0.0, seconds):.0f} s"


def count(number: int | None, style: str = "") -> Text:
    return Text(ABSENT if number is None else str(number), style if number else "dim")


def number(value: float | None) -> str:
    if value is None:
        return ABSENT
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return ABSENT
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1e3 * seconds:,.0f} ms"


def percent(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.0f}%"
