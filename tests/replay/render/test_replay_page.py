"""Replay page in a real browser: charts, zooming by mouse and keys, no network requests, escaped names."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from lockstep.replay.render.charts import chart_data
from lockstep.replay.render.pages import replay_page
from lockstep.replay.render.side import MAX_LINES, Side
from tests.replay.shows import HOSTILE_NAMES, crowded, few
from tests.visits import PAINTED, Visit, contrasts


def write_few(path: Path, names: tuple[str, ...] = ("a", "b", "c", "d")) -> None:
    side = Side()
    replay, report = few([side], names)
    side.end(report, replay.outcomes)
    path.write_text(replay_page(side))


def write_crowded(path: Path, num_requests: int = 40) -> None:
    side = Side()
    replay, report = crowded([side], num_requests)
    side.end(report, replay.outcomes)
    path.write_text(replay_page(side))


def test_all_charts_are_drawn_without_network_requests(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_few(path)
    page = visit.open(path)
    canvases = page.locator("#timeline canvas")
    assert canvases.count() == 5
    for index in range(5):
        assert canvases.nth(index).evaluate(PAINTED) > 8, "an empty canvas has one colour"
    assert visit.requests == [path.as_uri()]


def test_the_page_forbids_network_requests(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_few(path)
    page = visit.open(path)
    outcome = page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'reached', error => 'refused')")
    assert outcome == "refused"
    assert len(visit.complaints) >= 1
    assert all("Content Security Policy" in complaint for complaint in visit.complaints)
    visit.complaints.clear()


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


def test_every_control_is_reachable_by_the_tab_key(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_crowded(path)
    page = visit.open(path)
    seen = set()
    for _ in range(16):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("(document.activeElement.id || document.activeElement.dataset.action || '')"))
    assert {"left", "right", "zoom-in", "zoom-out", "reset", "chart-queue", "chart-lanes"} <= seen


def test_milliseconds_and_ticks_are_shown_if_time_is_known(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_crowded(path)
    page = visit.open(path)
    assert page.locator("#range").inner_text().startswith("all: time 0 to ")
    page.get_by_label("ticks", exact=True).check()
    assert page.locator("#range").inner_text().startswith("all: tick 0 to ")


def test_the_table_of_ticks_names_requests(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_few(path)
    rows = [row.split("\t") for row in visit.open(path).locator("#ticks tbody tr").all_inner_texts()]
    assert rows[0][:4] == ["0", "a, b", "70", "a, b"]
    completed = [row[4] for row in rows if row[4]]
    assert completed == ["b", "a", "c", "d"]


def test_hostile_names_are_escaped(visit: Visit, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(browser: Browser, tmp_path: Path, scheme: str) -> None:
    path = tmp_path / "report.html"
    write_few(path)
    assert all(each >= 4.5 for each in contrasts(browser, path, scheme, ["text", "muted", "accent", "a", "b"]))
    assert all(each >= 3 for each in contrasts(browser, path, scheme, ["queued", "running", "blocks", "prefill"]))


def test_a_long_replay_is_drawn_in_spans_with_a_hint(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_crowded(path, 1500)
    assert path.stat().st_size < 1_500_000
    page = visit.open(path)
    hint = page.locator("#timeline .hint").inner_text()
    assert "consecutive ticks of" in hint
    assert page.locator("#chart-lanes").count() == 0
    assert page.locator("#timeline canvas").first.evaluate(PAINTED) > 8
    assert page.locator("#ticks tbody tr").count() == MAX_LINES
    assert page.locator("#ticks").is_visible() is False, "a long table opens when asked"


def test_equal_replays_give_the_same_page(tmp_path: Path) -> None:
    write_few(tmp_path / "one.html")
    write_few(tmp_path / "two.html")
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_a_replay_without_steps_has_a_page() -> None:
    side = Side()
    replay, report = few([], ("a", "b", "c", "d"))
    side.end(report, replay.outcomes[:0])
    assert "<table" in replay_page(side)


def test_a_preempted_request_shows_its_stalls() -> None:
    """A stall lasts as long as the preemption of its sequence, in both units, within the time of its decoding."""
    side = Side()
    replay, report = crowded([side])
    side.end(report, replay.outcomes)
    lanes = {lane["name"]: lane for lane in chart_data([side])["lanes"]}
    preempted = [outcome for outcome in replay.outcomes if outcome.num_preemptions]
    assert preempted
    for outcome in preempted:
        lane = lanes[outcome.name]
        for unit in ("ticks", "ms"):
            stalls = lane["stalls"][unit]
            assert len(stalls) == outcome.num_preemptions
            _, admitted, _, finished = lane[unit]
            assert all(admitted <= start < end <= finished for start, end in stalls)
    assert all(not lanes[each.name]["stalls"]["ticks"] for each in replay.outcomes if not each.num_preemptions)
