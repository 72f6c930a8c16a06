"""Documents as pages, in a real browser: every block, sorting, no network, text that stays text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page

from lockstep.report.document import (
    Document,
    Finding,
    Folded,
    Paragraph,
    Section,
    Table,
    Tables,
    numbers,
    words,
)
from lockstep.report.page import to_html
from lockstep.shown import printable
from tests.report.documents import HOSTILE, candidates, document_of, everything, latencies, scatter
from tests.visits import Visit


def opened(visit: Visit, folder: Path, document: Document) -> Page:
    path = folder / "page.html"
    path.write_text(to_html(document))
    page = visit.open(path)
    assert visit.requests == [path.as_uri()], "a page asks for nothing but itself"
    return page


def test_every_block_is_on_the_page(visit: Visit, tmp_path: Path) -> None:
    page = opened(visit, tmp_path, everything())
    assert page.title() == page.locator("h1").inner_text() == "words"
    assert page.locator("header .lead").inner_text() == "A words Fingerprint words"
    assert page.locator("header .verdict").inner_text() == page.locator("header .note").inner_text() == "words"
    assert page.locator(".tile").count() == 2
    assert page.locator(".tile.twin dd").all_inner_texts() == ["A words words", "B words words"]
    assert page.locator(".columns .card tr").all_inner_texts() == ["words\t\nvalue", "words\t2 ms"]
    assert page.locator("#figures tr").all_inner_texts() == ["figure\tA\tB - A", *["words", "words\t1\t+1"] * 2]
    assert page.locator(".finding p, .finding li").all_inner_texts() == ["words"] * 5
    assert page.locator("#plans td.alarm").inner_text() == "words"
    assert page.locator("details").get_attribute("open") is None
    assert page.locator("details summary").inner_text() == "words"


@pytest.mark.parametrize("text", [HOSTILE, "</script><script>document.title = 'taken'</script>", "<!--"])
def test_text_is_only_text_wherever_it_stands(visit: Visit, tmp_path: Path, text: str) -> None:
    page = opened(visit, tmp_path, everything(text))
    assert page.title() != "taken"
    assert page.locator("img").count() == 0
    shown = page.locator("main").inner_text()
    assert "49" not in shown
    assert "\x1b" not in shown
    assert printable(text).split()[0] in page.locator("h1").inner_text()


def test_a_head_sorts_its_table_also_where_nothing_is_plotted(visit: Visit, tmp_path: Path) -> None:
    page = opened(visit, tmp_path, document_of(candidates(), scatter()))
    assert page.locator("#plot").count() == 0
    order = "rows => rows.map(row => row.dataset.row)"
    rows = page.locator("#candidates tbody tr")
    page.get_by_role("button", name="name").click()
    assert rows.evaluate_all(order) == ["1", "0", "2"]
    page.get_by_role("button", name="speed").click()
    assert rows.evaluate_all(order) == ["1", "0", "2"], "what has no figure is last"
    page.get_by_role("button", name="speed").click()
    assert rows.evaluate_all(order) == ["0", "1", "2"]
    assert page.locator("#candidates td.remark").inner_text() == "cannot work: too small"
    assert page.locator("#candidates tr.front").count() == 2
    assert page.locator(".badge").all_inner_texts() == ["cheapest"]


def test_points_and_rows_show_each_other(visit: Visit, tmp_path: Path) -> None:
    page = opened(visit, tmp_path, document_of(candidates(), scatter("x", "y")))
    page.wait_for_selector("#plot circle")
    assert page.locator("#plot circle.point").count() == 3, "one has no second figure"
    assert page.locator("#plot circle.ring").count() == 1
    assert page.locator("#scatter .key").inner_text().count("the chosen one") == 1
    page.locator("#candidates tbody tr").nth(1).hover()
    assert page.locator("#told").inner_text() == "second: x, long 10, y, long 4"


def test_rows_share_their_head_and_have_their_strips(visit: Visit, tmp_path: Path) -> None:
    page = opened(visit, tmp_path, document_of(latencies()))
    assert page.locator("#latencies tbody").count() == 2
    rows = [row.split("\t") for row in page.locator("#latencies tbody tr").all_inner_texts()]
    assert [row[0] for row in rows] == ["queue", "B", "change", "end", "B", "change"]
    assert page.locator("#latencies svg").count() == 4
    assert page.locator("svg.strip-b .median").first.get_attribute("x") == "50.0"


def test_words_between_backquotes_are_to_be_typed(visit: Visit, tmp_path: Path) -> None:
    page = opened(visit, tmp_path, document_of(Paragraph("Read `a b` and `c`.", "hint"), Finding("found")))
    assert page.locator(".hint code").all_inner_texts() == ["a b", "c"]
    assert page.locator(".hint").inner_text() == "Read a b and c."


def test_sections_without_content_are_left_out(visit: Visit, tmp_path: Path) -> None:
    empty = Table("Empty", words("a"))
    sections = [
        Section("One", (empty,)),
        Section("Two", (Tables([empty, empty]),)),
        Section("Three", (empty, Paragraph("words"))),
    ]
    page = opened(visit, tmp_path, Document("Title", sections))
    assert page.locator("h2").all_inner_texts() == ["Three"]
    assert page.locator("table").count() == 0


def test_a_folded_table_opens_on_click(visit: Visit, tmp_path: Path) -> None:
    table = Table("Inside", (*words("a"), *numbers("b")), [("x", "1")], id="inside")
    page = opened(visit, tmp_path, document_of(Folded("More", table), Folded("At once", table, is_open=True)))
    tables = page.locator("#inside")
    assert [tables.nth(index).is_visible() for index in range(2)] == [False, True]
    page.get_by_text("More").click()
    assert tables.nth(0).is_visible()


def test_only_the_scripts_of_its_blocks_are_in_a_page() -> None:
    plain, plotted = to_html(document_of(candidates())), to_html(document_of(candidates(), scatter("x", "y")))
    assert "<script>" not in plain
    assert plotted.count("<script>") == 1
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', plain)
    assert "default-src &#39;none&#39;" in policy
    assert "sha256" not in policy.split("style-src")[0]


def test_equal_documents_give_the_same_page() -> None:
    assert to_html(everything("a")) == to_html(everything("a")) != to_html(everything("b"))
