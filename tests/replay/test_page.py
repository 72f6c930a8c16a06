"""The page of a report in a real browser: drawn, zoomed by hand and by keys, without network, safe from names."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, expect, sync_playwright

from lockstep.errors import UsageError
from lockstep.replay.render.html import MAX_LINES, HtmlPage
from tests.replay.shows import HOSTILE_NAMES, crowded, few

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
PAINTED = """canvas => {
  const data = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(data).size;
}"""


class Visit:
    """One page, and whatever it asked for or complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", self._asked)
        page.on("console", self._said)
        page.on("pageerror", self._failed)

    def _asked(self, request: Request) -> None:
        self.requests.append(request.url)

    def _said(self, message: ConsoleMessage) -> None:
        self.complaints.append(message.text)

    def _failed(self, error: Error) -> None:
        self.complaints.append(str(error))

    def open(self, path: Path) -> Page:
        self.page.goto(path.as_uri())
        return self.page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    page = browser.new_page(viewport={"width": 1180, "height": 900})
    visit = Visit(page)
    yield visit
    page.close()
    assert visit.complaints == []


def write_few(path: Path, names: tuple[str, ...] = ("a", "b", "c", "d")) -> None:
    shown = HtmlPage()
    replay, report = few([shown], names)
    shown.write(path, report, replay.outcomes)


def write_crowded(path: Path, num_requests: int = 40) -> None:
    shown = HtmlPage()
    replay, report = crowded([shown], num_requests)
    shown.write(path, report, replay.outcomes)


@needs_browser
def test_all_charts_are_drawn_and_nothing_is_asked_for(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_few(path)
    page = visit.open(path)
    canvases = page.locator("#timeline canvas")
    assert canvases.count() == 5
    for index in range(5):
        assert canvases.nth(index).evaluate(PAINTED) > 8, "an empty canvas has one colour"
    assert visit.requests == [path.as_uri()]


@needs_browser
def test_the_network_is_forbidden(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_few(path)
    page = visit.open(path)
    outcome = page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'reached', error => 'refused')")
    assert outcome == "refused"
    assert len(visit.complaints) >= 1
    assert all("Content Security Policy" in complaint for complaint in visit.complaints)
    visit.complaints.clear()


@needs_browser
def test_a_drag_zooms_and_a_double_click_shows_all(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_few(path)
    page = visit.open(path)
    whole = page.locator("#range").inner_text()
    assert whole.startswith("all: tick 0 to ")
    box = page.locator("#chart-running .u-over").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    before = page.locator("#chart-batch canvas").evaluate("canvas => canvas.toDataURL()")
    page.mouse.move(box["x"] + box["width"] * 0.25, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, middle, steps=4)
    page.mouse.up()
    expect(page.locator("#range")).to_contain_text(" of ")
    after = page.locator("#chart-batch canvas").evaluate("canvas => canvas.toDataURL()")
    assert after != before, "every chart shows the same span"
    page.mouse.dblclick(box["x"] + box["width"] / 2, middle)
    expect(page.locator("#range")).to_have_text(whole)


@needs_browser
def test_keys_zoom_and_move_and_show_all(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_crowded(path)
    page = visit.open(path)
    page.locator("#chart-queue").focus()
    told = page.locator("#range")
    texts = [told.inner_text()]
    for key in ("+", "ArrowRight", "ArrowLeft", "-", "+", "0"):
        page.keyboard.press(key)
        texts.append(told.inner_text())
    whole, zoomed, right, left, out, _, reset = texts
    assert whole == reset == out
    assert zoomed == left
    assert len({whole, zoomed, right}) == 3


@needs_browser
def test_every_control_is_reached_by_the_tabulator(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_crowded(path)
    page = visit.open(path)
    seen = set()
    for _ in range(16):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("(document.activeElement.id || document.activeElement.dataset.action || '')"))
    assert {"left", "right", "zoom-in", "zoom-out", "reset", "chart-queue", "chart-lanes"} <= seen


@needs_browser
def test_milliseconds_and_ticks_are_both_shown_where_time_is_known(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_crowded(path)
    page = visit.open(path)
    assert page.locator("#range").inner_text().startswith("all: time 0 to ")
    page.get_by_label("ticks", exact=True).check()
    assert page.locator("#range").inner_text().startswith("all: tick 0 to ")


@needs_browser
def test_the_table_names_who_did_what(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_few(path)
    rows = [row.split("\t") for row in visit.open(path).locator("#ticks tbody tr").all_inner_texts()]
    assert rows[0][:4] == ["0", "a, b", "70", "a, b"]
    completed = [row[4] for row in rows if row[4]]
    assert completed == ["b", "a", "c", "d"]


@needs_browser
def test_hostile_names_are_only_text(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_few(path, HOSTILE_NAMES)
    page = visit.open(path)
    page.locator("#chart-lanes .u-over").hover(position={"x": 40, "y": 30})
    assert page.title() == "Replay of few.json"
    assert page.locator("img").count() == 0
    cells = "".join(page.locator("#ticks tbody").all_inner_texts())
    assert HOSTILE_NAMES[0] in cells
    assert "\x1b" not in cells
    assert "{{ 7 * 7 }}" in cells
    assert visit.requests == [path.as_uri()]


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible_in_both_schemes(browser: Browser, tmp_path: Path, scheme: str) -> None:
    """Contrast of text, muted text and marks to their ground, by WCAG 2.1's formula."""
    path = tmp_path / "report.html"
    write_few(path)
    page = browser.new_page(color_scheme="dark" if scheme == "dark" else "light")
    page.goto(path.as_uri())
    colors = page.evaluate(
        "['text', 'muted', 'accent', 'queued', 'running', 'blocks', 'prefill', 'surface'].map("
        "name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim())"
    )
    page.close()
    *inks, ground = map(luminance, colors)
    contrasts = [(max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) for ink in inks]
    assert all(contrast >= 4.5 for contrast in contrasts[:3])
    assert all(contrast >= 3 for contrast in contrasts[3:])


def luminance(color: str) -> float:
    parts = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@needs_browser
def test_a_long_replay_is_drawn_in_spans_and_says_so(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_crowded(path, 1500)
    assert path.stat().st_size < 1_500_000
    page = visit.open(path)
    hint = page.locator("#timeline .hint").inner_text()
    assert "in a row are drawn as one" in hint
    assert page.locator("#chart-lanes").count() == 0
    assert page.locator("#timeline canvas").first.evaluate(PAINTED) > 8
    assert page.locator("#ticks tbody tr").count() == MAX_LINES
    assert page.locator("#ticks").is_visible() is False, "a long table opens when asked"


def test_the_same_replay_gives_the_same_page(tmp_path: Path) -> None:
    write_few(tmp_path / "one.html")
    write_few(tmp_path / "two.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_nothing_ran_is_a_page_too(tmp_path: Path) -> None:
    shown = HtmlPage()
    replay, report = few([], ("a", "b", "c", "d"))
    shown.write(tmp_path / "empty.html", report, replay.outcomes[:0])
    assert "<table" in (tmp_path / "empty.html").read_text()


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the page cannot be written there"):
        write_few(tmp_path / "absent" / "report.html")
