"""Tables and sections: they fit, whatever the terminal's size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from lockstep.cli.top_layout import Column, Section, allot, joined, table_lines, to_ascii

Cells = tuple[str | float | None, ...]
COLUMNS: tuple[Column[Cells], ...] = (
    Column("NAME", 0, lambda row: row[0], width=6, is_word=True),
    Column("A", 1, lambda row: row[1], width=5),
    Column("B", 3, lambda row: row[2], "{:.0f}".format),
    Column("C", 2, lambda row: row[3]),
)


def cells(*values: str | float | None) -> Cells:
    return values


def rows(*texts: str) -> list[Text]:
    return [Text(text) for text in texts]


def test_numbers_stand_to_the_right_of_their_column() -> None:
    lines = table_lines(COLUMNS, [cells("one", 1, 22.0, "333")], 80)
    assert [line.plain.rstrip() for line in lines] == ["NAME        A   B    C", "one         1  22  333"]


@pytest.mark.parametrize(
    ("width", "head"),
    [(30, "NAME"), (22, "NAME        A   B    C"), (20, "NAME        A    C"), (14, "NAME        A"), (8, "NAME")],
)
def test_columns_of_the_highest_rank_are_left_out_first(width: int, head: str) -> None:
    shown = table_lines(COLUMNS, [cells("one", 1, 22.0, "333")], width)[0].plain
    assert shown.startswith(head)
    assert len(shown) == width


def test_a_long_name_is_narrowed_before_a_column_goes() -> None:
    lines = table_lines(COLUMNS, [cells("a name that is long", 1, 22, "333")], 25)
    assert lines[1].plain == "a name t…      1  22  333"


def test_a_table_without_a_bound_is_as_wide_as_its_cells() -> None:
    lines = table_lines(COLUMNS, [cells("one", 1, None, "a\nb")])
    assert [line.plain for line in lines] == ["NAME  A  B    C", "one   1  -  a�b"]


def test_section_counts_rows_that_do_not_fit() -> None:
    section = Section(Text("HEAD"), rows(*"abcdefgh"))
    assert [line.plain for line in section.fit(4)] == ["HEAD", "a", "b", "… 6 more"]
    assert [line.plain for line in section.fit(9)] == ["HEAD", *"abcdefgh"]
    assert section.fit(1) == section.fit(0) == []


def test_a_scrolled_section_counts_the_lines_above_and_below() -> None:
    section = Section(Text("HEAD"), rows(*"abcdefgh"), offset=3)
    assert [line.plain for line in section.fit(4)] == ["HEAD", "d", "e", "… 3 above, 3 below"]
    assert [line.plain for line in section._replace(offset=99).fit(4)][1:] == ["g", "h", "… 6 above, 0 below"]


@given(st.integers(0, 80), st.lists(st.integers(0, 60), max_size=6))
def test_no_more_lines_are_allotted_than_there_are_or_are_wanted(height: int, wants: list[int]) -> None:
    heights = allot(height, wants)
    assert sum(heights) <= height
    assert all(have <= want for have, want in zip(heights, wants, strict=True))
    if sum(wants) <= height:
        assert heights == wants


def test_first_section_gets_three_lines_before_others_get_one() -> None:
    assert allot(5, [50, 2, 9]) == [3, 2, 0]
    assert allot(12, [50, 2, 9]) == [6, 2, 4]


def test_the_first_has_a_third_before_others_have_more() -> None:
    assert allot(21, [6, 3, 50, 50, 50]) == [6, 3, 4, 4, 4]
    assert allot(48, [51, 3, 9]) == [36, 3, 9]


def test_parts_that_do_not_fit_are_left_out_whole() -> None:
    assert joined(rows("one", "two", "three"), 9).plain == "one  two"
    assert joined(rows("longer than that", "two"), 9).plain == "longer than that"


def test_a_terminal_with_ascii_only_is_sent_nothing_else() -> None:
    [line] = to_ascii([Text("█░ … · → ▼ é")])
    assert line.plain == '#. ~ " > v ?'
