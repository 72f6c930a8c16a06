"""Plots as SVG: round ticks, points within their frame, text that stays text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.document import Level, Line, Plot
from lockstep.report.plot import HEIGHT, WIDTH, decades, ticks, to_svg
from tests.report.documents import HOSTILE

finite = st.floats(-1e9, 1e9, allow_nan=False)


def plot_of(*lines: Line, levels: tuple[Level, ...] = (), is_log: bool = False, words: str = "words") -> Plot:
    return Plot(words, words, words, words, lines, levels, is_log)


@given(finite, st.floats(1e-6, 1e9))
def test_ticks_are_few_round_numbers_within_their_range(low: float, width: float) -> None:
    found = ticks(low, low + width)
    slack = 1e-9 * (abs(low) + width)
    assert all(low - slack <= each <= low + width + slack for each in found)
    assert len(found) <= 6
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(1, 1000, [1, 10, 100, 1000]), (30, 300, [50, 100, 200]), (0.2, 4, [0.2, 0.5, 1, 2])],
)
def test_a_logarithmic_axis_has_a_tick_at_each_decade_and_more_where_there_are_few(
    low: float, high: float, expected: list[float]
) -> None:
    assert decades(low, high) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(0.1, 1e6), finite), min_size=1, max_size=20), st.booleans())
def test_every_point_is_within_the_frame(points: list[tuple[float, float]], is_log: bool) -> None:
    line = Line("a side", "a", sorted(points), [(x, y - 1, y + 1) for x, y in sorted(points)])
    root = ElementTree.fromstring(to_svg(plot_of(line, levels=(Level("limit", 0.0),), is_log=is_log)))
    shapes = [each.get("points", "") for each in root.iter() if each.tag in ("polyline", "polygon")]
    assert len(shapes) == 2
    for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", " ".join(shapes)):
        assert 0 <= float(x) <= WIDTH
        assert 0 <= float(y) <= HEIGHT


def test_words_at_a_level_stand_over_the_lines() -> None:
    line = Line("a side", "a", [(1.0, 2.0), (2.0, 3.0)], [(1.0, 1.0, 4.0), (2.0, 1.0, 4.0)])
    root = ElementTree.fromstring(to_svg(plot_of(line, levels=(Level("limit", 2.5), Level("far away", 99.0)))))
    drawn = [each.get("class") for each in root if each.tag != "text" or each.get("class")]
    assert drawn[-6:] == ["band-a", "line-a", "level", "level-name", "level", "level-name"]


def test_an_axis_has_a_line_of_the_grid_at_each_number() -> None:
    root = ElementTree.fromstring(to_svg(plot_of(Line("a side", "a", [(1.0, 2.0), (100.0, 3.0)]), is_log=True)))
    words = [each.text for each in root if each.get("text-anchor") == "middle"][:-2]
    across = [each for each in root if each.get("class") == "grid" and each.get("x1") == each.get("x2")]
    assert words == ["1", "2", "5", "10", "20", "50", "100"]
    assert len(across) == len(words)


def test_words_of_a_plot_are_text() -> None:
    line = Line(HOSTILE, "a", [(1.0, 2.0), (2.0, 3.0)])
    root = ElementTree.fromstring(to_svg(plot_of(line, levels=(Level(HOSTILE, 2.5),), words=HOSTILE)))
    assert {each.tag for each in root.iter()} == {"svg", "line", "text", "polyline"}
    assert "onerror" in str(root.get("aria-label"))


def test_a_plot_without_points_draws_nothing() -> None:
    assert to_svg(plot_of(Line("a side", "a", []))) == ""
