"""Documents as text: Markdown that any reader takes, tables on a terminal, plots of characters."""

from __future__ import annotations

import io

import pytest

from lockstep.report.document import (
    Document,
    Finding,
    Folded,
    Number,
    Paragraph,
    Section,
    Table,
    Tables,
    Tile,
    Tiles,
    changes,
    numbers,
    words,
)
from lockstep.report.text import scatter_lines, show, show_block, to_lines, to_markdown
from tests.report.documents import HOSTILE, candidates, document_of, everything, latencies, scatter

MARKUP = "[bold]x[/bold] :smile:"
"""Words that a drawer could take for its own."""


class Terminal(io.StringIO):
    """Somebody looks."""

    def isatty(self) -> bool:
        return True


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_in_markdown_is_aligned_for_readers_of_the_source() -> None:
    table = Table("T", (*words("name"), *numbers("value")), [("long name", Number(7)), ("b", Number(1234567))])
    assert to_markdown(document_of(table)) == (
        "Title\n"
        "\n"
        "| name      |     value |\n"
        "|-----------|----------:|\n"
        "| long name |         7 |\n"
        "| b         | 1,234,567 |\n"
    )


def test_notes_follow_the_tables() -> None:
    text = to_markdown(document_of(Paragraph("Only words."), notes=("one", "a|b")))
    assert text == "Title\n\nOnly words.\n\nNote: one\n\nNote: a\\|b\n"


def test_what_only_a_page_can_show_is_left_out() -> None:
    blocks = (Tiles([Tile("label", "value")]), Folded("summary", candidates()), Paragraph("words"))
    assert to_markdown(document_of(*blocks)) == "Title\n\nwords\n"
    lines = to_markdown(document_of(latencies())).splitlines()
    assert cells_of(lines[2]) == ["ms", "side", "p50"]
    assert cells_of(lines[4]) == ["queue", "A", "5"]


def test_a_row_that_ends_in_a_remark_is_as_long_as_the_others() -> None:
    lines = to_markdown(document_of(candidates())).splitlines()[2:]
    assert {line.count("|") for line in lines} == {5}
    assert cells_of(lines[-1]) == ["", "c", "", ""]
    assert [cells_of(line)[0] for line in lines[2:]] == ["*", "*", ""]


def test_a_finding_is_printed_in_order() -> None:
    table = Table("", words("who"), [("it",)])
    finding = Finding("found", ("because", "and so"), ("state",), table, "only on pages", ("rest",))
    out = io.StringIO()
    show_block(finding, out)
    lines = out.getvalue().splitlines()
    assert lines[:7] == ["found", "", "- because", "- and so", "", "state", ""]
    assert lines[-2:] == ["", "rest"]
    assert "only on pages" not in out.getvalue()
    out = io.StringIO()
    show_block(Finding("nothing"), out)
    assert out.getvalue() == "nothing\n"


def test_words_are_no_markup_and_no_element() -> None:
    text = to_markdown(document_of(Finding("<b> | c", ("<i>",), ("a\\b",)), Table("", words("<u>"), [("x|y",)])))
    assert "\\<b> \\| c" in text
    assert "- \\<i>" in text
    assert "a\\\\b" in text
    assert cells_of(text.splitlines()[-3]) == ["\\<u>"]
    assert "x\\|y" in text.splitlines()[-1]


def test_a_terminal_gets_the_same_words_drawn() -> None:
    figures = Table("Figures", (*words("figures"), *numbers("value")), [("speed", Number(12.5, unit="ms"))])
    wide = Table("Wide", (*words("wide"), *numbers("A"), *changes("B - A")), [(MARKUP, Number(1), "+1")])
    finding = Finding(f"{MARKUP} verdict", table=figures, rest=("rest",))
    out = Terminal()
    show(document_of(Tables([figures, wide]), finding, Paragraph("words"), scatter("x", "y"), notes=("careful",)), out)
    text = out.getvalue()
    for said in ("Title", "speed", "12.5 ms", MARKUP, f"{MARKUP} verdict", "rest", "words"):
        assert said in text
    assert "note: careful" in text
    assert "─" in text
    out = Terminal()
    show_block(wide, out)
    assert "+1" in out.getvalue()


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_no_text_steers_a_terminal_or_breaks_a_table(out: io.StringIO) -> None:
    show(everything(HOSTILE), out)
    text = out.getvalue()
    assert "\x1b[2J" not in text
    assert HOSTILE not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


def test_text_is_printed_to_standard_output_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    show(Document("Only a title", [Section("", ())]))
    show_block(Paragraph("words"))
    assert capsys.readouterr().out == "Only a title\nwords\n"


def test_plain_lines_have_their_columns_two_spaces_apart() -> None:
    table = Table("", (*words("name"), *numbers("value")), [("a", Number(1000)), ("longer", "x"), ("last", "")])
    assert to_lines(table).split("\n") == ["name    value", "a       1,000", "longer      x", "last"]


def test_points_fall_where_their_values_say_and_the_best_is_seen() -> None:
    block = scatter("x", "y")
    lines = scatter_lines(block.points, *block.first, width=11, height=5)
    assert lines[0] == "y"
    assert lines[1] == "4 |          o"
    assert lines[3] == "  |     o"
    assert lines[5] == "0 |*"
    assert lines[7].split() == ["0", "10"]
    together = [point._replace(figures={"x": 1.0, "y": 1.0}) for point in block.points]
    assert sum(line.count("*") + line.count("o") for line in scatter_lines(together, *block.first)) == 1
    assert "*" in "".join(scatter_lines(together, *block.first))
    assert scatter_lines([], *block.first) == []


def test_one_point_is_no_plot() -> None:
    block = scatter("x", "y")
    out = io.StringIO()
    show_block(block, out)
    assert out.getvalue().count("\n") > 15
    for axes in (("x", "nobody has it"), ()):
        out = io.StringIO()
        show_block(scatter(*axes), out)
        assert out.getvalue() == "\n"
