"""Values of documents: numbers by their style, cells as words, places of strips, columns of tiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.document import (
    Cell,
    Flag,
    Number,
    Remark,
    Strip,
    Style,
    Tile,
    Tiles,
    cell_text,
    changes,
    format_number,
    numbers,
    words,
)
from lockstep.shown import printable


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (1234567, Style.EXACT, "1,234,567"),
        (1234567.0, Style.EXACT, "1,234,567"),
        (0.5, Style.EXACT, "0.5"),
        (-0.595062, Style.EXACT, "-0.595062"),
        (1234.5, Style.SHORT, "1,234"),
        (0.012345, Style.SHORT, "0.01235"),
        (99999.0, Style.SHORT, "99,999"),
        (1234.5678, Style.GENERAL, "1,234.57"),
        (0.1 + 0.2, Style.GENERAL, "0.3"),
    ],
)
def test_a_style_sets_the_number_of_digits(value: float, style: Style, text: str) -> None:
    assert format_number(value, style) == text


@given(st.integers(-(10**15), 10**15), st.sampled_from([Style.EXACT, Style.SHORT]))
def test_whole_numbers_lose_no_digit(value: int, style: Style) -> None:
    assert int(format_number(value, style).replace(",", "")) == value


@given(st.floats(-1e6, 1e6).map(lambda value: round(value, 6)))
def test_exact_numbers_are_read_back_to_six_decimals(value: float) -> None:
    assert float(format_number(value).replace(",", "")) == pytest.approx(value, abs=1e-6)


@given(st.floats(1e-6, 1e12))
def test_short_numbers_are_within_four_digits(value: float) -> None:
    assert float(format_number(value, Style.SHORT).replace(",", "")) == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("a\x1b[2J", "a\ufffd[2J"),
        (Number(12.5, Style.SHORT, "ms"), "12.5 ms"),
        (Number(3), "3"),
        (Flag(True, "best"), "*"),
        (Flag(False, "best", "badge"), ""),
        (Remark("across"), ""),
        (Strip(1, 2, 3, 1, 3), ""),
    ],
)
def test_a_cell_in_words(cell: Cell, text: str) -> None:
    assert cell_text(cell) == text


@given(st.text())
def test_printable_text_keeps_its_length_and_steers_nothing(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert shown.isprintable()
    assert printable(shown) == shown


def test_places_of_a_strip_are_percents_of_the_whole() -> None:
    strip = Strip(p50=1.0, p90=3.0, p99=4.0, mean=2.0, whole=8.0)
    assert [strip.position(value) for value in (strip.p50, strip.mean, strip.p90, strip.p99, 0.0)] == [
        12.5,
        25,
        37.5,
        50,
        0,
    ]


@pytest.mark.parametrize(("number", "columns"), [(3, 3), (4, 4), (5, 5), (6, 3), (8, 4), (9, 3), (10, 5), (12, 4)])
def test_tiles_stand_in_columns_that_leave_no_gap(number: int, columns: int) -> None:
    assert Tiles([Tile("label", "value")] * number).num_columns == columns


def test_columns_say_what_stands_to_the_left() -> None:
    columns = (*words("name"), *numbers("A", "B"), *changes("B - A"))
    assert [column.name for column in columns] == ["name", "A", "B", "B - A"]
    assert [column.is_word for column in columns] == [True, False, False, False]
    assert columns[-1].kind == "change"
