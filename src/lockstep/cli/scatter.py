"""Points of two figures as lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 60
HEIGHT = 15


class Point(NamedTuple):
    """One mark. Where several fall on one place, the first is seen."""

    x: float
    y: float
    mark: str


def scatter(points: Sequence[Point], x_name: str, y_name: str, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """The plot, with the least and the greatest value at each axis."""
    if not points:
        return []
    xs, ys = [point.x for point in points], [point.y for point in points]
    cells = [[" "] * width for _ in range(height)]
    for point in reversed(points):
        column = _place(point.x, min(xs), max(xs), width)
        row = height - 1 - _place(point.y, min(ys), max(ys), height)
        cells[row][column] = point.mark
    labels = [f"{max(ys):,g}", *[""] * (height - 2), f"{min(ys):,g}"]
    margin = max(map(len, labels))
    lines = [f"{label:>{margin}} |{''.join(cell)}".rstrip() for label, cell in zip(labels, cells, strict=True)]
    left, right = f"{min(xs):,g}", f"{max(xs):,g}"
    return [
        y_name,
        *lines,
        f"{'':>{margin}} +{'-' * width}",
        f"{'':>{margin}}  {left}{right:>{max(1, width - len(left))}}",
        f"{'':>{margin}}  {x_name:^{width}}".rstrip(),
    ]


def _place(value: float, least: float, most: float, count: int) -> int:
    return 0 if most == least else round((value - least) / (most - least) * (count - 1))
