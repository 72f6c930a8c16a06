"""Comparison page in a real browser: two replays side by side, in common charts, with their first difference."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from lockstep.replay.render.charts import MAX_LANES, chart_data
from lockstep.replay.render.pages import MAX_CHANGED, changed_requests, comparison_page, recordings_page
from lockstep.replay.workload import ArrivalUnit, Workload
from lockstep.report.document import Finding
from tests.replay.render.pairs import LIMITS, load, side_of, write_diff
from tests.replay.shows import HOSTILE_NAMES
from tests.replay.workloads import config, request, workload
from tests.visits import PAINTED, Visit, contrasts


@pytest.fixture(scope="module")
def diffed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "diff.html"
    write_diff(path, load(20), max_num_seqs=3)
    return path


def test_every_chart_shows_both_sides_without_network_requests(visit: Visit, diffed: Path) -> None:
    page = visit.open(diffed)
    canvases = page.locator("#timeline canvas")
    assert canvases.count() == 5
    for index in range(5):
        assert canvases.nth(index).evaluate(PAINTED) > 8
    for chart, label in (("queue", "queued"), ("running", "running"), ("blocks", "held"), ("batch", "tokens")):
        legend = page.locator(f"#chart-{chart} .u-legend .u-series:not(.aux) .u-label")
        assert legend.all_inner_texts()[1:] == [f"A {label}", f"B {label}"]
    assert visit.requests == [diffed.as_uri()]


def test_the_page_shows_the_first_difference_its_cause_and_the_reproducer(visit: Visit, diffed: Path) -> None:
    page = visit.open(diffed)
    told = page.locator(".finding")
    expect(told).to_contain_text("first difference (admission):")
    expect(told).to_contain_text("waits: 3 of 3 sequences run")
    expect(told).to_contain_text("decided by max_num_seqs: with max_num_seqs = 3 instead of 16")
    expect(told).to_contain_text("none of them can be removed")
    assert page.locator("#plans tbody tr").count() > 3
    assert page.locator("#settings tbody tr").all_inner_texts() == ["max_num_seqs\t16\t3"]


def test_figures_of_both_sides_are_shown_with_their_change(visit: Visit, diffed: Path) -> None:
    page = visit.open(diffed)
    rows = {row.split("\t")[0]: row.split("\t")[1:] for row in page.locator("#figures tr").all_inner_texts()}
    assert rows["maximum running"][:3] != rows["maximum running"][1:]
    a, b, change, percent = rows["maximum running"]
    assert (int(a), int(b), int(change)) == (int(a), 3, 3 - int(a))
    assert percent == f"{100 * (3 - int(a)) / int(a):+.1f} %"
    assert page.locator("#latencies tbody").count() == 5
    assert page.locator("#latencies tbody tr:last-child").first.inner_text().startswith("change\t")
    tiles = page.locator(".tile.twin").all_inner_texts()
    assert any(tile.startswith("End to end\n") for tile in tiles)


def test_keys_and_units_apply_to_both_sides(visit: Visit, diffed: Path) -> None:
    page = visit.open(diffed)
    told = page.locator("#range")
    whole = told.inner_text()
    assert whole.startswith("all: time 0 to ")
    page.locator("#chart-blocks").focus()
    before = page.locator("#chart-queue canvas").evaluate("canvas => canvas.toDataURL()")
    page.keyboard.press("+")
    assert " of " in told.inner_text()
    assert page.locator("#chart-queue canvas").evaluate("canvas => canvas.toDataURL()") != before
    page.keyboard.press("0")
    assert told.inner_text() == whole
    page.get_by_label("ticks", exact=True).check()
    assert told.inner_text().startswith("all: tick 0 to ")


def test_requests_with_the_largest_change_come_first(visit: Visit, diffed: Path) -> None:
    rows = [row.split("\t") for row in visit.open(diffed).locator("#requests tbody tr").all_inner_texts()]
    changes = [abs(float(row[6].replace(",", ""))) for row in rows]
    assert changes == sorted(changes, reverse=True)
    assert 0 < len(rows) <= MAX_CHANGED


def test_hostile_names_are_escaped(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    write_diff(path, load(12, HOSTILE_NAMES), max_num_seqs=2)
    page = visit.open(path)
    page.locator("#chart-lanes .u-over").hover(position={"x": 40, "y": 30})
    assert page.title() == "A and B on crowded.json"
    assert page.locator("img").count() == 0
    assert HOSTILE_NAMES[0] in page.locator("main").inner_text()
    assert visit.requests == [path.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_sides_are_distinguishable_in_both_schemes(browser: Browser, diffed: Path, scheme: str) -> None:
    assert all(each >= 4.5 for each in contrasts(browser, diffed, scheme, ["a", "b"]))


def test_runs_with_different_lengths_and_units_share_charts(visit: Visit, tmp_path: Path) -> None:
    """A counts ticks without a duration, B is timed and sampled: the charts use ticks, which both have."""
    ticks = Workload("ticks.json", (request("a", 20, 30), request("b", 9, 4, arrival=50)), ArrivalUnit.TICKS)
    path = tmp_path / "page.html"
    a, b = side_of(ticks, config(), None), side_of(load(900), LIMITS)
    path.write_text(comparison_page(a, b))
    page = visit.open(path)
    assert page.locator("#range").inner_text().startswith("all: tick 0 to ")
    assert not page.get_by_label("ticks", exact=True).is_visible()
    assert page.locator("#chart-running canvas").evaluate(PAINTED) > 8
    assert "A: The charts show all " in page.locator("#timeline .hint").inner_text()
    assert page.locator("#chart-lanes").count() == page.locator("#requests").count() == 0


def test_lanes_of_both_sides_alternate_for_few_requests() -> None:
    few = load(MAX_LANES // 2)
    names = [lane["name"] for lane in chart_data([side_of(few, LIMITS), side_of(few, LIMITS)])["lanes"]]
    assert names[:4] == ["A req-0", "B req-0", "A req-1", "B req-1"]
    many = load(MAX_LANES // 2 + 1)
    assert chart_data([side_of(many, LIMITS), side_of(many, LIMITS)])["lanes"] == []


def test_a_request_that_only_one_side_completes_comes_first() -> None:
    requests = workload(request("small", 8, 4), request("large", 90, 4), request("last", 8, 4))
    a, b = side_of(requests, config(), None), side_of(requests, config(max_model_len=64, max_num_seqs=1), None)
    table = changed_requests(a.outcomes, b.outcomes, is_timed=False)
    assert [row[0] for row in table.rows] == ["large", "last"]
    assert table.rows[0][2] == table.rows[0][5] == "-"
    assert changed_requests(a.outcomes, a.outcomes, is_timed=False).rows == []
    assert changed_requests(a.outcomes, b.outcomes[:2], is_timed=False).rows == []


def test_recordings_have_a_page_with_their_differences(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    engines = [Finding("engine 0 (alpha): identical, 12 steps"), Finding("engine 1: only A has it")]
    path.write_text(recordings_page("one", HOSTILE_NAMES[1], engines))
    page = visit.open(path)
    assert page.locator(".finding .verdict").all_inner_texts() == [engine.verdict for engine in engines]
    assert page.locator("img, canvas").count() == 0


def test_equal_replays_give_equal_pages() -> None:
    pages = {comparison_page(side_of(load(8), LIMITS), side_of(load(8), LIMITS)) for _ in range(2)}
    assert len(pages) == 1
    assert "Identical decisions." in pages.pop()
