"""Writer of plots as SVG: lines, shaded ranges and levels over two axes, without a script."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from xml.sax.saxutils import escape

from lockstep.report.document import Level, Line, Plot
from lockstep.shown import printable

WIDTH, HEIGHT = 400, 250
"""Size of a plot. The width is about that on the screen, also of a telephone, so that text has its usual size."""
LEFT, RIGHT, TOP, BOTTOM = 54, 20, 12, 42
"""Margins of a plot for the labels of its axes."""
_NUM_TICKS = 5
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
Scale = Callable[[float], float]


def to_svg(plot: Plot) -> str:
    """A plot as an SVG element; empty if its lines have no points."""
    xs = [x for line in plot.lines for x, _ in line.points]
    if not xs:
        return ""
    left, right = _widened(min(xs), max(xs), 0.0)
    bottom, top = _widened(*_range_of_values(plot), 0.05)
    across = _across(left, right, plot.is_log)
    up = _linear(bottom, top, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(plot.summary)}">',
        *_axes(plot, across, up, (left, right), (bottom, top)),
        *(piece for line in plot.lines for piece in _line(line, across, up)),
        *(_level(level, up) for level in plot.levels if bottom <= level.value <= top),
        "</svg>",
    ]
    return "".join(parts)


def ticks(low: float, high: float, count: int = _NUM_TICKS) -> list[float]:
    """About ``count`` round numbers from low to high."""
    rough = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(each * magnitude for each in _ROUND if each * magnitude >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[float]:
    """The numbers 1, 10, 100 and so on from low to high; in a narrow range also 2 and 5 times each."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    between = (1.0, 2.0, 5.0) if high < 200 * low else (1.0,)
    return [each * 10.0**power for power in powers for each in between if low <= each * 10.0**power <= high]


def _range_of_values(plot: Plot) -> tuple[float, float]:
    values = [y for line in plot.lines for _, y in line.points] + [level.value for level in plot.levels]
    values += [y for line in plot.lines for _, low, high in line.band for y in (low, high)]
    return min(values), max(values)


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    if low == high:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    room = (high - low) * share
    return low - room, high + room


def _linear(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _across(left: float, right: float, is_log: bool) -> Scale:
    if not is_log:
        return _linear(left, right, LEFT, WIDTH - RIGHT)
    scale = _linear(math.log(left), math.log(right), LEFT, WIDTH - RIGHT)
    return lambda value: scale(math.log(value))


def _axes(plot: Plot, across: Scale, up: Scale, xs: tuple[float, float], ys: tuple[float, float]) -> Iterator[str]:
    for value in ticks(*ys):
        y = up(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,g}</text>'
    for value in decades(*xs) if plot.is_log else ticks(*xs):
        x = across(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:,g}</text>'
    yield f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{_text(plot.x)}</text>'
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield f'<text transform="translate(12 {middle:.0f}) rotate(-90)" text-anchor="middle">{_text(plot.y)}</text>'


def _level(level: Level, up: Scale) -> str:
    y = up(level.value)
    return (
        f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="level-name" x="{WIDTH - RIGHT}" y="{y - 4:.1f}" text-anchor="end">{_text(level.label)}</text>'
    )


def _line(line: Line, across: Scale, up: Scale) -> Iterator[str]:
    if line.band:
        edge = [(x, high) for x, _, high in line.band] + [(x, low) for x, low, _ in reversed(line.band)]
        yield f'<polygon class="band-{_text(line.color)}" points="{_points(edge, across, up)}"/>'
    yield f'<polyline class="line-{_text(line.color)}" points="{_points(line.points, across, up)}"/>'


def _points(points: Sequence[tuple[float, float]], across: Scale, up: Scale) -> str:
    return " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)


def _text(text: str) -> str:
    return escape(printable(text), {'"': "&quot;"})
